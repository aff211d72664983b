# SPDX-License-Identifier: Apache-2.0
"""A synced watch has delivered everything that the stream's leader had, despite a stale replica.

The bus is a script: the leader's answers, and what the replica that holds the consumer delivers, in
turns. Revisions are stream sequences.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import msgspec
import pytest

from hami_common.bus import subjects
from hami_common.ports import Entry, Synced
from hami_common.runtime.natsio.bucket import NatsBucket
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import Bus

pytestmark = pytest.mark.anyio

BUCKET = subjects.ALLOC_BUCKET
STREAM = subjects.stream_of(BUCKET)
HEARTBEAT = Message(subject="inbox", data=b"", headers={"Status": "100"})


class _Over(Exception):
    """The script has ended."""


class _Script:
    """A bus on which a leader and a stale replica send what the test scripted."""

    name = "t"
    generation = 1
    request_timeout_s = 1.0
    subject = "inbox"

    def __init__(
        self, *, newest: Sequence[int], last: int, delivered: Sequence[Sequence[int]]
    ) -> None:
        """``newest``: the leader's answers for the newest record; the last answer repeats.

        ``last``: the stream's last sequence. ``delivered``: what the replica delivers at a time,
        a heartbeat where that is nothing.
        """
        self._newest = deque(newest)
        self._last = last
        self._delivered = deque(delivered)
        self._count = 0

    async def wait_connected(self, *, after: int = 0) -> int:
        return after + 1

    async def request(self, subject: str, *_: object, **__: object) -> Message:
        return Message(subject="answer", data=msgspec.json.encode(self._answer(subject)))

    def _answer(self, subject: str) -> dict[str, Any]:
        if subject == f"$JS.API.STREAM.INFO.{STREAM}":
            return {"created": "then", "state": {"last_seq": self._last}}
        if subject == f"$JS.API.STREAM.MSG.GET.{STREAM}":
            newest = self._newest.popleft() if len(self._newest) > 1 else self._newest[0]
            if newest == 0:
                return {"error": {"code": 404, "err_code": 10037, "description": "no message"}}
            return {
                "message": {
                    "subject": subjects.kv_subject(BUCKET, f"n.p{newest}"),
                    "seq": newest,
                    "time": "2026-01-01T00:00:00Z",
                }
            }
        assert subject.startswith(f"$JS.API.CONSUMER.CREATE.{STREAM}."), subject
        return {"num_pending": len(self._delivered[0])}

    @asynccontextmanager
    async def subscribe(self, subject: str) -> AsyncIterator["_Script"]:
        assert subject == self.subject
        yield self

    def new_inbox(self) -> str:
        return self.subject

    async def publish(self, *_: object, **__: object) -> bool:
        return True

    async def receive(self, *, timeout_s: float) -> list[Message]:
        del timeout_s
        if not self._delivered:
            raise _Over
        sequences = self._delivered.popleft()
        return [
            self._message(sequence, pending=len(sequences) - number)
            for number, sequence in enumerate(sequences, start=1)
        ] or [HEARTBEAT]

    def _message(self, sequence: int, *, pending: int) -> Message:
        self._count += 1
        return Message(
            subject=subjects.kv_subject(BUCKET, f"n.p{sequence}"),
            data=b"x",
            reply=f"$JS.ACK.{STREAM}.c.1.{sequence}.{self._count}.0.{pending}",
        )


async def told(script: _Script) -> list[int | str]:
    """Revisions in order, and the point at which the watch is synced."""
    found: list[int | str] = []
    with suppress(_Over):
        async with NatsBucket(cast("Bus", script), BUCKET).watch() as items:
            async for item in items:
                if isinstance(item, Entry):
                    found.append(item.revision)
                elif isinstance(item, Synced):
                    found.append(f"synced {item.revision}")
    return found


async def test_stale_replica_has_not_delivered_everything() -> None:
    """The leader has five records, the replica three; the other two arrive late."""
    script = _Script(newest=[5], last=5, delivered=[[1, 2, 3], [], [4, 5], [6]])
    assert await told(script) == [1, 2, 3, 4, 5, "synced 5", 6]


async def test_replica_without_data_is_not_an_empty_bucket() -> None:
    script = _Script(newest=[2], last=2, delivered=[[], [1, 2], [3]])
    assert await told(script) == [1, 2, "synced 2", 3]


async def test_record_that_is_written_while_the_replica_lags_is_not_taken_for_the_old_ones() -> (
    None
):
    script = _Script(newest=[2], last=1, delivered=[[1], [2, 3]])
    assert await told(script) == [1, 2, "synced 2", 3]


async def test_newest_record_that_is_removed_meanwhile_is_not_awaited() -> None:
    script = _Script(newest=[5, 4], last=5, delivered=[[2], [4], [], [6]])
    assert await told(script) == [2, 4, "synced 5", 6]


async def test_stream_with_only_unmatched_records_is_synced_at_once() -> None:
    script = _Script(newest=[0], last=7, delivered=[[], [8]])
    assert await told(script) == ["synced 7", 8]
