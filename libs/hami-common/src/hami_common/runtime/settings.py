# SPDX-License-Identifier: Apache-2.0
"""Loads a service's settings: TOML file, then environment, then flags; errors name the fix.

Precedence: defaults of the Struct < file (``--config``) < ``HAMI_<SERVICE>_<FIELD>`` (nested by
``__``) < ``--set a.b=value``. Unknown keys fail and the nearest known key is suggested. Values from
environment and flags are text and are converted to the type of their field: booleans are ``true``
or ``false``; lists are comma-separated or a JSON array; mappings and Structs are a JSON object.
Defines only the settings that all services share. ``reload`` applies changes of the file to a
running service.
"""

import argparse
import difflib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Struct, inspect

from hami_common import documents
from hami_common.bounds import INT32_MAX, INT64_MAX
from hami_common.errors import SettingsInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.units import real, shown, whole
from hami_common.vendors.catalog import VendorSettings

S = TypeVar("S", bound=Struct)

CONFIG = "--config"
"""Flag with the path of the settings file."""
MASK = "******"
REPLACED = {
    "device_config_poll_s": "config_poll_s",
    "policies_reload_s": "config_poll_s",
    "queues_reload_s": "config_poll_s",
    "trusted_key_files": "trusted_keys_dir",
}
"""Settings of earlier versions, with the one that is in their place now."""
_SECRET_WORDS = ("key", "secret", "token", "password", "creds")


class ServiceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every service. Each service's own Struct extends this one."""

    HOT: ClassVar[frozenset[str]] = frozenset({"log_level", "config_poll_s"})
    """Settings, with their full paths, whose change in the file takes effect without a restart.

    Settings nested in a listed one are hot too.
    """

    nats_urls: list[str] = msgspec.field(default_factory=lambda: ["nats://127.0.0.1:4222"])
    """Servers of one cluster; the first that answers is used."""
    nats_creds: str = ""
    """Path of a NATS credentials file (JWT and seed); empty: none."""
    nats_seed_file: str = ""
    """Path of the seed of a key in the servers' configuration; empty: none."""
    nats_token_file: str = ""
    """Path of a service account token for the bus, as kubelet projects it; empty: none."""
    nats_renew_s: float = 600.0
    """Interval at which a login by token is renewed, well before the server expires it."""
    nats_ca_file: str = ""
    """PEM bundle of the CA of ``tls://`` servers; empty: the system's."""
    kubeconfig: str = ""
    """Path of a kubeconfig; empty: the service account of the pod we run in."""
    http_host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` or ``::`` where callers are outside the pod."""
    http_port: int = 0
    """0: the kernel picks a free port, which is logged."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    otlp_endpoint: str = ""
    """Base URL of an OTLP/HTTP collector; empty: no export, yet traceparents are passed on."""
    otlp_ratio: float = 1.0
    """Ratio of the traces beginning here that are recorded: of the webhook's, part of the pods."""
    grace_s: float = 20.0
    """Time for work in flight after SIGTERM; less than the pod's termination period."""
    start_timeout_s: float = 0.0
    """Time to wait at start for NATS and the Kubernetes API before exit code 3; 0: indefinitely.

    While it waits, the service is alive and not ready."""
    config_poll_s: float = 1.0
    """Interval at which the settings file, and every file that the service reloads, is polled; a
    change applies once two reads agree. 0: never.
    """
    vendors: VendorSettings = VendorSettings()


class Loaded(Struct, Generic[S], frozen=True, kw_only=True):
    """Outcome of ``load``."""

    settings: S
    check_only: bool
    """``--check`` was given: print and exit."""
    config_path: Path | None
    digest: str = ""
    """SHA-256 of the file, hexadecimal, as ``sha256sum`` prints it; empty without a file."""


def load(
    settings_type: type[S],
    *,
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    content: bytes | None = None,
) -> Loaded[S]:
    """Effective settings of ``service`` (word as in ``hami_<service>``), or ``SettingsInvalid``.

    ``content``: that of the file, where it was read already.
    """
    flags = _parser(service).parse_args(argv)
    config_path: Path | None = flags.config
    schema = inspect.type_info(settings_type)
    if content is None:
        content = b"" if config_path is None else read(config_path, field=CONFIG)
    tree = {} if config_path is None else _parse_toml(content, config_path)
    _check_keys(tree, schema, path="")
    prefix = f"HAMI_{service.upper().replace('-', '_')}_"
    for path, text, origin in [
        *_from_environment(prefix, os.environ if environ is None else environ, schema),
        *_from_flags(flags.set),
    ]:
        _assign(tree, schema, path, text, origin)
    return Loaded(
        settings=_convert(tree, settings_type, source=str(config_path or "settings")),
        check_only=flags.check,
        config_path=config_path,
        digest=digest_of(content) if config_path is not None else "",
    )


def digest_of(content: bytes) -> str:
    """SHA-256 of a file's content, hexadecimal, as ``sha256sum`` prints it."""
    return hashlib.sha256(content).hexdigest()


def masked(settings: Struct) -> dict[str, Any]:
    """``settings`` as plain data for a log line: secrets masked, passwords cut out of URLs."""
    plain = msgspec.to_builtins(settings)
    return {name: _mask(name, value) for name, value in plain.items()}


def _mask(name: str, value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _mask(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(name, inner) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    if name.lower().endswith(_SECRET_WORDS):
        return MASK
    return without_password(value)


def without_password(text: str) -> str:
    """A URL that is safe to print: without the password before the host."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return text
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return text
    shown = f"{user.partition(':')[0]}:{MASK}@{host}" if ":" in user else f"{MASK}@{host}"
    return urlunsplit(parts._replace(netloc=shown))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsInvalid(
            field="command line", problem=message, fix=self.format_usage().strip()
        )


def _parser(service: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"hami_{service.replace('-', '_')}", allow_abbrev=False)
    parser.add_argument(CONFIG, type=Path, metavar="FILE", help="settings as TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, as a.b=value; may be repeated, wins over file and environment",
    )
    parser.add_argument(
        "--check", action="store_true", help="check the settings, print them and leave"
    )
    return parser


def read(path: Path, *, field: str) -> bytes:
    """Return a file's content; ``SettingsInvalid`` about ``field`` when it is not readable."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsInvalid(
            field=f"{field} {path}",
            problem=error.strerror or str(error),
            fix="give the path of a readable file",
        ) from error


def _parse_toml(content: bytes, path: Path) -> dict[str, Any]:
    return documents.toml(content, field=f"{CONFIG} {path}")


def _from_environment(
    prefix: str, environ: Mapping[str, str], schema: inspect.Type
) -> list[tuple[str, str, str]]:
    known = {field.encode_name for field in _fields(schema)}
    # Kubernetes itself sets HAMI_SCHEDULER_PORT, HAMI_SCHEDULER_SERVICE_HOST and the like in each
    # pod of a namespace that has a Service named hami-scheduler.
    service_link = re.compile(r"(service_host|service_port(_.*)?|port(_\d+_(tcp|udp|sctp)(_.*)?)?)")
    found = []
    for name in sorted(environ):
        if not name.upper().startswith(prefix):
            continue
        path = name[len(prefix) :].lower().replace("__", ".")
        if path.split(".", maxsplit=1)[0] not in known and service_link.fullmatch(path):
            continue
        found.append((path, environ[name], f"environment variable {name}"))
    return found


def _from_flags(pairs: Sequence[str]) -> list[tuple[str, str, str]]:
    found = []
    for pair in pairs:
        path, separator, text = pair.partition("=")
        if not separator or not path:
            raise SettingsInvalid(
                field=f"--set {pair}", problem="has no =", fix="write --set key=value"
            )
        found.append((path.strip(), text, f"--set {path.strip()}"))
    return found


def _fields(schema: inspect.Type) -> tuple[inspect.Field, ...]:
    for candidate in _alternatives(schema):
        if isinstance(candidate, inspect.StructType):
            return candidate.fields
    return ()


def _alternatives(schema: inspect.Type) -> tuple[inspect.Type, ...]:
    return schema.types if isinstance(schema, inspect.UnionType) else (schema,)


def _inner(schema: inspect.Type, name: str, *, path: str, origin: str) -> inspect.Type:
    """Type of key ``name`` inside ``schema``; ``SettingsInvalid`` when there is no such key."""
    for candidate in _alternatives(schema):
        if isinstance(candidate, inspect.DictType):
            return candidate.value_type
        if isinstance(candidate, inspect.StructType):
            for field in candidate.fields:
                if field.encode_name == name:
                    return field.type
    names = [field.encode_name for field in _fields(schema)]
    full = f"{path}.{name}" if path else name
    where = f" (from {origin})" if origin else ""
    if not names:
        raise SettingsInvalid(
            field=full, problem=f"{path} has no keys inside{where}", fix=f"set {path} itself"
        )
    prefix = f"{path}." if path else ""
    if not path and REPLACED.get(name) in names:
        raise SettingsInvalid(
            field=full,
            problem=f"is of an earlier version{where}",
            fix=f"remove it; {REPLACED[name]} is in its place",
        )
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    fix = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(sorted(names))}"
    raise SettingsInvalid(field=full, problem=f"is not a known key{where}", fix=fix)


def _check_keys(value: object, schema: inspect.Type, *, path: str) -> None:
    """Refuse unknown keys anywhere in ``value``."""
    if isinstance(value, dict):
        for name, inner in value.items():
            inner_schema = _inner(schema, name, path=path, origin="")
            _check_keys(inner, inner_schema, path=f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for candidate in _alternatives(schema):
            if isinstance(candidate, inspect.ListType | inspect.SetType | inspect.VarTupleType):
                for number, inner in enumerate(value):
                    _check_keys(inner, candidate.item_type, path=f"{path}[{number}]")


def _assign(tree: dict[str, Any], schema: inspect.Type, path: str, text: str, origin: str) -> None:
    """Set ``path`` in ``tree`` to ``text``, converted to the type that ``schema`` gives it."""
    names = path.split(".")
    here = tree
    walked = ""
    for position, name in enumerate(names):
        schema = _inner(schema, name, path=walked, origin=origin)
        walked = f"{walked}.{name}" if walked else name
        if position == len(names) - 1:
            value = _from_text(text, schema, path=walked, origin=origin)
            _check_keys(value, schema, path=walked)
            here[name] = value
        else:
            inner = here.setdefault(name, {})
            if not isinstance(inner, dict):
                raise SettingsInvalid(
                    field=walked,
                    problem=f"is not a table, yet {origin} sets a key inside it",
                    fix=f"write [{walked}] in the file",
                )
            here = inner


def _from_text(text: str, schema: inspect.Type, *, path: str, origin: str) -> object:
    """``text`` as plain data for ``schema``; ``_convert`` refuses values that do not fit."""
    for candidate in _alternatives(schema):
        if isinstance(candidate, inspect.StrType | inspect.LiteralType | inspect.EnumType):
            return text
        if isinstance(candidate, inspect.BoolType):
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
            raise SettingsInvalid(
                field=path,
                problem=f"{shown(text)} is not a truth value ({origin})",
                fix="write true or false",
            )
        if isinstance(candidate, inspect.IntType | inspect.FloatType):
            is_whole = isinstance(candidate, inspect.IntType)
            number = (
                whole(text, least=-INT32_MAX, most=INT64_MAX)
                if is_whole
                else real(text, least=-1e12, most=1e12)
            )
            if number is None:
                raise SettingsInvalid(
                    field=path,
                    problem=f"{shown(text)} is not a number ({origin})",
                    fix=f"write {'a whole number' if is_whole else 'a number'}",
                )
            return number
        if isinstance(candidate, inspect.ListType | inspect.SetType | inspect.VarTupleType):
            if text.lstrip().startswith("["):
                return _from_json(text, path=path, origin=origin)
            return [
                _from_text(part.strip(), candidate.item_type, path=path, origin=origin)
                for part in text.split(",")
                if part.strip()
            ]
        if isinstance(candidate, inspect.DictType | inspect.StructType):
            return _from_json(text, path=path, origin=origin)
    return text


def _from_json(text: str, *, path: str, origin: str) -> object:
    try:
        return msgspec.json.decode(text)
    except UNDECODABLE as error:
        raise SettingsInvalid(
            field=path,
            problem=f"{shown(text)} is not JSON ({origin}): {error}",
            fix="write a JSON array or object",
        ) from error


def _convert(tree: dict[str, Any], settings_type: type[S], *, source: str) -> S:
    try:
        return msgspec.convert(tree, settings_type, strict=True)
    except msgspec.ValidationError as error:
        problem, separator, where = str(error).rpartition(" - at `$.")
        if not separator:
            problem, where = str(error), source
        if missing := re.fullmatch(r"Object missing required field `(.+)`", problem):
            field = f"{where.rstrip('`')}.{missing[1]}" if separator else missing[1]
            raise SettingsInvalid(field=field, problem="is missing", fix="set it") from error
        raise SettingsInvalid(
            field=where.rstrip("`"), problem=problem, fix="write a value of that type"
        ) from error
