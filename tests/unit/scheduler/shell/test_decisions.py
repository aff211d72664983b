# SPDX-License-Identifier: Apache-2.0
"""Messages about decisions: one for each attempt to place a pod; every loss is counted."""

import pytest

from hami_common.events import codec
from hami_common.events.decision import DecisionRecord
from hami_scheduler.shell import decisions
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2"]
HOLD_S = 2.0


async def world_with_nodes() -> World:
    world = World()
    for node in NODES:
        await world.add_devices(builders.devices(node, count=2))
    return world


def told(world: World) -> list[list[tuple[str, str]]]:
    """Verb and verdict of each decision, message by message."""
    return [
        [(one.verb, one.verdict) for one in record.unfolded()]
        for record in (
            codec.decode(message.data, DecisionRecord, what=message.subject)
            for message in world.bus.published
            if ".decision." in message.subject
        )
    ]


async def place(s: Running, pod: builders.Obj) -> None:
    """kube-scheduler's requests for a pod that fits."""
    names = (await s.filter(pod, NODES))["NodeNames"]
    scores = await s.prioritize(pod, names)
    assert await s.bind(pod, max(scores, key=lambda score: score["Score"])["Host"]) == ""


async def test_placed_pod_is_published_in_one_message_with_all_its_decisions() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        for number in range(3):
            await place(s, world.add_pod(builders.pod(f"p{number}")))
        await quiet()
    assert told(world) == 3 * [
        [("filter", "feasible"), ("prioritize", "feasible"), ("bind", "placed")]
    ]


async def test_placing_a_pod_needs_one_api_write_two_appends_and_one_message() -> None:
    world = await world_with_nodes()
    pods = [world.add_pod(builders.pod(f"p{number}")) for number in range(5)]
    async with world.scheduler() as s:
        for pod in pods:
            await place(s, pod)
        await quiet()
    assert sorted(s.seen.calls) == sorted(
        len(pods) * ["append hami_alloc", "append hami_state", "post binding"]
    )
    assert len(told(world)) == len(pods)


async def test_refused_pod_is_published_at_once() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        await s.filter(builders.pod("large", mem_mib=99999), NODES)
        await quiet()
        assert told(world) == [[("filter", "refused")]]


async def test_decisions_without_a_bind_are_published_after_a_while() -> None:
    world = await world_with_nodes()
    async with world.scheduler(decision_hold_s=HOLD_S) as s:
        pod = builders.pod("a")
        await s.filter(pod, NODES)
        await world.clock.advance(0.75 * HOLD_S)
        await s.prioritize(pod, NODES)
        await world.clock.advance(0.5 * HOLD_S)
        assert told(world) == []
        await world.clock.advance(1.5 * HOLD_S)
        assert told(world) == [[("filter", "feasible"), ("prioritize", "feasible")]]


async def test_another_attempt_does_not_carry_the_decisions_of_the_last() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("a"))
        await s.filter(pod, NODES)
        await place(s, pod)
        await quiet()
    assert told(world) == [
        [("filter", "feasible")],
        [("filter", "feasible"), ("prioritize", "feasible"), ("bind", "placed")],
    ]


async def test_failed_bind_is_published_with_its_earlier_decisions() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        pod = builders.pod("nobody")
        await s.filter(pod, NODES)
        assert await s.bind(pod, "n1") != ""
        await quiet()
    assert told(world) == [[("filter", "feasible"), ("bind", "error")]]


async def test_too_many_waiting_attempts_are_published_without_their_bind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "HELD_MOST", 2)
    world = await world_with_nodes()
    async with world.scheduler() as s:
        for number in range(3):
            await s.filter(builders.pod(f"p{number}"), NODES)
        await quiet()
        assert told(world) == [[("filter", "feasible")]]


async def test_attempts_that_wait_for_a_bind_are_published_at_shutdown() -> None:
    world = await world_with_nodes()
    async with world.scheduler() as s:
        await s.filter(builders.pod("a"), NODES)
        await s.scheduler.drain(limit_s=1)
        assert told(world) == [[("filter", "feasible")]]
