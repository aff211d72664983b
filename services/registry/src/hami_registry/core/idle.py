# SPDX-License-Identifier: Apache-2.0
"""Finds idle periods of allocations in the agents' samples, and the messages that are due.

An allocation is idle while each sample of each of its devices shows no work, by the definition of
``metering``. Samples and messages may repeat. A period that was published ends with work only: a
gap between samples, or a restart, continues it. A period that was not published yet begins again
after a gap. Times in integer milliseconds, device time in nanoseconds of one device.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from hami_common.events.allocation import AllocationRecord
from hami_common.events.idle import IdleDevice, IdleRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import UsageRecord
from hami_common.model.device import Device
from hami_common.model.placement import booked_by_device
from hami_registry.core.lifetimes import MS, milliseconds
from hami_registry.core.metering import (
    PPM,
    RECENT_MS,
    RECENT_SAMPLES,
    Sample,
    Use,
    reserved_ppm,
    use_of,
)

NS: Final = 1_000_000_000


class Due(NamedTuple):
    """A message to be published."""

    record: IdleRecord
    sequence: int
    """Sequence of the newest message of its subject, under which alone it may be stored."""


class _Published(NamedTuple):
    sequence: int
    record: IdleRecord


class _State(Struct, kw_only=True):
    """One allocation."""

    allocation: AllocationRecord
    busy_ms: int = -1
    """End of the newest sample with work."""
    since_ms: int = -1
    """Begin of the idle time; -1: not idle."""
    is_since_known: bool = False
    end_ms: int = -1
    """End of the newest sample."""
    length_ms: int = 0
    """Length of the newest sample."""
    counted_ms: int = 0
    """Time up to which ``lost_ns`` counts."""
    lost_ns: int = 0
    ppm: int = 0
    """Reserved parts of all its devices."""
    is_counted: bool = False
    devices: tuple[IdleDevice, ...] = ()
    ended: IdleRecord | None = None
    """Message about the end of a published period, to be published."""


class IdleBook:
    """Idle periods of all allocations, as one replica knows them."""

    def __init__(self, *, after_s: float, writer: str) -> None:
        """Publish periods longer than ``after_s``, as ``writer``."""
        self._after_s = after_s
        self._writer = writer
        self._newest: dict[str, dict[str, _Published]] = {}
        """Newest message by node and pod."""
        self._samples: dict[str, UsageRecord] = {}
        """Newest sample of each node."""
        self._states: dict[str, dict[str, _State]] = {}
        """By node and pod."""

    def published(self, record: IdleRecord, sequence: int) -> None:
        """Note the newest message of a subject."""
        self._newest.setdefault(record.node, {})[record.pod_uid] = _Published(sequence, record)
        state = self._states.get(record.node, {}).get(record.pod_uid)
        if state is None or state.allocation.allocation_id != record.allocation_id:
            return
        if state.ended is not None and (record.change, record.since_s) != (
            "idle",
            state.ended.since_s,
        ):
            state.ended = None
        if record.change == "idle" and state.since_ms >= 0:
            self._adopt(state, record)

    def unpublished(self, node: str, pod_uid: str) -> None:
        """Note that the subject has no message."""
        self._newest.get(node, {}).pop(pod_uid, None)

    def fold(
        self,
        sample: UsageRecord,
        live: Iterable[AllocationRecord],
        devices: Iterable[NodeDevices],
    ) -> None:
        """Fold a sample of a node with its present allocations and devices, once in its order."""
        before = self._samples.get(sample.node)
        if before is not None and _order(before) >= _order(sample):
            return
        self._samples[sample.node] = sample
        use = use_of((sample,) if before is None else (before, sample))
        known = {device.uuid: device for one in devices for device in one.devices}
        states = self._states.get(sample.node, {})
        kept: dict[str, _State] = {}
        for allocation in live:
            state = states.get(allocation.pod_uid)
            if state is None or state.allocation.allocation_id != allocation.allocation_id:
                state = _State(allocation=allocation)
            state.allocation = allocation
            kept[allocation.pod_uid] = state
            self._fold(state, use, known)
        self._states[sample.node] = kept
        newest = self._newest.get(sample.node, {})
        for uid in newest.keys() - kept.keys():
            del newest[uid]

    def _fold(self, state: _State, use: Use, known: Mapping[str, Device]) -> None:
        allocation = state.allocation
        found: list[tuple[Sample, int, IdleDevice]] = []
        for uuid, booked in booked_by_device(allocation.containers).items():
            samples, device = use.samples_of(allocation, uuid), known.get(uuid)
            if not samples or device is None:
                return
            about = IdleDevice(
                uuid=uuid,
                model=device.type,
                memory_mib=booked.memory_mib,
                core_pct=booked.core_pct,
                used_mib=samples[-1].used_mib,
            )
            part = reserved_ppm(booked, device.capacity_mib, device.capacity_core_pct)
            found.append((samples[-1], part, about))
        if not found:
            return
        start_ms = max(sample.start_ms for sample, _, _ in found)
        end_ms = max(sample.end_ms for sample, _, _ in found)
        state.length_ms, state.ppm = end_ms - start_ms, sum(part for _, part, _ in found)
        state.is_counted = all(sample.is_counted for sample, _, _ in found)
        state.devices = tuple(about for _, _, about in found)
        if any(sample.compute_ppm for sample, _, _ in found):
            self._worked(state, start_ms, end_ms)
            return
        published = self._published_idle(allocation)
        if state.since_ms < 0 or (start_ms > state.end_ms and published is None):
            self._begin(state, start_ms)
            if published is not None and state.ended is None:
                self._adopt(state, published)
        state.end_ms = end_ms
        self._count(state, end_ms)

    def _begin(self, state: _State, start_ms: int) -> None:
        """Begin an idle period."""
        reserved_ms = milliseconds(state.allocation.time_s)
        state.is_since_known = state.busy_ms == start_ms
        if state.allocation.op == "reserve" and start_ms <= reserved_ms:
            start_ms, state.is_since_known = reserved_ms, True
        state.since_ms = state.counted_ms = start_ms
        state.lost_ns = 0

    @staticmethod
    def _count(state: _State, until_ms: int) -> None:
        state.lost_ns += state.ppm * max(0, until_ms - state.counted_ms)
        state.counted_ms = max(state.counted_ms, until_ms)

    @staticmethod
    def _adopt(state: _State, record: IdleRecord) -> None:
        """Continue the published period."""
        counted_ms = milliseconds(record.time_s)
        more = state.ppm * max(0, state.counted_ms - counted_ms)
        state.since_ms, state.is_since_known = milliseconds(record.since_s), record.is_since_known
        state.counted_ms = max(counted_ms, state.counted_ms)
        state.lost_ns = round(record.lost_s * NS) + more

    def _worked(self, state: _State, start_ms: int, end_ms: int) -> None:
        published = self._published_idle(state.allocation)
        if published is not None and end_ms > milliseconds(published.time_s) and not state.ended:
            if state.since_ms < 0:
                state.counted_ms = 0
                self._adopt(state, published)
            self._count(state, start_ms)
            state.ended = self._record(state, "active")
        state.busy_ms, state.end_ms, state.since_ms = end_ms, end_ms, -1

    def _published_idle(self, allocation: AllocationRecord) -> IdleRecord | None:
        """Return the message about the present idle period of an allocation."""
        newest = self._newest.get(allocation.node, {}).get(allocation.pod_uid)
        if newest is None or newest.record.allocation_id != allocation.allocation_id:
            return None
        return newest.record if newest.record.change == "idle" else None

    def due(self, *, now_s: float) -> list[Due]:
        """Return the messages to be published, at most one of each allocation."""
        found: list[Due] = []
        for node, states in self._states.items():
            for uid, state in states.items():
                newest = self._newest.get(node, {}).get(uid)
                sequence = 0 if newest is None else newest.sequence
                if state.ended is not None:
                    found.append(Due(state.ended, sequence))
                elif self._is_idle(state, now_s) and not self._published_idle(state.allocation):
                    found.append(Due(self._record(state, "idle"), sequence))
        return found

    def idle(self, *, now_s: float) -> Iterator[tuple[AllocationRecord, float]]:
        """Yield allocations that are idle for ``after_s``, with the whole devices they reserve."""
        for states in self._states.values():
            for state in states.values():
                if self._is_idle(state, now_s):
                    yield state.allocation, state.ppm / PPM

    def _is_idle(self, state: _State, now_s: float) -> bool:
        is_recent = milliseconds(now_s) - state.end_ms <= max(
            RECENT_SAMPLES * state.length_ms, RECENT_MS
        )
        idle_ms = state.end_ms - state.since_ms
        return state.since_ms >= 0 and is_recent and idle_ms >= self._after_s * MS

    def _record(self, state: _State, change: str) -> IdleRecord:
        allocation = state.allocation
        return IdleRecord(
            change="idle" if change == "idle" else "active",
            node=allocation.node,
            pod_uid=allocation.pod_uid,
            allocation_id=allocation.allocation_id,
            namespace=allocation.namespace,
            pod=allocation.pod,
            queue=allocation.account.queue if allocation.account else "",
            since_s=state.since_ms / MS,
            is_since_known=state.is_since_known,
            time_s=state.counted_ms / MS,
            lost_s=state.lost_ns / NS,
            after_s=self._after_s,
            measured_by="limiter" if state.is_counted else "driver",
            devices=state.devices,
            writer=self._writer,
        )


def event_id(record: IdleRecord) -> str:
    """Return the id of a message, the same at every replica that publishes it."""
    return f"{record.allocation_id}.{milliseconds(record.since_s)}.{record.change}"


def _order(sample: UsageRecord) -> tuple[int, str, int]:
    return milliseconds(sample.time_s), sample.boot_id, sample.seq
