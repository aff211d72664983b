# SPDX-License-Identifier: Apache-2.0
"""Judges from outside whether any device was allocated twice.

Reads the signed annotations of pods and the newest ledger records, never a table of the scheduler.
Memory in MiB, compute in percent of one device.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import NOTHING, Booked, ContainerShares, booked_by_device
from hami_common.pods import annotations
from hami_common.pods.signing import SignedPlacement, Verifier

Obj = dict[str, Any]
Holding = tuple[str, tuple[ContainerShares, ...]]


def committed(pods: Iterable[Obj], verifier: Verifier) -> list[tuple[Obj, SignedPlacement]]:
    """Return assigned, unfinished pods with an allocation, and the allocation; a bad signature
    raises.
    """
    found = []
    for pod in pods:
        meta, node = pod["metadata"], pod["spec"].get("nodeName")
        annotation = (meta.get("annotations") or {}).get(annotations.ALLOCATION)
        if node and annotation and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            found.append((pod, verifier.verify(annotation, pod_uid=meta["uid"], node=node)))
    return found


def check(
    pods: Iterable[Obj],
    records: Iterable[AllocationRecord],
    *,
    verifier: Verifier,
    capacity: Sequence[NodeDevices],
) -> None:
    """Verify that no device is over its capacity: by the pods' annotations, and by the ledger.

    A share that waits for other pods to leave counts once they have left.
    """
    records = list(records)
    there = {(r.node, r.pod_uid) for r in records if r.op != "release"}
    carried = [
        (signed.placement.node, signed.placement.containers)
        for _, signed in committed(pods, verifier)
    ]
    held = [
        (r.node, r.containers)
        for r in records
        if r.op != "release" and not any((r.node, uid) in there for uid in r.awaits)
    ]
    _check_capacity("pods", carried, capacity)
    _check_capacity("ledger", held, capacity)


def check_settled(
    pods: Sequence[Obj],
    records: Sequence[AllocationRecord],
    *,
    verifier: Verifier,
    capacity: Sequence[NodeDevices],
) -> None:
    """Verify also that every bound pod has exactly the shares of its annotation, and no other pod
    has any.
    """
    check(pods, records, verifier=verifier, capacity=capacity)
    live = {(r.node, r.pod_uid): r for r in records if r.op != "release"}
    for pod, signed in committed(pods, verifier):
        meta = pod["metadata"]
        record = live.pop((pod["spec"]["nodeName"], meta["uid"]), None)
        assert record is not None, f"pod {meta['name']} has no live record"
        assert record.allocation_id == signed.allocation_id, meta["name"]
        assert record.containers == signed.placement.containers, meta["name"]
        for container in record.containers:
            assert annotations.limits(container.name) in meta["annotations"], meta["name"]
    assert not live, f"records without a pod: {sorted(live)}"


def _check_capacity(who: str, holdings: Iterable[Holding], capacity: Sequence[NodeDevices]) -> None:
    used: dict[tuple[str, str], Booked] = defaultdict(lambda: NOTHING)
    holders: dict[tuple[str, str], int] = defaultdict(int)
    for node, containers in holdings:
        for uuid, booked in booked_by_device(containers).items():
            used[node, uuid] = used[node, uuid].plus(booked)
            holders[node, uuid] += 1
    by_device = {(d.node, device.uuid): device for d in capacity for device in d.devices}
    for at, booked in used.items():
        device = by_device[at]
        assert booked.memory_mib <= device.capacity_mib, (who, at, booked)
        assert booked.core_pct <= device.capacity_core_pct, (who, at, booked)
        assert booked.slots <= device.slots, (who, at, booked)
        assert not booked.exclusive or holders[at] == 1, (who, at, booked)
