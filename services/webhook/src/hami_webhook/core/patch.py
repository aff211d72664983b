# SPDX-License-Identifier: Apache-2.0
"""Computes a small RFC 6902 patch between two JSON documents.

Objects are compared key by key. Lists keep their untouched elements: elements may be changed in
place, removed, or added at the end; a reordered list is replaced as a whole. Paths follow RFC 6901.
"""

from typing import Any

from hami_common.admission.review import Operation

Json = Any


def _pointer(path: str, token: str | int) -> str:
    if isinstance(token, str):
        token = token.replace("~", "~0").replace("/", "~1")
    return f"{path}/{token}"


def diff(before: Json, after: Json, path: str = "") -> list[Operation]:
    """Return the operations from ``before`` to ``after``; empty when they are equal."""
    if before is after or (before == after and type(before) is type(after)):
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return _diff_objects(before, after, path)
    if isinstance(before, list) and isinstance(after, list):
        return _diff_lists(before, after, path)
    return [{"op": "replace", "path": path, "value": after}]


def _diff_objects(before: dict[str, Json], after: dict[str, Json], path: str) -> list[Operation]:
    operations: list[Operation] = [
        {"op": "remove", "path": _pointer(path, key)} for key in before if key not in after
    ]
    for key, value in after.items():
        if key in before:
            operations.extend(diff(before[key], value, _pointer(path, key)))
        else:
            operations.append({"op": "add", "path": _pointer(path, key), "value": value})
    return operations


def _identity(element: Json) -> Json:
    """Return the identity of a list element across a change: its name where it has one."""
    if isinstance(element, dict):
        for key in ("mountPath", "name"):
            if isinstance(element.get(key), str):
                return (key, element[key])
    return ("value", repr(element))


def _diff_lists(before: list[Json], after: list[Json], path: str) -> list[Operation]:
    wanted = [_identity(element) for element in after]
    identities = [_identity(element) for element in before]
    all_wanted = set(wanted)
    kept = [i for i, identity in enumerate(identities) if identity in all_wanted]
    head = [identities[i] for i in kept]
    if wanted[: len(head)] != head or len(all_wanted) != len(wanted):
        return [{"op": "replace", "path": path, "value": after}]
    still = set(kept)
    operations: list[Operation] = [
        {"op": "remove", "path": _pointer(path, i)}
        for i in reversed(range(len(before)))
        if i not in still
    ]
    for position, i in enumerate(kept):
        operations.extend(diff(before[i], after[position], _pointer(path, position)))
    operations.extend(
        {"op": "add", "path": f"{path}/-", "value": value} for value in after[len(kept) :]
    )
    return operations
