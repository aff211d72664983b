# SPDX-License-Identifier: Apache-2.0
"""Rebuilds what the fleet had to place in a period: pods that arrived, devices, pods that ran.

Source is the ledger as it is copied to the event stream (``hami.v1.event.allocation``, ``device``),
which is complete. A record has the shares that a pod was given, not its request, so:

- Amounts in percent count as the MiB that they were on the recorded device.
- A pod may use any device of the model that it had, and of the same mode. Its other selectors, its
  node selector and affinity are unknown.
- A pod arrives when its devices are reserved; how long it waited before is unknown, and a pod that
  never got devices is absent.

A stimulus log (``loghistory``) also has the requests, the nodes that were offered and the waits.

A pod with several reservations counts with its last one, and one that was resized with its last
amounts. Times in Unix seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from hami_common.events.allocation import AllocationRecord, is_of_claim
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import (
    NAMED_MODES,
    PARTITION_MODES,
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)


class Put(Struct, frozen=True, kw_only=True):
    """The canonical devices of one vendor on one node, as of a time."""

    time_s: float
    devices: NodeDevices
    revision: int = 0
    """Sequence in the bucket; 0: not known."""


class Run(Struct, frozen=True, kw_only=True):
    """One pod with the devices that it was given."""

    request: PodRequest
    node: str
    containers: tuple[ContainerShares, ...]
    start_s: float
    end_s: float | None
    """``None``: not released yet."""
    is_pinned: bool = False
    """A ResourceClaim: kube-scheduler chose node and devices, whatever our policy is."""
    refused_s: float | None = None
    """Time of the first refusal; ``None``: none is known, the pod arrived at ``start_s``."""
    offered: tuple[str, ...] | None = None
    """Nodes that kube-scheduler offers the pod; ``None``: not known, all."""

    @property
    def arrival_s(self) -> float:
        """Time at which the pod first requested devices."""
        return self.start_s if self.refused_s is None else min(self.refused_s, self.start_s)

    @property
    def is_placed(self) -> bool:
        """True when the pod got devices; else ``start_s`` is its arrival."""
        return bool(self.node)


class Asked(Struct, frozen=True, kw_only=True):
    """A pod as the scheduler was asked about it."""

    request: PodRequest
    offered: tuple[str, ...]
    """Nodes that kube-scheduler offered in the newest question."""
    refused_s: float | None
    """Time of the first refusal, if no node took the pod when it was first tried."""


class History(Struct, frozen=True, kw_only=True):
    """Everything to place in a period."""

    from_s: float
    until_s: float
    devices: tuple[NodeDevices, ...]
    """As of the start; of nodes without an earlier record, as of their first one."""
    puts: tuple[Put, ...]
    """Changes within the period, by time."""
    running: tuple[Run, ...]
    """Pods with devices at the start."""
    arrivals: tuple[Run, ...]
    """By time."""
    left_out: int = 0
    """Earlier arrivals beyond the limit, by which the period was shortened."""
    without_begin: int = 0
    """Releases of pods whose reservation is no longer stored."""


class _Entry(Struct, kw_only=True):
    """A pod on a node while records are folded."""

    record: AllocationRecord
    """The last one with shares."""
    start_s: float
    end_s: float | None = None


def history_of(
    records: Iterable[AllocationRecord],
    puts: Iterable[Put],
    *,
    present: Iterable[NodeDevices],
    live: Iterable[AllocationRecord],
    from_s: float,
    until_s: float,
    arrivals_most: int,
    asked: Mapping[str, Asked] = MappingProxyType({}),
) -> History:
    """Fold stored records, in stream order, into the period's history.

    ``asked``: questions by uid, as far as they are known, also about pods that never got devices.
    ``puts`` are those that are stored, by time; ``present`` and ``live``: devices and reservations
    of now, for nodes and pods whose records are older than the stream. If more than
    ``arrivals_most`` pods arrived, the period begins later, with the last of them.
    """
    entries, without_begin = _folded(records, live, from_s=from_s, until_s=until_s)
    starts = sorted(one.start_s for one in entries if from_s <= one.start_s <= until_s)
    left_out = max(0, len(starts) - arrivals_most)
    if left_out:
        # Pods that arrived at the same moment stay together.
        from_s = starts[left_out]
        left_out = sum(1 for start in starts if start < from_s)
    devices, later = _devices(list(puts), present, from_s=from_s, until_s=until_s)
    known = {
        (one.node, device.uuid): device
        for one in (*(put.devices for put in later), *devices)
        for device in one.devices
    }
    runs = [_run(one, known, asked) for one in entries]
    placed = {one.record.pod_uid for one in entries}
    runs += [
        Run(
            request=one.request,
            node="",
            containers=(),
            start_s=one.refused_s,
            end_s=None,
            offered=one.offered,
        )
        for uid, one in asked.items()
        if one.refused_s is not None and uid not in placed
    ]
    runs.sort(key=lambda run: (run.arrival_s, run.request.uid))
    return History(
        from_s=from_s,
        until_s=until_s,
        devices=tuple(devices),
        puts=tuple(later),
        running=tuple(
            one
            for one in runs
            if one.is_placed
            and one.arrival_s < from_s
            and (one.end_s is None or one.end_s > from_s)
        ),
        arrivals=tuple(one for one in runs if one.arrival_s >= from_s),
        left_out=left_out,
        without_begin=without_begin,
    )


def _folded(
    records: Iterable[AllocationRecord],
    live: Iterable[AllocationRecord],
    *,
    from_s: float,
    until_s: float,
) -> tuple[list[_Entry], int]:
    """Return the pods that held devices, by the time of their reservation.

    Also return the number of releases in the period whose reservation is not stored.
    """
    ended: dict[str, _Entry] = {}
    held: dict[tuple[str, str], _Entry] = {}
    unknown: set[tuple[str, str]] = set()
    for record in records:
        if record.time_s > until_s:
            continue
        key = record.node, record.pod_uid
        known = held.get(key)
        if record.op == "release":
            if known is not None:
                known.end_s = max(known.start_s, record.time_s)
                ended[record.pod_uid] = held.pop(key)
            elif record.pod_uid not in ended and record.time_s >= from_s:
                unknown.add(key)
        elif known is not None:
            known.record = record
        else:
            # A resize without a stored reservation: the pod ran before all records.
            held[key] = _Entry(
                record=record, start_s=record.time_s if record.op == "reserve" else 0
            )
    for record in live:
        if record.time_s <= until_s:
            key = record.node, record.pod_uid
            held.setdefault(key, _Entry(record=record, start_s=record.time_s))
    for _, pod_uid in held:
        ended.pop(pod_uid, None)
    found = sorted(
        (*ended.values(), *held.values()), key=lambda one: (one.start_s, one.record.pod_uid)
    )
    return found, len(unknown)


def _devices(
    puts: Sequence[Put], present: Iterable[NodeDevices], *, from_s: float, until_s: float
) -> tuple[list[NodeDevices], list[Put]]:
    """Return the devices at ``from_s``, and the changes after it."""
    begin: dict[tuple[str, str], NodeDevices] = {}
    later: list[Put] = []
    for put in puts:
        served = put.devices.node, put.devices.vendor
        if put.time_s <= from_s or served not in begin:
            begin[served] = put.devices
        elif put.time_s <= until_s:
            later.append(put)
    for devices in present:
        begin.setdefault((devices.node, devices.vendor), devices)
    return [begin[served] for served in sorted(begin)], later


# --- requests from shares -------------------------------------------------------------------------


def _run(
    entry: _Entry,
    known: dict[tuple[str, str], Device],
    asked: Mapping[str, Asked],
) -> Run:
    record = entry.record
    question = asked.get(record.pod_uid)
    return Run(
        request=question.request if question else request_of(record, known),
        node=record.node,
        containers=record.containers,
        start_s=entry.start_s,
        end_s=entry.end_s,
        is_pinned=is_of_claim(record),
        refused_s=question.refused_s if question else None,
        offered=question.offered if question else None,
    )


def request_of(record: AllocationRecord, known: dict[tuple[str, str], Device]) -> PodRequest:
    """Return a request that the recorded shares satisfy; ``known``: devices by node and UUID."""
    shares = [share for container in record.containers for share in container.shares]
    vendors = dict.fromkeys(share.vendor for share in shares)
    return PodRequest(
        uid=record.pod_uid,
        namespace=record.namespace,
        name=record.pod,
        containers=tuple(
            ContainerRequest(
                name=container.name,
                kind=container.kind,
                requests=tuple(_requests(container, record.node, known)),
                priority=container.priority,
            )
            for container in record.containers
        ),
        selectors={
            vendor: _selector([s for s in shares if s.vendor == vendor], record, known)
            for vendor in vendors
        },
    )


def _requests(
    container: ContainerShares, node: str, known: dict[tuple[str, str], Device]
) -> Iterable[DeviceRequest]:
    groups: dict[tuple[str, str, str], list[Share]] = {}
    for share in container.shares:
        groups.setdefault((share.vendor, share.profile, share.kind), []).append(share)
    for (vendor, profile, kind), some in groups.items():
        devices = [known.get((node, share.uuid)) for share in some]
        types = {"" if device is None else device.type for device in devices}
        yield DeviceRequest(
            vendor=vendor,
            count=len(some),
            memory_mib=max(share.memory_mib for share in some),
            core_pct=max(share.core_pct for share in some),
            exclusive=any(share.exclusive for share in some),
            profile=profile,
            kind=kind,
            types=() if "" in types else tuple(sorted(types)),
        )


def _selector(
    shares: Sequence[Share], record: AllocationRecord, known: dict[tuple[str, str], Device]
) -> DeviceSelector:
    modes: set[str] = {share.mode for share in shares if share.mode in NAMED_MODES}
    for share in shares:
        device = known.get((record.node, share.uuid))
        if share.profile and device is not None and device.mode in PARTITION_MODES:
            modes.add(device.mode)
    pinned = {share.uuid for share in shares} if is_of_claim(record) else ()
    return DeviceSelector(modes=tuple(sorted(modes)), allow_uuids=tuple(sorted(pinned)))
