# SPDX-License-Identifier: Apache-2.0
"""Calls of Volcano's extender plugin: verdicts, votes, and reservations before a Binding."""

import json
from typing import Any

import anyio
import pytest

from hami_common.errors import Unavailable, WireInvalid
from hami_common.pods import annotations as keys
from hami_common.runtime.httpd import Request, Response
from hami_scheduler.settings import VolcanoExtenderSettings
from hami_scheduler.shell.volcano import PREFIX, purpose
from hami_scheduler.shell.volcano_wire import ALLOCATED, PENDING
from tests.support import volcano_bodies as bodies
from tests.support.bindings import binding
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_bindadmission import admit, bind, raising
from tests.unit.scheduler.shell.test_quota import put_quota, quota
from tests.unit.scheduler.shell.world import LEASE_S, Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1")
OTHER = builders.devices("n2")
Obj = dict[str, Any]


async def world_with(*pods: Obj) -> World:
    world = World()
    await world.add_devices(NODE)
    await world.add_devices(OTHER)
    for pod in pods:
        world.add_pod(pod)
    return world


async def call(s: Running, verb: str, body: bytes) -> Obj:
    handler = s.scheduler.volcano.routes()["POST", f"{PREFIX}/{verb}"]
    request = Request(method="POST", path=verb, query={}, headers={}, body=body, params={})
    response = await handler(request)
    assert isinstance(response, Response)
    assert response.status == 200
    reply: Obj = json.loads(response.body)
    return reply


async def predicate(s: Running, pod: Obj, node: str) -> tuple[str, int]:
    reply = await call(s, "predicate", bodies.predicate(pod, node))
    return reply["status"], reply["code"]


async def allocate(s: Running, pod: Obj, node: str, *, status: int = ALLOCATED) -> str:
    """Error of the call; empty when the session may go on."""
    reply = await call(s, "allocate", bodies.event(pod, node, status=status))
    error: str = reply["errorMessage"]
    return error


async def deallocate(s: Running, pod: Obj, node: str, *, status: int = PENDING) -> None:
    reply = await call(s, "deallocate", bodies.event(pod, node, status=status))
    assert reply == {"errorMessage": ""}


async def vote(s: Running, pods: list[Obj], *, least: int) -> int:
    status: int = (await call(s, "jobEnqueueable", bodies.job("j", pods, least=least)))["status"]
    return status


# --- predicate ------------------------------------------------------------------------------------


async def test_predicate_refuses_what_filter_refuses_with_the_same_text() -> None:
    """Sums are no obstacle: the node has the memory, no single device has it."""
    world = await world_with(small := builders.pod("a"), large := builders.pod("b", mem_mib=20_000))
    await world.add_devices(builders.devices("n1", count=2))
    async with world.scheduler() as s:
        assert await predicate(s, small, "n1") == ("", 0)
        text, code = await predicate(s, large, "n1")
        failed = (await s.filter(large, ["n1", "n2"]))["FailedNodes"]
        assert (text, code) == (failed["n1"], 2)
        assert text.startswith("CardInsufficientMemory: 20000 MiB wanted, at most 16000 MiB")
        assert s.value("hami_scheduler_node_refusals_total", code="CardInsufficientMemory") == 3
        assert s.value("hami_scheduler_verb_seconds_count", verb="volcano-predicate") == 2


@pytest.mark.parametrize(
    ("pod", "node", "text"),
    [
        (
            builders.pod("a", annotated={"nvidia.com/use-gputype": "A100"}),
            "n1",
            "CardTypeMismatch",
        ),
        (builders.pod("a"), "elsewhere", "NodeUnregistered"),
        (builders.pod("a", managed=False), "n1", "PodNotAdmitted"),
    ],
)
async def test_preemption_is_not_tried_where_it_cannot_help(pod: Obj, node: str, text: str) -> None:
    world = await world_with(pod)
    async with world.scheduler() as s:
        told, code = await predicate(s, pod, node)
    assert told.startswith(text) or text in told
    assert code == 3


async def test_quota_refuses_a_node_and_the_reservation() -> None:
    world = await world_with(pod := builders.pod("a", namespace="team-a", mem_mib=8192))
    put_quota(world, quota(6000))
    async with world.scheduler() as s:
        text, code = await predicate(s, pod, "n1")
        assert 'quota "gpu" limits.nvidia.com/gpumem' in text
        assert code == 2
        assert 'quota "gpu" limits.nvidia.com/gpumem' in await allocate(s, pod, "n1")
    assert world.live() == []


async def test_pod_without_our_resources_fits_everywhere() -> None:
    world = await world_with()
    pod = builders.pod("a", gpu=None)
    async with world.scheduler() as s:
        assert await predicate(s, pod, "elsewhere") == ("", 0)
        assert (await call(s, "prioritize", bodies.prioritize(pod, ["n1"])))["nodeScore"] == {
            "n1": 0.0
        }
        assert await vote(s, [pod], least=1) == 0


async def test_pod_is_judged_from_the_call_until_the_watch_delivers_it() -> None:
    world = await world_with()
    async with world.scheduler() as s:
        assert await predicate(s, builders.pod("a"), "n1") == ("", 0)
        text, _ = await predicate(s, builders.pod("b", mem_mib=10**6), "n1")
        assert text.startswith("CardInsufficientMemory")


async def test_pod_of_the_call_is_judged_without_the_node_that_a_session_wrote() -> None:
    world = await world_with()
    async with world.scheduler() as s:
        pod = builders.pod("b", mem_mib=10**6)
        pod["spec"]["nodeName"] = "n1"
        assert (await predicate(s, pod, "n1"))[1] == 2


async def test_our_watch_wins_over_the_pod_of_the_call() -> None:
    world = await world_with(builders.pod("a", mem_mib=10**6))
    async with world.scheduler() as s:
        assert (await predicate(s, builders.pod("a"), "n1"))[1] == 2


async def test_unsynchronized_scheduler_answers_with_an_error() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        s.state.lost("pods")
        text, code = await predicate(s, pod, "n1")
        assert "not in sync" in text
        assert code == 1
        assert "not in sync" in await allocate(s, pod, "n1")
        assert await vote(s, [pod], least=1) == -1
        reply = await call(s, "prioritize", bodies.prioritize(pod, ["n1"]))
        assert reply == {"nodeScore": {"n1": 0.0}, "errorMessage": ""}


async def test_verdict_is_recorded_once_for_all_nodes_of_a_session() -> None:
    world = await world_with(large := builders.pod("a", mem_mib=10**6))
    async with world.scheduler() as s:
        for _ in range(3):
            for node in ("n1", "n2"):
                await predicate(s, large, node)
        await s.scheduler.drain(limit_s=1)
    (decision,) = world.decisions("filter")
    assert (decision.verdict, decision.nodes_considered) == ("refused", 2)
    (refused,) = decision.refusals
    assert (refused.count, refused.nodes) == (2, ("n1", "n2"))


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("predicate", b"{"),
        (
            "predicate",
            b'{"task": {"Name": "a", "Namespace": "b", "Pod": {}}, "node": {"Name": "n"}}',
        ),
        ("allocate", b'{"task": {"Name": "a", "Namespace": "b", "Pod": null}}'),
        (
            "deallocate",
            json.dumps(
                {"task": bodies.task(builders.pod("a")) | {"Name": "another than the pod's"}}
            ).encode(),
        ),
        ("jobEnqueueable", b'{"job": {"Name": "x", "Namespace": "y", "MinAvailable": -1}}'),
    ],
)
async def test_malformed_call_is_refused(verb: str, body: bytes) -> None:
    world = await world_with()
    async with world.scheduler() as s:
        with pytest.raises(WireInvalid):
            await call(s, verb, body)


# --- prioritize -----------------------------------------------------------------------------------


async def test_scores_are_those_of_prioritize_and_a_held_share_wins() -> None:
    binpack = {"hami.io/node-scheduler-policy": "binpack"}
    pods = [builders.pod(name, annotated=binpack) for name in ("a", "b")]
    world = await world_with(*pods)
    async with world.scheduler() as s:
        assert await s.bind(pods[0], "n2") == ""
        scores = (await call(s, "prioritize", bodies.prioritize(pods[1], ["n1", "n2"])))[
            "nodeScore"
        ]
        assert 0 <= scores["n1"] < scores["n2"] <= 100
        assert await allocate(s, pods[1], "n1") == ""
        after = (await call(s, "prioritize", bodies.prioritize(pods[1], ["n1", "n2"])))["nodeScore"]
        assert after["n1"] > after["n2"]


async def test_empty_list_of_nodes_has_an_empty_map() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        reply = await call(s, "prioritize", bodies.prioritize(pod, []))
    assert reply == {"nodeScore": {}, "errorMessage": ""}


# --- jobs -----------------------------------------------------------------------------------------


async def test_job_is_enqueued_only_with_room_for_all_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three of four fit, each alone fits."""
    pods = [builders.pod(f"p{n}", mem_mib=9000) for n in range(4)]
    world = await world_with(*pods)
    await world.add_devices(builders.devices("n2", count=2))
    async with world.scheduler() as s:
        caplog.set_level("INFO")
        assert await vote(s, pods, least=4) == -1
        assert await vote(s, pods, least=4) == -1
        logged = [one for one in caplog.records if one.message == "job not enqueued"]
        assert [one.__dict__["reason"] for one in logged] == ["no room for 4 pods at the same time"]
        assert await vote(s, pods, least=3) == 1
        assert await vote(s, pods[:3], least=3) == 1
    assert world.records() == {}


async def test_job_of_unequal_pods_needs_the_smallest_of_them() -> None:
    small = [builders.pod(f"s{n}", mem_mib=1000) for n in range(2)]
    large = [builders.pod(f"l{n}", mem_mib=10**6) for n in range(2)]
    world = await world_with(*small, *large)
    async with world.scheduler() as s:
        assert await vote(s, [*large, *small], least=2) == 1
        assert await vote(s, [*large, *small], least=3) == -1


async def test_pods_without_devices_count_as_members() -> None:
    worker, launcher = builders.pod("w"), builders.pod("l", gpu=None)
    world = await world_with(worker, builders.pod("x", mem_mib=10**6))
    async with world.scheduler() as s:
        assert await vote(s, [worker, launcher], least=2) == 1
        assert await vote(s, [builders.pod("x", mem_mib=10**6), launcher], least=2) == -1


async def test_job_whose_pods_do_not_exist_yet_is_not_judged() -> None:
    world = await world_with(pod := builders.pod("a", mem_mib=10**6))
    async with world.scheduler() as s:
        assert await vote(s, [], least=1) == 0
        assert await vote(s, [pod], least=2) == 0


# --- allocate and deallocate ----------------------------------------------------------------------


async def test_reservation_is_taken_over_by_the_binding() -> None:
    world = await world_with(
        pod := builders.pod("a", mem_mib=9000), builders.pod("b", mem_mib=9000)
    )
    async with world.scheduler() as s:
        assert await allocate(s, pod, "n1") == ""
        (held,) = world.live()
        assert (held.held_for, held.lease_s) == (purpose("default", "a"), LEASE_S)
        # No other pod gets the device meanwhile, and the pod still fits there.
        assert (await predicate(s, builders.pod("b", mem_mib=9000), "n1"))[1] == 2
        assert await predicate(s, pod, "n1") == ("", 0)
        assert await bind(world, s, binding("a", "n1")) == ""
        (record,) = world.live()
        assert (record.allocation_id, record.held_for) == (held.allocation_id, "")
        await s.scheduler.drain(limit_s=1)
        await world.advance(LEASE_S + 5, "n1", "n2")
    world.check_settled(NODE, OTHER)
    assert [one.verdict for one in world.decisions()] == ["placed"]


async def test_repeated_allocate_reserves_once() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s, world.scheduler("s2") as t:
        assert await allocate(s, pod, "n1") == ""
        assert await allocate(t, pod, "n1") == ""
        assert len(world.live()) == 1
        # Another session decides otherwise.
        assert await allocate(t, pod, "n2") == ""
        assert [one.node for one in world.live()] == ["n2"]


async def test_refused_reservation_has_the_reason_and_is_recorded() -> None:
    world = await world_with(pod := builders.pod("a", mem_mib=10**6))
    async with world.scheduler() as s:
        assert (await allocate(s, pod, "n1")).startswith("node n1: CardInsufficientMemory")
        await s.scheduler.drain(limit_s=1)
    (decision,) = world.decisions()
    assert (decision.verdict, decision.node) == ("refused", "n1")
    assert world.live() == []


@pytest.mark.parametrize("status", [PENDING, bodies.PIPELINED, bodies.RUNNING])
async def test_only_allocated_tasks_are_reserved(status: int) -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        assert await allocate(s, pod, "n1", status=status) == ""
    assert world.records() == {}


async def test_nothing_is_reserved_for_a_pod_that_the_api_server_does_not_have() -> None:
    world = await world_with(bound := builders.pod("b"))
    async with world.scheduler() as s:
        assert "does not exist any more" in await allocate(s, builders.pod("a"), "n1")
        other = builders.pod("b", uid="another")
        assert "does not exist any more" in await allocate(s, other, "n1")
        assert await s.bind(bound, "n1") == ""
        assert "already assigned" in await allocate(s, bound, "n2")
        assert await allocate(s, bound, "n1") == ""
    assert [one.node for one in world.live()] == ["n1"]


@pytest.mark.parametrize("replica", ["same", "other"])
async def test_deallocate_releases_the_reservation(replica: str) -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s, world.scheduler("s2") as t:
        assert await allocate(s, pod, "n1") == ""
        await deallocate(s if replica == "same" else t, pod, "n1")
        assert world.live() == []
        calls = len(s.seen.calls)
        await deallocate(s, pod, "n1")
        assert [one for one in s.seen.calls[calls:] if one.startswith("append")] == []
    assert world.kube.pod("a")["metadata"]["annotations"].get(keys.FENCE) is None


@pytest.mark.parametrize("replica", ["same", "other"])
async def test_share_whose_bind_has_begun_is_not_released(replica: str) -> None:
    """Also while the other replica has not seen the bind yet: the record's revision decides."""
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s, world.scheduler("s2") as t:
        assert await allocate(s, pod, "n1") == ""
        assert await bind(world, s, binding("a", "n1")) == ""
        await deallocate(s if replica == "same" else t, pod, "n1")
        await s.scheduler.drain(limit_s=1)
        await world.advance(LEASE_S + 5, "n1", "n2")
    assert [one.node for one in world.live()] == ["n1"]
    world.check_settled(NODE, OTHER)


async def test_failed_release_is_left_to_the_lease() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        assert await allocate(s, pod, "n1") == ""
        s.seen.before[len(s.seen.calls)] = raising(Unavailable(peer="NATS", detail="away"))
        await deallocate(s, pod, "n1")
        errors = {"verb": "volcano-deallocate", "cause": "unavailable"}
        assert s.value("hami_scheduler_verb_errors_total", **errors) == 1
        assert len(world.live()) == 1
        await world.advance(LEASE_S + 5, "n1", "n2")
        await s.scheduler.drain(limit_s=1)
        assert world.live() == []


async def test_failed_reservation_is_found_when_its_answer_was_lost() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        s.seen.after[len(s.seen.calls)] = raising(Unavailable(peer="NATS", detail="away"))
        assert await allocate(s, pod, "n1") == ""
        assert len(world.live()) == 1


async def test_failed_binding_is_retried_on_its_own_share() -> None:
    """Admitted and never stored: the next session may use the share at once."""
    world = await world_with(pod := builders.pod("a", mem_mib=9000))
    async with world.scheduler() as s:
        assert await allocate(s, pod, "n1") == ""
        assert (await admit(s, binding("a", "n1")))["allowed"] is True
        assert [one.held_for for one in world.live()] == [""]
        assert await predicate(s, pod, "n1") == ("", 0)
        assert await allocate(s, pod, "n1") == ""
        assert await bind(world, s, binding("a", "n1")) == ""
        assert len(world.live()) == 1


async def test_abandoned_reservation_ends_with_its_lease() -> None:
    """Volcano was killed between allocate and bind; the pod may be bound to another node later."""
    pods = [builders.pod(name) for name in ("a", "b")]
    world = await world_with(*pods)
    options = VolcanoExtenderSettings(lease_s=14.0)
    async with world.scheduler(volcano_extender=options) as s:
        for pod in pods:
            assert await allocate(s, pod, "n1") == ""
        assert await bind(world, s, binding("b", "n2")) == ""
        await s.scheduler.drain(limit_s=1)
        await world.advance(14.0, "n1", "n2")
        await s.scheduler.drain(limit_s=1)
        assert [(one.pod, one.node) for one in world.live()] == [("b", "n2")]
        assert await bind(world, s, binding("a", "n1")) == ""
        await s.scheduler.drain(limit_s=1)
    world.check_settled(NODE, OTHER)


async def test_reservation_of_a_killed_scheduler_ends_with_its_lease() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        assert await allocate(s, pod, "n1") == ""
    async with world.scheduler("s2"):
        await world.advance(LEASE_S + 10, "n1", "n2")
    assert world.live() == []


async def test_gang_that_does_not_fit_leaves_nothing() -> None:
    """A session as Volcano runs it: four members, room for three, everything is discarded."""
    pods = [builders.pod(f"p{n}", mem_mib=9000) for n in range(4)]
    world = await world_with(*pods)
    await world.add_devices(builders.devices("n2", count=2))
    async with world.scheduler() as s:
        placed: list[tuple[Obj, str]] = []
        for pod in pods:
            fits = [n for n in ("n1", "n2") if (await predicate(s, pod, n))[1] == 0]
            if fits:
                assert await allocate(s, pod, fits[0]) == ""
                placed.append((pod, fits[0]))
        assert len(placed) == 3
        for pod, node in reversed(placed):
            await deallocate(s, pod, node)
    assert world.live() == []


async def test_sessions_of_two_volcanos_never_exceed_a_device() -> None:
    pods = [builders.pod(f"p{n}", mem_mib=3000) for n in range(16)]
    world = await world_with(*pods)
    async with world.scheduler() as s, world.scheduler("s2") as t:
        errors: list[str] = []

        async def session(number: int) -> None:
            pod, node = pods[number], ("n1", "n2")[number % 2]
            mine = (s, t)[number // 2 % 2]
            if error := await allocate(mine, pod, node):
                errors.append(error)
            elif number % 5 == 0:
                await deallocate(t, pod, node)
            else:
                errors.append(await bind(world, mine, binding(f"p{number}", node)))

        async with anyio.create_task_group() as group:
            for number in range(len(pods)):
                group.start_soon(session, number)
        world.check(NODE, OTHER)
        assert "" in errors
        for one in (s, t):
            await one.scheduler.drain(limit_s=1)
        await world.advance(LEASE_S + 10, "n1", "n2")
        for one in (s, t):
            await one.scheduler.drain(limit_s=1)
    world.check_settled(NODE, OTHER)


async def test_deleted_pod_frees_its_reservation() -> None:
    world = await world_with(pod := builders.pod("a"))
    async with world.scheduler() as s:
        assert await allocate(s, pod, "n1") == ""
        world.kube.remove(pod_path(pod))
        await quiet()
        await s.scheduler.drain(limit_s=1)
        assert world.live() == []
