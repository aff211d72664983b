# SPDX-License-Identifier: Apache-2.0
"""Patch arithmetic on plain JSON: RFC 6902, RFC 7386, strategic merge and server-side apply.

Every function takes a document and returns a new one; the inputs are not changed. Lists that the
real types merge by a key are named in `MERGE_KEYS`; all others are replaced whole, as there
(``staging/src/k8s.io/api/core/v1/types.go``, patchMergeKey tags, Kubernetes 1.34).
"""

from __future__ import annotations

from typing import Any, Final

import jsonpatch

from hami_sim.apiserver.errors import ApiError, Obj, bad_request, clone

MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "conditions": "type",
    "imagePullSecrets": "name",
    "secrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
    "addresses": "type",
    "podIPs": "ip",
    "hostIPs": "ip",
    "resourceClaims": "name",
    "resourceClaimStatuses": "name",
    "schedulingGates": "name",
    "webhooks": "name",
    "matchConditions": "name",
}
_KEYS_BY_KIND: Final = {"Service": {"ports": "port"}}
MERGED_SETS: Final = frozenset({"finalizers"})
_SET_ORDER: Final = "$setElementOrder/"
_DELETE_PRIMITIVE: Final = "$deleteFromPrimitiveList/"
_RETAIN: Final = "$retainKeys"


# ------------------------------------------------------------------------------- JSON patch


def json_patch(document: Any, operations: object) -> Any:  # noqa: ANN401 - any JSON
    """Apply an RFC 6902 patch, all operations or none."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: a JSON patch is a list of operations")
    try:
        return jsonpatch.JsonPatch(operations).apply(document)
    except jsonpatch.InvalidJsonPatch as error:
        raise bad_request(f"error decoding patch: {error}") from error
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
        why = f"the server rejected our request due to an error in our request: {error}"
        raise ApiError(422, why) from error


# ------------------------------------------------------------------------------ merge patch


def merge_patch(document: Any, patch: Any) -> Any:  # noqa: ANN401 - any JSON
    """Apply an RFC 7386 merge patch."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return clone(result)


# -------------------------------------------------------------------------- strategic merge


def strategic_merge(document: Obj, patch: Obj, *, kind: str) -> Obj:
    """Apply a strategic merge patch for an object of this kind."""
    return _merge_map(clone(document), clone(patch), _KEYS_BY_KIND.get(kind, {}))


def _merge_map(document: Obj, patch: Obj, keys: dict[str, str]) -> Obj:
    directive = patch.pop("$patch", "merge")
    if directive in ("replace", "delete"):
        return patch if directive == "replace" else {}
    if directive != "merge":
        msg = f"unknown patch type: {directive}"
        raise bad_request(msg)
    retain = patch.pop(_RETAIN, None)
    if isinstance(retain, list):
        document = {key: value for key, value in document.items() if key in retain}
    orders = {
        key.removeprefix(_SET_ORDER): patch.pop(key)
        for key in list(patch)
        if key.startswith(_SET_ORDER)
    }
    _delete_primitives(document, patch)
    for key, value in patch.items():
        if value is None:
            document.pop(key, None)
        elif isinstance(value, dict):
            if value.get("$patch") == "delete":
                document.pop(key, None)
                continue
            before = document.get(key)
            document[key] = _merge_map(before if isinstance(before, dict) else {}, value, keys)
        elif isinstance(value, list):
            before = document.get(key)
            document[key] = _merge_list(
                key, before if isinstance(before, list) else [], value, keys
            )
        else:
            document[key] = value
    for key, order in orders.items():
        if isinstance(document.get(key), list):
            document[key] = _ordered(key, document[key], order, keys)
    return document


def _delete_primitives(document: Obj, patch: Obj) -> None:
    for key in [key for key in patch if key.startswith(_DELETE_PRIMITIVE)]:
        gone = patch.pop(key)
        name = key.removeprefix(_DELETE_PRIMITIVE)
        if isinstance(document.get(name), list):
            document[name] = [item for item in document[name] if item not in gone]


def _merge_list(
    field: str, document: list[Any], patch: list[Any], keys: dict[str, str]
) -> list[Any]:
    if field in MERGED_SETS:
        return document + [item for item in patch if item not in document]
    merge_key = keys.get(field) or MERGE_KEYS.get(field)
    if merge_key is None or not all(isinstance(item, dict) for item in patch):
        return patch
    if any(item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if item.get("$patch") != "replace"]
    result = list(document)
    for item in patch:
        if merge_key not in item:
            msg = f"map: {item} does not contain declared merge key: {merge_key}"
            raise bad_request(msg)
        places = [
            position
            for position, existing in enumerate(result)
            if isinstance(existing, dict) and existing.get(merge_key) == item[merge_key]
        ]
        if item.get("$patch") == "delete":
            result = [entry for position, entry in enumerate(result) if position not in places]
        elif places:
            result[places[0]] = _merge_map(result[places[0]], item, keys)
        else:
            result.append(_merge_map({}, item, keys))
    return result


def _ordered(field: str, items: list[Any], order: list[Any], keys: dict[str, str]) -> list[Any]:
    """Put items in the order the patch asks for; items it does not name keep their place last."""
    merge_key = keys.get(field) or MERGE_KEYS.get(field)

    def identity(item: Any) -> Any:  # noqa: ANN401 - any JSON
        return item.get(merge_key) if isinstance(item, dict) and merge_key else item

    rank = {identity(item): position for position, item in enumerate(order)}
    return sorted(items, key=lambda item: rank.get(identity(item), len(rank)))


# -------------------------------------------------------------------------- server-side apply

_APPLY_IGNORED: Final = frozenset({"apiVersion", "kind"})
_APPLY_IGNORED_METADATA: Final = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "creationTimestamp", "managedFields"}
)


def field_set(applied: Obj, kind: str) -> Obj:
    """List the fields an applied configuration owns, in FieldsV1 form."""
    keys = _KEYS_BY_KIND.get(kind, {})
    body = {key: value for key, value in applied.items() if key not in _APPLY_IGNORED}
    if isinstance(body.get("metadata"), dict):
        body["metadata"] = {
            key: value
            for key, value in body["metadata"].items()
            if key not in _APPLY_IGNORED_METADATA
        }
        if not body["metadata"]:
            del body["metadata"]
    return _fields_of_map(body, keys)


def _list_key(field: str, keys: dict[str, str]) -> str:
    return keys.get(field) or MERGE_KEYS.get(field, "")


def _fields_of_map(value: Obj, keys: dict[str, str]) -> Obj:
    fields: Obj = {}
    for key, child in value.items():
        if isinstance(child, dict) and child:
            fields[f"f:{key}"] = _fields_of_map(child, keys)
        elif isinstance(child, list) and (merge_key := _list_key(key, keys)):
            fields[f"f:{key}"] = {
                _element(item, merge_key): {".": {}, **_fields_of_map(item, keys)}
                for item in child
                if isinstance(item, dict)
            }
        else:
            fields[f"f:{key}"] = {}
    return fields


def _element(item: Obj, merge_key: str) -> str:
    value = item.get(merge_key)
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return f'k:{{"{merge_key}":{text}}}'


def apply_merge(live: Obj, applied: Obj, *, kind: str) -> Obj:
    """Merge an applied configuration over the live object, keyed lists element-wise."""
    body = {key: value for key, value in applied.items() if key not in _APPLY_IGNORED}
    return _apply_map(clone(live), clone(body), _KEYS_BY_KIND.get(kind, {}))


def _apply_map(live: Obj, applied: Obj, keys: dict[str, str]) -> Obj:
    for key, value in applied.items():
        before = live.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            live[key] = _apply_map(before, value, keys)
        elif isinstance(value, list) and isinstance(before, list) and _list_key(key, keys):
            live[key] = _apply_list(before, value, _list_key(key, keys), keys)
        elif key in MERGED_SETS and isinstance(before, list):
            live[key] = before + [item for item in value if item not in before]
        else:
            live[key] = value
    return live


def _apply_list(
    live: list[Any], applied: list[Any], merge_key: str, keys: dict[str, str]
) -> list[Any]:
    result = list(live)
    for item in applied:
        for position, existing in enumerate(result):
            if existing.get(merge_key) == item.get(merge_key):
                result[position] = _apply_map(existing, item, keys)
                break
        else:
            result.append(item)
    return result


def drop_fields(document: Obj, gone: Obj, kind: str) -> Obj:
    """Remove the fields of a FieldsV1 set from a document."""
    return _drop(clone(document), gone, _KEYS_BY_KIND.get(kind, {}))


def _drop(document: Obj, gone: Obj, keys: dict[str, str]) -> Obj:
    for mark, inner in gone.items():
        name = mark.removeprefix("f:")
        value = document.get(name)
        if not inner:
            document.pop(name, None)
        elif isinstance(value, dict):
            document[name] = _drop(value, inner, keys)
            if not document[name]:
                del document[name]
        elif isinstance(value, list) and (merge_key := _list_key(name, keys)):
            kept = []
            for item in value:
                wanted = inner.get(_element(item, merge_key))
                if wanted is None:
                    kept.append(item)
                elif "." not in wanted:
                    kept.append(_drop(item, wanted, keys))
            document[name] = kept
            if not kept:
                del document[name]
    return document


def subtract(fields: Obj, others: Obj) -> Obj:
    """Take from one FieldsV1 set everything that another also holds."""
    rest: Obj = {}
    for mark, inner in fields.items():
        if mark not in others:
            rest[mark] = inner
        elif inner:
            left = subtract(inner, others[mark])
            if left:
                rest[mark] = left
    return rest


def differing(fields: Obj, live: Any, applied: Any, path: str = "") -> list[str]:  # noqa: ANN401 - any JSON
    """List the leaf paths of a FieldsV1 set whose values differ between two documents."""
    found: list[str] = []
    for mark, inner in fields.items():
        if mark == ".":
            continue
        if mark.startswith("k:"):
            merge_key, _, text = mark[4:-1].partition('":')
            wanted = text.strip('"')
            one, two = (
                next((item for item in side or () if str(item.get(merge_key)) == wanted), None)
                for side in (live, applied)
            )
            child = f"{path}[{merge_key}={text}]"
        else:
            name = mark.removeprefix("f:")
            one = live.get(name) if isinstance(live, dict) else None
            two = applied.get(name) if isinstance(applied, dict) else None
            child = f"{path}.{name}"
        if two is None:
            continue
        if inner:
            found += differing(inner, one, two, child)
        elif one != two:
            found.append(child)
    return found
