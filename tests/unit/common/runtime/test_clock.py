# SPDX-License-Identifier: Apache-2.0
"""Clocks: the manual one stands still, wakes sleepers in order, and drops canceled ones."""

import anyio
import pytest

from hami_common.runtime.clock import SystemClock
from tests.support.manualclock import ManualClock

pytestmark = pytest.mark.anyio


async def test_the_system_clock_moves_forward() -> None:
    clock = SystemClock()
    before = clock.monotonic_s(), clock.now_s()
    await clock.sleep(0.001)
    assert clock.monotonic_s() > before[0]
    assert clock.now_s() >= before[1] > 1_600_000_000


async def test_the_manual_clock_stands_still_until_advanced() -> None:
    clock = ManualClock(now_s=1000.0)
    assert (clock.now_s(), clock.monotonic_s()) == (1000.0, 0.0)
    await clock.advance(2.5)
    assert (clock.now_s(), clock.monotonic_s()) == (1002.5, 2.5)


async def test_sleepers_wake_in_order_at_their_own_time_and_may_sleep_again() -> None:
    clock = ManualClock(now_s=0.0)
    woken: list[tuple[str, float]] = []

    async def tick(name: str, period_s: float) -> None:
        while True:
            await clock.sleep(period_s)
            woken.append((name, clock.now_s()))

    async with anyio.create_task_group() as group:
        group.start_soon(tick, "two", 2.0)
        group.start_soon(tick, "three", 3.0)
        await clock.advance(6.0)
        assert woken == [("two", 2.0), ("three", 3.0), ("two", 4.0), ("three", 6.0), ("two", 6.0)]
        assert clock.sleeper_count == 2
        group.cancel_scope.cancel()
    assert clock.sleeper_count == 0


async def test_a_sleep_of_nothing_returns_at_once() -> None:
    clock = ManualClock()
    with anyio.fail_after(1):
        await clock.sleep(0)
        await clock.sleep(-1)
