# SPDX-License-Identifier: Apache-2.0
"""Turns ledger and device records into intervals: who held which share, which devices existed.

Records may arrive repeatedly and in any order; only their content counts. The content decides their
order, by the writer's time. Times in integer milliseconds since the Unix epoch, rounded from the
record; intervals include their start and exclude their end. Memory in MiB, compute in percent of
one device.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import Booked, booked_by_device

FOREVER: Final = 1 << 53
"""End of an interval that is still open, in milliseconds."""
MS: Final = 1000
_RANK: Final = {"reserve": 0, "resize": 1, "release": 2}
"""Order of records of one allocation with the same time."""
_BOOT_DIGITS: Final = 13
"""Digits of the Unix time in milliseconds with which the boot ID of an agent begins."""

DeviceKey = tuple[str, str]
"""Node and UUID."""


def milliseconds(time_s: float) -> int:
    """Return Unix seconds as whole milliseconds."""
    return round(time_s * MS)


class Booking(NamedTuple):
    """Amounts that an allocation held in an interval."""

    start_ms: int
    end_ms: int
    by_device: Mapping[str, Booked]
    """By UUID."""


class Life(Struct, frozen=True, kw_only=True):
    """One allocation from its first to its last known moment."""

    allocation_id: str
    node: str
    pod_uid: str
    namespace: str
    pod: str
    queue: str
    """Queue that the pod names; empty: its namespace decides."""
    sku: str
    """SKU that the pod was admitted with, ``<name>@<version>``; empty: none."""
    service_class: str
    """Class of the SKU, or that the pod names; empty without either."""
    labels: tuple[tuple[str, str], ...]
    """Recorded labels of the pod."""
    end_ms: int
    """``FOREVER``: not released."""
    bookings: tuple[Booking, ...]
    """In order, without overlap."""
    is_begin_known: bool
    """False when no record of its reservation is known: amounts before the first booking are
    missing.
    """

    @property
    def start_ms(self) -> int:
        """Begin of the first known booking; ``end_ms`` without one."""
        return self.bookings[0].start_ms if self.bookings else self.end_ms


def lives(records: Iterable[AllocationRecord]) -> list[Life]:
    """Return the allocations of all records, sorted by begin and ID.

    An allocation ends with its release, or when another one takes over its key of the ledger. One
    that awaits pods holds their shares, and so books nothing until these pods have released them.
    """
    by_key: dict[tuple[str, str], dict[str, set[AllocationRecord]]] = defaultdict(dict)
    for record in records:
        by_key[record.node, record.pod_uid].setdefault(record.allocation_id, set()).add(record)
    found: dict[tuple[str, str], list[tuple[Life, list[AllocationRecord]]]] = {}
    for key, several in by_key.items():
        begins = sorted(
            min(milliseconds(one.time_s) for one in one_life)
            for one_life in several.values()
            if any(one.op != "release" for one in one_life)
        )
        found[key] = [_life(one_life, begins) for one_life in several.values()]
    ends = {key: [life for life, _ in several] for key, several in found.items()}
    return sorted(
        (
            _without_awaited(life, versions, ends)
            for several in found.values()
            for life, versions in several
        ),
        key=lambda life: (life.start_ms, life.allocation_id),
    )


def _life(records: set[AllocationRecord], begins: list[int]) -> tuple[Life, list[AllocationRecord]]:
    """Return an allocation, and the record of each of its bookings.

    ``begins``: of all allocations of its key.
    """
    ordered = sorted(records, key=_order)
    versions = [one for one in ordered if one.op != "release"]
    ends = [milliseconds(one.time_s) for one in ordered if one.op == "release"]
    last = versions[-1] if versions else ordered[-1]
    if versions:
        begin = milliseconds(versions[0].time_s)
        ends += [other for other in begins if other > begin]
    end_ms = min(ends, default=FOREVER)
    times = [min(milliseconds(one.time_s), end_ms) for one in versions]
    bookings, kept = [], []
    for record, (start, end) in zip(versions, pairwise([*times, end_ms]), strict=True):
        if start < end:
            bookings.append(Booking(start, end, booked_by_device(record.containers)))
            kept.append(record)
    life = Life(
        allocation_id=last.allocation_id,
        node=last.node,
        pod_uid=last.pod_uid,
        namespace=last.namespace,
        pod=last.pod,
        queue=last.account.queue if last.account else "",
        sku=last.sku,
        service_class=last.service_class,
        labels=last.labels,
        end_ms=end_ms,
        bookings=tuple(bookings),
        is_begin_known=bool(versions) and versions[0].op == "reserve",
    )
    return life, kept


def _order(record: AllocationRecord) -> tuple[int, int, bytes]:
    return milliseconds(record.time_s), _RANK[record.op], codec.encode(record)


def _without_awaited(
    life: Life, versions: list[AllocationRecord], by_key: Mapping[tuple[str, str], list[Life]]
) -> Life:
    """Cut the time in which the awaited pods still hold the shares."""
    if not any(version.awaits for version in versions):
        return life
    kept = []
    for booking, version in zip(life.bookings, versions, strict=True):
        free_ms = max(
            (
                other.end_ms
                for uid in version.awaits
                for other in by_key.get((life.node, uid), ())
                if other.start_ms < booking.end_ms
            ),
            default=booking.start_ms,
        )
        start_ms = max(booking.start_ms, free_ms)
        if start_ms < booking.end_ms:
            kept.append(booking._replace(start_ms=start_ms))
    return replace(life, bookings=tuple(kept))


class Listing(NamedTuple):
    """A device with its capacity, in an interval in which its node listed it."""

    start_ms: int
    end_ms: int
    node: str
    uuid: str
    number: int
    """Position in the vendor's own enumeration."""
    model: str
    capacity_mib: int
    capacity_core_pct: int
    memory_mib: int
    """Its own memory, which the capacity exceeds where it is overcommitted."""


def listings(records: Iterable[NodeDevices]) -> dict[DeviceKey, list[Listing]]:
    """Return the intervals of each device in which its node listed it, in order.

    The first known record of a node is taken to hold since the start of the agent that reported it.
    """
    by_source: dict[tuple[str, str], dict[tuple[int, str, int, int], NodeDevices]] = {}
    for record in records:
        order = (
            milliseconds(record.time_s),
            record.boot_id,
            record.seq,
            record.config_generation,
        )
        by_source.setdefault((record.node, record.vendor), {})[order] = record
    found: dict[DeviceKey, list[Listing]] = {}
    for by_order in by_source.values():
        ordered = [record for _, record in sorted(by_order.items())]
        times = [_listed_since(ordered[0]), *(milliseconds(one.time_s) for one in ordered[1:])]
        for record, (start, end) in zip(ordered, pairwise([*times, FOREVER]), strict=True):
            if start < end:
                for listing in _listed(record, start, end):
                    found.setdefault((record.node, listing.uuid), []).append(listing)
    return found


def _listed_since(record: NodeDevices) -> int:
    time_ms = milliseconds(record.time_s)
    boot = record.boot_id.partition("-")[0]
    if len(boot) == _BOOT_DIGITS and boot.isascii() and boot.isdecimal():
        return min(time_ms, int(boot))
    return time_ms


def _listed(record: NodeDevices, start_ms: int, end_ms: int) -> Iterator[Listing]:
    for device in record.devices:
        yield Listing(
            start_ms=start_ms,
            end_ms=end_ms,
            node=record.node,
            uuid=device.uuid,
            number=device.index,
            model=device.type,
            capacity_mib=device.capacity_mib,
            capacity_core_pct=device.capacity_core_pct,
            memory_mib=device.memory_mib,
        )
