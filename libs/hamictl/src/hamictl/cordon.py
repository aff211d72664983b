# SPDX-License-Identifier: Apache-2.0
"""Takes devices out of service for new pods, and back; pods that run stay.

The annotation ``hami.io/device-cordon`` of the device's node is the truth, a comma list of UUIDs:
the registry follows it. ``hami.io/device-cordon-reasons`` says why, for people: a JSON object from
UUID to reason, time and who. Both are written together, on condition that nobody changed the node.
"""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec

from hami_common.apipath import api_path
from hami_common.errors import Conflict, Unavailable
from hami_common.pods import annotations
from hami_common.ports import KubeApi
from hamictl.errors import InputRefused

REASONS = "hami.io/device-cordon-reasons"
TRIES = 5
Document = dict[str, Any]


class Cordoned(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    node: str
    uuid: str
    cordoned: bool
    changed: bool
    reason: str = ""


async def set_cordon(
    kube: KubeApi, *, node: str, uuid: str, cordoned: bool, reason: str, now_s: float
) -> Cordoned:
    """Put the device on its node's list, or take it off."""
    path = api_path("api", "v1", "nodes", node)
    for _ in range(TRIES):
        document: Document = msgspec.json.decode(await kube.get(path))
        metadata = document["metadata"]
        notes = metadata.get("annotations") or {}
        listed = [part.strip() for part in notes.get(annotations.DEVICE_CORDON, "").split(",")]
        uuids = [part for part in listed if part]
        reasons = _reasons(notes.get(REASONS, ""))
        is_listed = uuid in uuids
        if cordoned == is_listed and (not cordoned or not reason or _why(reasons, uuid) == reason):
            return Cordoned(
                node=node, uuid=uuid, cordoned=cordoned, changed=False, reason=_why(reasons, uuid)
            )
        if cordoned:
            uuids = uuids if is_listed else [*uuids, uuid]
            when = datetime.fromtimestamp(now_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            reasons[uuid] = {"reason": reason, "time": when}
        else:
            uuids = [one for one in uuids if one != uuid]
            reasons.pop(uuid, None)
        reasons = {one: why for one, why in reasons.items() if one in uuids}
        patch = {
            "metadata": {
                "resourceVersion": metadata.get("resourceVersion"),
                "annotations": {
                    annotations.DEVICE_CORDON: ",".join(uuids) or None,
                    REASONS: json.dumps(reasons, sort_keys=True) if reasons else None,
                },
            }
        }
        try:
            await kube.patch(path, json.dumps(patch).encode())
        except Conflict:
            continue
        return Cordoned(node=node, uuid=uuid, cordoned=cordoned, changed=True, reason=reason)
    raise Unavailable(peer="API server", detail=f"node {node} kept changing; try again")


def check_reason(reason: str) -> str:
    """The reason as it is kept; ``InputRefused`` when it is too long to be one."""
    longest = 500
    if len(reason) > longest:
        message = f"--reason has {len(reason)} characters, give at most {longest}"
        raise InputRefused(message)
    return reason.strip()


def _reasons(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _why(reasons: dict[str, Any], uuid: str) -> str:
    found = reasons.get(uuid)
    return str(found.get("reason", "")) if isinstance(found, dict) else ""
