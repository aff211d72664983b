# SPDX-License-Identifier: Apache-2.0
"""Writes the payload tables of docs/wire.md from the message Structs; ``--check`` only compares.

Everything between the markers ``generated: payloads`` and ``end of generated part`` belongs to this
program: one table per Struct that travels on the bus or in an annotation, with the text of each
field's docstring.
"""

import ast
import inspect
import sys
import types
import typing
from pathlib import Path

import msgspec

from hami_common import limits, signing
from hami_common.events import (
    allocation,
    asking,
    breach,
    decision,
    inventory,
    partition,
    quarantine,
    usage,
)
from hami_common.model import device, placement, request

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "wire.md"
BEGIN, END = "<!-- generated: payloads -->", "<!-- end of generated part -->"
MODULES = (
    inventory,
    allocation,
    decision,
    breach,
    partition,
    usage,
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
    texts: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts[before.target.id] = " ".join(str(after.value.value).split())
    return texts


def type_text(annotation: object) -> str:
    """A type as readers of JSON think of it."""
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
            parts.append("| field | type | default | |\n| --- | --- | --- | --- |")
            hints = typing.get_type_hints(struct)
            for field in msgspec.structs.fields(struct):
                default = "required" if field.required else f"`{_default(field)}`"
                text = texts.get(field.name, "").replace("|", "\\|")
                kind = type_text(hints[field.name])
                parts.append(f"| `{field.encode_name}` | {kind} | {default} | {text} |")
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
    text = TARGET.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    wanted = f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text else 1
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
