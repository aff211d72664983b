# SPDX-License-Identifier: Apache-2.0
"""Reports incompatible changes of a published JSON Schema for readers of the published one.

Allowed are changes that consumers tolerate: further optional fields, other texts, and narrower
ranges of numbers, texts, lists and maps. All else is a break: a wider range; a field that is
removed, has another type or other values, or is no longer required; a further value of a closed
list, which a strict reader refuses; a further required field, for which stored messages have no
value. Supports the schemas that msgspec writes.
"""

from collections.abc import Iterator
from typing import Any, TypeGuard

Schema = dict[str, Any]

_TEXTS = frozenset({"description", "title", "$schema", "$id", "$defs", "properties", "required"})


_AT_MOST = frozenset({"maximum", "maxLength", "maxItems", "maxProperties"})
_AT_LEAST = frozenset({"minimum"})


def breaks(published: Schema, now: Schema) -> list[str]:
    """One line per break; empty when every reader of ``published`` can read ``now``."""
    return list(_breaks(published, now, published, now, "$", frozenset()))


def _breaks(
    old: Schema, new: Schema, old_root: Schema, new_root: Schema, at: str, seen: frozenset[str]
) -> Iterator[str]:
    if "$ref" in old and old["$ref"] in seen:
        return
    seen |= {old.get("$ref", "")}
    old, new = _resolved(old, old_root), _resolved(new, new_root)
    old_fields, new_fields = old.get("properties", {}), new.get("properties", {})
    for name in old_fields:
        if name not in new_fields:
            yield f"{at}.{name}: gone"
            continue
        yield from _breaks(
            old_fields[name], new_fields[name], old_root, new_root, f"{at}.{name}", seen
        )
    old_required, new_required = set(old.get("required", ())), set(new.get("required", ()))
    yield from (f"{at}.{name}: no longer always there" for name in old_required - new_required)
    yield from (
        f"{at}.{name}: required, but stored without" for name in new_required - old_required
    )
    for key in sorted((old.keys() | new.keys()) - _TEXTS):
        path = f"{at}[{key}]"
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _breaks(before, after, old_root, new_root, path, seen)
        elif _is_schemas(before) and _is_schemas(after) and len(before) == len(after):
            for number, (left, right) in enumerate(zip(before, after, strict=True)):
                yield from _breaks(left, right, old_root, new_root, f"{path}[{number}]", seen)
        elif before != after and not _is_narrower(key, before, after):
            yield f"{path}: {before!r} became {after!r}"


def _is_narrower(key: str, before: Any, after: Any) -> bool:
    if key == "propertyNames":
        return before is None  # names of a map had no range
    if after is None or key not in _AT_MOST | _AT_LEAST:
        return False
    return before is None or (after < before if key in _AT_MOST else after > before)


def _is_schemas(value: object) -> TypeGuard[list[Schema]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _resolved(schema: Schema, root: Schema) -> Schema:
    while "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        schema = root if name == "#" else root["$defs"][name]
    return schema
