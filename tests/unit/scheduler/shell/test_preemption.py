# SPDX-License-Identifier: Apache-2.0
"""Preemption for pods with a high priority: victims, reservations, recovery after a crash."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common.events.allocation import AllocationRecord
from hami_common.pods import annotations
from hami_scheduler.shell.preemption import TRIES_MOST
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import STEP_S, Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = [builders.devices(node, memory_mib=10_000) for node in NODES]

BUDGET_PATH = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/db"
BUDGET: builders.Obj = {
    "metadata": {"name": "db", "namespace": "default"},
    "spec": {"selector": {"matchLabels": {"app": "db"}}},
    "status": {"disruptionsAllowed": 0},
}


def pod(name: str, priority: int, *, mem_mib: int = 6000, **metadata: Any) -> builders.Obj:
    made = builders.pod(name, mem_mib=mem_mib, annotated=metadata.pop("annotations", None))
    made["spec"]["priority"] = priority
    made["metadata"]["labels"] |= metadata.pop("labels", {})
    return made


async def world_with(*bound: tuple[builders.Obj, str]) -> World:
    """Two nodes with one device each, and pods that run there."""
    world = World()
    for devices in DEVICES:
        await world.add_devices(devices)
    async with world.scheduler("before") as s:
        for obj, node in bound:
            world.add_pod(obj)
            await quiet()
            assert await s.bind(obj, node) == ""
            path = f"/api/v1/namespaces/default/pods/{obj['metadata']['name']}"
            world.kube.change(
                path, status={"phase": "Running", "startTime": "1970-01-01T00:00:10Z"}
            )
    return world


async def ask(world: World, s: Running, obj: builders.Obj) -> builders.Obj:
    """filter's answer, after the work that it caused was done."""
    if obj["metadata"]["name"] not in {p["metadata"]["name"] for p in world.kube.pods()}:
        world.add_pod(obj)
        await quiet()
    answer: builders.Obj = await s.filter(obj, NODES)
    await quiet()
    return answer


def held(world: World) -> list[AllocationRecord]:
    return [record for record in world.live() if record.held_for]


async def gone(world: World, *names: str) -> None:
    for name in names:
        world.kube.remove(f"/api/v1/namespaces/default/pods/{name}")
    await quiet()


async def test_the_pod_with_the_lowest_priority_is_evicted_and_its_share_reserved() -> None:
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 5), "n2"))
    urgent = pod("urgent", 10)
    async with world.scheduler() as s:
        answer = await ask(world, s, urgent)
        assert answer["NodeNames"] == []
        assert world.kube.evictions == ["low"]
        (room,) = held(world)
        assert (room.pod, room.node, room.awaits) == ("urgent", "n1", ("uid-low",))
        assert world.kube.pod("urgent")["status"]["nominatedNodeName"] == "n1"
        # While the victim is there, no other pod gets in, and the reason names the victim.
        answer = await ask(world, s, urgent)
        assert "1 pods leave node n1" in answer["FailedNodes"]["n1"]
        assert "have not left" in await s.bind(urgent, "n1")
        await gone(world, "low")
        thief = pod("thief", 3)
        assert (await ask(world, s, thief))["NodeNames"] == []
        assert "no-fit" not in await s.bind(thief, "n1")
        assert (await ask(world, s, urgent))["NodeNames"] == ["n1"]
        assert await s.bind(urgent, "n1") == ""
        await quiet()
        assert world.bound() == {"mid": "n2", "urgent": "n1"}
        world.check_settled(*DEVICES)
        assert s.value("hami_scheduler_preemptions_total", outcome="placed") == 1
        assert s.value("hami_scheduler_preemption_victims_total") == 1
    (decision,) = world.decisions("preempt")
    assert [victim.pod for victim in decision.victims] == ["low"]
    events = {event["reason"]: event for event in world.kube.events}
    assert events["Preempted"]["involvedObject"]["name"] == "low"
    assert "default/urgent" in events["Preempted"]["message"]
    assert events["Preempting"]["involvedObject"]["name"] == "urgent"


async def test_pod_filtered_before_its_watch_event_gets_its_reservation() -> None:
    """The watch may deliver a pod after kube-scheduler asked, which then waits for minutes."""
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 5), "n2"))
    urgent = pod("urgent", 10)
    async with world.scheduler(preempt_retry_s=1.0) as s:
        for _ in range(3):
            assert (await s.filter(urgent, NODES))["NodeNames"] == []
            await quiet()
        assert world.kube.evictions == []
        world.add_pod(urgent)
        await quiet()
        await world.advance(STEP_S, *NODES)
        assert world.kube.evictions == ["low"]
        assert [room.pod for room in held(world)] == ["urgent"]
        assert s.value("hami_scheduler_preemptions_total", outcome="early") == 1


async def test_retries_for_a_pod_that_never_appears_are_bounded() -> None:
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 5), "n2"))
    async with world.scheduler(preempt_retry_s=1.0) as s:
        await s.filter(pod("ghost", 10), NODES)
        await world.advance(30 * STEP_S, *NODES)
        assert s.value("hami_scheduler_preemptions_total", outcome="early") == 1 + TRIES_MOST
    assert world.kube.evictions == []


async def test_early_call_is_retried_later() -> None:
    """Kube-scheduler asks at once when the pod changes, then not again."""
    low = pod("low", 1, labels={"app": "db"})
    world = await world_with((low, "n1"), (pod("mid", 20), "n2"))
    world.kube.put(BUDGET_PATH, BUDGET)
    urgent = pod("urgent", 10)
    async with world.scheduler(preempt_retry_s=5.0) as s:
        await ask(world, s, urgent)
        world.kube.put(BUDGET_PATH, {**BUDGET, "status": {"disruptionsAllowed": 1}})
        assert (await ask(world, s, urgent))["NodeNames"] == []
        assert world.kube.evictions == []
        await world.advance(STEP_S, *NODES)
        assert world.kube.evictions == ["low"]


@pytest.mark.parametrize("why", ["off", "never", "equal"])
async def test_no_pod_is_evicted_for_a_pod_that_may_not_preempt(why: str) -> None:
    world = await world_with((pod("a", 5), "n1"), (pod("b", 5), "n2"))
    waits = pod("waits", 5 if why == "equal" else 10)
    if why == "never":
        waits["spec"]["preemptionPolicy"] = "Never"
    async with world.scheduler(preemption=why != "off") as s:
        assert (await ask(world, s, waits))["NodeNames"] == []
    assert world.kube.evictions == []
    assert held(world) == []


async def test_minimum_runtime_protects_pods_up_to_its_maximum() -> None:
    long_claim = {"hami.io/min-runtime-s": "1e9"}
    world = await world_with(
        (pod("claims", 1, annotations=long_claim), "n1"), (pod("plain", 2), "n2")
    )
    began_s = world.clock.now_s()
    world.kube.change(
        "/api/v1/namespaces/default/pods/claims", status={"startTime": _time(began_s)}
    )
    async with world.scheduler(min_runtime_most_s=60.0, preempt_retry_s=1.0) as s:
        await ask(world, s, pod("first", 10))
        assert world.kube.evictions == ["plain"]
        await ask(world, s, pod("second", 10))
        assert world.kube.evictions == ["plain"]
        await world.advance(70, *NODES)
        await ask(world, s, pod("second", 10))
    assert world.kube.evictions == ["plain", "claims"]


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat()


async def test_budgets_are_never_violated() -> None:
    world = await world_with((pod("low", 1, labels={"app": "db"}), "n1"), (pod("mid", 5), "n2"))
    world.kube.put(BUDGET_PATH, BUDGET)
    async with world.scheduler(preempt_retry_s=1.0) as s:
        await ask(world, s, pod("first", 10))
        assert world.kube.evictions == ["mid"]
        await ask(world, s, pod("second", 10))
        assert world.kube.evictions == ["mid"]
        assert s.value("hami_scheduler_preemptions_total", outcome="budget") == 1
        world.kube.put(BUDGET_PATH, {**BUDGET, "status": {"disruptionsAllowed": 1}})
        await world.advance(7, *NODES)
        await ask(world, s, pod("second", 10))
    assert world.kube.evictions == ["mid", "low"]


async def test_refused_eviction_releases_the_reservation_and_tries_other_pods() -> None:
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 5), "n2"))
    world.kube.kept.add("low")
    urgent = pod("urgent", 10)
    async with world.scheduler(preempt_retry_s=1.0) as s:
        await ask(world, s, urgent)
        assert held(world) == []
        assert s.value("hami_scheduler_preemptions_total", outcome="refused") == 1
        await world.advance(7, *NODES)
        await ask(world, s, urgent)
        assert world.kube.evictions == ["mid"]
        assert [record.node for record in held(world)] == ["n2"]


async def test_gang_is_evicted_as_a_whole_or_not_at_all() -> None:
    gang: dict[str, Any] = {"annotations": {"hami.io/gang": "g", "hami.io/gang-size": "1"}}
    world = await world_with((pod("g-1", 1, **gang), "n1"), (pod("g-2", 9, **gang), "n2"))
    async with world.scheduler(preempt_retry_s=1.0) as s:
        await ask(world, s, pod("middle", 5))
        assert world.kube.evictions == []
        await ask(world, s, pod("urgent", 10))
        assert sorted(world.kube.evictions) == ["g-1", "g-2"]
        await gone(world, "g-1", "g-2")
        await quiet()
    assert len(held(world)) == 1


async def test_reservation_is_released_when_the_pod_is_deleted_or_its_time_ends() -> None:
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 5), "n2"))
    async with world.scheduler(preempt_hold_s=60.0) as s:
        await ask(world, s, pod("urgent", 10))
        await gone(world, "low", "urgent")
        assert held(world) == []
        other = pod("other", 10)
        assert (await ask(world, s, other))["NodeNames"] == ["n1"]
        assert await s.bind(other, "n1") == ""
        await ask(world, s, pod("big", 20, mem_mib=9000))
        (room,) = held(world)
        assert (room.pod, room.node) == ("big", "n2")
        await gone(world, "mid")
        touched = len(world.kube.node_touches)
        await world.advance(60 + 30 + 2 * 7, *NODES)
        assert held(world) == []
        await world.advance(7, *NODES)
        assert len(world.kube.node_touches) > touched
    world.check(*DEVICES)


@pytest.mark.parametrize("point", range(6))
@pytest.mark.parametrize("reason", ["priority", "guarantee"])
async def test_crash_at_any_point_is_recovered(point: int, reason: str, tmp_path: Path) -> None:
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 5), "n2"))
    reclaims = reason == "guarantee"
    urgent = world.add_pod(of_research("urgent", 6000) if reclaims else pod("urgent", 10))
    settings: dict[str, Any] = (
        {"queues_file": queues(tmp_path, guaranteed_mib=4000)} if reclaims else {}
    )

    async with world.scheduler("s1", **settings) as s:

        async def stop() -> None:
            await anyio.sleep_forever()

        s.seen.before[len(s.seen.calls) + point] = stop
        await s.filter(urgent, NODES)
        await quiet()
    async with world.scheduler("s1", preempt_retry_s=1.0, **settings) as s:
        for _ in range(4):
            await s.filter(urgent, NODES)
            await quiet()
            for name in list(world.kube.evictions):
                if name in {p["metadata"]["name"] for p in world.kube.pods()}:
                    await gone(world, name)
            await world.advance(7, *NODES)
        answer = await s.filter(urgent, NODES)
        assert len(answer["NodeNames"]) == 1
        assert await s.bind(urgent, answer["NodeNames"][0]) == ""
        await quiet()
        world.check_settled(*DEVICES)
    assert len(set(world.kube.evictions)) == 1


async def test_two_schedulers_preempt_for_one_pod_once() -> None:
    world = await world_with((pod("low", 1), "n1"), (pod("mid", 1), "n2"))
    urgent = world.add_pod(pod("urgent", 10))
    async with world.scheduler("s1") as one, world.scheduler("s2") as two:
        await one.filter(urgent, NODES)
        await two.filter(urgent, NODES)
        await quiet()
        assert len(held(world)) == 1
        evicted = set(world.kube.evictions)
        assert len(evicted) == 1
        await gone(world, *evicted)
        answer = await two.filter(urgent, NODES)
        assert await two.bind(urgent, answer["NodeNames"][0]) == ""
        await quiet()
        world.check_settled(*DEVICES)


async def test_preempt_verb_adds_required_victims_and_drops_useless_nodes() -> None:
    small = pod("small", 1, mem_mib=1000)
    world = await world_with(
        (small, "n1"), (pod("low", 2, mem_mib=8000), "n1"), (pod("high", 20), "n2")
    )
    body = {
        "Pod": world.add_pod(pod("urgent", 10)),
        "NodeNameToMetaVictims": {
            "n1": {"Pods": [{"UID": "uid-small"}], "NumPDBViolations": 0},
            "n2": {"Pods": [], "NumPDBViolations": 0},
        },
    }
    async with world.scheduler() as s:
        answer = await s.call("preempt", json.dumps(body).encode())
        assert answer == {
            "NodeNameToMetaVictims": {
                "n1": {"Pods": [{"UID": "uid-small"}, {"UID": "uid-low"}], "NumPDBViolations": 0}
            }
        }
        whole = {"Pod": body["Pod"], "NodeNameToVictims": {"n1": {"Pods": [small]}}}
        again = await s.call("preempt", json.dumps(whole).encode())
        assert again == answer
    assert world.kube.evictions == []


# --- reclaim -------------------------------------------------------------------------------------


def queues(tmp_path: Path, *, guaranteed_mib: int) -> str:
    """A file with queues ``default`` with this guarantee, and ``research`` with 10,000 MiB."""
    file = tmp_path / "queues.toml"
    file.write_text(
        f"""
        [[queue]]
        name = "research"
        guaranteed = {{ memory_mib = 10000 }}
        namespaces = ["research"]
        [[queue]]
        name = "default"
        guaranteed = {{ memory_mib = {guaranteed_mib} }}
        namespaces = ["default"]
        [[queue]]
        name = "spare"
        guaranteed = {{ memory_mib = 10000 }}
        """
    )
    return str(file)


def of_research(name: str, mem_mib: int) -> builders.Obj:
    """A pod with a lower priority than all others."""
    made = pod(name, 0, mem_mib=mem_mib)
    made["metadata"]["namespace"] = "research"
    return made


async def test_guarantee_is_reclaimed_at_once_from_borrowers_of_any_priority(
    tmp_path: Path,
) -> None:
    world = await world_with((pod("old", 9), "n1"), (pod("more", 5), "n2"))
    waits = of_research("waits", 6000)
    settings: dict[str, Any] = {"queues_file": queues(tmp_path, guaranteed_mib=4000)}
    async with world.scheduler(**settings) as s:
        answer = await ask(world, s, waits)
        assert answer["NodeNames"] == []
        assert world.kube.evictions == ["more"]
        (room,) = held(world)
        assert (room.pod, room.node, room.awaits) == ("waits", "n2", ("uid-more",))
        (event,) = [e for e in world.kube.events if e["reason"] == "Preempted"]
        assert (
            "its queue research uses its guarantee, this pod's queue default borrows"
            in (event["message"])
        )
        await gone(world, "more")
        assert (await ask(world, s, waits))["NodeNames"] == ["n2"]
        assert await s.bind(waits, "n2") == ""
        again = pod("again", 9)
        assert (await ask(world, s, again))["NodeNames"] == []
        assert world.kube.evictions == ["more"], "the owner of the guarantee keeps it"
        await quiet()
        world.check_settled(*DEVICES)


@pytest.mark.parametrize(
    ("guaranteed_mib", "wanted_mib", "evicted"),
    [
        (4000, 6000, ["small-1"]),
        (4000, 9000, ["small-1", "small-2"]),
        (8000, 6000, ["small-1"]),
        (8000, 9000, []),  # one small pod is above the guarantee of 8000, two are not
        (12000, 6000, []),
        (0, 10500, []),  # more than the guarantee of its own queue
    ],
)
async def test_no_queue_falls_below_its_guarantee(
    tmp_path: Path, guaranteed_mib: int, wanted_mib: int, evicted: list[str]
) -> None:
    small = [(pod(f"small-{n}", 9, mem_mib=3000), "n1") for n in (1, 2)]
    world = await world_with(*small, (pod("large", 20), "n2"))
    settings: dict[str, Any] = {"queues_file": queues(tmp_path, guaranteed_mib=guaranteed_mib)}
    async with world.scheduler(**settings) as s:
        await ask(world, s, of_research("waits", wanted_mib))
    assert sorted(world.kube.evictions) == evicted


async def test_reclaim_can_be_disabled(tmp_path: Path) -> None:
    world = await world_with((pod("old", 9), "n1"), (pod("more", 5), "n2"))
    settings: dict[str, Any] = {
        "queues_file": queues(tmp_path, guaranteed_mib=4000),
        "reclaim": False,
    }
    async with world.scheduler(**settings) as s:
        await ask(world, s, of_research("waits", 6000))
    assert world.kube.evictions == []


# --- bursts --------------------------------------------------------------------------------------


async def bursting(world: World, node: str, **mib: int) -> None:
    """Let pods of a node use more memory than they request."""
    await world.add_devices(builders.devices(node, memory_mib=10_000, bursts=mib))
    await quiet()


async def test_pod_beyond_its_request_is_evicted_for_a_pod_of_any_priority() -> None:
    world = await world_with((pod("calm", 0), "n1"), (pod("eager", 9, mem_mib=3000), "n2"))
    await bursting(world, "n2", eager=4000)
    waits = pod("waits", 0)
    async with world.scheduler() as s:
        answer = await ask(world, s, waits)
        assert answer["FailedNodes"]["n2"].startswith(
            "CardBurstUse: 6000 MiB wanted, 3000 free, 4000 used by pods beyond their requests"
        )
        assert world.kube.evictions == ["eager"]
        (room,) = held(world)
        assert (room.pod, room.node, room.awaits) == ("waits", "n2", ("uid-eager",))
        (event,) = [e for e in world.kube.events if e["reason"] == "Preempted"]
        assert "this pod uses 4000 MiB beyond its request" in event["message"]
        await gone(world, "eager")  # its use is still in the record
        assert (await ask(world, s, waits))["NodeNames"] == ["n2"]
        assert await s.bind(waits, "n2") == ""
        await quiet()
        await bursting(world, "n2")
        world.check_settled(*DEVICES)
    (decision,) = world.decisions("preempt")
    found = [(victim.pod, victim.priority, victim.burst_mib) for victim in decision.victims]
    assert found == [("eager", 9, 4000)]


async def test_burst_that_returns_too_little_ends_no_pod() -> None:
    world = await world_with(
        (pod("calm", 0), "n1"), (pod("eager", 9, mem_mib=1000), "n2"), (pod("base", 9), "n2")
    )
    await bursting(world, "n2", eager=2000)
    async with world.scheduler() as s:
        await ask(world, s, pod("waits", 0))
        assert world.kube.evictions == []
        assert s.value("hami_scheduler_preemptions_total", outcome="none") == 1


async def test_pod_that_needs_the_request_of_a_burst_evicts_it_by_priority_only() -> None:
    world = await world_with((pod("calm", 5), "n1"), (pod("eager", 5), "n2"))
    await bursting(world, "n2", eager=2000)
    async with world.scheduler() as s:
        await ask(world, s, pod("waits", 5))  # eager could not start again, and would evict it
        assert world.kube.evictions == []
        assert s.value("hami_scheduler_preemptions_total", outcome="none") == 1
        await ask(world, s, pod("urgent", 6))
        assert world.kube.evictions == ["calm"]


async def test_bursts_are_within_budgets_and_not_for_spot_pods() -> None:
    eager = pod("eager", 9, mem_mib=3000, labels={"app": "db"})
    world = await world_with((pod("calm", 9), "n1"), (eager, "n2"))
    world.kube.put(BUDGET_PATH, BUDGET)
    await bursting(world, "n2", eager=4000)
    async with world.scheduler() as s:
        await ask(world, s, pod("waits", 0))
        assert s.value("hami_scheduler_preemptions_total", outcome="budget") == 1
        world.kube.remove(BUDGET_PATH)
        await ask(world, s, spot("cheap", 5))
        assert world.kube.evictions == []
        await ask(world, s, pod("other", 0))
        assert world.kube.evictions == ["eager"]


# --- spot ----------------------------------------------------------------------------------------


def spot(name: str, priority: int, **more: Any) -> builders.Obj:
    return pod(name, priority, annotations={annotations.CLASS: "spot"}, **more)


async def test_spot_pods_are_evicted_first_whatever_their_priority() -> None:
    world = await world_with((pod("low", 1), "n1"), (spot("cheap", 1000), "n2"))
    async with world.scheduler() as s:
        await ask(world, s, pod("urgent", 10))
        assert world.kube.evictions == ["cheap"]
        (event,) = [e for e in world.kube.events if e["reason"] == "Preempted"]
        assert "this pod is of class spot" in event["message"]
    assert {record.service_class for record in world.live() if record.pod == "cheap"} == {"spot"}


async def test_spot_pod_evicts_by_priority_alone() -> None:
    world = await world_with((spot("a", 5), "n1"), (spot("b", 6), "n2"))
    async with world.scheduler() as s:
        await ask(world, s, spot("same", 5))
        assert world.kube.evictions == []
        await ask(world, s, spot("higher", 7))
        assert world.kube.evictions == ["a"]


async def test_spot_pods_use_no_guarantee(tmp_path: Path) -> None:
    """The queue's own pod evicts them; they may borrow what others do not use."""
    world = await world_with((spot("a", 9), "n1"), (spot("b", 9), "n2"))
    settings: dict[str, Any] = {"queues_file": queues(tmp_path, guaranteed_mib=6000)}
    async with world.scheduler(**settings) as s:
        await ask(world, s, pod("own", 0))
        assert len(world.kube.evictions) == 1
        (room,) = held(world)
        assert room.pod == "own"
