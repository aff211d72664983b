# SPDX-License-Identifier: Apache-2.0
"""In-memory bus: buckets, publisher and feed with the semantics of the real ones, for unit tests.

One ``MemoryBus`` stands for one server; the adapters made from it share its streams. It can be made
unavailable and can lose its store, so shells are tested with the same failures as the real
server's. The contract suite of the ports runs over these and over NATS (design D38).
"""

import itertools
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from hami_common.bus import subjects
from hami_common.errors import Conflict, HamiError, Unavailable
from hami_common.ports import Bucket, Clock, Entry, Expect, Outgoing, Reset, Synced, Write
from hami_common.runtime.clock import SystemClock

_PEER = "memory bus"
_NEWEST = 256
"""Values that a reader who is not far behind gets without a scan of all keys."""


class Published:
    """One message that was published, for tests to inspect."""

    def __init__(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        self.subject = subject
        self.data = data
        self.headers = dict(headers)


class _Stream:
    """Values by key, oldest first; indexes keep long unit tests fast."""

    def __init__(self, history: int) -> None:
        self.incarnation = 0
        self.next_revision = 1
        self.changed = anyio.Event()
        self._history = history
        self._by_key: dict[str, list[Entry]] = {}
        self._newest_by_node: dict[str, Entry] = {}
        self._keys_by_node: dict[str, dict[str, None]] = {}
        self._newest: deque[Entry] = deque(maxlen=_NEWEST)

    def add(self, entry: Entry) -> None:
        values = self._by_key.setdefault(entry.key, [])
        values.append(entry)
        del values[: -self._history]
        node = entry.key.partition(".")[0]
        self._newest_by_node[node] = entry
        self._keys_by_node.setdefault(node, {})[entry.key] = None
        self._newest.append(entry)
        self.next_revision += 1
        self.wake()

    def wipe(self) -> None:
        self.incarnation += 1
        self.next_revision = 1
        self._by_key.clear()
        self._newest_by_node.clear()
        self._keys_by_node.clear()
        self._newest.clear()
        self.wake()

    def drop(self, key: str) -> None:
        """Drop a value; only for keys that do not have their node's newest value."""
        self._by_key.pop(key, None)
        self._keys_by_node.get(key.partition(".")[0], {}).pop(key, None)

    def last(self, key_filter: str) -> Entry | None:
        if values := self._by_key.get(key_filter):
            return values[-1]
        node, _, rest = key_filter.partition(".")
        if rest == ">" and node != "*":
            return self._newest_by_node.get(node)
        latest = self.latest(key_filter)
        return latest[-1] if latest else None

    def latest(self, key_filter: str) -> list[Entry]:
        """Newest value of each matching key, by revision."""
        keys: Iterable[str] = self._by_key
        if not key_filter.startswith(("*", ">")):
            keys = self._keys_by_node.get(key_filter.partition(".")[0], ())
        found = [self._by_key[key][-1] for key in keys if matches(key, key_filter)]
        return sorted(found, key=lambda entry: entry.revision)

    def after(self, key_filter: str, revision: int) -> list[Entry]:
        """All stored values of matching keys later than ``revision``, by revision."""
        if self._newest and revision >= self._newest[0].revision - 1:
            new = itertools.takewhile(lambda e: e.revision > revision, reversed(self._newest))
            return [e for e in reversed([*new]) if self._holds(e) and matches(e.key, key_filter)]
        found: list[Entry] = []
        for key, values in self._by_key.items():
            if values[-1].revision > revision and matches(key, key_filter):
                found.extend(entry for entry in values if entry.revision > revision)
        return sorted(found, key=lambda entry: entry.revision)

    def _holds(self, entry: Entry) -> bool:
        """Return True when history has not dropped the value."""
        values = self._by_key.get(entry.key)
        return values is not None and values[0].revision <= entry.revision

    def wake(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()


class MemoryBus:
    """One server's worth of buckets."""

    def __init__(self, *, clock: Clock | None = None, history: int = 64) -> None:
        self.clock = clock or SystemClock()
        self.is_available = True
        """False: every call is ``Unavailable`` and watches wait."""
        self.lose_next_ack = False
        """True: the next append is stored but its writer gets ``Unavailable``."""
        self.published: list[Published] = []
        """All fire-and-forget and stored messages, oldest first."""
        self._history = history
        self._streams: dict[str, _Stream] = {}
        self._listeners: list[Callable[[Published], None]] = []
        self._message_ids: dict[tuple[str, str], int] = {}

    def stream(self, bucket: str) -> _Stream:
        """Stream behind a bucket, made when it is first used."""
        stream = self._streams.get(bucket)
        if stream is None:
            stream = self._streams[bucket] = _Stream(self._history)
        return stream

    def wipe(self) -> None:
        """Lose everything that is stored: watches see ``Reset``."""
        for stream in self._streams.values():
            stream.wipe()

    def set_available(self, *, available: bool) -> None:
        """Make the bus unavailable or available."""
        self.is_available = available
        for stream in self._streams.values():
            stream.wake()

    def on_publish(self, listener: Callable[[Published], None]) -> None:
        """Call ``listener`` with each message published from now on."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raise ``Unavailable`` while the bus is unavailable."""
        if not self.is_available:
            raise Unavailable(peer=_PEER, detail="taken away by the test")

    def record(self, message: Published, *, message_id: str = "") -> int:
        """Store and deliver a published message; return its number, or the repeated one's."""
        key = (message.subject, message_id)
        if message_id and key in self._message_ids:
            return self._message_ids[key]
        self.published.append(message)
        for listener in self._listeners:
            listener(message)
        number = len(self.published)
        if message_id:
            self._message_ids[key] = number
        return number

    def store(
        self, bucket: str, key: str, value: bytes, headers: Mapping[str, str], expect: Expect | None
    ) -> int:
        """Append to a bucket's stream with the server's atomic check."""
        stream = self.stream(bucket)
        subject = subjects.kv_subject(bucket, key)
        if expect is not None:
            newest = self.last(bucket, expect.subject)
            found = 0 if newest is None else newest.revision
            if found != expect.sequence:
                raise Conflict(what=subject, detail=f"wrong last sequence: {found}")
        entry = Entry(
            key=key,
            value=value,
            revision=stream.next_revision,
            headers=dict(headers),
            time_s=self.clock.now_s(),
        )
        stream.add(entry)
        return entry.revision

    def last(self, bucket: str, subject_filter: str) -> Entry | None:
        """Newest entry whose subject matches."""
        return self.stream(bucket).last(subjects.key_of(bucket, subject_filter))


def matches(subject: str, subject_filter: str) -> bool:
    """Return True when ``subject`` matches a NATS filter: ``*`` is one token, ``>`` all that are
    left.
    """
    tokens, pattern = subject.split("."), subject_filter.split(".")
    for position, expected in enumerate(pattern):
        if expected == ">":
            return len(tokens) > position
        if position >= len(tokens) or expected not in ("*", tokens[position]):
            return False
    return len(tokens) == len(pattern)


class MemoryBucket:
    """Port ``Bucket`` over a ``MemoryBus``."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self.name = name
        self._bus = bus

    async def get(self, key: str) -> Entry | None:
        """Latest value of ``key``, or ``None``."""
        await self._answer()
        return self._bus.last(self.name, subjects.kv_subject(self.name, key))

    async def latest(self, key_filter: str = ">") -> Sequence[Entry]:
        """Latest value of each key that matches the filter, in order of revision."""
        await self._answer()
        return self._bus.stream(self.name).latest(key_filter)

    async def append(
        self,
        key: str,
        value: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expect: Expect | None = None,
    ) -> int:
        """Store a value and return its revision; see the port."""
        await self._answer()
        revision = self._bus.store(self.name, key, value, headers or {}, expect)
        if self._bus.lose_next_ack:
            self._bus.lose_next_ack = False
            raise Unavailable(peer=_PEER, detail="the answer was lost")
        return revision

    async def append_all(self, writes: Sequence[Write]) -> list[int | HamiError]:
        """Store several values; see the port."""
        return await one_by_one(self, writes)

    async def last_revision(self, subject_filter: str) -> int:
        """Sequence of the newest message whose subject matches the filter, 0 when there is none."""
        await self._answer()
        entry = self._bus.last(self.name, subject_filter)
        return 0 if entry is None else entry.revision

    async def forget(self, key: str) -> None:
        """Remove the values of ``key``; ``Conflict`` while it holds its node's newest value."""
        await self._answer()
        own = self._bus.last(self.name, subjects.kv_subject(self.name, key))
        if own is None:
            return
        node_filter = subjects.kv_subject(self.name, f"{key.partition('.')[0]}.>")
        newest = self._bus.last(self.name, node_filter)
        if newest is None or newest.revision <= own.revision:
            raise Conflict(
                what=f"{self.name} {key}",
                detail=f"revision {own.revision} is the newest of its node and carries the fence",
            )
        self._bus.stream(self.name).drop(key)

    @asynccontextmanager
    async def watch(
        self, key_filter: str = ">"
    ) -> AsyncIterator[AsyncIterator[Entry | Synced | Reset]]:
        """See the port."""
        items = self._items(key_filter)
        try:
            yield items
        finally:
            await items.aclose()

    async def _items(self, key_filter: str) -> AsyncGenerator[Entry | Synced | Reset, None]:
        stream = self._bus.stream(self.name)
        incarnation = stream.incarnation
        synced = False
        position = 0
        while True:
            changed = stream.changed
            if not self._bus.is_available:
                await changed.wait()
                continue
            if stream.incarnation != incarnation:
                incarnation, position, synced = stream.incarnation, 0, False
                yield Reset()
                continue
            newest = stream.next_revision - 1
            fresh = stream.after(key_filter, position) if synced else stream.latest(key_filter)
            for entry in fresh:
                yield entry
                position = entry.revision
            if not synced:
                synced = True
                position = max(position, newest)
                yield Synced(revision=position)
            elif not fresh:
                await changed.wait()

    async def _answer(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._bus.check()


async def one_by_one(bucket: Bucket, writes: Sequence[Write]) -> list[int | HamiError]:
    """``Bucket.append_all`` of a bucket that stores one value after another."""
    found: list[int | HamiError] = []
    for write in writes:
        try:
            found.append(
                await bucket.append(
                    write.key, write.value, headers=write.headers, expect=write.expect
                )
            )
        except HamiError as error:
            found.append(error)
    return found


class MemoryFeed:
    """Port ``Feed`` over a ``MemoryBus``."""

    def __init__(self, bus: MemoryBus, node: str) -> None:
        self._bucket = MemoryBucket(bus, subjects.ALLOC_BUCKET)
        self._node = node

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Entry | Synced | Reset]]:
        """See the port."""
        async with self._bucket.watch(subjects.node_keys(self._node)) as items:
            yield items


class MemoryPublisher:
    """Port ``Publisher`` over a ``MemoryBus``; ``bus.published`` lists the messages."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Publish without acknowledgement; dropped while the bus is unavailable."""
        await anyio.lowlevel.checkpoint()
        if self._bus.is_available:
            self._bus.record(Published(subject, data, headers or {}))

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str = "",
    ) -> int:
        """Store the message; a repeated ``message_id`` is dropped."""
        await anyio.lowlevel.checkpoint()
        self._bus.check()
        return self._bus.record(Published(subject, data, headers or {}), message_id=message_id)

    async def publish_all_stored(self, messages: Sequence[Outgoing]) -> list[int | HamiError]:
        """Store several messages; see the port."""
        found: list[int | HamiError] = []
        for message in messages:
            try:
                found.append(
                    await self.publish_stored(
                        message.subject,
                        message.data,
                        headers=message.headers,
                        message_id=message.message_id,
                    )
                )
            except HamiError as error:
                found.append(error)
        return found
