# SPDX-License-Identifier: Apache-2.0
"""Reads TOML and YAML that people wrote, within bounds of size, depth and expansion.

The parsers behind it recurse and convert numbers without limit: deep nesting exhausts the stack
(libyaml's then ends the process), a number of thousands of digits raises ``ValueError``, and a few
aliases expand to millions of values. This module raises ``SettingsInvalid`` with the fix for each
of them. Size in bytes, depth in levels of lists and mappings. Reads no files.
"""

import re
import tomllib
from typing import Any, Final

import yaml

from hami_common.errors import SettingsInvalid

TOML_SIZE_MOST: Final = 1 << 20
"""Kubernetes allows 1 MiB for a ConfigMap."""
YAML_SIZE_MOST: Final = 4 << 20
DEPTH_MOST: Final = 64
ALIASED_MOST: Final = 100_000
"""Values that aliases add to a YAML document when they are written out."""
DIGITS_MOST: Final = 100
"""Characters of a number, digits and signs together."""

Document = dict[str, Any]

_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_UNREADABLE: Final = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions of PyYAML for text that is not YAML, or has a tag that does not fit its value."""
_LONG_NUMBER: Final = re.compile(rf"[-+]?[0-9.][0-9._:eExXoOa-fA-F+-]{{{DIGITS_MOST},}}")
_TOML_NUMBER: Final = re.compile(
    rf"(?<![\w.'\"+-])[-+]?[0-9][0-9a-fA-F_xo]{{{DIGITS_MOST},}}(?![\w'\"-]|\s*=)"
)
_TABLE: Final = re.compile(r"\s*\[+([^\],]*)\]")
_SHOWN: Final = 300


class _Beyond(ValueError):
    """A document exceeds a bound; the text names the bound."""


def toml(content: bytes | str, *, field: str, fix: str = "write valid TOML (v1.0)") -> Document:
    """Decode TOML; ``SettingsInvalid`` about ``field`` when it is invalid or beyond the bounds."""
    try:
        _check_size(content, TOML_SIZE_MOST)
        text = content if isinstance(content, str) else content.decode()
        for line in text.splitlines():
            _check_toml_line(line)
        tree = tomllib.loads(text)
        _check_depth(tree)
    except (ValueError, RecursionError) as error:
        raise SettingsInvalid(field=field, problem=_problem(error, "TOML"), fix=fix) from error
    return tree


def yaml_one(
    content: bytes | str,
    *,
    field: str,
    fix: str = "write valid YAML (v1.1)",
    size_most: int = YAML_SIZE_MOST,
) -> Any:  # noqa: ANN401 - YAML may hold anything
    """Decode the one document of ``content``, ``None`` when there is none; errors as ``toml``."""
    found = yaml_all(content, field=field, fix=fix, size_most=size_most)
    if len(found) > 1:
        raise SettingsInvalid(field=field, problem="holds several documents", fix="write one")
    return found[0] if found else None


def yaml_all(
    content: bytes | str,
    *,
    field: str,
    fix: str = "write valid YAML (v1.1)",
    size_most: int = YAML_SIZE_MOST,
) -> list[Any]:
    """Decode all documents of a YAML stream; errors as for ``toml``."""
    try:
        _check_size(content, size_most)
        _check_yaml(content)
        return list(yaml.load_all(content, Loader=_Loader))
    except _UNREADABLE as error:
        raise SettingsInvalid(field=field, problem=_problem(error, "YAML"), fix=fix) from error


def _problem(error: Exception, language: str) -> str:
    if isinstance(error, RecursionError):
        return f"is nested more than {DEPTH_MOST} levels deep"
    text = " ".join(str(error).split())
    if isinstance(error, _Beyond):
        return text
    return f"is not {language}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"


def _check_size(content: bytes | str, most: int) -> None:
    if len(content) > most:
        raise _Beyond(f"has {len(content)} bytes, at most {most} are read")


def _check_toml_line(line: str) -> None:
    """Refuse lines that the parser handles in quadratic time or not at all."""
    if _TOML_NUMBER.search(line):
        raise _Beyond(f"holds a number of more than {DIGITS_MOST} digits")
    heads = [part.replace(",", "{").rpartition("{")[2] for part in line.split("=")[:-1]]
    if table := _TABLE.match(line):
        heads.append(table[1])
    if any(head.count(".") >= DEPTH_MOST for head in heads):
        raise _Beyond(f"is nested more than {DEPTH_MOST} levels deep")


def _check_depth(tree: object) -> None:
    """Walk level by level; a recursion would overflow the stack on deep documents."""
    level: list[object] = [tree]
    for _ in range(DEPTH_MOST + 1):
        level = [
            inner
            for value in level
            for inner in (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list)
                else ()
            )
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _Beyond(f"is nested more than {DEPTH_MOST} levels deep")


def _check_yaml(content: bytes | str) -> None:
    """Check the parser's events, which it makes without recursion, and build no values."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    count = aliased = 0
    for event in yaml.parse(content, Loader=_Loader):
        match event:
            case yaml.AliasEvent():
                if any(anchor == event.anchor for anchor, _ in open_):
                    raise _Beyond(f"alias {event.anchor!r} stands for itself")
                size = sizes.get(event.anchor or "", 0)
                count, aliased = count + size, aliased + size
                if aliased > ALIASED_MOST:
                    raise _Beyond(f"aliases stand for more than {ALIASED_MOST} values")
            case yaml.ScalarEvent():
                count += 1
                if event.anchor:
                    sizes[event.anchor] = 1
                if event.implicit[0] and _LONG_NUMBER.match(event.value):
                    raise _Beyond(f"holds a number of more than {DIGITS_MOST} digits")
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                open_.append((event.anchor, count))
                count += 1
                if len(open_) > DEPTH_MOST:
                    raise _Beyond(f"is nested more than {DEPTH_MOST} levels deep")
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                anchor, before = open_.pop()
                if anchor:
                    sizes[anchor] = count - before
