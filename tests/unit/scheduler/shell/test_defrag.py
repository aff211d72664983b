# SPDX-License-Identifier: Apache-2.0
"""Moves of running pods for a waiting one: places, evictions, budgets, crashes and the loop."""

import json
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from hami_common.errors import NotFound
from hami_common.events.allocation import AllocationRecord
from hami_common.runtime.httpd import Request
from hami_common.vendors.catalog import VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_scheduler.settings import DefragSettings
from hami_scheduler.shell import defrag
from hami_scheduler.shell.defrag import PATH
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_whatif import node
from tests.unit.scheduler.shell.world import STEP_S, Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = [builders.devices(name, memory_mib=10_000) for name in NODES]
PODS = "/api/v1/namespaces/default/pods"
BUDGET_PATH = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/web"


def pod(name: str, mem_mib: int, *, owner: str = "web", number: int = 0, **more: Any) -> Any:
    made = builders.pod(
        name, mem_mib=mem_mib, uid=f"uid-{name}-{number}", annotated=more.pop("annotations", None)
    )
    made["metadata"]["creationTimestamp"] = "1970-01-01T00:00:00Z"
    made["metadata"]["labels"]["app"] = owner
    if owner:
        reference = {"kind": "ReplicaSet", "name": owner, "uid": f"rs-{owner}", "controller": True}
        made["metadata"]["ownerReferences"] = [reference]
    made["spec"] |= {"tolerations": [{"operator": "Exists"}], "priority": 0} | more
    return made


async def world_of(*bound: tuple[Any, str], nodes: list[str] | None = None) -> World:
    world = World()
    for name in nodes or NODES:
        await world.add_devices(builders.devices(name, memory_mib=10_000))
        world.kube.put(f"/api/v1/nodes/{name}", node(name))
    async with world.scheduler("before") as s:
        for obj, name in bound:
            world.add_pod(obj)
            await quiet()
            assert await s.bind(obj, name) == ""
            world.kube.change(
                f"{PODS}/{obj['metadata']['name']}",
                status={"phase": "Running", "startTime": "1970-01-01T00:00:10Z"},
            )
            await quiet()
    return world


async def fragmented(**more: Any) -> World:
    """Two cards with 4,000 MiB free each: 8,000 MiB in all, and no place for 7,000."""
    return await world_of((pod("a", 6000, **more), "n1"), (pod("b", 3000, owner="db"), "n2"))


async def step(s: Running, name: str = "big", **more: Any) -> Any:
    body = json.dumps({"namespace": "default", "pod": name, **more}).encode()
    request = Request(method="POST", path=PATH, query={}, headers={}, body=body, params={})
    response = await s.scheduler.defrag.routes()["POST", PATH](request)
    await quiet()
    return json.loads(response.body)  # type: ignore[union-attr]  # not streamed


async def once(s: Running, act: Callable[[], Awaitable[None]], done: list[str]) -> None:
    """Act before the first post of a Binding."""
    if s.seen.calls[-1] == "post binding" and not done:
        await act()


def held(world: World) -> list[AllocationRecord]:
    return [one for one in world.live() if one.held_for.startswith("defrag ")]


async def replaced(world: World, s: Running, name: str, new: Any) -> str:
    """The pod ends, its controller re-creates it, kube-scheduler places it; returns the node."""
    world.kube.remove(f"{PODS}/{name}")
    world.add_pod(new)
    await quiet()
    return await placed(s, new)


async def placed(s: Running, obj: Any, names: list[str] | None = None) -> str:
    found = (await s.filter(obj, names or NODES))["NodeNames"]
    if not found:
        return ""
    assert await s.bind(obj, found[0]) == ""
    await quiet()
    return str(found[0])


async def test_pod_is_moved_to_its_held_place_and_the_waiting_pod_gets_the_freed_one() -> None:
    world = await fragmented()
    big = pod("big", 8000, owner="")
    async with world.scheduler() as s:
        world.add_pod(big)
        await quiet()
        planned = await step(s)
        assert planned["outcome"] == "planned", planned
        assert (await step(s, moves=0))["outcome"] == "none"
        assert world.kube.evictions == []
        assert held(world) == []
        first = await step(s, execute=True)
        assert first["outcome"] == "held"
        moved = first["moves"][0]["pod"]
        assert [one.pod for one in held(world)] == [moved, "big"]
        # Neither the place nor what is about to become free goes to others.
        thief = pod("thief", 7500)
        world.add_pod(thief)
        await quiet()
        assert await placed(s, thief) == ""
        assert (await step(s, execute=True, evict=False))["outcome"] == "held"
        assert (await step(s, execute=True))["evicted"] == f"default/{moved}"
        assert world.kube.evictions == [moved]
        assert (await step(s, execute=True))["outcome"] == "waiting"
        assert await placed(s, big) == ""
        target = first["moves"][0]["target"]
        new = pod("new", first["moves"][0]["memory_mib"], owner={"a": "web", "b": "db"}[moved])
        assert await replaced(world, s, moved, new) == target
        assert await placed(s, thief) == ""
        during: list[str] = []
        calls = len(s.seen.calls)

        async def called() -> None:
            """The pod has its share, and its Binding is not posted yet."""
            during.append((await step(s, execute=True))["outcome"])

        assert (await s.filter(big, NODES))["NodeNames"] == [first["node"]]
        s.seen.before = {calls + n: partial(once, s, called, during) for n in range(8)}
        assert await placed(s, big) == first["node"]
        assert during == ["waiting"]
        assert (await step(s, execute=True))["outcome"] == "placed"
        assert held(world) == []
        world.check_settled(*DEVICES)
        assert s.value("hami_scheduler_defrag_evictions_total") == 1
    events = {event["reason"]: event for event in world.kube.events}
    assert "default/big" in events["DefragEvicted"]["message"]
    assert events["DefragPlanned"]["involvedObject"]["name"] == "big"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"owner": ""}, "no controller"),
        ({"priority": 5}, "priority"),
        ({"annotations": {"hami.io/no-move": "true"}}, "annotation"),
        ({"annotations": {"hami.io/min-runtime-s": "3600"}}, "minimum run time"),
    ],
)
async def test_protected_pods_are_never_moved(more: Any, why: str) -> None:
    del why
    world = await world_of(
        (pod("a", 6000, **more), "n1"), (pod("b", 3000, **{"owner": "db"} | more), "n2")
    )
    async with world.scheduler() as s:
        world.add_pod(pod("big", 8000, owner=""))
        await quiet()
        assert (await step(s, execute=True))["outcome"] == "none"
    assert world.kube.evictions == []
    assert held(world) == []


async def test_budget_without_disruptions_is_respected_before_and_by_the_eviction() -> None:
    world = await world_of((pod("a", 6000), "n1"), (pod("b", 3000), "n2"))
    budget: builders.Obj = {
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "web"}}},
        "status": {"disruptionsAllowed": 0},
    }
    world.kube.put(BUDGET_PATH, budget)
    async with world.scheduler() as s:
        world.add_pod(pod("big", 8000, owner=""))
        await quiet()
        assert (await step(s, execute=True))["outcome"] == "none"
        world.kube.put(BUDGET_PATH, {**budget, "status": {"disruptionsAllowed": 1}})
        assert (await step(s, execute=True))["outcome"] == "held"
        world.kube.put(BUDGET_PATH, budget)
        assert "allows no disruption" in (await step(s, execute=True))["text"]
        assert len(held(world)) == 2, "it may allow one later"
        world.kube.put(BUDGET_PATH, {**budget, "status": {"disruptionsAllowed": 1}})
        world.kube.kept |= {"a", "b"}  # the API server refuses with 429
        refused = await step(s, execute=True)
        assert refused["outcome"] == "refused"
        assert "429" in refused["text"]
        assert held(world) == []
        # The pod is spared for a while; the other one also makes it fit.
        world.kube.kept.clear()
        again = await step(s, execute=True)
        assert again["outcome"] in {"held", "none"}
        assert world.kube.evictions == []


async def test_stop_releases_what_is_not_begun_and_keeps_the_place_of_an_evicted_pod() -> None:
    names = ["n1", "n2", "n3"]
    world = await world_of(
        (pod("a", 2000), "n1"),
        (pod("b", 2000, owner="db"), "n1"),
        (pod("c", 7000, owner=""), "n2"),
        (pod("d", 7000, owner=""), "n3"),
        nodes=names,
    )
    big = pod("big", 9000, owner="")
    async with world.scheduler() as s:
        world.add_pod(big)
        await quiet()
        first = await step(s, execute=True)
        assert (first["outcome"], len(first["moves"])) == ("held", 2)
        evicted = (await step(s, execute=True))["evicted"].removeprefix("default/")
        assert (await step(s, stop=True))["outcome"] == "stopped"
        (kept,) = held(world)
        assert kept.pod == evicted
        new = pod("new", 2000, owner={"a": "web", "b": "db"}[evicted])
        world.kube.remove(f"{PODS}/{evicted}")
        world.add_pod(new)
        await quiet()
        assert await placed(s, new, names) == kept.node
        assert held(world) == []
        assert world.kube.evictions == [evicted]
        world.check_settled(*[builders.devices(name, memory_mib=10_000) for name in names])


@pytest.mark.parametrize("cut", ["held", "evicted", "moved"])
async def test_another_scheduler_continues_after_a_crash(cut: str) -> None:
    world = await fragmented()
    big = pod("big", 8000, owner="")
    async with world.scheduler("s1") as s:
        world.add_pod(big)
        await quiet()
        first = await step(s, execute=True)
        move = first["moves"][0]
        new = pod("new", move["memory_mib"], owner={"a": "web", "b": "db"}[move["pod"]])
        if cut != "held":
            assert (await step(s, execute=True))["outcome"] == "evicted"
        if cut == "moved":
            assert await replaced(world, s, move["pod"], new) == move["target"]
    async with world.scheduler("s2") as s:
        if cut == "held":
            assert (await step(s, execute=True))["outcome"] == "evicted"
        if cut != "moved":
            assert (await step(s, execute=True))["outcome"] == "waiting"
            assert await replaced(world, s, move["pod"], new) == move["target"]
        assert await placed(s, big) == first["node"]
        assert (await step(s, execute=True))["outcome"] == "placed"
        assert world.kube.evictions == [move["pod"]]
        world.check_settled(*DEVICES)


async def test_places_end_with_their_lease_when_the_calls_end() -> None:
    world = await fragmented()
    async with world.scheduler() as s:
        world.add_pod(pod("big", 8000, owner=""))
        await quiet()
        assert (await step(s, execute=True))["outcome"] == "held"
        for _ in range(20):
            await world.advance(STEP_S, *NODES)
            await step(s, execute=True, evict=False)
        assert len(held(world)) == 2, "calls renew the places"
        await world.advance(20 * STEP_S, *NODES)
        assert held(world) == []
    assert world.kube.evictions == []


async def test_dry_run_releases_nothing() -> None:
    world = await fragmented()
    big = pod("big", 8000, owner="")
    async with world.scheduler() as s:
        world.add_pod(big)
        await quiet()
        assert (await step(s, execute=True))["outcome"] == "held"
        assert (await step(s))["outcome"] == "held"
        world.kube.remove(f"{PODS}/big")
        await quiet()
        before = held(world)
        assert len(before) == 2
        with pytest.raises(NotFound):
            await step(s)
        assert held(world) == before
        with pytest.raises(NotFound):
            await step(s, stop=True)
        assert held(world) == []


async def test_unknown_pod_is_not_found() -> None:
    world = await fragmented()
    async with world.scheduler() as s:
        with pytest.raises(NotFound, match="default/big"):
            await step(s, execute=True)


async def test_loop_moves_pods_within_its_budget_of_evictions() -> None:
    names = ["n1", "n2", "n3"]
    world = await world_of(
        (pod("a", 2000), "n1"),
        (pod("b", 2000, owner="db"), "n1"),
        (pod("c", 7000, owner=""), "n2"),
        (pod("d", 7000, owner=""), "n3"),
        nodes=names,
    )
    big = pod("big", 9000, owner="")
    options = DefragSettings(
        enabled=True, wait_s=30.0, evictions=1, interval_s=400.0, lease_s=600.0, run_s=2000.0
    )
    async with world.scheduler(defrag=options) as s:
        world.add_pod(big)
        await quiet()
        evicted: list[str] = []
        begun_s = first_s = world.clock.monotonic_s()
        while "big" not in world.bound():
            await world.advance(STEP_S, *names)
            for name in world.kube.evictions[len(evicted) :]:
                evicted.append(name)
                new = pod(f"new-{name}", 2000, owner={"a": "web", "b": "db"}[name])
                world.kube.remove(f"{PODS}/{name}")
                world.add_pod(new)
                await quiet()
                assert await placed(s, new, names)
                if len(evicted) == 1:
                    first_s = world.clock.monotonic_s()
            await placed(s, big, names)
            assert world.clock.monotonic_s() - begun_s < 2000
        assert sorted(evicted) == ["a", "b"]
        assert world.clock.monotonic_s() - first_s >= 400 - 3 * STEP_S
        await world.advance(10 * STEP_S, *names)
        assert held(world) == []
        world.check_settled(*[builders.devices(name, memory_mib=10_000) for name in names])


async def two_moves() -> World:
    """Only ``big`` needs moves: two, of pods on n1."""
    return await world_of(
        (pod("a", 2000), "n1"),
        (pod("b", 2000, owner="db"), "n1"),
        (pod("c", 7000, owner=""), "n2"),
        (pod("d", 7000, owner=""), "n3"),
        nodes=["n1", "n2", "n3"],
    )


@pytest.mark.parametrize("stopper", ["s1", "s2"])
async def test_loop_leaves_a_stopped_pod_while_an_evicted_one_keeps_its_place(stopper: str) -> None:
    names = ["n1", "n2", "n3"]
    world = await two_moves()
    options = DefragSettings(enabled=True, wait_s=30.0, lease_s=600.0, run_s=2000.0)
    async with world.scheduler(defrag=options) as s, world.scheduler("s2") as other:
        world.add_pod(pod("big", 9000, owner=""))
        await quiet()
        while not world.kube.evictions:
            await world.advance(STEP_S, *names)
        assert len(held(world)) == 3
        assert (await step(other if stopper == "s2" else s, stop=True))["outcome"] == "stopped"
        (kept,) = held(world)
        assert kept.pod == world.kube.evictions[0]
        asked: list[str] = []
        advance = s.scheduler.defrag.advance

        async def seen(question: Any) -> Any:
            asked.append(question.pod)
            return await advance(question)

        s.scheduler.defrag.advance = seen  # type: ignore[method-assign]
        world.add_pod(pod("next", 9500, owner=""))
        await world.advance(60 * STEP_S, *names)
        assert set(asked) == {"next"}
        assert held(world) == [kept]
    assert world.kube.evictions == [kept.pod]


async def test_stop_ends_a_search_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    began, release = threading.Event(), threading.Event()

    def endless(*_: Any, **__: Any) -> None:
        began.set()
        release.wait(30)

    world = await fragmented()
    monkeypatch.setattr(defrag, "_planned", endless)
    async with world.scheduler() as s, anyio.create_task_group() as group:
        world.add_pod(pod("big", 8000, owner=""))
        await quiet()
        outcomes: list[str] = []

        async def execute() -> None:
            question = defrag.DefragQuestion(namespace="default", pod="big", execute=True)
            outcomes.append((await s.scheduler.defrag.advance(question)).outcome)

        group.start_soon(execute)
        try:
            with anyio.fail_after(20):
                await anyio.to_thread.run_sync(began.wait)
            with anyio.fail_after(1):
                assert (await step(s, stop=True))["outcome"] == "stopped"
        finally:
            release.set()
    assert outcomes == ["stopped"]
    assert held(world) == []


async def test_loop_forgets_a_pod_that_is_deleted_meanwhile() -> None:
    world = await fragmented()
    big = pod("big", 8000, owner="")
    async with world.scheduler(defrag=DefragSettings(enabled=True, wait_s=30.0)) as s:
        world.add_pod(big)
        await quiet()
        while not held(world):
            await world.advance(STEP_S, *NODES)
        world.kube.remove(f"{PODS}/big")
        await world.advance(10 * STEP_S, *NODES)
        assert s.scheduler.defrag._begun_s == {}  # noqa: SLF001 - a leak shows nowhere else


async def test_pods_that_ask_by_names_of_the_installation_are_moved() -> None:
    names = NvidiaSettings(
        resource_count_name="example.com/gpu",
        resource_memory_name="example.com/gpumem",
        resource_core_name="example.com/gpucores",
    )
    vendors = VendorSettings(nvidia=names)

    def renamed(made: Any) -> Any:
        resources = made["spec"]["containers"][0]["resources"]
        for group, some in resources.items():
            resources[group] = {
                key.replace("nvidia.com/", "example.com/"): value for key, value in some.items()
            }
        return made

    world = World()
    for name in NODES:
        await world.add_devices(builders.devices(name, memory_mib=10_000))
        world.kube.put(f"/api/v1/nodes/{name}", node(name))
    async with world.scheduler(vendors=vendors) as s:
        for name, mib, place in (("a", 6000, "n1"), ("b", 3000, "n2")):
            obj = renamed(pod(name, mib))
            world.add_pod(obj)
            await quiet()
            assert await s.bind(obj, place) == ""
            status = {"phase": "Running", "startTime": "1970-01-01T00:00:10Z"}
            world.kube.change(f"{PODS}/{name}", status=status)
            await quiet()
        world.add_pod(renamed(pod("big", 8000, owner="")))
        await quiet()
        assert (await step(s))["outcome"] == "planned"
