# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of docs/wire.md from the message Structs.

``payloads``: one table per Struct that travels on the bus or in an annotation, with the range and
the docstring of each field. ``ranges``: one table of all ranges, from ``hami_common.bounds``.
"""

import ast
import inspect
import itertools
import sys
import types
import typing

import msgspec

from hami_common import bounds
from hami_common.events import (
    allocation,
    asking,
    breach,
    decision,
    idle,
    inventory,
    partition,
    quarantine,
    usage,
)
from hami_common.model import device, placement, request
from hami_common.pods import limits, signing
from tools.generated import DOCS, write_parts

MODULES = (
    inventory,
    allocation,
    decision,
    breach,
    partition,
    usage,
    idle,
    quarantine,
    asking,
    signing,
    placement,
    device,
    request,
    limits,
)


def field_texts(struct: type) -> dict[str, str]:
    """First sentence or two of each field's docstring, by field."""
    tree = ast.parse(inspect.getsource(struct)).body[0]
    if not isinstance(tree, ast.ClassDef):
        raise TypeError(struct)
    return _texts(tree.body)


def _texts(body: list[ast.stmt]) -> dict[str, str]:
    """Docstrings of the names that are assigned in ``body``."""
    texts: dict[str, str] = {}
    for before, after in itertools.pairwise(body):
        if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
            continue
        target = before.targets[0] if isinstance(before, ast.Assign) else None
        if isinstance(before, ast.AnnAssign):
            target = before.target
        if isinstance(target, ast.Name):
            texts[target.id] = " ".join(str(after.value.value).split())
    return texts


def _metas(annotation: object) -> list[msgspec.Meta]:
    """Constraints of the type itself, not of its items."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return []
    return [meta for meta in typing.get_args(annotation)[1:] if isinstance(meta, msgspec.Meta)]


def _bare(annotation: object) -> object:
    is_annotated = typing.get_origin(annotation) is typing.Annotated
    return typing.get_args(annotation)[0] if is_annotated else annotation


def range_text(annotation: object) -> str:
    """Range of a field, of a list also of its items: ``0 … 4,095``, ``≤ 253 characters``."""
    parts: list[str] = []
    bare = _bare(annotation)
    origin, arguments = typing.get_origin(bare), typing.get_args(bare)
    for meta in _metas(annotation):
        if meta.ge is not None and meta.le is not None:
            parts.append(f"{_number(meta.ge)} … {_number(meta.le)}")
        if meta.max_length is not None:
            unit = "characters" if bare is str else "entries"
            parts.append(f"≤ {_number(meta.max_length)} {unit}")
    if origin in (typing.Union, types.UnionType):
        parts += [text for one in arguments if (text := range_text(one))]
    elif origin is dict:
        parts += [
            f"{word} {text}"
            for word, one in zip(("keys", "values"), arguments, strict=True)
            if (text := range_text(one))
        ]
    elif origin in (tuple, list):
        texts = dict.fromkeys(range_text(one) for one in arguments if one is not Ellipsis)
        parts += [f"each {text}" for text in texts if text]
    return ", ".join(parts)


def _number(value: float) -> str:
    """Powers of two less one as such; others as they are."""
    whole = int(value)
    exponent = (abs(whole) + 1).bit_length() - 1
    if whole == value and exponent >= 31 and whole == (1 << exponent) - 1:  # noqa: PLR2004 - int32
        return f"2^{exponent} − 1"
    if whole == value and whole < 0 and -whole & (-whole - 1) == 0 and exponent >= 31:  # noqa: PLR2004
        return f"−2^{exponent}"
    return f"{whole:,}" if whole == value else str(value)


def ranges() -> str:
    """Tables of all ranges and bounds by their names in ``hami_common.bounds``."""
    texts = _texts(ast.parse(inspect.getsource(bounds)).body)
    lines = ["| range | type | | what it is |", "| --- | --- | --- | --- |"]
    for name, value in vars(bounds).items():
        if typing.get_origin(value) is typing.Annotated:
            lines.append(f"| {name} | {type_text(value)} | {range_text(value)} | {texts[name]} |")
    lines += ["", "| bound | at most | |", "| --- | --- | --- |"]
    for name, value in vars(bounds).items():
        if name.endswith("_MOST") and name in texts:
            lines.append(f"| `{name}` | {_number(value)} | {texts[name]} |")
    return "\n".join(lines) + "\n"


def type_text(annotation: object) -> str:
    """Name of a type for readers of JSON."""
    annotation = _bare(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(a) for a in arguments if a is not type(None)) + ", optional"
    if origin in (tuple, list):
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"map to {type_text(arguments[1])}"
    names = {str: "text", int: "integer", float: "number", bool: "boolean"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))  # type: ignore[call-overload,no-any-return]  # unhashable annotations do not occur


def tables() -> str:
    """All tables, in module order."""
    parts: list[str] = []
    for module in MODULES:
        for name, struct in vars(module).items():
            own = isinstance(struct, type) and issubclass(struct, msgspec.Struct)
            if not own or struct.__module__ != module.__name__ or name.startswith("_"):
                continue
            texts = field_texts(struct)
            summary = (struct.__doc__ or "").strip().split("\n\n")[0]
            parts.append(f"### {name}\n\n{' '.join(summary.split())}\n")
            if struct.__struct_config__.array_like:
                parts.append("On the wire: an array in this order.\n")
            parts.append("| field | type | range | default | |\n| --- | --- | --- | --- | --- |")
            hints = typing.get_type_hints(struct, include_extras=True)
            for field in msgspec.structs.fields(struct):
                default = "required" if field.required else f"`{_default(field)}`"
                text = texts.get(field.name, "").replace("|", "\\|")
                hint = hints[field.name]
                columns = (
                    f"`{field.encode_name}`",
                    type_text(hint),
                    range_text(hint),
                    default,
                    text,
                )
                parts.append(f"| {' | '.join(columns)} |")
            parts.append("")
    return "\n".join(parts)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        value = field.default
    return msgspec.json.encode(value).decode()


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "wire.md", {"ranges": ranges(), "payloads": tables()})


if __name__ == "__main__":
    sys.exit(main())
