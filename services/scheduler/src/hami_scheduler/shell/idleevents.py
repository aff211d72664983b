# SPDX-License-Identifier: Apache-2.0
"""Reads idle periods, the actions on them, and the peak use of pods from the event stream.

Usage is decoded in a thread; readings are bounded in events, bytes and time. Memory in MiB, times
in Unix seconds.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Protocol

import anyio.to_thread
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.events.idle import IdleActionRecord, IdleRecord
from hami_common.ports import Clock
from hami_common.runtime.natsio import Bus
from hami_common.runtime.natsio.connection import PEER
from hami_common.runtime.natsio.history import Bounds, Event, History

BOUNDS: Final = Bounds(messages=100_000, mib=256, time_s=10.0)
"""A week of a node's usage has 10,080 messages, with 16 shares some 50 MiB."""

IdleMessage = IdleRecord | IdleActionRecord
Peaks = Mapping[tuple[str, str], int]
"""Largest memory that a container used of a device, by container and UUID."""


class IdleEvents(Protocol):
    """The part of the event stream that the policies for idle allocations need."""

    def messages(self) -> AsyncGenerator[IdleMessage | None, None]:
        """Yield the newest messages, then new ones; ``None`` if none came for a second."""
        ...

    async def peaks(self, node: str, pod_uid: str, since_s: float) -> Peaks:
        """Return the peak use of a pod; ``Unavailable`` if not all its samples can be read."""
        ...


class NothingIdle:
    """Events of a bus without a stream."""

    async def messages(self) -> AsyncGenerator[IdleMessage | None, None]:
        """Yield nothing."""
        stored: tuple[IdleMessage, ...] = ()
        for message in stored:
            yield message

    async def peaks(self, node: str, pod_uid: str, since_s: float) -> Peaks:
        """Raise ``Unavailable``."""
        del pod_uid, since_s
        raise Unavailable(peer=PEER, detail=f"no usage of node {node} is stored")


class StoredIdleEvents:
    """Events of the stream ``HAMI_EVENTS``."""

    def __init__(self, bus: Bus, *, clock: Clock) -> None:
        self._history = History(bus, bounds=BOUNDS, clock=clock)

    async def messages(self) -> AsyncGenerator[IdleMessage | None, None]:
        """See the port."""
        filters = [f"{subjects.EVENT_PREFIX}.{word}.*.*" for word in ("idle", "idleaction")]
        _, newest = await self._history.extent()
        async with self._history.read(filters, is_newest_only=True) as reading:
            async for event in reading:
                if (record := _record(event)) is not None:
                    yield record
        yield None
        async with aclosing(self._history.follow(filters, after=newest)) as events:
            async for stored in events:
                yield None if stored is None else _record(stored)

    async def peaks(self, node: str, pod_uid: str, since_s: float) -> Peaks:
        """See the port. Events older than the stream's are not stored any more."""
        async with self._history.read([subjects.usage_event(node)], since_s=since_s) as reading:
            events = [event async for event in reading]
        if reading.cut:
            raise Unavailable(peer=PEER, detail=f"usage of node {node}: {reading.cut}")
        return await anyio.to_thread.run_sync(peaks_of, events, pod_uid)


class _Share(Struct, frozen=True):
    pod_uid: str = ""
    container: str = ""
    uuid: str = ""
    used_mib: int = 0


class _Usage(Struct, frozen=True):
    node: str = ""
    shares: tuple[_Share, ...] = ()


def peaks_of(events: Sequence[Event], pod_uid: str) -> Peaks:
    """Return the peak use of a pod in usage events."""
    found: dict[tuple[str, str], int] = {}
    for event in events:
        usage = event.record(_Usage)
        if usage is None:
            continue
        now: dict[tuple[str, str], int] = {}
        for share in usage.shares:
            if share.pod_uid == pod_uid:
                key = share.container, share.uuid
                now[key] = now.get(key, 0) + share.used_mib  # several parts of one device
        for key, used_mib in now.items():
            found[key] = max(found.get(key, 0), used_mib)
    return found


def _record(event: Event) -> IdleMessage | None:
    if event.word == "idle":
        return event.record(IdleRecord)
    return event.record(IdleActionRecord)
