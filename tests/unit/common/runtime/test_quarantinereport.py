# SPDX-License-Identifier: Apache-2.0
from itertools import count

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.events import codec
from hami_common.events.quarantine import REPEAT_LEAST_S, REPEAT_MOST_S, QuarantineRecord
from hami_common.runtime.kubeio.recorder import EventRecorder
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.quarantinereport import AT_ONCE, QuarantineReporter
from tests.support.manualclock import ManualClock
from tests.support.memorybus import MemoryBus, MemoryPublisher
from tests.unit.scheduler.shell.fakekube import FakeKube

pytestmark = pytest.mark.anyio

BROKEN = "int too large"


class Desk:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bus = MemoryBus(clock=self.clock)
        self.kube = FakeKube()
        self.publisher = MemoryPublisher(self.bus)
        self.quarantine = Quarantine(
            kinds=("pod",), clock=self.clock, registry=CollectorRegistry(), most_s=10_000.0
        )
        numbers = count(1)
        self.reporter = QuarantineReporter(
            self.quarantine,
            publisher=self.publisher,
            clock=self.clock,
            service="scheduler",
            replica="s1",
            ids=lambda: str(next(numbers)),
            events=EventRecorder(self.kube, component="hami-scheduler", clock=self.clock),
        )

    def fail(self, uid: str) -> None:
        def broken() -> None:
            raise OverflowError(BROKEN)

        self.quarantine.call("pod", uid, broken, name=("team", f"p-{uid}"))

    def sent(self) -> list[QuarantineRecord]:
        return [
            codec.decode(message.data, QuarantineRecord, what="message")
            for message in self.bus.published
            if message.subject == subjects.quarantine_event("scheduler", "s1")
        ]


async def test_first_failure_is_published_and_becomes_an_event_of_the_pod() -> None:
    desk = Desk()
    desk.fail("u1")
    await desk.reporter.send_due()
    (record,) = desk.sent()
    assert (record.kind, record.key, record.namespace, record.name) == (
        "pod",
        "u1",
        "team",
        "p-u1",
    )
    assert record.problem == "OverflowError: int too large"
    assert not record.is_over
    (event,) = desk.kube.events
    assert event["type"] == "Warning"
    assert event["reason"] == "ObjectQuarantined"
    assert event["involvedObject"]["uid"] == "u1"
    assert "int too large" in event["message"]


async def test_failures_in_a_row_are_coalesced_and_a_lasting_one_is_repeated() -> None:
    desk = Desk()
    for _ in range(100):
        desk.fail("u1")
        await desk.reporter.send_due()
    assert len(desk.sent()) == 1
    assert len(desk.kube.events) == 1
    await desk.clock.advance(REPEAT_LEAST_S)
    await desk.reporter.send_due()
    assert [record.failures for record in desk.sent()] == [1, 100]
    await desk.clock.advance(REPEAT_LEAST_S)
    await desk.reporter.send_due()
    assert len(desk.sent()) == 2, "nothing changed"
    await desk.clock.advance(REPEAT_MOST_S)
    await desk.reporter.send_due()
    assert len(desk.sent()) == 3


async def test_the_end_is_published_once_and_only_of_what_was_published() -> None:
    desk = Desk()
    desk.fail("u1")
    await desk.reporter.send_due()
    desk.fail("u2")
    desk.quarantine.forget("pod", "u1")
    desk.quarantine.forget("pod", "u2")
    await desk.clock.advance(REPEAT_LEAST_S)
    await desk.reporter.send_due()
    await desk.reporter.send_due()
    assert [(record.key, record.is_over) for record in desk.sent()] == [("u1", False), ("u1", True)]


async def test_object_that_is_released_while_others_are_sent_is_left_out() -> None:
    desk = Desk()
    for uid in ("u1", "u2", "u3"):
        desk.fail(uid)
    desk.bus.on_publish(lambda _: desk.quarantine.forget("pod", "u2"))
    await desk.reporter.send_due()
    assert [record.key for record in desk.sent()] == ["u1", "u3"]


async def test_a_flood_is_sent_at_a_bounded_rate() -> None:
    desk = Desk()
    for number in range(3 * AT_ONCE):
        desk.fail(f"u{number}")
    await desk.reporter.send_due()
    assert len(desk.sent()) == AT_ONCE
    assert len(desk.kube.events) == AT_ONCE


async def test_unavailable_peers_do_not_end_the_reporter() -> None:
    desk = Desk()
    calls: list[str] = []

    async def away(path: str, body: bytes) -> bytes:
        del body
        calls.append(path)
        raise ValueError(path)

    async def gone(*args: object, **kwargs: object) -> int:
        calls.append("bus")
        raise Unavailable(peer="NATS", detail="away")

    desk.kube.create = away  # type: ignore[method-assign]
    desk.publisher.publish_stored = gone  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(desk.reporter.work)
        desk.fail("u1")
        while len(calls) < 2:
            await anyio.lowlevel.checkpoint()
        desk.fail("u2")
        while len(calls) < 4:
            await anyio.lowlevel.checkpoint()
            if desk.clock.sleeper_count:
                await desk.clock.advance(1.0)
        group.cancel_scope.cancel()
