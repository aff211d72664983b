# SPDX-License-Identifier: Apache-2.0
"""Pods by claim that kube-scheduler finds no node for get preemption, gangs and explanations."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hami_scheduler.settings import DraSettings
from tests.support import claims
from tests.support.claims import by_claim, result
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.fakekube import Obj
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

DRA = DraSettings(enabled=True)
NODES = ("n1", "n2")


@asynccontextmanager
async def running_world(
    dra: DraSettings = DRA, **taints: Any
) -> AsyncIterator[tuple[World, Running]]:
    """A scheduler and two nodes with one device of 10,000 MiB each; ``taints`` by node."""
    world = World()
    for node in NODES:
        await world.add_devices(builders.devices(node, memory_mib=10_000))
        spec = {"taints": taints[node]} if node in taints else {}
        world.kube.put(f"/api/v1/nodes/{node}", {"metadata": {"name": node}, "spec": spec})
    async with world.scheduler(dra=dra, gang_wait_s=0.1) as running:
        yield world, running


async def add(world: World, name: str, *, priority: int = 0, **more: Any) -> Obj:
    """A pod in allocation mode ``dra`` that wants most of a device."""
    pod = by_claim(builders.pod(name, mem_mib=9000, **more))
    pod["spec"]["priority"] = priority
    world.add_pod(pod)
    await quiet()
    return pod


async def fill(world: World, running: Running) -> None:
    """Fill both nodes with pods of device-plugin mode."""
    for node in NODES:
        low = builders.pod(f"low-{node}", mem_mib=9000)
        low["spec"]["priority"] = 1
        world.add_pod(low)
        await quiet()
        assert await running.bind(low, node) == ""
        path = f"/api/v1/namespaces/default/pods/low-{node}"
        status = {"phase": "Running", "startTime": "1970-01-01T00:00:10Z"}
        world.kube.change(path, status=status)
    await quiet()


def filters(world: World, name: str) -> int:
    return len([one for one in world.decisions("filter") if one.pod == name])


async def test_pod_that_no_node_has_room_for_displaces_another() -> None:
    async with running_world() as (world, running):
        await fill(world, running)
        pod = await add(world, "urgent", priority=10)
        await world.advance(3, *NODES)
        await world.advance(14, *NODES)
        assert world.kube.evictions == ["low-n1"]
        (held,) = [record for record in world.live() if record.held_for]
        assert (held.pod, held.claim, held.node) == ("urgent", "hami-urgent", "n1")
        world.kube.remove("/api/v1/namespaces/default/pods/low-n1")
        await quiet()
        # Now kube-scheduler finds room, and asks.
        assert (await running.filter(pod, list(NODES)))["NodeNames"] == ["n1"]
        assert await running.bind(pod, "n1") == ""
        world.check_settled(*(builders.devices(node, memory_mib=10_000) for node in NODES))


async def test_reasons_are_recorded_and_repeated_ever_less_often() -> None:
    async with running_world() as (world, running):
        await fill(world, running)
        await add(world, "late")
        await world.advance(21, *NODES)
        found = [one for one in world.decisions("filter") if one.pod == "late"]
        assert found
        assert found[0].verdict == "refused"
        assert {one.code for one in found[0].refusals} == {"CardInsufficientMemory"}
        assert found[0].nodes_considered == 2
        await world.advance(280, *NODES)
        assert 5 <= filters(world, "late") <= 9


async def test_nodes_that_the_pod_does_not_tolerate_are_left_out() -> None:
    taint = {"key": "reserved", "value": "x", "effect": "NoSchedule"}
    async with running_world(n1=[taint]) as (world, running):
        await fill(world, running)
        await add(world, "urgent", priority=10)
        await world.advance(21, *NODES)
        assert world.kube.evictions == ["low-n2"]


async def test_gang_whose_members_are_never_asked_about_is_placed() -> None:
    async with running_world() as (world, _):
        marks = {"hami.io/gang": "g", "hami.io/gang-size": "2"}
        for number in range(2):
            await add(world, f"g-{number}", annotated=marks)
        await world.advance(21, *NODES)
        held = {record.pod: record.node for record in world.live() if record.held_for}
        assert held.keys() == {"g-0", "g-1"}
        assert set(held.values()) == set(NODES)


async def test_pod_that_kube_scheduler_works_on_is_left_to_it() -> None:
    async with running_world(DraSettings(enabled=True, unasked_s=10.0)) as (world, running):
        pod = await add(world, "asked")
        await add(world, "allocated")
        world.kube.change(
            claims.path("hami-allocated"),
            status={
                "allocation": claims.allocation(result("GPU-n1-0", request="main-nvidia")),
                "reservedFor": [claims.consumer("allocated")],
            },
        )
        for _ in range(4):
            await running.filter(pod, ["n2"])
            await world.advance(3, *NODES)
        assert filters(world, "asked") == 4
        assert filters(world, "allocated") == 0


async def test_pod_whose_claim_is_created_at_the_bind_is_left_to_kube_scheduler() -> None:
    """Its claim keeps no node from the extender, so kube-scheduler asks about it."""
    async with running_world() as (world, running):
        await fill(world, running)
        world.add_pod(by_claim(builders.pod("late", mem_mib=9000), at_bind=True))
        await world.advance(60, *NODES)
        assert filters(world, "late") == 0
