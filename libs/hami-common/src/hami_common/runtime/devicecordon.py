# SPDX-License-Identifier: Apache-2.0
"""Cordons devices in the annotations of their node: for ``hamictl cordon`` and the registry.

The annotation ``hami.io/device-cordon`` of a node is the desired state, a comma list of UUIDs: the
registry follows it. ``hami.io/device-cordon-reasons`` records reasons for operators: a JSON object
from UUID to reason and time. One patch writes both, on condition of the node's resourceVersion.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.errors import Conflict, Unavailable
from hami_common.pods import annotations
from hami_common.ports import KubeApi

REASON_LENGTH_MOST = 500
TRIES = 5
Document = dict[str, Any]


class Cordoned(Struct, frozen=True, kw_only=True):
    """Result of a cordon or uncordon."""

    node: str
    uuid: str
    cordoned: bool
    changed: bool
    reason: str = ""


class CordonChange(Struct, frozen=True, kw_only=True):
    """Desired state of devices of one node."""

    uuids: Sequence[str]
    cordoned: bool
    reason: str = ""
    """At most ``REASON_LENGTH_MOST`` characters; empty: an earlier one stays."""
    now_s: float


async def change_cordon(api: KubeApi, node: str, change: CordonChange) -> tuple[Cordoned, ...]:
    """Add the devices to their node's list, or remove them; retry on a conflict.

    Errors are those of the API server, and ``Unavailable`` after ``TRIES`` conflicts.
    """
    path = api_path("api", "v1", "nodes", node)
    for _ in range(TRIES):
        document: Document = msgspec.json.decode(await api.get(path))
        metadata = document["metadata"]
        notes = metadata.get("annotations") or {}
        listed = [part.strip() for part in notes.get(annotations.DEVICE_CORDON, "").split(",")]
        uuids = [part for part in listed if part]
        reasons = _reasons(notes.get(annotations.DEVICE_CORDON_REASONS, ""))
        done = tuple(_changed(change, node, uuid, uuids, reasons) for uuid in change.uuids)
        if not any(one.changed for one in done):
            return done
        reasons = {one: value for one, value in reasons.items() if one in uuids}
        patch = {
            "metadata": {
                "resourceVersion": metadata.get("resourceVersion"),
                "annotations": {
                    annotations.DEVICE_CORDON: ",".join(uuids) or None,
                    annotations.DEVICE_CORDON_REASONS: _encoded(reasons),
                },
            }
        }
        try:
            await api.patch(path, json.dumps(patch).encode())
        except Conflict:
            continue
        return done
    raise Unavailable(peer="API server", detail=f"node {node} kept changing; retry")


def _changed(
    change: CordonChange, node: str, uuid: str, uuids: list[str], reasons: Document
) -> Cordoned:
    """Apply the change to one device of the two lists."""
    is_listed = uuid in uuids
    known = _reason(reasons, uuid)
    if change.cordoned == is_listed and change.reason in ("", known):
        return Cordoned(node=node, uuid=uuid, cordoned=change.cordoned, changed=False, reason=known)
    if change.cordoned:
        if not is_listed:
            uuids.append(uuid)
        when = datetime.fromtimestamp(change.now_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reasons[uuid] = {"reason": change.reason, "time": when}
    else:
        uuids[:] = [one for one in uuids if one != uuid]
        reasons.pop(uuid, None)
    return Cordoned(
        node=node, uuid=uuid, cordoned=change.cordoned, changed=True, reason=change.reason
    )


def _encoded(reasons: Document) -> str | None:
    return json.dumps(reasons, sort_keys=True) if reasons else None


def _reasons(text: str) -> Document:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _reason(reasons: Document, uuid: str) -> str:
    found = reasons.get(uuid)
    return str(found.get("reason", "")) if isinstance(found, dict) else ""
