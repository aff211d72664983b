# SPDX-License-Identifier: Apache-2.0
"""``hamictl cordon`` and ``uncordon``: mark a device unschedulable for new pods, and schedulable.

The annotation ``hami.io/device-cordon`` of the device's node is the desired state, a comma list of
UUIDs: the registry follows it. ``hami.io/device-cordon-reasons`` records reasons for operators: a
JSON object from UUID to reason and time. One patch writes both, on condition of the node's
resourceVersion.
"""

import json
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.errors import Conflict, Unavailable
from hami_common.pods import annotations
from hami_common.ports import KubeApi
from hami_common.runtime.clock import SystemClock
from hamictl import client, kube, options, output
from hamictl.errors import Absent, InputRefused

REASONS = "hami.io/device-cordon-reasons"
REASON_LENGTH_MOST = 500
TRIES = 5
Document = dict[str, Any]
_CLOCK = SystemClock()


class Cordoned(Struct, frozen=True, kw_only=True):
    """Result of a cordon or uncordon."""

    node: str
    uuid: str
    cordoned: bool
    changed: bool
    reason: str = ""


class _Change(Struct, frozen=True, kw_only=True):
    uuid: str
    cordoned: bool
    reason: str
    now_s: float


_device_node_option = click.option(
    "--node", default="", help="Node of the device; read from the registry by default."
)


@click.group()
def cordon() -> None:
    """Mark a device unschedulable for new pods."""


@click.group()
def uncordon() -> None:
    """Mark a device schedulable again."""


@cordon.command(name="device")
@click.argument("uuid")
@click.option("--reason", default="", help="Reason to record for other operators.")
@_device_node_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def cordon_device(  # noqa: PLR0917 - click passes them by name
    uuid: str, reason: str, node: str, registry: str, kubeconfig: str, format_: str
) -> None:
    """Mark a device unschedulable for new pods; running pods stay."""
    if len(reason) > REASON_LENGTH_MOST:
        message = f"--reason has {len(reason)} characters, give at most {REASON_LENGTH_MOST}"
        raise InputRefused(message)
    change = _Change(uuid=uuid, cordoned=True, reason=reason.strip(), now_s=_CLOCK.now_s())
    _apply(change, node=node, registry=registry, kubeconfig=kubeconfig, format_=format_)


@uncordon.command(name="device")
@click.argument("uuid")
@_device_node_option
@options.registry_option
@options.kubeconfig_option
@options.format_option
def uncordon_device(uuid: str, node: str, registry: str, kubeconfig: str, format_: str) -> None:
    """Mark a device schedulable for new pods again."""
    change = _Change(uuid=uuid, cordoned=False, reason="", now_s=_CLOCK.now_s())
    _apply(change, node=node, registry=registry, kubeconfig=kubeconfig, format_=format_)


def _apply(change: _Change, *, node: str, registry: str, kubeconfig: str, format_: str) -> None:
    uuid, node = change.uuid, node or _node_of(change.uuid, registry)
    done = kube.with_kube(kubeconfig, lambda api: _patch(api, node, change))
    if output.structured(done, format_):
        return
    word = "cordoned" if done.cordoned else "uncordoned"
    already = "" if done.changed else " already"
    click.echo(f"{uuid} on {node} is{already} {word}" + (f": {done.reason}" if done.reason else ""))


def _node_of(uuid: str, registry: str) -> str:
    answer = client.read(client.Devices, registry, "/v1/devices")
    found = sorted({device.node for device in answer.items if device.uuid == uuid})
    if not found:
        message = f"device {uuid} not found; see hamictl get devices -o wide, or give --node"
        raise Absent(message)
    if len(found) > 1:
        message = f"several nodes have device {uuid}: give --node with one of {', '.join(found)}"
        raise InputRefused(message)
    return found[0]


async def _patch(api: KubeApi, node: str, change: _Change) -> Cordoned:
    """Add the device to its node's list, or remove it; retry on a conflict."""
    uuid, cordoned, reason = change.uuid, change.cordoned, change.reason
    path = api_path("api", "v1", "nodes", node)
    for _ in range(TRIES):
        document: Document = msgspec.json.decode(await api.get(path))
        metadata = document["metadata"]
        notes = metadata.get("annotations") or {}
        listed = [part.strip() for part in notes.get(annotations.DEVICE_CORDON, "").split(",")]
        uuids = [part for part in listed if part]
        reasons = _reasons(notes.get(REASONS, ""))
        is_listed = uuid in uuids
        if cordoned == is_listed and (
            not cordoned or not reason or _reason(reasons, uuid) == reason
        ):
            return Cordoned(
                node=node,
                uuid=uuid,
                cordoned=cordoned,
                changed=False,
                reason=_reason(reasons, uuid),
            )
        if cordoned:
            uuids = uuids if is_listed else [*uuids, uuid]
            when = datetime.fromtimestamp(change.now_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            reasons[uuid] = {"reason": reason, "time": when}
        else:
            uuids = [one for one in uuids if one != uuid]
            reasons.pop(uuid, None)
        reasons = {one: value for one, value in reasons.items() if one in uuids}
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
            await api.patch(path, json.dumps(patch).encode())
        except Conflict:
            continue
        return Cordoned(node=node, uuid=uuid, cordoned=cordoned, changed=True, reason=reason)
    raise Unavailable(peer="API server", detail=f"node {node} kept changing; retry")


def _reasons(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _reason(reasons: dict[str, Any], uuid: str) -> str:
    found = reasons.get(uuid)
    return str(found.get("reason", "")) if isinstance(found, dict) else ""
