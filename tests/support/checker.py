# SPDX-License-Identifier: Apache-2.0
"""Judges a cluster by its outside: pods of the API server and messages of the streams.

It never asks a service of ours, so a wrong table cannot hide. Memory in MiB.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import anyio
from nats.aio.client import Client

from hami_common.bus import subjects
from hami_common.dra.claims import ResourceClaim, containers_of, node_of
from hami_common.dra.podclaims import by_request
from hami_common.events.allocation import AllocationRecord, is_by_claim, is_of_claim
from hami_common.events.codec import decode
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, Booked, ContainerShares, booked_by_device
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.pods.signing import SignedPlacement, Verifier

AGREED_S = 60.0
"""Longest time for which pods, ledger and events may differ after a change."""


class Outside(Protocol):
    """Access that the checks need to a cluster."""

    @property
    def bus(self) -> Client:
        """A connection that may read every stream."""
        ...

    async def pods(self, *, namespace: str = "default") -> list[PodView]:
        """All pods of a namespace."""
        ...


EVENT_KINDS = (
    ("allocation", subjects.ALLOC_BUCKET),
    ("state", subjects.STATE_BUCKET),
    ("device", subjects.DEVICES_BUCKET),
)


async def _latest(cluster: Outside, bucket: str) -> dict[str, bytes]:
    """Newest value of each key, as the stream leader has it."""
    stream = cluster.bus.jetstream()
    name = subjects.stream_of(bucket)
    info = await stream.stream_info(name, subjects_filter=subjects.kv_subject(bucket, ">"))
    return {
        subjects.key_of(bucket, subject): (await stream.get_last_msg(name, subject)).data or b""
        for subject in info.state.subjects or {}
    }


async def ledger_of(cluster: Outside) -> dict[str, AllocationRecord]:
    """Newest ledger record by key."""
    stored = await _latest(cluster, subjects.ALLOC_BUCKET)
    return {key: decode(value, AllocationRecord, what=key) for key, value in stored.items()}


async def inventory_of(cluster: Outside) -> list[NodeDevices]:
    """Return the inventory that the registry has published."""
    stored = await _latest(cluster, subjects.DEVICES_BUCKET)
    return [decode(value, NodeDevices, what=key) for key, value in stored.items()]


def placement_of(pod: PodView, verifier: Verifier) -> SignedPlacement | None:
    """Return the placement of a bound pod; an error when it does not verify."""
    text = pod.annotations().get(annotations.ALLOCATION)
    if text is None:
        return None
    return verifier.verify(text, pod_uid=pod.metadata.uid, node=pod.spec.node_name)


def _sum(parts: Iterable[tuple[ContainerShares, ...]]) -> dict[str, Booked]:
    total: dict[str, Booked] = {}
    for containers in parts:
        for uuid, booked in booked_by_device(containers).items():
            total[uuid] = total.get(uuid, NOTHING).plus(booked)
    return total


def over_capacity(
    held: Iterable[tuple[ContainerShares, ...]], inventory: Iterable[NodeDevices]
) -> list[str]:
    """Return devices booked beyond their capacity, one line each."""
    devices = {device.uuid: device for node in inventory for device in node.devices}
    problems = []
    for uuid, booked in _sum(held).items():
        device = devices.get(uuid)
        if device is None:
            problems.append(f"{uuid} holds {booked} but is not in the inventory")
            continue
        over = (
            booked.memory_mib > device.capacity_mib
            or booked.core_pct > device.capacity_core_pct
            or booked.slots > device.slots
            or (booked.exclusive and booked.slots > 1)
        )
        if over:
            problems.append(f"{uuid} of {device.capacity_mib} MiB holds {booked}")
    return problems


async def problems_of(cluster: Outside, verifier: Verifier, *, namespace: str) -> list[str]:
    """Return all violations; empty when no share is lost or doubled."""
    problems: list[str] = []
    pods = {
        pod.metadata.uid: pod
        for pod in await cluster.pods(namespace=namespace)
        if pod.labels().get(annotations.MANAGED_LABEL) == "true"
    }
    ledger = await ledger_of(cluster)
    live = {record.pod_uid: record for record in ledger.values() if record.op != "release"}
    counts = Counter(record.pod_uid for record in ledger.values() if record.op != "release")
    problems += [f"pod uid {uid} holds {n} shares" for uid, n in counts.items() if n > 1]
    placements = []
    for uid, pod in pods.items():
        name = pod.metadata.name
        if not pod.spec.node_name or pod.is_finished():
            if uid in live:
                problems.append(f"{name} is not placed, yet the ledger holds a share for it")
            continue
        placement = placement_of(pod, verifier)
        if placement is None:
            problems.append(f"{name} runs on {pod.spec.node_name} without a placement")
            continue
        placements.append(placement.placement.containers)
        record = live.get(uid)
        if record is None:
            problems.append(f"{name} runs on {pod.spec.node_name}, but its share is not booked")
        elif (record.node, record.allocation_id, record.containers) != (
            pod.spec.node_name,
            placement.allocation_id,
            placement.placement.containers,
        ):
            problems.append(f"{name}: ledger and annotation differ")
    for uid, record in live.items():
        if is_of_claim(record):
            placements.append(record.containers)
        elif uid not in pods:
            problems.append(
                f"share of {record.pod} on {record.node} is booked for a pod that is gone"
            )
    inventory = await inventory_of(cluster)
    problems += over_capacity(placements, inventory)
    problems += over_capacity([record.containers for record in live.values()], inventory)
    return problems


async def lasting_problems(
    cluster: Outside, verifier: Verifier, *, namespace: str, with_events: bool = False
) -> list[str]:
    """Return the violations that are left once the parts had time to agree, at most ``AGREED_S``.

    ``with_events``: also differences between buckets and their events.
    """
    problems = ["not looked yet"]
    with anyio.move_on_after(AGREED_S):
        while True:
            problems = await problems_of(cluster, verifier, namespace=namespace)
            if with_events:
                problems += await event_differences(cluster)
            if not problems:
                break
            await anyio.sleep(0.1)
    return problems


def claim_problems(
    claims: Iterable[ResourceClaim],
    live: Iterable[AllocationRecord],
    inventory: Iterable[NodeDevices],
) -> list[str]:
    """Return claims that differ from the ledger, and devices that booked claims overbook.

    ``live``: records of the ledger that are not released. A claim without a record was refused: it
    is never prepared, and keeps what kube-scheduler allocated to it until its pod is gone.
    """
    found = {(claim.namespace, claim.metadata.name): claim for claim in claims}
    devices: dict[str, list[Device]] = {}
    for node in (inventory := list(inventory)):
        devices.setdefault(node.node, []).extend(node.devices)
    problems, given = [], []
    for record in live:
        if not is_by_claim(record):
            given.append(record.containers)
            continue
        name = record.claim or record.pod
        claim = found.get((record.namespace, name))
        shares = () if claim is None else containers_of(claim, devices[node_of(claim)])
        wanted = by_request(record.containers) if record.claim else record.containers
        given.append(shares)
        if record.op != "resize" and _amounts(shares) != _amounts(wanted):
            problems.append(f"{record.pod}: ledger and claim {name} differ")
    return problems + over_capacity(given, inventory)


def _amounts(containers: Iterable[ContainerShares]) -> list[tuple[str, str, int, int]]:
    return sorted(
        (one.name, share.uuid, share.memory_mib, share.core_pct)
        for one in containers
        for share in one.shares
    )


def at_every_instant(
    history: Iterable[AllocationRecord], inventory: Iterable[NodeDevices]
) -> list[str]:
    """Return devices that the ledger booked beyond their capacity after any of its records.

    ``history``: all records in the order of the stream.
    """
    inventory = list(inventory)
    capacity = {device.uuid: device for node in inventory for device in node.devices}
    live: dict[tuple[str, str], AllocationRecord] = {}
    problems: set[str] = set()
    for record in history:
        live[record.node, record.pod_uid] = record
        touched = {share.uuid for one in record.containers for share in one.shares}
        if not touched <= capacity.keys():
            problems.add(f"{record.pod} has devices that are not in the inventory")
        held = [one.containers for one in live.values() if one.op != "release"]
        problems |= set(over_capacity(held, inventory)) if touched else set()
    return sorted(problems)


async def event_differences(cluster: Outside) -> list[str]:
    """Kinds of events whose number is not that of the accepted appends of their bucket."""
    stream = cluster.bus.jetstream()
    differences = []
    for kind, bucket in EVENT_KINDS:
        info = await stream.stream_info(
            subjects.EVENTS_STREAM, subjects_filter=f"{subjects.EVENT_PREFIX}.{kind}.>"
        )
        events = sum((info.state.subjects or {}).values())
        appended = (await stream.stream_info(subjects.stream_of(bucket))).state.last_seq
        if events != appended:
            differences.append(f"{kind}: {events} events, {appended} accepted appends")
    return differences
