# SPDX-License-Identifier: Apache-2.0
"""Folds events of a node, or of a pod, into a timeline: slices of devices and changes.

Events are folded in stream order. An event before the start of the timeline only changes what is
known at its start: which slices are open, and the state of each device. Slices that were reserved
before the oldest event come from the read model. Memory in MiB, compute in percent of one device,
times in Unix seconds.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import CLAIM, AllocationRecord, StateRecord
from hami_common.events.breach import BreachRecord
from hami_common.events.decision import AdmissionRecord, DecisionRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.partition import PartitionRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, booked_by_device

ENTRIES_MOST: Final = 5000
"""Entries, and slices, of one answer: the newest."""


class Slice(Struct, frozen=True, kw_only=True):
    """Part of a device that a pod or claim held for a time."""

    uuid: str
    begin_s: float
    end_s: float | None
    """``None``: it is still held."""
    namespace: str
    """Empty together with pod, pod_uid, allocation_id and reason: another tenant's."""
    pod: str
    pod_uid: str
    allocation_id: str
    memory_mib: int
    core_pct: int
    slots: int
    exclusive: bool
    parts: tuple[str, ...]
    """Hardware partitions that carry it, ``<profile>`` or ``<profile>@<start>``."""
    is_claim: bool
    """A ResourceClaim holds it; ``pod`` and ``pod_uid`` are the claim's."""
    reason: str
    """Reason of its end, as the ledger records it."""


class Entry(Struct, frozen=True, kw_only=True):
    """One change of a node or of a pod on it."""

    time_s: float
    sequence: int
    """Stream sequence of its event."""
    kind: str
    """``allocation``, ``state``, ``device``, ``partition``, ``breach``, ``decision`` or
    ``admission``."""
    what: str
    """Change: ``reserve``, ``resize``, ``release``; a state; ``appeared``, ``vanished``,
    ``healthy``, ``unhealthy``, ``cordoned``, ``uncordoned``, ``mode``, ``capacity``; a change of a
    partition; a kind of breach; verb and verdict of a decision; ``allowed`` or ``denied``."""
    node: str = ""
    uuids: tuple[str, ...] = ()
    namespace: str = ""
    pod: str = ""
    container: str = ""
    memory_mib: int = 0
    core_pct: int = 0
    text: str = ""
    """Details in words: a reason, a code, old and new value."""


class Timeline(Struct, frozen=True, kw_only=True):
    """Slices and changes of the devices of a node."""

    node: str
    uuid: str
    """Empty: all devices of the node."""
    from_s: float
    until_s: float
    slices: tuple[Slice, ...]
    """By begin."""
    entries: tuple[Entry, ...]
    """By time."""
    cut: str
    """Reason for which the answer is incomplete; empty: it is complete."""


class TimelineFold:
    """Folds the events of one node."""

    def __init__(self, node: str, *, from_s: float) -> None:
        """Keep entries of ``from_s`` and later."""
        self._node = node
        self._from_s = from_s
        self._entries: list[Entry] = []
        self._states: list[tuple[str, Entry]] = []
        """Entries of states without devices, by allocation ID."""
        self._open: dict[str, list[Slice]] = {}
        """Open slices by pod UID."""
        self._closed: list[Slice] = []
        self._devices: dict[str, dict[str, Device]] = {}
        self._released: set[str] = set()

    # --- events -------------------------------------------------------------------------------

    def allocation_seen(self, record: AllocationRecord, sequence: int, stored_s: float) -> None:
        """Fold a ledger record."""
        time_s = record.time_s or stored_s
        before = self._open.pop(record.pod_uid, [])
        closed = [replace(one, end_s=time_s, reason=record.reason) for one in before]
        self._closed += [one for one in closed if (one.end_s or 0.0) >= self._from_s]
        slices = _slices(record, time_s)
        if slices:
            self._open[record.pod_uid] = slices
        if record.op == "release":
            self._released.add(record.allocation_id)
        shown = slices or before
        self._note(allocation_entry(record, shown, sequence, time_s))

    def state_seen(self, record: StateRecord, sequence: int, stored_s: float) -> None:
        """Fold a state of an allocation.

        The two buckets are copied into the stream independently, so that a state may come before
        its allocation: the answer adds the devices.
        """
        entry = state_entry(record, (), sequence, stored_s)
        if entry.time_s >= self._from_s:
            self._states.append((record.allocation_id, entry))

    def devices_seen(self, record: NodeDevices, sequence: int, stored_s: float) -> None:
        """Fold the devices of a vendor; each difference from the last ones is an entry."""
        before = self._devices.get(record.vendor)
        now = {device.uuid: device for device in record.devices}
        self._devices[record.vendor] = now
        if before is None:
            return
        # ``time_s`` is that of the agent's report; a cordon changes the devices without a report.
        for uuid, what, text in _changes(before, now):
            self._note(
                Entry(
                    time_s=stored_s,
                    sequence=sequence,
                    kind="device",
                    what=what,
                    node=self._node,
                    uuids=(uuid,),
                    text=text,
                )
            )

    def partition_seen(self, record: PartitionRecord, sequence: int, stored_s: float) -> None:
        """Fold a change of a partition."""
        what = record.profile or record.instance_id
        self._note(
            Entry(
                time_s=record.time_s or stored_s,
                sequence=sequence,
                kind="partition",
                what=record.change,
                node=self._node,
                uuids=(record.uuid,),
                namespace=record.namespace,
                pod=record.pod,
                memory_mib=record.memory_mib,
                core_pct=record.core_pct,
                text=_joined(what, record.code, record.reason),
            )
        )

    def breach_seen(self, record: BreachRecord, sequence: int, stored_s: float) -> None:
        """Fold a breach."""
        self._note(breach_entry(record, sequence, stored_s))

    def _note(self, entry: Entry) -> None:
        if entry.time_s >= self._from_s:
            self._entries.append(entry)

    # --- answer -------------------------------------------------------------------------------

    def timeline(
        self,
        *,
        held: Iterable[Slice],
        until_s: float,
        uuid: str = "",
        namespace: str = "",
        cut: str = "",
    ) -> Timeline:
        """Return the timeline of the node, or of one device.

        ``held``: slices that are held now, which the events may not include because they are
        older. With ``namespace``, slices of others lose their names and their entries are left out.
        """
        known = {(one.allocation_id, one.uuid) for some in self._open.values() for one in some}
        ended = {(one.allocation_id, one.uuid) for one in self._closed}
        open_ = [one for some in self._open.values() for one in some]
        open_ += [
            one
            for one in held
            if (one.allocation_id, one.uuid) not in known | ended
            and one.allocation_id not in self._released
        ]
        devices: dict[str, set[str]] = {}
        for one in (*self._closed, *open_):
            devices.setdefault(one.allocation_id, set()).add(one.uuid)
        states = [
            replace(entry, uuids=tuple(sorted(devices.get(allocation_id, ()))))
            for allocation_id, entry in self._states
        ]
        slices = [
            one if namespace in ("", one.namespace) else _anonymous(one)
            for one in (*self._closed, *open_)
            if uuid in ("", one.uuid)
        ]
        entries = [
            one
            for one in (*self._entries, *states)
            if (not uuid or uuid in one.uuids)
            and (not namespace or one.namespace == namespace or one.kind == "device")
        ]
        slices.sort(key=lambda one: (one.begin_s, one.uuid, one.pod))
        entries.sort(key=lambda one: (one.time_s, one.sequence))
        if not cut and max(len(slices), len(entries)) > ENTRIES_MOST:
            cut = f"only the newest {ENTRIES_MOST} entries are listed; ask for fewer hours"
        return Timeline(
            node=self._node,
            uuid=uuid,
            from_s=self._from_s,
            until_s=until_s,
            slices=tuple(slices[-ENTRIES_MOST:]),
            entries=tuple(entries[-ENTRIES_MOST:]),
            cut=cut,
        )


class PodFold:
    """Folds the events of one pod."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._slices: list[Slice] = []
        self.containers: tuple[ContainerShares, ...] = ()
        """Newest shares; a released pod keeps those that it had."""

    def allocation_seen(self, record: AllocationRecord, sequence: int, stored_s: float) -> None:
        """Fold a ledger record."""
        time_s = record.time_s or stored_s
        if record.containers:
            self.containers = record.containers
            self._slices = _slices(record, time_s)
        self._entries.append(allocation_entry(record, self._slices, sequence, time_s))

    def state_seen(self, record: StateRecord, sequence: int, stored_s: float) -> None:
        """Fold a state of an allocation."""
        self._entries.append(state_entry(record, _uuids(self._slices), sequence, stored_s))

    def breach_seen(self, record: BreachRecord, sequence: int, stored_s: float) -> None:
        """Fold a breach."""
        self._entries.append(breach_entry(record, sequence, stored_s))

    def decision_seen(self, record: DecisionRecord, sequence: int) -> None:
        """Fold the decisions of one message; holders of devices are not shown."""
        for one in record.unfolded():
            refusal = one.refusals[0].text if one.refusals else ""
            self._entries.append(
                Entry(
                    time_s=one.time_s,
                    sequence=sequence,
                    kind="decision",
                    what=f"{one.verb}: {one.verdict}",
                    node=one.node,
                    namespace=one.namespace,
                    pod=one.pod,
                    text=one.error or refusal,
                )
            )

    def admission_seen(self, record: AdmissionRecord, sequence: int) -> None:
        """Fold an admission."""
        self._entries.append(
            Entry(
                time_s=record.time_s,
                sequence=sequence,
                kind="admission",
                what="allowed" if record.allowed else "denied",
                namespace=record.namespace,
                pod=record.pod,
                text=_joined(record.message, *record.warnings),
            )
        )

    def entries(self) -> tuple[tuple[Entry, ...], str]:
        """Return the newest entries by time, and a sentence if some are left out."""
        found = sorted(self._entries, key=lambda one: (one.time_s, one.sequence))
        cut = ""
        if len(found) > ENTRIES_MOST:
            cut = f"only the newest {ENTRIES_MOST} events are listed"
        return tuple(found[-ENTRIES_MOST:]), cut


def allocation_entry(
    record: AllocationRecord, slices: list[Slice], sequence: int, time_s: float
) -> Entry:
    """Return the entry of a ledger record; ``slices``: those it gave or released."""
    return Entry(
        time_s=time_s,
        sequence=sequence,
        kind="allocation",
        what=record.op,
        node=record.node,
        uuids=_uuids(slices),
        namespace=record.namespace,
        pod=record.pod,
        memory_mib=sum(one.memory_mib for one in slices),
        core_pct=sum(one.core_pct for one in slices),
        text=_joined(record.reason, record.held_for),
    )


def state_entry(
    record: StateRecord, uuids: tuple[str, ...], sequence: int, stored_s: float
) -> Entry:
    """Return the entry of a state."""
    return Entry(
        time_s=record.time_s or stored_s,
        sequence=sequence,
        kind="state",
        what=record.state,
        node=record.node,
        uuids=uuids,
        namespace=record.namespace,
        pod=record.pod,
        text=_joined(record.code, record.reason),
    )


def breach_entry(record: BreachRecord, sequence: int, stored_s: float) -> Entry:
    """Return the entry of a breach."""
    if record.kind == "compute":
        text = f"{record.core_pct} % of {record.limit_core_pct} %"
    else:
        text = f"{record.used_mib} MiB of {record.limit_mib} MiB"
    return Entry(
        time_s=record.time_s or stored_s,
        sequence=sequence,
        kind="breach",
        what=record.kind,
        node=record.node,
        uuids=(record.uuid,),
        namespace=record.namespace,
        pod=record.pod,
        container=record.container,
        memory_mib=record.used_mib,
        core_pct=record.core_pct,
        text=_joined(text, "evicted" if record.action == "evict" else ""),
    )


def slices_of(
    containers: Iterable[ContainerShares],
    *,
    begin_s: float,
    namespace: str,
    pod: str,
    pod_uid: str,
    allocation_id: str,
    origin: str,
) -> list[Slice]:
    """Return the slices of one allocation, by device."""
    return [
        Slice(
            uuid=uuid,
            begin_s=begin_s,
            end_s=None,
            namespace=namespace,
            pod=pod,
            pod_uid=pod_uid,
            allocation_id=allocation_id,
            memory_mib=booked.memory_mib,
            core_pct=booked.core_pct,
            slots=booked.slots,
            exclusive=booked.exclusive,
            parts=tuple(sorted(booked.parts)),
            is_claim=origin == CLAIM,
            reason="",
        )
        for uuid, booked in sorted(booked_by_device(containers).items())
    ]


def _slices(record: AllocationRecord, time_s: float) -> list[Slice]:
    return slices_of(
        record.containers,
        begin_s=time_s,
        namespace=record.namespace,
        pod=record.pod,
        pod_uid=record.pod_uid,
        allocation_id=record.allocation_id,
        origin=record.origin,
    )


def _uuids(slices: Iterable[Slice]) -> tuple[str, ...]:
    return tuple(one.uuid for one in slices)


def _anonymous(one: Slice) -> Slice:
    return replace(one, namespace="", pod="", pod_uid="", allocation_id="", reason="")


def _changes(before: dict[str, Device], now: dict[str, Device]) -> Iterator[tuple[str, str, str]]:
    """Yield (uuid, change, text) of each difference that concerns users of the devices."""
    for uuid in sorted(before.keys() - now.keys()):
        yield uuid, "vanished", before[uuid].type
    for uuid, device in sorted(now.items()):
        old = before.get(uuid)
        if old is None:
            yield uuid, "appeared", device.type
            continue
        if old.healthy != device.healthy:
            yield uuid, "healthy" if device.healthy else "unhealthy", device.health_reason
        if old.cordoned != device.cordoned:
            yield uuid, "cordoned" if device.cordoned else "uncordoned", ""
        if old.mode != device.mode:
            yield uuid, "mode", f"{old.mode} to {device.mode}"
        if old.capacity_mib != device.capacity_mib:
            yield uuid, "capacity", f"{old.capacity_mib} MiB to {device.capacity_mib} MiB"
        if old.slots != device.slots:
            yield uuid, "capacity", f"{old.slots} slots to {device.slots} slots"


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
