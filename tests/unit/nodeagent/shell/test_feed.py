# SPDX-License-Identifier: Apache-2.0
"""An unreadable ledger record makes Allocate fail for its pod, and for no other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.events.codec import encode
from hami_common.ports import Entry, Reset, Synced
from hami_common.runtime.tasks import background
from hami_nodeagent.shell.feed import LedgerFeed
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryPublisher
from tests.unit.nodeagent.core.builders import NODE, Given
from tests.unit.nodeagent.shell.support import make_site, until

pytestmark = pytest.mark.anyio

Item = Entry | Synced | Reset


class FakeFeed:
    def __init__(self) -> None:
        self.send, self._receive = anyio.create_memory_object_stream[Item](100)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Item]]:
        yield self._receive

    def close(self) -> None:
        self.send.close()
        self._receive.close()


class Bench:
    def __init__(self, directory: Path) -> None:
        self.site = make_site(directory)
        self.feed = FakeFeed()
        bus = MemoryBus()
        self.ledger = LedgerFeed(
            site=self.site,
            feed=self.feed,
            bucket=MemoryBucket(bus, subjects.ALLOC_BUCKET),
            publisher=MemoryPublisher(bus),
        )

    def tell(self, pod: Given, value: bytes | None = None, *, revision: int) -> None:
        self.feed.send.send_nowait(
            Entry(
                key=subjects.allocation_key(NODE, pod.uid),
                value=encode(pod.record) if value is None else value,
                revision=revision,
            )
        )

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        self.feed.send.send_nowait(Synced(revision=0))
        async with background() as group:
            await group.start(self.ledger.follow)
            yield
        self.feed.close()


async def test_pod_of_an_unreadable_record_is_noted_until_a_newer_one_is_read(
    tmp_path: Path,
) -> None:
    bench, pod, other = Bench(tmp_path), Given("pod"), Given("other")
    picture = bench.site.picture
    async with bench.following():
        bench.tell(pod, revision=1)
        bench.tell(pod, b'{"op":', revision=2)
        bench.tell(other, revision=3)
        await until(lambda: other.uid in picture.entries_by_uid)
        assert "record of the allocation cannot be read" in picture.unreadable_of(pod.uid)
        assert picture.unreadable_of(other.uid) == ""
        assert picture.entries_by_uid[pod.uid].sequence == 1, "what runs is judged by the last one"
        assert [entry.kind for entry in bench.site.quarantine.entries()] == ["record"]
        bench.tell(pod, revision=4)
        await until(lambda: picture.unreadable_of(pod.uid) == "")
        assert bench.site.quarantine.entries() == []


async def test_replaced_ledger_clears_unreadable_records(tmp_path: Path) -> None:
    bench, pod = Bench(tmp_path), Given("pod")
    async with bench.following():
        bench.tell(pod, b"", revision=1)
        await until(lambda: bench.site.picture.unreadable_of(pod.uid) != "")
        bench.feed.send.send_nowait(Reset())
        await until(lambda: bench.site.picture.unreadable_of(pod.uid) == "")
        assert bench.site.quarantine.entries() == []
