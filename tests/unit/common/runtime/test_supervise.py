# SPDX-License-Identifier: Apache-2.0
import logging
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import Unavailable
from hami_common.runtime.supervise import Supervisor
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio


class Desk:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.supervisor = Supervisor(clock=self.clock, registry=self.registry, most_s=4.0)
        self.runs = 0

    async def until(self, runs: int) -> None:
        while self.runs < runs:
            await anyio.lowlevel.checkpoint()
            if self.clock.sleeper_count:
                await self.clock.advance(0.5)

    def restarts(self) -> float | None:
        return self.registry.get_sample_value("hami_loop_restarts_total", {"loop": "feed"})


async def test_a_loop_that_raises_is_restarted_with_growing_delays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    begun_s: list[float] = []

    async def loop() -> None:
        desk.runs += 1
        begun_s.append(desk.clock.monotonic_s())
        raise RuntimeError("defect")

    async with anyio.create_task_group() as group:
        group.start_soon(desk.supervisor.keep, "feed", loop)
        await desk.until(5)
        group.cancel_scope.cancel()
    delays = [later - earlier for earlier, later in pairwise(begun_s)]
    assert delays[0] <= 1.5
    assert delays[3] >= 2.0
    assert desk.restarts() in {4, 5}
    assert {record.levelno for record in caplog.records} == {logging.CRITICAL}
    assert "defect" in caplog.text


async def test_a_loop_that_is_done_is_not_restarted() -> None:
    desk = Desk()

    async def loop() -> None:
        desk.runs += 1

    await desk.supervisor.keep("feed", loop)
    assert desk.runs == 1
    assert desk.restarts() == 0


async def test_an_endless_loop_is_restarted_when_it_returns() -> None:
    desk = Desk()

    async def loop() -> None:
        desk.runs += 1
        await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: desk.supervisor.keep("feed", loop, is_endless=True))
        await desk.until(3)
        group.cancel_scope.cancel()


async def test_unavailable_peer_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()

    async def loop() -> None:
        desk.runs += 1
        raise Unavailable(peer="NATS", detail="away")

    async with anyio.create_task_group() as group:
        group.start_soon(
            lambda: desk.supervisor.keep("feed", loop, expected=(Unavailable,), is_endless=True)
        )
        await desk.until(2)
        group.cancel_scope.cancel()
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
