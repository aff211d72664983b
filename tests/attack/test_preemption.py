# SPDX-License-Identifier: Apache-2.0
"""Tenants choose gangs, priorities and finalizers of their pods: none of that ends preemption."""

from typing import Any

import pytest

from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = [builders.devices(node, memory_mib=10_000) for node in NODES]
GANG = {"hami.io/gang": "g", "hami.io/gang-size": "1"}


def pod(name: str, priority: int, **more: Any) -> builders.Obj:
    made = builders.pod(name, mem_mib=6000, **more)
    made["spec"]["priority"] = priority
    return made


async def test_gang_that_is_being_deleted_does_not_end_the_search_for_victims() -> None:
    """A finalizer keeps the members there for as long as their tenant likes."""
    world = World()
    for devices in DEVICES:
        await world.add_devices(devices)
    leaving, low = pod("leaving", 9, annotated=GANG), pod("low", 1)
    async with world.scheduler() as s:
        for obj, node in ((leaving, "n1"), (low, "n2")):
            world.add_pod(obj)
            await quiet()
            assert await s.bind(obj, node) == ""
        world.kube.change(
            "/api/v1/namespaces/default/pods/leaving",
            metadata={"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["team/x"]},
        )
        await quiet()
        urgent = pod("urgent", 5)
        world.add_pod(urgent)
        await quiet()
        await s.filter(urgent, NODES)
        await quiet()
        assert world.kube.evictions == ["low"]
