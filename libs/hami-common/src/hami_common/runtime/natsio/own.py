# SPDX-License-Identifier: Apache-2.0
"""A node's own part of a bucket, for an agent that may read no other (ADR 0013).

Such an agent has no JetStream API. It reads one value by a direct get that names its subject in the
request's own subject, so that a permission can restrict it to its node; any server of a cluster
answers, so other writers' values may appear a moment late. It requests all values of its node from
a replica of the registry (``serve_records``), which reads them as for itself and answers in pieces.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import anyio
import msgspec
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import HamiError, Unavailable, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.ports import Entry
from hami_common.runtime.natsio.bucket import NatsBucket, entry_from_direct
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import PEER, Bus
from hami_common.runtime.natsio.jetstream import API
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.tasks import background

PIECE_BYTES = 256 * 1024
"""Size at which an answer continues in another message; base64 adds a third, the server's limit is
1 MiB, and one value is far smaller than either.
"""
_NOT_FOUND = "404"
_IDENTITY_ONLY = b"identity"
_AT_ONCE = 16
"""Requests that one registry processes at the same time."""
_PER_SUBJECT = 8
"""Waiting requests about one node and bucket; an agent sends one after the other."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class _Piece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of an answer."""

    identity: str
    number: int = 0
    is_last: bool = False
    entries: tuple[Entry, ...] = ()


_decoder = msgspec.json.Decoder(_Piece)


class OwnBucket(NatsBucket):
    """Port ``Bucket`` for the keys of one node; it cannot ``watch`` and cannot ``forget``."""

    def __init__(self, bus: Bus, name: str, node: str) -> None:
        super().__init__(bus, name)
        self._node = node
        self._question = subjects.records(node, name)

    async def latest(self, key_filter: str = ">") -> Sequence[Entry]:
        """Latest value of each key of the node, in order of revision; no other filter is served."""
        if key_filter != subjects.node_keys(self._node):
            raise WireInvalid(what=f"filter {key_filter!r}", problem="is not that of our own node")
        bus = self._bus
        found: list[Entry] = []
        expected = 0
        async with bus.subscribe(bus.new_inbox()) as subscription:
            if not await bus.publish(self._question, b"", reply=subscription.subject):
                raise self._unavailable("the connection is down")
            while True:
                received = await subscription.receive(timeout_s=bus.request_timeout_s)
                if not received:
                    raise self._unavailable("no answer")
                for message in received:
                    piece = self._piece(message)
                    if piece.number != expected:
                        raise self._unavailable("a piece of the answer is missing")
                    expected += 1
                    found.extend(piece.entries)
                    if piece.is_last:
                        return found

    async def identity(self) -> str:
        """See ``NatsBucket``."""
        return self._piece(await self._bus.request(self._question, _IDENTITY_ONLY)).identity

    def _piece(self, message: Message) -> _Piece:
        try:
            return _decoder.decode(message.data)
        except UNDECODABLE as error:
            raise self._unavailable(message.status or "the answer does not decode") from error

    def _unavailable(self, why: str) -> Unavailable:
        return Unavailable(peer=PEER, detail=f"{self._question}: {why}")

    async def _last(self, subject_filter: str) -> Entry | None:
        stream = subjects.stream_of(self.name)
        answer = await self._bus.request(f"{API}.DIRECT.GET.{stream}.{subject_filter}")
        if answer.status == _NOT_FOUND:
            return None
        if answer.status:
            raise Unavailable(peer=PEER, detail=f"{subject_filter}: status {answer.status}")
        return entry_from_direct(self.name, answer)


async def serve_records(bus: Bus, quarantine: Quarantine) -> None:
    """Answer agents about the records of their nodes until cancelled; replicas share the load."""
    places = anyio.Semaphore(_AT_ONCE)
    pattern = f"{subjects.RECORDS_PREFIX}.*.*"
    async with (
        bus.subscribe(pattern, queue="registry", per_subject=_PER_SUBJECT) as questions,
        background() as group,
    ):
        async for message in questions:
            await places.acquire()  # the subscription bounds the queue
            answer = partial(_answer, bus, message, places)
            group.start_soon(quarantine.once, "question", answer)


async def _answer(bus: Bus, message: Message, places: anyio.Semaphore) -> None:
    try:
        entries: Sequence[Entry] = ()
        try:
            node, name = subjects.parse_records(message.subject)
            bucket = NatsBucket(bus, name)
            identity = await bucket.identity()
            if message.data != _IDENTITY_ONLY:
                entries = await bucket.latest(subjects.node_keys(node))
        except HamiError as error:
            # The agent retries.
            _log.info("records not read", extra={"subject": message.subject, "problem": str(error)})
            return
        for piece in _pieces(identity, entries):
            await bus.publish(message.reply, _encoder.encode(piece))
    finally:
        places.release()


def _pieces(identity: str, entries: Sequence[Entry]) -> Iterator[_Piece]:
    number, size = 0, 0
    waiting: list[Entry] = []
    for entry in entries:
        if size > 0 and size + len(entry.value) > PIECE_BYTES:
            yield _Piece(identity=identity, number=number, entries=tuple(waiting))
            number, size = number + 1, 0
            waiting.clear()
        waiting.append(entry)
        size += len(entry.value)
    yield _Piece(identity=identity, number=number, is_last=True, entries=tuple(waiting))
