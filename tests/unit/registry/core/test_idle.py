# SPDX-License-Identifier: Apache-2.0
"""Idle periods: one message for each, whatever is repeated, late, restarted or raced."""

import random
from typing import Any

import pytest
from msgspec import structs

from hami_common.events.allocation import Account, AllocationRecord
from hami_common.events.idle import IdleRecord
from hami_common.events.inventory import NodeDevices
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import ContainerShares, Share
from hami_registry.core.idle import IdleBook, event_id
from tests.support.builders import device

MINUTE_S = 60.0
HALF_HOUR_S = 30 * MINUTE_S
DEVICES = NodeDevices(
    node="n",
    vendor="nvidia",
    boot_id="b",
    seq=1,
    time_s=0.0,
    config_generation=1,
    devices=tuple(device(uuid, index=i, memory_mib=1000) for i, uuid in enumerate("ab")),
)


def allocation(time_s: float = 0.0, **more: Any) -> AllocationRecord:
    shares = tuple(
        Share(vendor="nvidia", uuid=uuid, memory_mib=more.pop("mib", 500))
        for uuid in more.pop("uuids", ("a",))
    )
    return AllocationRecord(
        **{
            "op": "reserve",
            "allocation_id": "x",
            "node": "n",
            "pod_uid": "u",
            "namespace": "team-a",
            "pod": "p",
            "time_s": time_s,
            "containers": (ContainerShares(name="main", kind="app", shares=shares),),
            "account": Account(queue="gold"),
            **more,
        }
    )


def sample(
    time_s: float, device_s: float, *, uuids: tuple[str, ...] = ("a",), **more: Any
) -> UsageRecord:
    who: Any = {"namespace": "team-a", "pod": "p", "pod_uid": "u", "container": "main"}
    launches, core_pct = more.pop("launches", 1), more.pop("core_pct", 0)
    return UsageRecord(
        node="n",
        boot_id="b",
        seq=int(time_s) + 1,
        time_s=time_s,
        every_s=60.0,
        shares=tuple(
            ShareUsage(
                vendor="nvidia",
                uuid=uuid,
                allocation_id="x",
                used_mib=300,
                core_pct=core_pct,
                **who,
            )
            for uuid in uuids
        ),
        containers=(ContainerUsage(device_time_s=device_s, launches=launches, **who),),
    )


class Stream:
    """The subject of the allocation, with its condition, as the server stores it."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, IdleRecord]] = []
        self.sequence = 0

    @property
    def records(self) -> list[IdleRecord]:
        return [record for _, record in self.stored]

    def newest(self) -> tuple[int, IdleRecord] | None:
        return self.stored[-1] if self.stored else None

    def start(self, name: str = "r") -> IdleBook:
        """A replica that starts now."""
        book = IdleBook(after_s=HALF_HOUR_S, writer=name)
        self.tell(book)
        return book

    def tell(self, book: IdleBook) -> None:
        if newest := self.newest():
            book.published(newest[1], newest[0])

    def look(self, book: IdleBook, now_s: float) -> None:
        for due in book.due(now_s=now_s):
            newest = self.newest()
            if due.sequence != (newest[0] if newest else 0):
                self.tell(book)
                continue
            self.sequence += 10
            self.stored.append((self.sequence, due.record))
            book.published(due.record, self.sequence)


def fold(book: IdleBook, *samples: UsageRecord, live: AllocationRecord | None = None) -> None:
    for one in samples:
        book.fold(one, [live or allocation()], [DEVICES])


def run(stream: Stream, book: IdleBook, samples: list[UsageRecord], **more: Any) -> None:
    for one in samples:
        fold(book, one, **more)
        stream.look(book, one.time_s + 1)


def idle_trace(minutes: int, *, since_s: float = 0.0, device_s: float = 7.0) -> list[UsageRecord]:
    return [sample(since_s + MINUTE_S * i, device_s) for i in range(minutes + 1)]


def busy_trace(minutes: int, *, since_s: float = 0.0) -> list[UsageRecord]:
    return [sample(since_s + MINUTE_S * i, 7.0 + i) for i in range(minutes + 1)]


def test_an_idle_trace_of_half_an_hour_is_one_message_with_the_device_seconds_lost() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, busy_trace(5) + idle_trace(28, since_s=360, device_s=12.0))
    assert stream.records == []
    run(stream, book, idle_trace(60, since_s=360 + 29 * 60, device_s=12.0))
    (record,) = stream.records
    assert (record.change, record.namespace, record.pod, record.queue) == (
        "idle",
        "team-a",
        "p",
        "gold",
    )
    # Half of the device, from the last sample with work (300 s) for 30 minutes.
    assert (record.since_s, record.is_since_known, record.time_s) == (300, True, 300 + 1800)
    assert record.lost_s == 0.5 * 1800
    assert record.measured_by == "limiter"
    assert [(one.uuid, one.memory_mib, one.used_mib) for one in record.devices] == [("a", 500, 300)]


def test_a_busy_trace_is_no_message() -> None:
    stream = Stream()
    run(stream, stream.start(), busy_trace(300))
    assert stream.records == []


def test_work_ends_the_period_with_a_message_of_its_own_and_the_next_is_another() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, idle_trace(40) + busy_trace(2, since_s=2460))
    idle, active = stream.records
    assert (idle.change, active.change) == ("idle", "active")
    assert (idle.since_s, active.since_s) == (0.0, 0.0)
    # It worked in the sample from 2460 s to 2520 s.
    assert (active.time_s, active.lost_s) == (2460, 0.5 * 2460)
    run(stream, book, idle_trace(31, since_s=2640, device_s=9.0))
    assert [one.change for one in stream.records] == ["idle", "active", "idle"]
    assert stream.records[-1].since_s == 2580
    assert len({event_id(one) for one in stream.records}) == 3


def test_repeated_and_older_samples_have_no_effect() -> None:
    stream, rng = Stream(), random.Random(3)
    book = stream.start()
    samples = idle_trace(90)
    for number, one in enumerate(samples):
        fold(book, one, one, samples[rng.randrange(number + 1)])
        stream.look(book, one.time_s + 1)
        stream.look(book, one.time_s + 2)
    assert [one.change for one in stream.records] == ["idle"]


@pytest.mark.parametrize("restarts", range(1, 95, 7))
def test_a_restart_at_any_minute_neither_repeats_nor_loses_a_message(restarts: int) -> None:
    """Each start reads the samples of the last 32 minutes again."""
    trace = busy_trace(3) + idle_trace(45, since_s=240, device_s=10.0)
    trace += busy_trace(3, since_s=3000) + idle_trace(40, since_s=3240, device_s=10.0)
    whole, stream = Stream(), Stream()
    run(whole, whole.start(), trace)
    book = stream.start()
    for number, one in enumerate(trace):
        if number and number % restarts == 0:
            book = stream.start()
            for other in trace[:number]:
                if other.time_s >= one.time_s - HALF_HOUR_S - 120:
                    fold(book, other)
        fold(book, one)
        stream.look(book, one.time_s + 1)
    assert [structs.replace(one, is_since_known=True) for one in stream.records] == [
        structs.replace(one, is_since_known=True) for one in whole.records
    ]
    assert [one.change for one in stream.records] == ["idle", "active", "idle"]


def test_of_two_replicas_one_publishes() -> None:
    stream = Stream()
    first, second = stream.start("r-0"), stream.start("r-1")
    for one in idle_trace(40) + busy_trace(40, since_s=2460):
        for book in (first, second):
            fold(book, one)
        both = first.due(now_s=one.time_s), second.due(now_s=one.time_s)
        assert [event_id(due.record) for due in both[0]] == [event_id(d.record) for d in both[1]]
        stream.look(second, one.time_s)
        stream.look(first, one.time_s)
    assert [(one.change, one.writer) for one in stream.records] == [
        ("idle", "r-1"),
        ("active", "r-1"),
    ]


def test_a_stream_that_lost_the_message_gets_the_end_all_the_same() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, idle_trace(40))
    stream.stored.clear()
    fold(book, *busy_trace(1, since_s=2460))
    (due,) = book.due(now_s=2521)
    assert due.sequence
    book.unpublished("n", "u")
    (due,) = book.due(now_s=2521)
    assert (due.record.change, due.sequence) == ("active", 0)


def test_silence_of_the_agent_is_not_idle_time_but_does_not_end_a_published_period() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, idle_trace(20))
    run(stream, book, idle_trace(19, since_s=1200 + 1200))
    assert stream.records == []
    run(stream, book, idle_trace(10, since_s=3600))
    (record,) = stream.records
    assert (record.since_s, record.is_since_known) == (1800, False)
    run(stream, book, idle_trace(60, since_s=10_000))
    assert len(stream.records) == 1
    assert list(book.idle(now_s=13_601))
    assert not list(book.idle(now_s=20_000))


def test_every_device_has_to_be_idle_and_measured() -> None:
    both = allocation(uuids=("a", "b"), time_s=0.0)
    stream = Stream()
    book = stream.start()
    for i in range(60):
        fold(book, sample(MINUTE_S * i, 7.0, uuids=("a",)), live=both)
        stream.look(book, MINUTE_S * i + 1)
    assert stream.records == []
    for i in range(60, 120):
        fold(book, sample(MINUTE_S * i, 7.0, uuids=("a", "b")), live=both)
        stream.look(book, MINUTE_S * i + 1)
    (record,) = stream.records
    assert record.lost_s == 2 * 0.5 * (record.time_s - record.since_s)
    assert [one.uuid for one in record.devices] == ["a", "b"]


def test_where_no_limiter_counts_the_drivers_utilization_decides() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, [sample(MINUTE_S * i, 0.0, launches=0, core_pct=9) for i in range(50)])
    assert stream.records == []
    run(stream, book, [sample(3000 + MINUTE_S * i, 0.0, launches=0) for i in range(50)])
    (record,) = stream.records
    assert (record.measured_by, record.since_s) == ("driver", 2940)


def test_a_resize_changes_the_rate_of_the_loss() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, idle_trace(30))
    smaller = allocation(1800.0, op="resize", mib=250)
    run(stream, book, idle_trace(9, since_s=1860), live=smaller)
    run(stream, book, busy_trace(1, since_s=2460), live=smaller)
    assert [one.lost_s for one in stream.records] == [900, 900 + 0.25 * 660]


def test_a_release_ends_a_period_without_a_message_and_another_allocation_begins_another() -> None:
    stream = Stream()
    book = stream.start()
    run(stream, book, idle_trace(31))
    book.fold(sample(1920, 7.0), [], [DEVICES])
    assert book.due(now_s=1921) == []
    other = allocation(2000.0, allocation_id="y")
    samples = [
        structs.replace(
            one, shares=tuple(structs.replace(s, allocation_id="y") for s in one.shares)
        )
        for one in idle_trace(40, since_s=1980)
    ]
    run(stream, book, samples, live=other)
    assert [(one.allocation_id, one.since_s) for one in stream.records] == [("x", 0), ("y", 2000)]
