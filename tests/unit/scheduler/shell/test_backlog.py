# SPDX-License-Identifier: Apache-2.0
"""A bounded queue: a full queue drops, failures are counted, and work continues."""

from collections.abc import Sequence

import anyio
import pytest
from prometheus_client import CollectorRegistry, Counter

from hami_common.errors import HamiError, Unavailable
from hami_common.runtime.quarantine import Quarantine
from hami_scheduler.shell.backlog import Backlog, Isolation
from tests.support.manualclock import ManualClock
from tests.unit.scheduler.shell.world import quiet

pytestmark = pytest.mark.anyio


class Rig:
    def __init__(self, *, capacity: int) -> None:
        self._registry = CollectorRegistry()
        self.backlog: Backlog[int] = Backlog(
            "q",
            capacity=capacity,
            dropped=Counter("dropped", "", ["queue"], registry=self._registry),
            failed=Counter("failed", "", ["queue"], registry=self._registry),
            isolation=Isolation(
                quarantine=Quarantine(
                    kinds=("chore",), clock=ManualClock(), registry=self._registry
                ),
                kind="chore",
                key=str,
                name=lambda _: ("", ""),
            ),
        )

    def value(self, name: str) -> float | None:
        return self._registry.get_sample_value(f"{name}_total", {"queue": "q"})


async def test_items_are_handled_in_order_and_drain_waits_for_the_last() -> None:
    rig = Rig(capacity=10)
    done: list[int] = []

    async def handle(item: int) -> None:
        await anyio.lowlevel.checkpoint()
        done.append(item)

    async with anyio.create_task_group() as group:
        group.start_soon(rig.backlog.work, handle)
        for item in range(3):
            assert rig.backlog.add(item)
        assert await rig.backlog.drain(limit_s=1)
        assert done == [0, 1, 2]
        assert rig.backlog.add(3)
        assert await rig.backlog.drain(limit_s=1)
        assert done == [0, 1, 2, 3]
        group.cancel_scope.cancel()


async def test_full_queue_drops_and_counts() -> None:
    rig = Rig(capacity=2)
    assert [rig.backlog.add(item) for item in range(3)] == [True, True, False]
    assert len(rig.backlog) == 2
    assert rig.value("dropped") == 1


async def test_failures_are_counted_and_the_worker_continues() -> None:
    rig = Rig(capacity=10)
    done: list[int] = []

    async def handle(item: int) -> None:
        await anyio.lowlevel.checkpoint()
        if item == 0:
            raise Unavailable(peer="x", detail="y")
        if item == 1:
            raise ValueError(item)
        done.append(item)

    async with anyio.create_task_group() as group:
        group.start_soon(rig.backlog.work, handle)
        for item in range(3):
            rig.backlog.add(item)
        assert await rig.backlog.drain(limit_s=1)
        group.cancel_scope.cancel()
    assert done == [2]
    assert rig.value("failed") == 2


async def test_drain_gives_up_after_its_limit() -> None:
    rig = Rig(capacity=10)

    async def handle(item: int) -> None:
        del item
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(rig.backlog.work, handle)
        rig.backlog.add(1)
        await quiet()
        assert not await rig.backlog.drain(limit_s=0.01)
        group.cancel_scope.cancel()


async def test_several_workers_share_the_queue() -> None:
    rig = Rig(capacity=10)
    running = 0
    most = 0

    async def handle(item: int) -> None:
        nonlocal running, most
        del item
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001)
        running -= 1

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(rig.backlog.work, handle)
        for item in range(9):
            rig.backlog.add(item)
        assert await rig.backlog.drain(limit_s=2)
        group.cancel_scope.cancel()
    assert most == 3


async def test_one_item_wakes_one_worker() -> None:
    rig = Rig(capacity=10)
    begun: list[str] = []

    async def work(name: str) -> None:
        async def handle(item: int) -> None:
            begun.append(f"{name}{item}")
            await anyio.sleep(0.01)

        await rig.backlog.work(handle)

    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(work, name)
            await quiet()
        rig.backlog.add(1)
        rig.backlog.add(2)
        assert await rig.backlog.drain(limit_s=2)
        rig.backlog.add(3)
        assert await rig.backlog.drain(limit_s=2)
        group.cancel_scope.cancel()
    assert begun == ["a1", "b2", "c3"]  # who has waited longest


async def test_items_within_a_delay_are_batched() -> None:
    rig = Rig(capacity=10)
    batches: list[list[int]] = []

    async def handle(items: Sequence[int]) -> list[HamiError]:
        await anyio.lowlevel.checkpoint()
        batches.append(list(items))
        if items[0] == 7:
            raise ValueError(items)
        return [Unavailable(peer="x", detail=f"{item}") for item in items if item % 2]

    async with anyio.create_task_group() as group:
        group.start_soon(rig.backlog.work_together, handle, 0.02, 3)
        for item in range(5):
            rig.backlog.add(item)
        assert await rig.backlog.drain(limit_s=2)
        rig.backlog.add(7)
        assert await rig.backlog.drain(limit_s=2)
        rig.backlog.add(8)
        assert await rig.backlog.drain(limit_s=2)
        group.cancel_scope.cancel()
    assert batches == [[0, 1, 2], [3, 4], [7], [8]]
    assert rig.value("failed") == 3  # 1, 3 and the whole of [7]
