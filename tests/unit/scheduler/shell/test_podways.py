# SPDX-License-Identifier: Apache-2.0
"""``/v1/whatif/pods``: why a pod waits and which ways start it, for operators and for tenants."""

import json
from typing import Any

import pytest

from hami_common.errors import NotFound
from hami_common.runtime.httpd import Request
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_whatif import node
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio
PATH = "/v1/whatif/pods/{namespace}/{pod}"


def pod(name: str, mem_mib: int, *, namespace: str = "team-a") -> builders.Obj:
    made = builders.pod(name, mem_mib=mem_mib, namespace=namespace)
    made["spec"]["tolerations"] = [{"operator": "Exists"}]
    return made


async def ask(s: Running, name: str, *, operator: bool = True) -> Any:
    async def sees_everything() -> bool:
        return operator

    params = {"namespace": "team-a", "pod": name}
    request = Request(method="GET", path=PATH, query={}, headers={}, body=b"", params=params)
    request.sees_everything = sees_everything
    response = await s.scheduler.pod_ways.routes()["GET", PATH](request)
    return json.loads(response.body)  # type: ignore[union-attr]  # not streamed


async def world_of_two_cards() -> World:
    world = World()
    await world.add_devices(builders.devices("n1", count=2))  # 16,000 MiB each
    world.kube.put("/api/v1/nodes/n1", node("n1"))
    return world


@pytest.mark.timeout(20)
async def test_ways_of_a_waiting_pod_are_listed_the_cheapest_first() -> None:
    world = await world_of_two_cards()
    async with world.scheduler() as s:
        assert await s.bind(world.add_pod(pod("a", 10_000, namespace="team-b")), "n1") == ""
        assert await s.bind(world.add_pod(pod("b", 9_000)), "n1") == ""
        world.add_pod(pod("waits", 12_000))
        await quiet()
        answer = await ask(s, "waits")
        hidden = await ask(s, "waits", operator=False)
    now = answer["now"]
    assert (now["nodes"], now["feasible"]) == (1, 0)
    ways = {way["kind"]: way for way in now["closest"]}
    assert set(ways) == {"less", "wait", "node"}
    costs = [way["cost"] for way in now["closest"]]
    assert costs == sorted(costs)
    assert ways["less"]["change"]["fits"] == "7000"
    assert len(ways["wait"]["ends"]) == 1
    assert ways["node"]["like"] == "n1"
    assert [way["kind"] for way in hidden["now"]["closest"]] == [w["kind"] for w in now["closest"]]


async def test_names_of_other_namespaces_are_hidden_from_tenants() -> None:
    world = await world_of_two_cards()
    async with world.scheduler() as s:
        for name in ("secret-0", "secret-1"):
            assert await s.bind(world.add_pod(pod(name, 9_000, namespace="team-b")), "n1") == ""
        world.add_pod(pod("waits", 12_000))
        await quiet()
        seen = json.dumps(await ask(s, "waits"))
        hidden = json.dumps(await ask(s, "waits", operator=False))
    assert "secret-" in seen
    assert "secret-" not in hidden
    assert "team-b" not in hidden
    assert '"memory_mib": 9000' in hidden


async def test_pod_that_does_not_wait_is_not_found() -> None:
    world = await world_of_two_cards()
    async with world.scheduler() as s:
        assert await s.bind(world.add_pod(pod("a", 1_000)), "n1") == ""
        await quiet()
        for name in ("a", "missing"):
            with pytest.raises(NotFound, match=f"team-a/{name}"):
                await ask(s, name)


async def test_running_pods_of_the_cluster_may_move_to_other_nodes() -> None:
    world = World()
    for name in ("n1", "n2"):
        await world.add_devices(builders.devices(name))  # 16,000 MiB
        world.kube.put(f"/api/v1/nodes/{name}", node(name))
    async with world.scheduler() as s:
        assert await s.bind(world.add_pod(pod("a", 6_000)), "n1") == ""
        assert await s.bind(world.add_pod(pod("b", 7_000)), "n2") == ""
        world.add_pod(pod("waits", 12_000))
        await quiet()
        ways = {way["kind"]: way for way in (await ask(s, "waits"))["now"]["closest"]}
    (move,) = ways["move"]["moves"]
    assert (move["pod"], move["source"], move["target"]) == ("a", "n1", "n2")
