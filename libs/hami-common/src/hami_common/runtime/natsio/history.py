# SPDX-License-Identifier: Apache-2.0
"""Reads events of the last days from the stream ``HAMI_EVENTS`` on demand.

``History.read`` yields the stored events of some subjects from a time to the present end of the
stream, in stream order, within bounds on messages, bytes and time; ``Reading.cut`` says which bound
ended it early. ``History.follow`` yields events from a sequence on, without bounds, and then new
ones. Both use an ordered consumer without acknowledgements that the server drops soon after.
Nothing is kept here. Filter subjects of one call must not overlap. Times in Unix seconds.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import NotFound, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.ports import Clock
from hami_common.runtime.natsio import Bus
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import PEER
from hami_common.runtime.natsio.consume import (
    NS,
    Heartbeat,
    PullSession,
    Sequences,
    ordered_session,
    parse_ack,
)
from hami_common.runtime.natsio.jetstream import api, user_headers
from hami_common.runtime.tasks import Backoff

S = TypeVar("S", bound=Struct)

BATCH: Final = 250
"""Messages of one pull: at most 94 MiB, usually below 2 MiB."""
TURN_EVENTS: Final = 16
"""Events of a pull after which other tasks of the loop run."""
INACTIVE_S: Final = 5.0
"""Time for which the server keeps the consumer of an ended reading."""
FILTERS_MOST: Final = 64
"""Filter subjects of one consumer; the server compares each message with all of them."""
MIB_SHIFT: Final = 20
_SOURCE_HEADER: Final = "Nats-Stream-Source"
LATEST_S: Final = 9e9
"""Year 2255; the server counts nanoseconds in 64 bits, and starts at the oldest event beyond."""


class Event(Struct, frozen=True, kw_only=True):
    """One event of the stream."""

    sequence: int
    """Sequence in the stream."""
    stored_s: float
    """Time at which the server stored it."""
    subject: str
    headers: Mapping[str, str]
    """CloudEvents attributes (docs/events.md)."""
    data: bytes
    """Payload, JSON."""
    source_sequence: int = 0
    """Sequence in the stream of the bucket from which it was copied; 0: it was not."""

    @property
    def word(self) -> str:
        """Word of its family, such as ``usage``."""
        return self.subject.removeprefix(f"{subjects.EVENT_PREFIX}.").partition(".")[0]

    def record(self, kind: type[S]) -> S | None:
        """Return the payload; ``None`` if it does not decode or names another node or pod."""
        try:
            if f"{subjects.EVENT_PREFIX}.{self.word}" in subjects.NODES_OWN:
                return codec.decode_on(self.subject, self.data, kind)
            return codec.decode(self.data, kind, what=self.subject)
        except WireInvalid:
            return None


class Bounds(Struct, frozen=True, kw_only=True):
    """Largest reading for one request."""

    messages: int
    mib: int
    """Payloads, MiB."""
    time_s: float


class Reading:
    """The events of one reading, to be iterated once."""

    def __init__(
        self,
        session: PullSession,
        *,
        pending: int,
        bounds: Bounds,
        clock: Clock,
        prefix: str = "",
    ) -> None:
        self._session = session
        self._prefix = prefix
        self.pending = pending
        """Messages of the reading at its begin, without bounds."""
        self._bounds = bounds
        self._clock = clock
        self._bytes_left = bounds.mib << MIB_SHIFT
        self.count = 0
        """Events yielded so far."""
        self.newest_s = 0.0
        """Time at which the last of them was stored."""
        self.cut = ""
        """Bound that ended the reading before the end of the stream, as a sentence; else empty."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Iterate over ``events``, to their end."""
        return self.events()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events in order; ``Unavailable`` if the bus loses the reading."""
        if not self.pending:
            return
        ends_s = self._clock.monotonic_s() + self._bounds.time_s
        async with aclosing(_ordered(self._session, self._prefix)) as events:
            async for event in events:
                if self._clock.monotonic_s() > ends_s:
                    self._end(f"{self._bounds.time_s:g} s")
                    return
                if event is None:
                    continue
                self._bytes_left -= len(event.data)
                if self._bytes_left < 0:
                    self._end(f"{self._bounds.mib} MiB of events")
                    return
                if self.count == self._bounds.messages:
                    self._end(f"{self._bounds.messages} events")
                    return
                self.count += 1
                self.newest_s = event.stored_s
                if self.count % TURN_EVENTS == 0:
                    await anyio.lowlevel.checkpoint()
                yield event
                if self.count >= self.pending:
                    return

    def _end(self, bound: str) -> None:
        until = ""
        if self.newest_s:
            at = datetime.fromtimestamp(int(self.newest_s), tz=UTC)
            until = f", at events of {at:%Y-%m-%dT%H:%M:%SZ}"
        self.cut = f"reading stopped after {bound}{until}; ask for fewer hours, a node or a pod"


class History:
    """Reader of the event stream."""

    def __init__(
        self,
        bus: Bus,
        *,
        bounds: Bounds,
        clock: Clock,
        stream: str = subjects.EVENTS_STREAM,
        prefix: str = "",
    ) -> None:
        """``bounds`` apply to each reading.

        ``prefix`` precedes the subjects that the stream stores, and is removed from events.
        """
        self._bus = bus
        self._stream = stream
        self._prefix = f"{prefix}." if prefix else ""
        self.bounds = bounds
        self._clock = clock
        self._closed = anyio.Event()

    @asynccontextmanager
    async def read(
        self,
        filter_subjects: Sequence[str],
        *,
        since_s: float | None = None,
        after: int | None = None,
        is_newest_only: bool = False,
    ) -> AsyncIterator[Reading]:
        """Yield a reading of the events of ``filter_subjects``, in the order of the stream.

        It begins with events stored at ``since_s``, or after sequence ``after``; without both with
        the oldest, usually of seven days ago. ``is_newest_only``: the newest of each subject.
        ``Unavailable`` if the bus does not answer. For example::

            async with history.read(["hami.v1.event.usage.*"], since_s=now_s - 3600) as reading:
                async for event in reading:
                    record = event.record(UsageRecord)  # None: not decodable
            cut = reading.cut
        """
        start: dict[str, Any] = {"deliver_policy": "all"}
        if is_newest_only:
            start = {"deliver_policy": "last_per_subject"}
        elif after is not None:
            start = _from_sequence(after + 1)
        elif since_s is not None:
            start = _from_time(since_s)
        async with self._session(filter_subjects, start) as (session, info):
            yield Reading(
                session,
                pending=int(info["num_pending"]),
                bounds=self.bounds,
                clock=self._clock,
                prefix=self._prefix,
            )

    async def follow(
        self,
        filter_subjects: Sequence[str],
        *,
        after: int | None = None,
        since_s: float | None = None,
    ) -> AsyncGenerator[Event | None, None]:
        """Yield events after sequence ``after``, or from ``since_s`` on, or new ones; then live.

        ``None`` is yielded when no event came for a second. Survives reconnects without a gap. Ends
        when the service stops.
        """
        backoff = Backoff(first_s=0.05, most_s=2.0)
        start: dict[str, Any] = {"deliver_policy": "new"}
        if after is not None:
            start = _from_sequence(after + 1)
        elif since_s is not None:
            start = _from_time(since_s)
        while not self._closed.is_set():
            try:
                async with (
                    self._session(filter_subjects, start) as (session, info),
                    aclosing(_ordered(session, self._prefix)) as events,
                ):
                    if start["deliver_policy"] == "new":
                        start = _from_sequence(int(info["delivered"]["stream_seq"]) + 1)
                    async for event in events:
                        if self._closed.is_set():
                            return
                        if event is not None:
                            start = _from_sequence(event.sequence + 1)
                            backoff.reset()
                        yield event
            except (Unavailable, NotFound):
                yield None
                await backoff.wait()

    async def extent(self) -> tuple[int, int]:
        """Return the sequences of the oldest and the newest event that are stored."""
        state = (await api(self._bus, f"STREAM.INFO.{self._stream}"))["state"]
        return int(state["first_seq"]), int(state["last_seq"])

    def close(self) -> None:
        """End all ``follow``."""
        self._closed.set()

    @asynccontextmanager
    async def _session(
        self, filter_subjects: Sequence[str], start: Mapping[str, Any]
    ) -> AsyncIterator[tuple[PullSession, dict[str, Any]]]:
        async with ordered_session(
            self._bus,
            stream=self._stream,
            start=start,
            filter_subjects=[f"{self._prefix}{one}" for one in filter_subjects],
            inactive_s=INACTIVE_S,
        ) as session:
            yield session


async def _ordered(session: PullSession, prefix: str) -> AsyncGenerator[Event | None, None]:
    """Yield the session's events, ``None`` for heartbeats; ``Unavailable`` at a gap."""
    expected = 1
    async with aclosing(session.messages(batch=BATCH)) as messages:
        async for message in messages:
            if isinstance(message, Heartbeat):
                yield None
                continue
            sequences = parse_ack(message.reply)
            if sequences is None:
                continue
            if sequences.consumer != expected:
                raise Unavailable(peer=PEER, detail="an event was lost on the way")
            expected += 1
            yield _event(message, sequences, prefix)


def _event(message: Message, sequences: Sequences, prefix: str) -> Event:
    return Event(
        sequence=sequences.stream,
        stored_s=sequences.time_ns / NS,
        subject=message.subject.removeprefix(prefix),
        headers=user_headers(message),
        data=message.data,
        source_sequence=_source_sequence(message.headers.get(_SOURCE_HEADER, "")),
    )


def _source_sequence(origin: str) -> int:
    """Return the sequence in ``<stream> <sequence> …``, as the server names the origin."""
    return int(number) if (number := origin.partition(" ")[2].partition(" ")[0]).isdigit() else 0


def _from_time(since_s: float) -> dict[str, Any]:
    moment = datetime.fromtimestamp(min(max(since_s, 0.0), LATEST_S), tz=UTC)
    return {"deliver_policy": "by_start_time", "opt_start_time": moment.isoformat()}


def _from_sequence(sequence: int) -> dict[str, Any]:
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, sequence)}
