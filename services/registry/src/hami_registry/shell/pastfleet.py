# SPDX-License-Identifier: Apache-2.0
"""Answers what the fleet was at a past time, from the event stream. Times in Unix seconds."""

import gzip
from collections.abc import Sequence
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import Final

import anyio.to_thread
import msgspec

from hami_common.bus import subjects
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.runtime.natsio.history import Event, History
from hami_registry.core.pastfleet import PastFleet
from hami_registry.core.projection import Projection, Stored

_FILTERS: Final = tuple(
    f"{subjects.EVENT_PREFIX}.{word}.*.*" for word in ("allocation", "state", "device")
)
_LATE_S: Final = 60.0
"""Time after which a record is in the stream, with differences between clocks."""
WEEK_S: Final = 7 * 24 * 3600.0
"""Age of the oldest events."""
_GZIP_LEVEL: Final = 5


def time_of(text: str, *, now_s: float) -> float:
    """Return the time of a parameter ``at``; ``RequestInvalid`` unless it is of the last week."""
    try:
        moment = datetime.fromisoformat(text)
        at_s = moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        at_s = None
    if at_s is None or not now_s - WEEK_S <= at_s <= now_s:
        raise RequestInvalid(
            field="query parameter at",
            problem=f"{text[:40]!r} is not a time of the last seven days",
            fix="give a time with an offset, such as 2026-01-31T08:00:00Z",
        )
    return at_s


async def fleet_at(
    history: History,
    projection: Projection,
    *,
    at_s: float,
    namespace: str,
    compressed: bool,
) -> bytes:
    """Return the fleet at ``at_s`` as JSON, gzip if ``compressed``; folds in a thread.

    ``RequestInvalid`` if reading up to that time exceeds the bounds of ``history``.
    """
    events: list[Event] = []
    async with history.read(_FILTERS) as reading, aclosing(reading.events()) as stored:
        async for event in stored:
            if event.stored_s > at_s + _LATE_S:
                break
            events.append(event)
    if reading.cut:
        raise RequestInvalid(
            field="query parameter at",
            problem=f"the events up to it exceed a bound: {reading.cut.partition(';')[0]}",
            fix="give an earlier time, or raise the registry's settings history_*",
        )
    folded = partial(_folded, events, projection.stored(), at_s, namespace)
    plain = await anyio.to_thread.run_sync(folded)
    if not compressed:
        return plain
    return await anyio.to_thread.run_sync(partial(gzip.compress, plain, _GZIP_LEVEL, mtime=0))


def _folded(events: Sequence[Event], present: Stored, at_s: float, namespace: str) -> bytes:
    past = PastFleet(at_s)
    for event in events:
        key = event.subject.split(".", 4)[-1]
        match event.word:
            case "allocation":
                if record := event.record(AllocationRecord):
                    past.record_seen(key, event.sequence, record)
            case "state":
                if state := event.record(StateRecord):
                    past.state_seen(key, event.sequence, state)
            case _:
                if devices := event.record(NodeDevices):
                    past.devices_seen(devices, time_s=event.stored_s)
    return msgspec.json.encode(past.document(present, namespace=namespace))
