# SPDX-License-Identifier: Apache-2.0
"""Lanes: one call at a time, a deadline for each, and no second thread behind a hung one."""

import threading
from collections.abc import Iterator

import anyio
import pytest

from hami_nodeagent.drivers.errors import DeviceHung
from hami_nodeagent.drivers.nvidia.lane import Lane

pytestmark = pytest.mark.anyio


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def begin_and_cancel(lane: Lane, release: threading.Event) -> None:
    """Cancel a call once its thread is inside."""
    entered = threading.Event()

    def hang() -> None:
        entered.set()
        release.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(lane.call, "read", hang)
        with anyio.fail_after(5):
            while not entered.is_set():
                await anyio.sleep(0.001)
        group.cancel_scope.cancel()


async def test_call_returns_the_functions_result() -> None:
    assert await Lane("card", 5.0).call("add", lambda: 1 + 1) == 2


async def test_call_raises_the_functions_exception() -> None:
    with pytest.raises(ZeroDivisionError):
        await Lane("card", 5.0).call("divide", lambda: 1 // 0)


async def test_hung_call_is_given_up_at_its_deadline(release: threading.Event) -> None:
    lane = Lane("card", 0.05)
    with anyio.fail_after(2), pytest.raises(DeviceHung, match=r"card: read: no answer within 0.05"):
        await lane.call("read", release.wait)
    assert lane.is_stuck


async def test_lane_refuses_at_once_while_a_call_hangs_and_serves_again_afterwards(
    release: threading.Event,
) -> None:
    lane = Lane("card", 0.05)
    with pytest.raises(DeviceHung):
        await lane.call("read", release.wait)
    started = anyio.current_time()
    with pytest.raises(DeviceHung, match="an earlier call has not returned yet"):
        await lane.call("read", lambda: 1, deadline_s=60)
    assert anyio.current_time() - started < 1
    with pytest.raises(DeviceHung):
        async with lane.hold("close"):
            pytest.fail("a stuck lane was given away")
    release.set()
    with anyio.fail_after(2):
        while lane.is_stuck:
            await anyio.sleep(0.001)
    assert await lane.call("read", lambda: 7) == 7


async def test_call_after_a_cancelled_one_waits_for_it(release: threading.Event) -> None:
    lane = Lane("card", 5.0)
    await begin_and_cancel(lane, release)
    assert not lane.is_stuck
    results: list[int] = []

    async def call() -> None:
        results.append(await lane.call("read", lambda: 1))

    async with anyio.create_task_group() as callers:
        callers.start_soon(call)
        await anyio.sleep(0.03)
        assert results == []
        release.set()
    assert results == [1]


async def test_cancelled_call_that_never_returns_counts_as_hung(release: threading.Event) -> None:
    lane = Lane("card", 0.05)
    await begin_and_cancel(lane, release)
    with pytest.raises(DeviceHung, match="an earlier call has not returned yet"):
        await lane.call("read", lambda: 1)
    assert lane.is_stuck


async def test_calls_of_one_lane_never_overlap() -> None:
    lane = Lane("card", 5.0)
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.002)
        inside -= 1

    async with anyio.create_task_group() as callers:
        for _ in range(20):
            callers.start_soon(lane.call, "work", work)
    assert most == 1


async def test_calls_wait_while_the_lane_is_busy() -> None:
    lane = Lane("card", 5.0)
    results: list[int] = []

    async def call() -> None:
        results.append(await lane.call("read", lambda: 1))

    async with anyio.create_task_group() as callers, lane.hold("close"):
        callers.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert results == []
    assert results == [1]
