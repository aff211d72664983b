# SPDX-License-Identifier: Apache-2.0
"""Key-value bucket over a JetStream stream (port ``Bucket``), with compare-and-set on any filter.

Reads that a decision depends on (``get``, ``last_revision``, the read-back after a lost answer) are
answered by the stream's leader, so that they see every append acknowledged before; ``latest`` and
``watch`` read from any replica, which may be stale, and count as complete only once they have the
leader's newest message. Design D3.
"""

import base64
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec

from hami_common.bus import subjects
from hami_common.errors import Conflict, HamiError, NotFound, Unavailable
from hami_common.ports import Entry, Expect, Reset, Synced, Write
from hami_common.runtime.natsio.client import Message, Question
from hami_common.runtime.natsio.connection import PEER, Bus, Subscription
from hami_common.runtime.natsio.consume import (
    NS,
    Heartbeat,
    ordered_session,
    parse_ack,
    parse_time_s,
)
from hami_common.runtime.natsio.jetstream import (
    API,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT,
    MESSAGE_NOT_FOUND,
    ApiRefusal,
    api,
    store,
    store_all,
    user_headers,
)
from hami_common.runtime.tasks import Backoff

DIRECT_BATCH = 512
"""Keys read by one direct get; the server refuses more than 1,024 and then a consumer is used."""
_STALE_TRIES = 20
_STALE_S = 0.01
_PROPOSED_TRIES = 100
_END_OF_BATCH = "204"
_NOT_FOUND = "404"
_TOO_MANY = "413"

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class TooMany(Exception):
    """More keys match than one direct get may return."""


class NatsBucket:
    """Port ``Bucket`` over the stream ``KV_<name>``."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self._bus = bus
        self._stream = subjects.stream_of(name)

    async def get(self, key: str) -> Entry | None:
        """Latest value of ``key``."""
        return await self._last(subjects.kv_subject(self.name, key))

    async def latest(self, key_filter: str = ">") -> Sequence[Entry]:
        """Latest value of each key that matches the filter, in order of revision."""
        subject_filter = subjects.kv_subject(self.name, key_filter)
        newest = await self.last_revision(subject_filter)
        if newest == 0:
            return []
        try:
            for _ in range(_STALE_TRIES):
                entries = await self._direct_latest(subject_filter)
                if entries and entries[-1].revision >= newest:
                    return entries
                await anyio.sleep(_STALE_S)
        except TooMany:
            return await self._consumed_latest(key_filter)
        raise Unavailable(peer=PEER, detail=f"{subject_filter}: replicas lag behind their leader")

    async def append(
        self,
        key: str,
        value: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        expect: Expect | None = None,
    ) -> int:
        """Store a value; see the port."""
        message = self._message(Write(key=key, value=value, headers=headers or {}, expect=expect))
        try:
            return await store(self._bus, message.subject, value, headers=message.headers)
        except Conflict:
            if expect is not None:
                await self._until_moved(expect)
            raise

    async def append_all(self, writes: Sequence[Write]) -> list[int | HamiError]:
        """Store several values; see the port."""
        return await store_all(self._bus, [self._message(write) for write in writes])

    def _message(self, write: Write) -> Question:
        """Message that a stream stores for this write."""
        subject, expect = subjects.kv_subject(self.name, write.key), write.expect
        headers = dict(write.headers)
        if expect is not None:
            headers[EXPECTED_LAST_SUBJECT_SEQUENCE] = str(expect.sequence)
            if expect.subject != subject:
                headers[EXPECTED_LAST_SUBJECT_SEQUENCE_SUBJECT] = expect.subject
        return Question(subject=subject, data=write.value, headers=headers or None)

    async def _until_moved(self, expect: Expect) -> None:
        """Wait until reads return the value that an append conflicted with, so the caller sees it.

        A leader rejects an append as soon as the competing one is proposed to its followers;
        readers see that one once a majority has stored it. If it is never stored, the wait ends
        after a moment.
        """
        for _ in range(_PROPOSED_TRIES):
            try:
                if await self.last_revision(expect.subject) != expect.sequence:
                    return
            except Unavailable:
                return
            await anyio.sleep(_STALE_S)

    async def last_revision(self, subject_filter: str) -> int:
        """Sequence of the newest message whose subject matches the filter, 0 when there is none."""
        entry = await self._last(subject_filter)
        return 0 if entry is None else entry.revision

    async def forget(self, key: str) -> None:
        """Remove the values of ``key``; ``Conflict`` while it holds its node's newest value."""
        subject = subjects.kv_subject(self.name, key)
        node_filter = subjects.kv_subject(self.name, f"{key.partition('.')[0]}.>")
        own = await self.last_revision(subject)
        if own == 0:
            return
        if await self.last_revision(node_filter) <= own:
            raise Conflict(
                what=f"{self.name} {key}",
                detail=f"revision {own} is the newest of its node and carries the fence",
            )
        # Only up to the revision that was checked: a value stored meanwhile stays.
        await api(self._bus, f"STREAM.PURGE.{self._stream}", {"filter": subject, "seq": own + 1})

    @asynccontextmanager
    async def watch(
        self, key_filter: str = ">"
    ) -> AsyncIterator[AsyncIterator[Entry | Synced | Reset]]:
        """See the port."""
        items = _Watch(self._bus, self, key_filter).items()
        try:
            yield items
        finally:
            await items.aclose()

    async def identity(self) -> str:
        """Identity of this incarnation of the stream: re-creating the stream changes it."""
        info = await api(self._bus, f"STREAM.INFO.{self._stream}")
        return str(info["created"])

    async def _last(self, subject_filter: str) -> Entry | None:
        try:
            answer = await api(
                self._bus, f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": subject_filter}
            )
        except ApiRefusal as refusal:
            if refusal.err_code == MESSAGE_NOT_FOUND:
                return None
            raise
        except NotFound as error:
            raise Unavailable(peer=PEER, detail=f"bucket {self.name} does not exist") from error
        return _entry_from_api(self.name, answer["message"])

    async def _direct_latest(self, subject_filter: str) -> list[Entry]:
        bus = self._bus
        request = _encoder.encode({"multi_last": [subject_filter], "batch": DIRECT_BATCH})
        async with bus.subscribe(bus.new_inbox()) as subscription:
            sent = await bus.publish(
                f"{API}.DIRECT.GET.{self._stream}", request, reply=subscription.subject
            )
            if not sent:
                raise Unavailable(peer=PEER, detail="the connection is down")
            return await self._batch(subscription, what=subject_filter)

    async def _batch(self, subscription: Subscription, *, what: str) -> list[Entry]:
        """The entries of one direct get, up to its end."""
        entries: list[Entry] = []
        while True:
            received = await subscription.receive(timeout_s=self._bus.request_timeout_s)
            if not received:
                raise Unavailable(peer=PEER, detail=f"{what}: no answer")
            for message in received:
                if not message.status:
                    entries.append(entry_from_direct(self.name, message))
                elif message.status == _NOT_FOUND:
                    return []
                elif message.status == _TOO_MANY:
                    raise TooMany
                elif message.status == _END_OF_BATCH:
                    if message.headers.get("Nats-Num-Pending", "0") != "0":
                        raise TooMany
                    return sorted(entries, key=lambda entry: entry.revision)
                else:
                    raise Unavailable(peer=PEER, detail=f"{what}: status {message.status}")

    async def _consumed_latest(self, key_filter: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        async with self.watch(key_filter) as items:
            async for item in items:
                if isinstance(item, Entry):
                    found.pop(item.key, None)
                    found[item.key] = item
                elif isinstance(item, Reset):
                    found.clear()
                else:
                    break
        return list(found.values())


def _entry_from_api(bucket: str, message: Mapping[str, Any]) -> Entry:
    headers: dict[str, str] = {}
    if "hdrs" in message:
        for line in base64.b64decode(message["hdrs"]).decode("utf-8", "replace").split("\r\n")[1:]:
            name, separator, value = line.partition(":")
            if separator and not name.startswith("Nats-"):
                headers[name.strip()] = value.strip()
    return Entry(
        key=subjects.key_of(bucket, message["subject"]),
        value=base64.b64decode(message.get("data", "")),
        revision=message["seq"],
        headers=headers,
        time_s=parse_time_s(message["time"]),
    )


def entry_from_direct(bucket: str, message: Message) -> Entry:
    """The value in the answer of a direct get."""
    return Entry(
        key=subjects.key_of(bucket, message.headers["Nats-Subject"]),
        value=message.data,
        revision=int(message.headers["Nats-Sequence"]),
        headers=user_headers(message),
        time_s=parse_time_s(message.headers["Nats-Time-Stamp"]),
    )


class _Watch:
    """One watch: sessions on an ephemeral consumer, each resuming where the last one ended."""

    def __init__(self, bus: Bus, bucket: NatsBucket, key_filter: str) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = subjects.stream_of(bucket.name)
        self._filter = subjects.kv_subject(bucket.name, key_filter)
        self._created = ""
        self._position = 0
        """Highest revision delivered, or known to have no value for us."""
        self._synced = False
        self._last: Entry | None = None

    async def items(self) -> AsyncGenerator[Entry | Synced | Reset, None]:
        backoff = Backoff(first_s=0.02, most_s=2.0)
        while True:
            try:
                await self._bus.wait_connected()
                info = await api(self._bus, f"STREAM.INFO.{self._stream}")
                if await self._is_other_history(info):
                    self._position, self._synced, self._last = 0, False, None
                    yield Reset()
                self._created = info["created"]
                async with AsyncExitStack() as stack:
                    async for item in self._session(stack, info["state"]["last_seq"]):
                        backoff.reset()
                        yield item
            except (Unavailable, NotFound) as error:
                _log.debug("watch interrupted", extra={"problem": str(error)})
                await backoff.wait()

    async def _is_other_history(self, info: Mapping[str, Any]) -> bool:
        """True when the stream was replaced, or is behind the position read before."""
        if not self._created:
            return False
        if info["created"] != self._created or info["state"]["last_seq"] < self._position:
            return True
        if self._last is None:
            return False
        # A store restored from an older copy and written on: the same revision has another value.
        try:
            answer = await api(
                self._bus, f"STREAM.MSG.GET.{self._stream}", {"seq": self._last.revision}
            )
        except ApiRefusal as refusal:
            if refusal.err_code == MESSAGE_NOT_FOUND:
                return False  # dropped by history or forgotten
            raise
        now = _entry_from_api(self._bucket.name, answer["message"])
        return _fingerprint(now) != _fingerprint(self._last)

    async def _session(
        self, stack: AsyncExitStack, stream_last: int
    ) -> AsyncIterator[Entry | Synced]:
        start: dict[str, Any] = {"deliver_policy": "last_per_subject"}
        if self._synced:
            start = {
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": self._position + 1,
            }
        session, _ = await stack.enter_async_context(
            ordered_session(
                self._bus, stream=self._stream, start=start, filter_subjects=(self._filter,)
            )
        )
        # The consumer sits on any replica. An empty backlog proves nothing: messages that the
        # leader had stored may still be on their way to that replica.
        newest = 0 if self._synced else await self._bucket.last_revision(self._filter)
        if not self._synced and self._position >= newest:
            yield self._sync(stream_last)
        expected = 1
        async for message in session.messages():
            if isinstance(message, Heartbeat):
                if not self._synced:
                    # If the newest was removed meanwhile, waiting for it would not end.
                    newest = await self._bucket.last_revision(self._filter)
                    if self._position >= newest:
                        yield self._sync(stream_last)
                continue
            sequences = parse_ack(message.reply)
            if sequences is None:
                continue
            if sequences.consumer != expected:
                raise Unavailable(peer=PEER, detail=f"{self._stream}: a message is missing")
            expected += 1
            if sequences.stream > self._position:
                self._position = sequences.stream
                self._last = Entry(
                    key=subjects.key_of(self._bucket.name, message.subject),
                    value=message.data,
                    revision=sequences.stream,
                    headers=user_headers(message),
                    time_s=sequences.time_ns / NS,
                )
                yield self._last
            if not self._synced and self._position >= newest:
                yield self._sync(stream_last)

    def _sync(self, stream_last: int) -> Synced:
        """Mark the watch synced once it delivered all up to ``stream_last``."""
        self._synced = True
        self._position = max(self._position, stream_last)
        return Synced(revision=self._position)


def _fingerprint(entry: Entry) -> tuple[str, int, bytes]:
    return entry.key, entry.revision, hashlib.sha256(entry.value).digest()
