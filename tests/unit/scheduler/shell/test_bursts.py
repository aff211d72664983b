# SPDX-License-Identifier: Apache-2.0
"""Pods that use more memory than they request, on a device that lacks memory."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_preemption import (
    bursting,
    pod,
    world_with,
)
from tests.unit.scheduler.shell.world import World, quiet

pytestmark = pytest.mark.anyio

FAST: dict[str, Any] = {"tick_s": 1.0}


async def short_world() -> World:
    """A device of 10,000 MiB with 12,000 in use, 5,000 of it beyond requests."""
    world = await world_with(
        (pod("low", 1, mem_mib=3000), "n1"),
        (pod("high", 5, mem_mib=3000), "n1"),
        (pod("calm", 0, mem_mib=1000), "n1"),
    )
    await bursting(world, "n1", high=3000, low=2000)
    return world


async def test_least_important_burst_ends_when_the_device_lacks_memory() -> None:
    world = await short_world()
    async with world.scheduler(**FAST) as s:
        await world.clock.advance(4)
        assert world.kube.evictions == []
        await world.clock.advance(3)
        assert world.kube.evictions == ["low"]
        await world.clock.advance(20)
        assert world.kube.evictions == ["low"], "it is leaving"
        assert s.value("hami_scheduler_bursts_evicted_total") == 1
    (event,) = [e for e in world.kube.events if e["reason"] == "BurstEvicted"]
    assert event["involvedObject"]["name"] == "low"
    assert event["message"] == (
        "Evicted because device GPU-n1-0 of node n1 lacks 2000 MiB for the requests of its pods;"
        " this pod uses 2000 MiB beyond its request"
    )


async def test_use_that_falls_in_time_ends_no_pod() -> None:
    world = await short_world()
    async with world.scheduler(**FAST):
        await world.clock.advance(3)
        await bursting(world, "n1", high=2000, low=1000)  # exactly what the device has
        await world.clock.advance(10)
        await bursting(world, "n1", high=2000, low=1001)
        await world.clock.advance(3)
    assert world.kube.evictions == []


async def test_next_burst_ends_when_a_budget_protects_the_first() -> None:
    world = await short_world()
    world.kube.kept.add("low")
    async with world.scheduler(**FAST):
        await world.clock.advance(10)
    assert world.kube.evictions == ["high"]


async def test_pod_that_budgets_keep_is_deleted_when_the_device_stays_short() -> None:
    world = await short_world()
    world.kube.kept |= {"low", "high"}
    async with world.scheduler(**FAST, burst_delete_s=20.0) as s:
        await world.clock.advance(24)
        assert (world.kube.evictions, world.kube.deletions) == ([], [])
        assert s.value("hami_scheduler_short_devices") == 1
        await world.clock.advance(6)
        assert world.kube.deletions == ["low"]
        await world.clock.advance(60)
        assert s.value("hami_scheduler_short_devices") == 0
    assert world.kube.deletions == ["low"], "the device is not short any more"
    assert [e["reason"] for e in world.kube.events] == ["BurstEvicted"]


async def test_budgets_always_protect_when_nothing_is_deleted() -> None:
    world = await short_world()
    world.kube.kept |= {"low", "high"}
    async with world.scheduler(**FAST):
        await world.clock.advance(200)
    assert world.kube.deletions == []


async def test_eviction_of_bursts_can_be_disabled() -> None:
    world = await short_world()
    async with world.scheduler(**FAST, burst_evict=False):
        await world.clock.advance(20)
    assert world.kube.evictions == []


async def test_all_replicas_choose_the_same_pod() -> None:
    world = await short_world()
    async with AsyncExitStack() as replicas:
        for number in range(3):
            await replicas.enter_async_context(world.scheduler(f"s{number}", **FAST))
        await world.clock.advance(20)
    assert set(world.kube.evictions) == {"low"}


async def test_reservation_of_a_preemption_makes_no_device_short() -> None:
    world = await world_with(
        (pod("low", 1, mem_mib=6000), "n1"), (pod("eager", 5, mem_mib=1000), "n1")
    )
    await world.add_devices(builders.devices("n1", memory_mib=10_000, bursts={"eager": 1000}))
    urgent = pod("urgent", 3, mem_mib=5000)
    async with world.scheduler(**FAST) as s:
        world.add_pod(urgent)
        await quiet()
        await s.filter(urgent, ["n1"])
        await world.clock.advance(20)
        assert [record.pod for record in world.live() if record.held_for] == ["urgent"]
    assert world.kube.evictions == ["low"]
