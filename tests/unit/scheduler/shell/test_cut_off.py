# SPDX-License-Identifier: Apache-2.0
"""A scheduler is cut off, stopped for minutes, or loses the bus between two steps of a bind.

Each scenario is a bind with one kind of fault. It runs once per step and kind of interruption:
right before a call takes effect, or right after it did and before its answer arrives. Then another
replica continues, other pods request the same share, and in the end pods and the ledger's log
(never a table of this project) must agree: no device is assigned twice, and every held share has
an owner.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import anyio.lowlevel
import pytest
from msgspec import Struct

from hami_common.errors import Denied, Unavailable
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_binder import doing, foreign_record, raising
from tests.unit.scheduler.shell.world import LEASE_S, Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1")
When = Literal["before", "after"]


class Scenario(Struct, frozen=True):
    """One kind of fault, and the calls that the bind then makes."""

    calls: tuple[str, ...]
    prepare: Callable[[World, Running], object]


def plain(world: World, s: Running) -> None:
    del world, s


def pod_changed(world: World, s: Running) -> None:
    s.seen.before[1] = doing(
        lambda: world.kube.change(pod_path(world.kube.pod("a")), metadata={"labels": {"x": "y"}})
    )


def lost_race(world: World, s: Running) -> None:
    async def other_writes() -> None:
        await world.record(foreign_record("uid-ghost", memory_mib=1))

    s.seen.before[0] = other_writes


def lost_ack(world: World, s: Running) -> None:
    del s
    world.bus.lose_next_ack = True


def binding_answer_lost(world: World, s: Running) -> None:
    del world
    s.seen.after[1] = raising(Unavailable(peer="API server", detail="reset"))


def binding_never_arrived(world: World, s: Running) -> None:
    del world
    s.seen.before[1] = raising(Unavailable(peer="API server", detail="timeout"))


def binding_denied(world: World, s: Running) -> None:
    del world
    s.seen.before[1] = raising(Denied(peer="API server", detail="no", status=403))


RESERVE, READ, POST, STATE = (
    "append hami_alloc",
    "latest hami_alloc",
    "post binding",
    "append hami_state",
)
SCENARIOS = {
    "plain": Scenario((RESERVE, POST, STATE), plain),
    "pod-changed": Scenario((RESERVE, POST, "get pod", RESERVE, POST, STATE), pod_changed),
    "lost-race": Scenario((RESERVE, READ, RESERVE, POST, STATE), lost_race),
    "lost-ack": Scenario((RESERVE, READ, POST, STATE), lost_ack),
    "answer-lost": Scenario((RESERVE, POST, "get pod", STATE), binding_answer_lost),
    "never-arrived": Scenario(
        (RESERVE, POST, "get pod", "patch pods", RESERVE), binding_never_arrived
    ),
    "denied": Scenario((RESERVE, POST, RESERVE), binding_denied),
}
POINTS = [
    pytest.param(name, step, when, id=f"{name}-{when}-{step}-{call.replace(' ', '-')}")
    for name, scenario in SCENARIOS.items()
    for step, call in enumerate(scenario.calls)
    for when in ("before", "after")
]


def hook(s: Running, step: int, when: When, act: Callable[[], Awaitable[None]]) -> None:
    """Run ``act`` at a step, after the scenario's own action there."""
    hooks = s.seen.before if when == "before" else s.seen.after
    first = hooks.get(step)

    async def both() -> None:
        if first is None:
            await act()
            return
        try:
            await first()
        finally:
            await act()

    hooks[step] = both


async def world_with(*names: str, mem_mib: int = 9000) -> World:
    world = World()
    await world.add_devices(NODE)
    for name in names:
        world.add_pod(builders.pod(name, mem_mib=mem_mib))
    return world


async def bind_until_settled(world: World, s: Running, *names: str) -> list[str]:
    """kube-scheduler's part: bind what is unbound, retry after a while; the last errors."""
    errors: list[str] = []
    for _ in range(2):
        errors = [
            await s.bind(world.kube.pod(name), "n1") for name in names if name not in world.bound()
        ]
        world.check(NODE)
        await world.advance(LEASE_S + 12, "n1")
    return errors


def test_enough_points_are_enumerated() -> None:
    assert len(POINTS) >= 50


@pytest.mark.parametrize("name", SCENARIOS)
async def test_scenarios_make_the_calls_they_list(name: str) -> None:
    scenario = SCENARIOS[name]
    world = await world_with("a")
    async with world.scheduler("s1") as s:
        scenario.prepare(world, s)
        await s.bind(world.kube.pod("a"), "n1")
        await s.scheduler.drain(limit_s=1)
        assert tuple(s.seen.calls) == scenario.calls


@pytest.mark.parametrize(("name", "step", "when"), POINTS)
@pytest.mark.parametrize("heir", ["s1", "s2"])
async def test_crash_between_two_steps_double_books_nothing(
    name: str, step: int, when: When, heir: str
) -> None:
    """The successor is the same replica started again (``s1``) or another one (``s2``)."""
    world = await world_with("a", "b")
    reached = anyio.Event()

    async def die() -> None:
        reached.set()
        await anyio.sleep_forever()

    async with world.scheduler("s1") as s:
        SCENARIOS[name].prepare(world, s)
        hook(s, step, when, die)
        async with anyio.create_task_group() as group:
            group.start_soon(s.bind, world.kube.pod("a"), "n1")
            with anyio.fail_after(2):
                await reached.wait()
            group.cancel_scope.cancel()
    world.check(NODE)
    async with world.scheduler(heir) as s:
        # Only one of the two fits: b asks first, a is asked for again after that.
        await bind_until_settled(world, s, "b", "a")
        world.check(NODE)
    world.check_settled(NODE)
    assert len(world.bound()) == 1


@pytest.mark.parametrize(("name", "step", "when"), POINTS)
async def test_scheduler_stopped_for_minutes_between_two_steps_double_books_nothing(
    name: str, step: int, when: When
) -> None:
    """As with SIGSTOP: the first replica resumes with the state that it had then."""
    world = await world_with("a", "b")
    reached, thawed = anyio.Event(), anyio.Event()

    async def freeze() -> None:
        if not reached.is_set():
            reached.set()
            await thawed.wait()

    async with world.scheduler("s1") as s, world.scheduler("s2") as other:
        SCENARIOS[name].prepare(world, s)
        hook(s, step, when, freeze)
        async with anyio.create_task_group() as group:
            group.start_soon(s.bind, world.kube.pod("a"), "n1")
            with anyio.fail_after(2):
                await reached.wait()
            await world.advance(LEASE_S + 12, "n1")
            await other.bind(world.kube.pod("b"), "n1")
            world.check(NODE)
            thawed.set()
        world.check(NODE)
        await bind_until_settled(world, other, "a", "b")
    world.check_settled(NODE)
    assert len(world.bound()) == 1


@pytest.mark.parametrize(("name", "step", "when"), POINTS)
async def test_storage_wiped_between_two_steps_double_books_nothing(
    name: str, step: int, when: When
) -> None:
    """The bus loses its store while a bind is under way; another pod requests the same share."""
    world = await world_with("a", "b", "old", mem_mib=5000)
    reached, thawed = anyio.Event(), anyio.Event()

    async def freeze() -> None:
        if not reached.is_set():
            reached.set()
            await thawed.wait()

    async with world.scheduler("s1") as s, world.scheduler("s2") as other:
        assert await other.bind(world.kube.pod("old"), "n1") == ""
        for running in (s, other):
            await running.scheduler.drain(limit_s=1)
        await quiet()
        s.seen.calls.clear()
        SCENARIOS[name].prepare(world, s)
        hook(s, step, when, freeze)
        async with anyio.create_task_group() as group:
            group.start_soon(s.bind, world.kube.pod("a"), "n1")
            with anyio.fail_after(2):
                await reached.wait()
            world.bus.wipe()
            world.bus.lose_next_ack = False
            await world.add_devices(NODE)
            await quiet()
            await other.bind(world.kube.pod("b"), "n1")
            world.check(NODE)
            thawed.set()
        world.check(NODE)
        await bind_until_settled(world, other, "a", "b")
        assert len(world.bound()) == 3
    world.check_settled(NODE)
