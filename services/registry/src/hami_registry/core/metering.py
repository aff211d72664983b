# SPDX-License-Identifier: Apache-2.0
"""Meters devices: how much of them was reserved, used, idle and free in an interval.

Device time counts in nanoseconds: parts per million of one device times milliseconds. A share's
part of a device is the larger of its parts of memory and compute, and all of it for an exclusive
share. All sums are integers, so they are exact: over any interval, memory and compute that
allocations reserve plus what is free equal the capacity times the interval, and so does device time
less ``overlap_ns``, in which shares use different resources of one device. A device offers at least
what is reserved on it, also while its node does not list it.

Use comes from the agents' samples: one covers the time since the sample before it, at most ``GAPS``
of its intervals or ten minutes. Counters that fell began again from zero. Memory in MiB, compute in
percent of one device.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from msgspec import Struct

from hami_common.events.allocation import AllocationRecord
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import Booked
from hami_registry.core.lifetimes import DeviceKey, Life, Listing, milliseconds

PPM: Final = 1_000_000
GAPS: Final = 10
"""Intervals of the agent that may be missing between two samples; memory in between counts as in
the later one.
"""
COVERED_MS: Final = 600_000
"""Time that a sample covers at most, if that is longer than ``GAPS`` intervals: readers may skip
samples.
"""
SAMPLE_MS: Final = 60_000
"""Interval of a sample that does not name its own."""
RECENT_MS: Final = 90_000
"""Age up to which the newest sample of a share is recent, whatever the interval of samples."""
RECENT_SAMPLES: Final = 3
"""Lengths of the newest sample up to which it is recent, if they are longer than that."""


class Held(NamedTuple):
    """Part of a device that one allocation holds."""

    life: int
    """Position of the allocation."""
    ppm: int
    memory_mib: int
    core_pct: int
    slots: int
    """Containers that use the device at a time: without sharing each would need one."""


class Slice(NamedTuple):
    """One device in an interval in which nothing about it changes."""

    start_ms: int
    end_ms: int
    device: Listing
    """Nearest known description of the device."""
    held: tuple[Held, ...]
    capacity_ppm: int
    free_ppm: int
    overlap_ppm: int
    capacity_mib: int
    capacity_core_pct: int
    is_overcommitted: bool
    """Shares reserve more memory than the device has."""

    @property
    def length_ms(self) -> int:
        return self.end_ms - self.start_ms


class _Piece(NamedTuple):
    start_ms: int
    end_ms: int
    life: int
    booked: Booked


def slices(
    lives: Sequence[Life],
    listings: Mapping[DeviceKey, Sequence[Listing]],
    *,
    start_ms: int,
    end_ms: int,
) -> Iterator[Slice]:
    """Yield slices of all devices that were listed or held between the two times.

    A device that no record describes is left out; ``unknown_devices`` counts those.
    """
    pieces: dict[DeviceKey, list[_Piece]] = defaultdict(list)
    for number, life in enumerate(lives):
        for booking in life.bookings:
            start, end = max(booking.start_ms, start_ms), min(booking.end_ms, end_ms)
            if start < end:
                for uuid, booked in booking.by_device.items():
                    pieces[life.node, uuid].append(_Piece(start, end, number, booked))
    for key in sorted(listings):
        yield from _of_device(listings[key], pieces.get(key, ()), start_ms, end_ms)


def unknown_devices(
    lives: Sequence[Life], listings: Mapping[DeviceKey, Sequence[Listing]]
) -> set[DeviceKey]:
    """Return devices that allocations hold and no record describes."""
    return {
        (life.node, uuid)
        for life in lives
        for booking in life.bookings
        for uuid in booking.by_device
        if (life.node, uuid) not in listings
    }


def _of_device(
    listed: Sequence[Listing], pieces: Sequence[_Piece], start_ms: int, end_ms: int
) -> Iterator[Slice]:
    times = {start_ms, end_ms}
    times.update(time for one in listed for time in (one.start_ms, one.end_ms))
    times.update(time for one in pieces for time in (one.start_ms, one.end_ms))
    bounds = sorted(time for time in times if start_ms <= time <= end_ms)
    waiting = sorted(pieces, key=attrgetter("start_ms"), reverse=True)
    active: list[_Piece] = []
    for start, end in pairwise(bounds):
        active = [piece for piece in active if piece.end_ms > start]
        while waiting and waiting[-1].start_ms <= start:
            active.append(waiting.pop())
        place = bisect_right(listed, start, key=attrgetter("start_ms")) - 1
        device = listed[max(place, 0)]
        is_listed = device.start_ms <= start < device.end_ms
        if is_listed or active:
            yield _slice(start, end, device, active, is_listed=is_listed)


def _slice(
    start_ms: int, end_ms: int, device: Listing, active: Sequence[_Piece], *, is_listed: bool
) -> Slice:
    held = tuple(_held(piece, device) for piece in sorted(active, key=attrgetter("life")))
    memory_mib = sum(one.memory_mib for one in held)
    core_pct = sum(one.core_pct for one in held)
    taken = max(_part(memory_mib, device.capacity_mib), _part(core_pct, device.capacity_core_pct))
    if any(piece.booked.exclusive for piece in active):
        taken = PPM
    taken = min(PPM, taken)
    return Slice(
        start_ms=start_ms,
        end_ms=end_ms,
        device=device,
        held=held,
        capacity_ppm=PPM if is_listed else taken,
        free_ppm=PPM - taken if is_listed else 0,
        overlap_ppm=sum(one.ppm for one in held) - taken,
        capacity_mib=max(memory_mib, device.capacity_mib if is_listed else 0),
        capacity_core_pct=max(core_pct, device.capacity_core_pct if is_listed else 0),
        is_overcommitted=len(held) > 1 and memory_mib > device.memory_mib > 0,
    )


def _held(piece: _Piece, device: Listing) -> Held:
    booked = piece.booked
    if booked.exclusive:
        return Held(
            life=piece.life,
            ppm=PPM,
            memory_mib=device.capacity_mib,
            core_pct=device.capacity_core_pct,
            slots=booked.slots,
        )
    return Held(
        life=piece.life,
        ppm=reserved_ppm(booked, device.capacity_mib, device.capacity_core_pct),
        memory_mib=booked.memory_mib,
        core_pct=booked.core_pct,
        slots=booked.slots,
    )


def reserved_ppm(booked: Booked, capacity_mib: int, capacity_core_pct: int) -> int:
    """Return the part of a device that a booking reserves, in parts per million."""
    if booked.exclusive:
        return PPM
    part = max(_part(booked.memory_mib, capacity_mib), _part(booked.core_pct, capacity_core_pct))
    return min(PPM, part)


def _part(amount: int, capacity: int) -> int:
    """Return the parts per million that ``amount`` is of ``capacity``, rounded up."""
    return -(-amount * PPM // capacity) if capacity else 0


# --- use -----------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Use of one device by one allocation in an interval."""

    start_ms: int
    end_ms: int
    used_mib: int
    compute_ppm: int
    """Of one device with 100 % compute."""
    is_counted: bool
    """The limiter counted the device time; else the driver's utilization is taken."""


class Growth(NamedTuple):
    """Growth of an allocation's counters in an interval."""

    start_ms: int
    end_ms: int
    device_ms: int
    waited_ms: int
    refusals: int


class Use(Struct, frozen=True, kw_only=True):
    """Use of all allocations. An allocation is named by its ID, or else by the UID of its pod."""

    samples: dict[tuple[str, str], list[Sample]]
    """By allocation and UUID, in order, without overlap."""
    growths: dict[str, list[Growth]]
    """By allocation."""

    def samples_of(self, life: Life | AllocationRecord, uuid: str) -> Sequence[Sample]:
        """Return the samples of an allocation on a device."""
        found = self.samples.get((life.allocation_id, uuid))
        return found if found is not None else self.samples.get((life.pod_uid, uuid), ())

    def growths_of(self, life: Life) -> Sequence[Growth]:
        """Return the growths of an allocation's counters."""
        found = self.growths.get(life.allocation_id)
        return found if found is not None else self.growths.get(life.pod_uid, ())


class _Counters(NamedTuple):
    time_ms: int
    launches: int
    device_ms: int
    waited_ms: int
    refusals: int


_Container = tuple[str, str]


def use_of(records: Iterable[UsageRecord]) -> Use:
    """Return the use that the agents' samples show; samples may repeat and come in any order."""
    by_node: dict[str, dict[tuple[int, str, int], UsageRecord]] = defaultdict(dict)
    for record in records:
        order = (milliseconds(record.time_s), record.boot_id, record.seq)
        by_node[record.node][order] = record
    use = Use(samples=defaultdict(list), growths=defaultdict(list))
    for by_order in by_node.values():
        before_ms: int | None = None
        counters: dict[_Container, _Counters] = {}
        for (time_ms, _, _), record in sorted(by_order.items()):
            if before_ms is None or before_ms < time_ms:
                counters.update(_sample(record, before_ms, time_ms, counters, use))
                before_ms = time_ms
    return use


def _sample(
    record: UsageRecord,
    before_ms: int | None,
    time_ms: int,
    counters: Mapping[_Container, _Counters],
    use: Use,
) -> dict[_Container, _Counters]:
    """Add one sample of a node to ``use``; return the counters of its containers."""
    shares: dict[_Container, list[ShareUsage]] = defaultdict(list)
    for share in record.shares:
        shares[share.pod_uid, share.container].append(share)
    found = {(one.pod_uid, one.container): _counters(one, time_ms) for one in record.containers}
    if before_ms is None:
        return found
    grown: dict[_Container, Growth] = {}
    for key, now in found.items():
        grown[key] = growth = _growth(counters.get(key), now, before_ms)
        use.growths[_named(shares[key], key)].append(growth)
    every_ms = milliseconds(record.every_s) or SAMPLE_MS
    start_ms = max(before_ms, time_ms - max(GAPS * every_ms, COVERED_MS))
    merged: dict[tuple[str, str], Sample] = {}
    for key, several in shares.items():
        counted_ppm, is_counted = 0, False
        if key in found:
            start, end, device_ms, _, _ = grown[key]
            counted_ppm = device_ms * PPM // ((end - start) * len(several))
            is_counted = bool(found[key].launches or found[key].device_ms)
        for share in several:
            used_mib = share.used_mib
            compute_ppm = counted_ppm if is_counted else share.core_pct * (PPM // 100)
            place = (share.allocation_id or share.pod_uid, share.uuid)
            other = merged.get(place)
            if other is None:
                merged[place] = Sample(start_ms, time_ms, used_mib, compute_ppm, is_counted)
            else:
                merged[place] = Sample(
                    start_ms,
                    time_ms,
                    used_mib + other.used_mib,
                    compute_ppm + other.compute_ppm,
                    is_counted and other.is_counted,
                )
    for place, sample in merged.items():
        use.samples[place].append(sample)
    return found


def _named(shares: Sequence[ShareUsage], key: _Container) -> str:
    return shares[0].allocation_id or key[0] if shares else key[0]


def _counters(one: ContainerUsage, time_ms: int) -> _Counters:
    return _Counters(
        time_ms,
        one.launches,
        milliseconds(one.device_time_s),
        milliseconds(one.waited_s),
        one.refusals,
    )


def _growth(before: _Counters | None, now: _Counters, before_ms: int) -> Growth:
    """Return the growth since the sample before; a container that is new began with zeros."""
    if before is None:
        return Growth(before_ms, now.time_ms, now.device_ms, now.waited_ms, now.refusals)
    if (
        now.launches < before.launches
        or now.device_ms < before.device_ms
        or now.waited_ms < before.waited_ms
        or now.refusals < before.refusals
    ):
        return Growth(before.time_ms, now.time_ms, now.device_ms, now.waited_ms, now.refusals)
    return Growth(
        before.time_ms,
        now.time_ms,
        now.device_ms - before.device_ms,
        now.waited_ms - before.waited_ms,
        now.refusals - before.refusals,
    )


def within(amount: int, growth: Growth, *, start_ms: int, end_ms: int) -> int:
    """Return the part of ``amount`` that falls into an interval, spread evenly over the growth.

    Parts of adjacent intervals add up to the whole amount.
    """
    length_ms = growth.end_ms - growth.start_ms
    start = min(max(start_ms, growth.start_ms), growth.end_ms) - growth.start_ms
    end = min(max(end_ms, growth.start_ms), growth.end_ms) - growth.start_ms
    return amount * end // length_ms - amount * start // length_ms


class Spent(Struct, kw_only=True):
    """Use of one device by one allocation; device time in nanoseconds."""

    used_ns: int = 0
    wasted_ns: int = 0
    """Reserved and measured, but not used."""
    idle_ns: int = 0
    """Reserved in samples without any work on the device."""
    used_mib_ms: int = 0


def spend(spent: Spent, piece: Slice, held: Held, samples: Sequence[Sample]) -> None:
    """Add what ``samples`` show about one allocation's part of a slice."""
    capacity_mib, capacity_pct = piece.device.capacity_mib, piece.device.capacity_core_pct
    reserved_ppm = held.ppm
    used_ns = measured_ns = idle_ns = used_mib_ms = 0
    first = bisect_right(samples, piece.start_ms, key=attrgetter("end_ms"))
    for number in range(first, len(samples)):
        start_ms, end_ms, used_mib, device_ppm, _ = samples[number]
        if start_ms >= piece.end_ms:
            break
        length_ms = min(end_ms, piece.end_ms) - max(start_ms, piece.start_ms)
        compute_ppm = device_ppm * 100 // capacity_pct if capacity_pct else 0
        part = max(_part(used_mib, capacity_mib), compute_ppm)
        used_ns += min(part, reserved_ppm) * length_ms
        measured_ns += reserved_ppm * length_ms
        used_mib_ms += used_mib * length_ms
        if not compute_ppm:
            idle_ns += reserved_ppm * length_ms
    spent.used_ns += used_ns
    spent.wasted_ns += measured_ns - used_ns
    spent.idle_ns += idle_ns
    spent.used_mib_ms += used_mib_ms
