# SPDX-License-Identifier: Apache-2.0
"""Credentials for the API server: kubeconfig or service account, read again at each login.

Plain credentials (token, token file, certificates, the service account of our pod) are read here.
Credentials that need a program or a protocol (exec plugins, OIDC, passwords) are left to
kubernetes_asyncio, which is imported only then: it brings a thousand model classes, 3 s of CPU and
60 MiB that no service uses (ADR 0007). Certificates inside the kubeconfig are first written to
files of our own. Outside document: kubeconfig, ``k8s.io/client-go/tools/clientcmd`` (v1.34). Times
in seconds.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import yaml

from hami_common import documents
from hami_common.errors import SettingsInvalid
from hami_common.runtime.clock import SystemClock

_CERTIFICATES = ("certificate-authority", "client-certificate", "client-key")
_FILES = (*_CERTIFICATES, "tokenFile")
_PLAIN = frozenset({"token", "tokenFile", "client-certificate", "client-key"})
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_FRESH_S = 60.0
"""A token file is read again after this long; kubelet rotates it well before it expires."""


class Login:
    """Address, certificates and token of one login."""

    def __init__(
        self,
        *,
        host: str,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        verify: bool = True,
        authorization: Callable[[], Awaitable[str]],
    ) -> None:
        """``authorization`` returns the value of the header for each request, empty for none."""
        self.host = host.rstrip("/")
        self.ca_file = ca_file
        self.cert_file = cert_file
        self.key_file = key_file
        self.verify = verify
        self.authorization = authorization

    def with_token(self, token: str) -> "Login":
        """Return a login at the same server with this token and without a client certificate."""

        async def authorization() -> str:
            return f"Bearer {token}"

        return Login(
            host=self.host, ca_file=self.ca_file, verify=self.verify, authorization=authorization
        )


class _TokenFile:
    """A bearer token in a file that another program replaces."""

    def __init__(self, path: Path) -> None:
        self._path = anyio.Path(path)
        self._clock = SystemClock()
        self._read_s = 0.0
        self._value = ""

    async def __call__(self) -> str:
        now_s = self._clock.monotonic_s()
        if not self._value or now_s - self._read_s > _TOKEN_FRESH_S:
            self._value = f"Bearer {(await self._path.read_text()).strip()}"
            self._read_s = now_s
        return self._value


async def log_in(kubeconfig: str, context: str, directory: Path) -> Login:
    """Login of ``kubeconfig`` (``context``, else its current one), empty: of the pod we run in.

    ``directory`` is ours alone and lives as long as the result is used.
    """
    try:
        if not kubeconfig:
            return await _service_account()
        document = await _read(kubeconfig)
        cluster, user = _selected(document, context)
        if {name.removesuffix("-data") for name in user} <= _PLAIN:
            await _with_files(cluster, kubeconfig, directory)
            await _with_files(user, kubeconfig, directory)
            return await _plain(cluster, user)
        return await _by_library(document, kubeconfig, context, directory)
    except (OSError, binascii.Error) as error:
        raise _invalid(kubeconfig, str(error)) from error
    except (KeyError, TypeError, AttributeError, AssertionError, ValueError) as error:
        # Parts of the document are missing or of another type.
        raise _invalid(kubeconfig, f"{type(error).__name__} {error}".strip()) from error


def _invalid(kubeconfig: str, problem: str) -> SettingsInvalid:
    return SettingsInvalid(
        field="kubeconfig",
        problem=f"{kubeconfig or 'service account of this pod'}: {problem}",
        fix="give the path of a kubeconfig file, or run as a pod with a service account",
    )


async def _service_account() -> Login:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    token = _TokenFile(_SERVICE_ACCOUNT / "token")
    await token()
    return Login(
        host=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_file=str(_SERVICE_ACCOUNT / "ca.crt"),
        authorization=token,
    )


async def _read(kubeconfig: str) -> dict[str, Any]:
    text = await anyio.Path(kubeconfig).read_text(encoding="utf-8")
    document = documents.yaml_one(text, field=f"kubeconfig {kubeconfig}")
    if not isinstance(document, dict):
        raise _invalid(kubeconfig, "is not a kubeconfig")
    return document


def _named(document: dict[str, Any], kind: str, inner: str, name: str) -> dict[str, Any]:
    for entry in document.get(kind) or []:
        if entry.get("name") == name:
            section = entry.get(inner) or {}
            if not isinstance(section, dict):
                raise TypeError(f"{inner} of {name} is not a mapping")
            return section
    raise KeyError(f"{kind} has no entry {name!r}")


def _selected(document: dict[str, Any], context: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(cluster, user) of the context that applies."""
    name = context or document.get("current-context") or ""
    chosen = _named(document, "contexts", "context", name)
    user = _named(document, "users", "user", chosen["user"]) if chosen.get("user") else {}
    return _named(document, "clusters", "cluster", chosen["cluster"]), user


async def _plain(cluster: dict[str, Any], user: dict[str, Any]) -> Login:
    authorization: Callable[[], Awaitable[str]]
    if user.get("token"):

        async def authorization() -> str:
            return f"Bearer {user['token']}"

    elif user.get("tokenFile"):
        authorization = _TokenFile(Path(user["tokenFile"]))
        await authorization()
    else:

        async def authorization() -> str:
            return ""

    return Login(
        host=cluster["server"],
        ca_file=cluster.get("certificate-authority"),
        cert_file=user.get("client-certificate"),
        key_file=user.get("client-key"),
        verify=not cluster.get("insecure-skip-tls-verify", False),
        authorization=authorization,
    )


async def _by_library(
    document: dict[str, Any], kubeconfig: str, context: str, directory: Path
) -> Login:
    from kubernetes_asyncio.client import Configuration  # noqa: PLC0415 - see the docstring
    from kubernetes_asyncio.config import (  # noqa: PLC0415 - see the docstring
        ConfigException,
        load_kube_config,
    )

    for kind, inner in (("clusters", "cluster"), ("users", "user")):
        for entry in document.get(kind) or []:
            entry[inner] = entry.get(inner) or {}
            await _with_files(entry[inner], kubeconfig, directory)
    copy = directory / "kubeconfig"
    await anyio.Path(copy).write_text(yaml.safe_dump(document), encoding="utf-8")
    configuration = Configuration()
    try:
        await load_kube_config(
            config_file=str(copy),
            context=context or None,
            client_configuration=configuration,
            persist_config=False,
        )
    except ConfigException as error:
        raise _invalid(kubeconfig, str(error)) from error

    async def authorization() -> str:
        return await configuration.get_api_key_with_prefix("BearerToken") or ""

    return Login(
        host=configuration.host or "",
        ca_file=configuration.ssl_ca_cert,
        cert_file=configuration.cert_file,
        key_file=configuration.key_file,
        verify=configuration.verify_ssl,
        authorization=authorization,
    )


async def _with_files(section: dict[str, Any], kubeconfig: str, directory: Path) -> None:
    """Make certificates in ``section`` files, and its paths absolute."""
    base = Path(await anyio.Path(kubeconfig).absolute()).parent
    for name in _FILES:
        if section.get(name):
            section[name] = str(base / section[name])
    for name in _CERTIFICATES:
        if data := section.pop(f"{name}-data", None):
            section[name] = str(await _file_of(data, directory))


async def _file_of(data: str, directory: Path) -> Path:
    content = base64.b64decode(data, validate=True)
    path = anyio.Path(directory / hashlib.sha256(content).hexdigest())
    await path.touch(mode=0o600)
    await path.write_bytes(content)
    return Path(path)
