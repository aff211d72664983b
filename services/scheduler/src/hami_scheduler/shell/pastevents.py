# SPDX-License-Identifier: Apache-2.0
"""Reads the ledger and the devices of the last days from the event stream.

The reading shares the loop with decisions: it is bounded in events, bytes and time, and lets other
tasks run after each pull. Payloads are decoded by the caller, in a thread. Times in Unix seconds.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from hami_common.bus import subjects
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.catalog import FAMILIES
from hami_common.events.inventory import NodeDevices
from hami_common.ports import Clock
from hami_common.runtime.natsio import Bus
from hami_common.runtime.natsio.history import Bounds, Event, History
from hami_core.replay.arrivals import Put

EVENTS_MOST: Final = 100_000
"""Events of one reading, which takes about 3 s of the loop's time."""
EVENTS_MIB: Final = 128

_ALLOCATION, _DEVICE = "allocation", "device"
FILTERS: Final = tuple(
    family.subject_filter for family in FAMILIES if family.word in (_ALLOCATION, _DEVICE)
)

PastEvents = Callable[[float, float], Awaitable[Sequence[Event]]]
"""Returns the events from at least a time on (or all that are stored), within seconds."""
StoredEvents = Callable[[Sequence[str], float], Awaitable[Sequence[Event]]]
"""Returns all stored events of some subjects, within seconds."""


async def nothing_stored(from_s: float, limit_s: float) -> Sequence[Event]:
    """Return no event, for a bus without a stream."""
    del from_s, limit_s
    return ()


async def past_events(bus: Bus, clock: Clock, from_s: float, limit_s: float) -> Sequence[Event]:
    """Return the stored events of ledger and devices, in stream order.

    All, if they are at most ``EVENTS_MOST``: pods that run at ``from_s`` may have begun long
    before. Else as many hours before ``from_s`` as after it, or none. ``RequestInvalid`` if the
    events since ``from_s`` exceed a bound; ``Unavailable`` if the bus does not answer.
    """
    reader = History(
        bus,
        bounds=Bounds(messages=EVENTS_MOST, mib=EVENTS_MIB, time_s=limit_s),
        clock=clock,
    )
    for since_s in (None, from_s - max(0.0, clock.now_s() - from_s), from_s):
        async with reader.read(FILTERS, since_s=since_s) as reading:
            if reading.pending > EVENTS_MOST:
                continue
            events = [event async for event in reading]
            if not reading.cut:
                return events
            raise RequestInvalid(field="hours", problem=reading.cut, fix="ask for fewer hours")
    raise RequestInvalid(
        field="hours",
        problem=f"the period has more than {EVENTS_MOST} events of the ledger and devices",
        fix="ask for fewer hours",
    )


async def stored_events(
    bus: Bus, clock: Clock, filters: Sequence[str], limit_s: float
) -> Sequence[Event]:
    """Return all stored events of some subjects; ``RequestInvalid`` beyond a bound."""
    reader = History(
        bus, bounds=Bounds(messages=EVENTS_MOST, mib=EVENTS_MIB, time_s=limit_s), clock=clock
    )
    async with reader.read(filters) as reading:
        events = [event async for event in reading]
    if reading.cut:
        raise RequestInvalid(
            field="query parameter at",
            problem=f"the stored events exceed a bound: {reading.cut.partition(';')[0]}",
            fix="use hamictl replay with the log of stimulus_log_dir",
        )
    return events


async def no_events(filters: Sequence[str], limit_s: float) -> Sequence[Event]:
    """Return no event, for a bus without a stream."""
    del filters, limit_s
    return ()


def numbered(events: Sequence[Event]) -> list[tuple[int, AllocationRecord]]:
    """Return the records of the ledger with their sequences, in order."""
    return [
        (event.source_sequence, record)
        for event in events
        if event.word == _ALLOCATION and (record := event.record(AllocationRecord)) is not None
    ]


def decoded(events: Sequence[Event]) -> tuple[list[AllocationRecord], list[Put]]:
    """Return the records of the ledger in order, and the devices; skips what does not decode."""
    records: list[AllocationRecord] = []
    puts: list[Put] = []
    for event in events:
        if event.word == _ALLOCATION:
            record = event.record(AllocationRecord)
            if record is not None:
                records.append(record)
            continue
        devices = event.record(NodeDevices) if event.data else _removed(event.subject)
        if devices is not None:
            puts.append(Put(time_s=event.stored_s, devices=devices, revision=event.source_sequence))
    return records, puts


def _removed(subject: str) -> NodeDevices:
    """Return the devices of a deleted record: none."""
    named = subjects.named(subject)
    return NodeDevices(
        node=named["node"],
        vendor=named["vendor"],
        boot_id="",
        seq=0,
        time_s=0.0,
        config_generation=0,
        devices=(),
    )
