# SPDX-License-Identifier: Apache-2.0
"""Server-side apply: create or merge, with field ownership between managers that apply.

Ownership is kept in `metadata.managedFields` (FieldsV1) for Apply operations only; what a manager
applied before and leaves out now is removed unless another manager applied it too. Writers that
use other verbs own nothing, so they never conflict.
"""

from __future__ import annotations

from typing import Final

from hami_sim.apiserver import errors
from hami_sim.apiserver.calls import Call
from hami_sim.apiserver.errors import Cause, Obj, clone
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.patches import apply_merge, differing, drop_fields, field_set, subtract
from hami_sim.apiserver.store import Stored

_APPLY: Final = "Apply"


async def apply(operations: Operations, call: Call, body: object) -> tuple[Stored, bool]:
    """Apply a configuration; the second value is true if the object was created."""
    if not call.field_manager:
        raise errors.bad_request(
            'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required '
            "for apply patch"
        )
    if not isinstance(body, dict):
        raise errors.bad_request("the apply patch must be an object")
    applied = clone(body)
    metadata = applied.setdefault("metadata", {})
    if metadata.get("managedFields"):
        raise errors.bad_request("metadata.managedFields must be nil")
    metadata.setdefault("name", call.name)
    fields = field_set(applied, call.resource.kind)
    if operations.store.get(call.key, call.namespace, call.name) is None:
        if call.subresource:
            operations.get(call)
        fresh = clone(applied)
        fresh["metadata"]["managedFields"] = [_entry(operations, call, fields)]
        return await operations.create(call, fresh), True

    def produce(current: Obj) -> Obj:
        return _merged(operations, call, current, applied, fields)

    return await operations.update(call, produce), False


def _merged(operations: Operations, call: Call, current: Obj, applied: Obj, fields: Obj) -> Obj:
    kind = call.resource.kind
    entries = [
        entry
        for entry in current["metadata"].get("managedFields") or ()
        if entry.get("operation") == _APPLY
    ]
    mine = [entry for entry in entries if _is_mine(entry, call)]
    others = [entry for entry in entries if not _is_mine(entry, call)]
    _refuse_conflicts(call, current, applied, fields, others)
    merged = apply_merge(current, applied, kind=kind)
    for entry in mine:
        gone = subtract(entry.get("fieldsV1") or {}, fields)
        for other in others:
            gone = subtract(gone, other.get("fieldsV1") or {})
        merged = drop_fields(merged, gone, kind)
    before = mine[0] if mine else None
    if before is not None and before.get("fieldsV1") == fields:
        fresh = before
    else:
        fresh = _entry(operations, call, fields)
    kept = others
    if call.force:
        kept = [_without(entry, fields, current, applied) for entry in others]
    merged["metadata"]["managedFields"] = [*kept, fresh]
    if applied["metadata"].get("resourceVersion") is None:
        merged["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
    return merged


def _is_mine(entry: Obj, call: Call) -> bool:
    return (
        entry.get("manager") == call.field_manager
        and entry.get("subresource", "") == call.subresource
    )


def _without(entry: Obj, fields: Obj, current: Obj, applied: Obj) -> Obj:
    if not differing(fields, current, applied):
        return entry
    return {**entry, "fieldsV1": subtract(entry.get("fieldsV1") or {}, fields)}


def _refuse_conflicts(
    call: Call, current: Obj, applied: Obj, fields: Obj, others: list[Obj]
) -> None:
    if call.force:
        return
    causes = []
    for other in others:
        shared = subtract(fields, subtract(fields, other.get("fieldsV1") or {}))
        causes += [
            Cause(
                reason="FieldManagerConflict",
                message=f'conflict with "{other.get("manager")}"',
                field=path,
            )
            for path in differing(shared, current, applied)
        ]
    if causes:
        count = len(causes)
        listed = "\n".join(f"- {cause.field}" for cause in causes)
        names = causes[0].message
        plural = "conflict" if count == 1 else "conflicts"
        raise errors.ApiError(
            409,
            f"Apply failed with {count} {plural}: {names}: {causes[0].field}"
            if count == 1
            else f"Apply failed with {count} {plural}: {names}:\n{listed}",
            details={"causes": [cause.to_json() for cause in causes]},
        )


def _entry(operations: Operations, call: Call, fields: Obj) -> Obj:
    entry: Obj = {
        "manager": call.field_manager,
        "operation": _APPLY,
        "apiVersion": call.resource.api_version,
        "time": operations.now(),
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }
    if call.subresource:
        entry["subresource"] = call.subresource
    return entry
