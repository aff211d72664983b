# SPDX-License-Identifier: Apache-2.0
"""meta.k8s.io/v1 Tables: the columns that `kubectl get` prints.

Pods, nodes and events have columns of their own; all other kinds show name and creation time. Ages
are relative to now, in two units, as the real server renders them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from hami_sim.apiserver.calls import parse_rfc3339
from hami_sim.apiserver.errors import Obj

Cells: TypeAlias = Callable[[Obj, float], list[Any]]

_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400


class Column(msgspec.Struct, frozen=True):
    """One column; priority 1 is shown with `-o wide` only."""

    name: str
    type: str = "string"
    format: str = ""
    priority: int = 0

    def to_json(self) -> Obj:
        """Render as a TableColumnDefinition."""
        return {
            "name": self.name,
            "type": self.type,
            "format": self.format,
            "description": "",
            "priority": self.priority,
        }


_NAME: Final = Column("Name", format="name")
_AGE: Final = Column("Age")


def human_duration(seconds: float) -> str:
    """Shorten a duration the way ``duration.HumanDuration`` does."""
    total = int(seconds)
    if total < 0:
        return "<invalid>" if total < -1 else "0s"
    if total < 2 * _MINUTE:
        return f"{total}s"
    minutes, hours, days = total // _MINUTE, total // _HOUR, total // _DAY
    if minutes < 10:  # noqa: PLR2004 - as in HumanDuration
        return f"{minutes}m{total % _MINUTE}s" if total % _MINUTE else f"{minutes}m"
    if minutes < 180:  # noqa: PLR2004 - as in HumanDuration
        return f"{minutes}m"
    if hours < 8:  # noqa: PLR2004 - as in HumanDuration
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:  # noqa: PLR2004 - as in HumanDuration
        return f"{hours}h"
    if hours < 192:  # noqa: PLR2004 - as in HumanDuration
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d"


def _age(obj: Obj, now: float) -> str:
    stamp = obj["metadata"].get("creationTimestamp")
    return human_duration(now - parse_rfc3339(stamp)) if stamp else "<unknown>"


def _pod_reason(pod: Obj) -> str:
    status = pod.get("status") or {}
    reason = status.get("reason") or status.get("phase", "")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            reason = "SchedulingGated"
    for container in reversed(status.get("containerStatuses") or []):
        state = container.get("state") or {}
        waiting, terminated = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason"):
            reason = waiting["reason"]
        elif terminated:
            reason = terminated.get("reason") or f"ExitCode:{terminated.get('exitCode', 0)}"
    if pod["metadata"].get("deletionTimestamp"):
        reason = "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)


def _pod(pod: Obj, now: float) -> list[Any]:
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    ready = sum(1 for container in containers if container.get("ready"))
    gates = [gate.get("conditionType") for gate in spec.get("readinessGates") or ()]
    met = {c.get("type") for c in status.get("conditions") or () if c.get("status") == "True"}
    return [
        pod["metadata"]["name"],
        f"{ready}/{len(spec.get('containers') or ())}",
        _pod_reason(pod),
        str(sum(container.get("restartCount", 0) for container in containers)),
        _age(pod, now),
        status.get("podIP") or "<none>",
        spec.get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        f"{sum(gate in met for gate in gates)}/{len(gates)}" if gates else "<none>",
    ]


def _node(node: Obj, now: float) -> list[Any]:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    ready = next(
        (c.get("status") for c in status.get("conditions") or () if c.get("type") == "Ready"), None
    )
    words = ["Unknown" if ready is None else "Ready" if ready == "True" else "NotReady"]
    if spec.get("unschedulable"):
        words.append("SchedulingDisabled")
    prefix = "node-role.kubernetes.io/"
    roles = sorted(
        key.removeprefix(prefix)
        for key in node["metadata"].get("labels") or {}
        if key.startswith(prefix)
    )
    info = status.get("nodeInfo") or {}
    addresses = {item.get("type"): item.get("address") for item in status.get("addresses") or ()}
    return [
        node["metadata"]["name"],
        ",".join(words),
        ",".join(roles) or "<none>",
        _age(node, now),
        info.get("kubeletVersion", ""),
        addresses.get("InternalIP") or "<none>",
        addresses.get("ExternalIP") or "<none>",
        info.get("osImage") or "<unknown>",
        info.get("kernelVersion") or "<unknown>",
        info.get("containerRuntimeVersion") or "<unknown>",
    ]


def _event(event: Obj, now: float) -> list[Any]:
    involved = event.get("involvedObject") or {}
    stamp = event.get("lastTimestamp") or event.get("eventTime")
    source = event.get("source") or {}
    kind, name = involved.get("kind", ""), involved.get("name", "")
    first = event.get("firstTimestamp") or event.get("eventTime")
    return [
        human_duration(now - parse_rfc3339(stamp)) if stamp else "<unknown>",
        event.get("type", ""),
        event.get("reason", ""),
        f"{kind.lower()}/{name}",
        involved.get("fieldPath", ""),
        ", ".join(
            part
            for part in (
                source.get("component") or event.get("reportingComponent", ""),
                source.get("host", ""),
            )
            if part
        ),
        (event.get("message") or "").strip(),
        human_duration(now - parse_rfc3339(first)) if first else "<unknown>",
        event.get("count") or 1,
        event["metadata"]["name"],
    ]


def _generic(obj: Obj, now: float) -> list[Any]:
    del now
    return [obj["metadata"]["name"], obj["metadata"].get("creationTimestamp", "")]


_GENERIC: Final[tuple[tuple[Column, ...], Cells]] = (
    (_NAME, Column("Created At", "date")),
    _generic,
)
_PRINTERS: Final[Mapping[str, tuple[tuple[Column, ...], Cells]]] = {
    "pods": (
        (
            _NAME,
            Column("Ready"),
            Column("Status"),
            Column("Restarts"),
            _AGE,
            Column("IP", priority=1),
            Column("Node", priority=1),
            Column("Nominated Node", priority=1),
            Column("Readiness Gates", priority=1),
        ),
        _pod,
    ),
    "nodes": (
        (
            _NAME,
            Column("Status"),
            Column("Roles"),
            _AGE,
            Column("Version"),
            Column("Internal-IP", priority=1),
            Column("External-IP", priority=1),
            Column("OS-Image", priority=1),
            Column("Kernel-Version", priority=1),
            Column("Container-Runtime", priority=1),
        ),
        _node,
    ),
    "events": (
        (
            Column("Last Seen"),
            Column("Type"),
            Column("Reason"),
            Column("Object"),
            Column("Subobject", priority=1),
            Column("Source", priority=1),
            Column("Message"),
            Column("First Seen", priority=1),
            Column("Count", "integer", priority=1),
            Column("Name", format="name", priority=1),
        ),
        _event,
    ),
}


def render(
    storage_key: str,
    objects: list[Obj],
    *,
    now: float,
    metadata: Obj,
    include: str = "Metadata",
    full: Callable[[Obj], Obj],
    with_columns: bool = True,
) -> Obj:
    """Build a Table; `include` says what part of each object rides along."""
    columns, cells = _PRINTERS.get(storage_key, _GENERIC)
    rows = []
    for obj in objects:
        row: Obj = {"cells": cells(obj, now)}
        if include == "Object":
            row["object"] = full(obj)
        elif include == "Metadata":
            row["object"] = {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": obj["metadata"],
            }
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [column.to_json() for column in columns] if with_columns else None,
        "rows": rows,
    }
