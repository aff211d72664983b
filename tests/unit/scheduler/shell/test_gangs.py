# SPDX-License-Identifier: Apache-2.0
"""Gangs: all members get their shares before the first is bound, or none does."""

from collections import Counter
from typing import Any

import anyio
import pytest

from hami_common.events.allocation import AllocationRecord
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_shared_reservation import Gate
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
DEVICES = [builders.devices(node, count=2, memory_mib=10_000) for node in NODES]


def member(number: int, *, size: int = 4, gang: str = "g", mem_mib: int = 9000) -> builders.Obj:
    told = {"hami.io/gang": gang, "hami.io/gang-size": str(size)}
    return builders.pod(f"{gang}-{number}", mem_mib=mem_mib, annotated=told)


async def world_with_nodes() -> World:
    world = World()
    for devices in DEVICES:
        await world.add_devices(devices)
    return world


def held(world: World) -> dict[str, AllocationRecord]:
    return {record.pod: record for record in world.live() if record.held_for}


async def ask(world: World, s: Running, pod: builders.Obj, **more: Any) -> builders.Obj:
    """filter's answer, after the work that it caused was done."""
    if pod["metadata"]["name"] not in {p["metadata"]["name"] for p in world.kube.pods()}:
        world.add_pod(pod)
        await quiet()
    answer: builders.Obj = await s.filter(pod, more.get("nodes", NODES))
    await quiet()
    return answer


async def test_gang_waits_for_its_last_member_and_then_each_has_its_own_node() -> None:
    world = await world_with_nodes()
    pods = [member(number) for number in range(4)]
    async with world.scheduler(gang_wait_s=60.0) as s:
        for count, pod in enumerate(pods[:3], start=1):
            answer = await ask(world, s, pod)
            assert answer["NodeNames"] == []
            text = f"GangIncomplete: gang default/g has {count} of 4 pods"
            assert set(answer["FailedNodes"].values()) == {text}
        assert world.live() == []
        touched = len(world.kube.node_touches)
        answers = {pods[3]["metadata"]["name"]: await ask(world, s, pods[3])}
        assert len(held(world)) == 4
        await world.advance(7, *NODES)  # touches keep a distance
        assert len(world.kube.node_touches) > touched, "the others are not woken"
        for pod in pods[:3]:
            answers[pod["metadata"]["name"]] = await ask(world, s, pod)
        for pod in pods:
            name = pod["metadata"]["name"]
            assert answers[name]["NodeNames"] == [held(world)[name].node]
            assert await s.bind(pod, held(world)[name].node) == ""
        await quiet()
        assert sorted(world.bound().values()) == ["n1", "n1", "n2", "n2"]
        world.check_settled(*DEVICES)
        assert s.value("hami_scheduler_gangs_total", outcome="placed") == 1
    assert {record.pod for record in world.decisions("gang")} == {f"g-{n}" for n in range(4)}


async def test_gang_that_does_not_fit_as_a_whole_reserves_nothing() -> None:
    world = await world_with_nodes()
    async with world.scheduler(gang_wait_s=60.0) as s:
        for number in range(4):
            await ask(world, s, member(number, size=5))
        answer = await ask(world, s, member(4, size=5))
        assert answer["NodeNames"] == []
        (text,) = set(answer["FailedNodes"].values())
        assert text == "GangWaiting: gang default/g: no room for 5 pods at the same time"
    assert world.live() == []


async def test_gang_is_placed_once_there_is_capacity() -> None:
    world = await world_with_nodes()
    blocker = world.add_pod(builders.pod("blocker", mem_mib=9000))
    pods = [member(number) for number in range(4)]
    async with world.scheduler(gang_wait_s=60.0) as s:
        assert await s.bind(blocker, "n2") == ""
        for pod in pods:
            await ask(world, s, pod)
        assert held(world) == {}
        world.kube.remove("/api/v1/namespaces/default/pods/blocker")
        await quiet()
        assert world.kube.node_touches
        assert (await ask(world, s, pods[0]))["NodeNames"] != []
    assert len(held(world)) == 4


@pytest.mark.timeout(30)  # half a second of work, and much of it on a busy machine
async def test_as_many_of_twenty_gangs_run_as_fit_and_the_others_reserve_nothing() -> None:
    world = await world_with_nodes()
    gangs = [
        [member(number, gang=f"gang{gang}", mem_mib=1000) for number in range(4)]
        for gang in range(20)
    ]
    for members in gangs:
        for pod in members:
            world.add_pod(pod)
    async with world.scheduler(gang_wait_s=60.0) as s:
        for members in gangs:
            for pod in members:
                nodes = (await s.filter(pod, NODES))["NodeNames"]
                if not nodes:
                    break
                assert await s.bind(pod, nodes[0]) == ""
        await quiet()
        bound = Counter(name.partition("-")[0] for name in world.bound())
        assert sorted(bound.values()) == [4] * 10
        assert {record.pod for record in world.live()} == set(world.bound())
        world.check_settled(*DEVICES)


async def test_expired_leases_release_what_no_member_took() -> None:
    world = await world_with_nodes()
    pods = [member(number) for number in range(4)]
    async with world.scheduler(gang_lease_s=20.0, gang_wait_s=60.0) as s:
        for pod in pods:
            await ask(world, s, pod)
        assert await s.bind(pods[0], held(world)["g-0"].node) == ""
        await quiet()
        await world.advance(20 + 2 * 7, *NODES)
        assert [record.pod for record in world.live()] == ["g-0"]
        world.check_settled(*DEVICES)
        # Fenced reservations are not reused: the rest is placed again, around what is there.
        answer = await ask(world, s, world.kube.pod("g-1"))
        assert len(answer["NodeNames"]) == 1
        for name in ("g-1", "g-2", "g-3"):
            assert await s.bind(world.kube.pod(name), held(world)[name].node) == ""
        await quiet()
        world.check_settled(*DEVICES)


async def test_member_that_died_is_replaced_alone() -> None:
    world = await world_with_nodes()
    pods = [member(number, size=3) for number in range(3)]
    async with world.scheduler(gang_wait_s=60.0) as s:
        for pod in pods:
            await ask(world, s, pod)
        for pod in pods:
            assert await s.bind(pod, held(world)[pod["metadata"]["name"]].node) == ""
        world.kube.remove("/api/v1/namespaces/default/pods/g-1")
        await quiet()
        again = member(7, size=3)
        answer = await ask(world, s, again)
        assert answer["NodeNames"] != []
        assert await s.bind(again, answer["NodeNames"][0]) == ""
        await quiet()
        world.check_settled(*DEVICES)


async def test_gang_is_placed_again_when_its_node_is_no_candidate_any_more() -> None:
    world = await world_with_nodes()
    pods = [member(number, size=2) for number in range(2)]
    async with world.scheduler(gang_wait_s=60.0) as s:
        for pod in pods:
            await ask(world, s, pod)
        before = held(world)["g-0"].node
        (other,) = {*NODES} - {before}
        assert (await ask(world, s, pods[0], nodes=[other]))["NodeNames"] == [other]
        answer = await ask(world, s, pods[1])
        assert answer["NodeNames"] == [held(world)["g-1"].node]
    assert len(world.live()) == 2


async def test_two_schedulers_that_place_the_same_two_gangs_admit_one() -> None:
    """The capacity is for one of them: never half of each, in either order of arrival."""
    world = await world_with_nodes()
    gangs = {name: [member(n, size=3, gang=name) for n in range(3)] for name in ("a", "b")}
    async with (
        world.scheduler("s1", gang_wait_s=60.0) as one,
        world.scheduler("s2", gang_wait_s=60.0) as two,
    ):
        for pod in [pod for pods in gangs.values() for pod in pods]:
            world.add_pod(pod)
        await quiet()
        async with anyio.create_task_group() as group:
            group.start_soon(one.filter, gangs["a"][0], NODES)
            group.start_soon(two.filter, gangs["b"][0], NODES)
        await quiet()
        for _ in range(5):
            await world.advance(7, *NODES)
            await ask(world, one, gangs["a"][0])
            await ask(world, two, gangs["b"][0])
        admitted = {record.held_for for record in held(world).values()}
        assert len(held(world)) == 3
        assert len(admitted) == 1
        world.check(*DEVICES)


def before_binding(s: Running) -> Gate:
    """Holds the Binding of the next bind, whose reservation is renewed before."""
    gate = s.seen.before[len(s.seen.calls) + 1] = Gate()
    return gate


async def test_share_of_a_member_that_another_scheduler_binds_stays_when_the_gang_moves() -> None:
    world = await world_with_nodes()
    pods = [member(number, size=2) for number in range(2)]
    async with (
        world.scheduler("s1", gang_wait_s=60.0) as one,
        world.scheduler("s2", gang_wait_s=60.0) as two,
        anyio.create_task_group() as group,
    ):
        for pod in pods:
            await ask(world, one, pod)
        of_first, of_second = held(world)["g-0"], held(world)["g-1"]
        gate = before_binding(one)
        group.start_soon(one.bind, pods[0], of_first.node)
        await gate.reached.wait()
        await quiet()
        (other,) = {*NODES} - {of_second.node}
        assert (await ask(world, two, pods[1], nodes=[other]))["NodeNames"] == [other]
        assert of_first.allocation_id in {record.allocation_id for record in world.live()}
        await gate.open()
    assert world.bound()["g-0"] == of_first.node
    world.check(*DEVICES)


async def test_failed_attempt_keeps_the_shares_that_another_scheduler_reserved() -> None:
    world = await world_with_nodes()
    pods = {f"g-{number}": world.add_pod(member(number, size=3)) for number in range(3)}
    async with (
        world.scheduler("s1", gang_wait_s=60.0) as one,
        world.scheduler("s2", gang_wait_s=60.0) as two,
        anyio.create_task_group() as group,
    ):
        await quiet()
        slow = two.seen.before[len(two.seen.calls)] = Gate()
        group.start_soon(two.filter, pods["g-0"], NODES)
        await slow.reached.wait()
        await ask(world, one, pods["g-0"])
        first, _, last = sorted(held(world).values(), key=lambda r: (r.node, r.pod_uid))
        assert await one.bind(pods[last.pod], last.node) == ""
        gate = before_binding(one)
        group.start_soon(one.bind, pods[first.pod], first.node)
        await gate.reached.wait()
        await slow.open()  # its attempt meets shares of the other, and a member that is bound
        assert {record.writer for record in world.live()} == {first.writer}
        assert len(world.live()) == 3
        await gate.open()
    world.check(*DEVICES)


PLUGINS = "scheduling.x-k8s.io/v1alpha1"
VOLCANO = "scheduling.volcano.sh/v1beta1"


def grouped(kind: str, number: int) -> builders.Obj:
    pod = builders.pod(f"g-{number}", mem_mib=9000)
    metadata = pod["metadata"]
    if kind == "scheduler-plugins":
        metadata["labels"]["scheduling.x-k8s.io/pod-group"] = "g"
    elif kind == "volcano":
        metadata["annotations"]["scheduling.k8s.io/group-name"] = "g"
    elif kind == "kueue":
        metadata["labels"]["kueue.x-k8s.io/pod-group-name"] = "g"
        metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] = "2"
    return pod


@pytest.mark.parametrize("kind", ["scheduler-plugins", "volcano", "kueue"])
async def test_groups_of_other_schedulers_are_gangs(kind: str) -> None:
    world = await world_with_nodes()
    group = {"metadata": {"name": "g", "namespace": "default"}, "spec": {"minMember": 2}}
    for api in {"scheduler-plugins": [PLUGINS], "volcano": [VOLCANO]}.get(kind, []):
        world.kube.put(f"/apis/{api}/namespaces/default/podgroups/g", group)
    async with world.scheduler(gang_wait_s=60.0) as s:
        answer = await ask(world, s, grouped(kind, 0))
        assert "gang default/g has 1 of 2 pods" in answer["FailedNodes"]["n1"]
        assert len((await ask(world, s, grouped(kind, 1)))["NodeNames"]) == 1
    assert len(held(world)) == 2


@pytest.mark.parametrize("kind", ["scheduler-plugins", "volcano"])
async def test_without_its_pod_group_a_pod_is_an_ordinary_one(kind: str) -> None:
    world = await world_with_nodes()
    async with world.scheduler(gang_wait_s=60.0) as s:
        assert (await ask(world, s, grouped(kind, 0)))["NodeNames"] == NODES


async def test_invalid_gang_size_is_reported_with_the_fix() -> None:
    world = await world_with_nodes()
    pod = builders.pod("g-0", annotated={"hami.io/gang": "g", "hami.io/gang-size": "four"})
    async with world.scheduler(gang_wait_s=60.0) as s:
        answer = await ask(world, s, pod)
    (text,) = set(answer["FailedAndUnresolvableNodes"].values())
    assert "hami.io/gang-size" in text
    assert "write the number of pods" in text


async def test_gated_members_do_not_count_yet() -> None:
    world = await world_with_nodes()
    gated = member(0, size=2)
    gated["spec"]["schedulingGates"] = [{"name": "wait"}]
    world.add_pod(gated)
    async with world.scheduler(gang_wait_s=60.0) as s:
        answer = await ask(world, s, member(1, size=2))
        assert "has 1 of 2 pods" in answer["FailedNodes"]["n1"]
