# SPDX-License-Identifier: Apache-2.0
"""The in-memory bus: the faults it can inject, beyond the contract it shares with the real one."""

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Conflict, Unavailable
from hami_common.ports import Entry, Expect, Synced
from tests.support.manualclock import ManualClock
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryPublisher, Published, matches

pytestmark = pytest.mark.anyio

KEY = subjects.allocation_key("node.a", "u")


async def test_a_lost_acknowledgement_stores_and_a_repetition_conflicts() -> None:
    bus = MemoryBus()
    bucket = MemoryBucket(bus, subjects.ALLOC_BUCKET)
    expect = Expect(subject=subjects.node_fence("node.a"), sequence=0)
    bus.lose_next_ack = True
    with pytest.raises(Unavailable, match="answer was lost"):
        await bucket.append(KEY, b"1", expect=expect)
    with pytest.raises(Conflict):
        await bucket.append(KEY, b"1", expect=expect)
    entry = await bucket.get(KEY)
    assert entry is not None
    assert entry.revision == 1


async def test_while_the_bus_is_unavailable_calls_fail_and_watches_wait() -> None:
    bus = MemoryBus()
    bucket = MemoryBucket(bus, subjects.ALLOC_BUCKET)
    async with bucket.watch() as items:
        assert await anext(items) == Synced(revision=0)
        bus.set_available(available=False)
        for call in (bucket.get(KEY), bucket.latest(), bucket.append(KEY, b"1")):
            with pytest.raises(Unavailable):
                await call
        with anyio.move_on_after(0.02) as scope:
            await anext(items)
        assert scope.cancelled_caught


async def test_entries_carry_the_buses_time() -> None:
    clock = ManualClock(now_s=100.0)
    bucket = MemoryBucket(MemoryBus(clock=clock), "b")
    await clock.advance(5)
    await bucket.append("n.k", b"1")
    entry = await bucket.get("n.k")
    assert entry is not None
    assert entry.time_s == 105.0


async def test_history_is_bounded_per_key() -> None:
    bucket = MemoryBucket(MemoryBus(history=2), "b")
    async with bucket.watch() as items:
        assert await anext(items) == Synced(revision=0)
        for number in range(5):
            await bucket.append("n.k", b"%d" % number)
        got = [await anext(items) for _ in range(2)]
    assert [item.value for item in got if isinstance(item, Entry)] == [b"3", b"4"]


async def test_listeners_receive_published_messages() -> None:
    bus = MemoryBus()
    heard: list[Published] = []
    bus.on_publish(heard.append)
    await MemoryPublisher(bus).publish("a.b", b"1", headers={"h": "v"})
    assert [(m.subject, m.data, m.headers) for m in heard] == [("a.b", b"1", {"h": "v"})]
    assert [m.subject for m in bus.published] == ["a.b"]


@pytest.mark.parametrize(
    ("subject", "subject_filter", "expected"),
    [
        ("a.b.c", "a.b.c", True),
        ("a.b.c", "a.*.c", True),
        ("a.b.c", "a.>", True),
        ("a.b.c", ">", True),
        ("a.b.c", "*.*.*", True),
        ("a", "a.>", False),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.b.c", "a.*", False),
        ("a.b.c", "b.>", False),
    ],
)
def test_filters_match_as_nats_does(subject: str, subject_filter: str, *, expected: bool) -> None:
    assert matches(subject, subject_filter) is expected
