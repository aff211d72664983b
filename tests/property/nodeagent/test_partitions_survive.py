# SPDX-License-Identifier: Apache-2.0
"""After any failure, and death of the agent at any point, hardware equals journal equals ledger.

Deaths are enumerated: a scenario runs once to count the accesses to the hardware and the storage,
and then once for each of them with a death there. Failures are random, from fixed seeds.
"""

import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import anyio
import pytest

from hami_common.model.placement import Share
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.partitions import owner_of
from hami_nodeagent.drivers.simulated.partitioner import Act
from tests.support.partitions_world import World, share

pytestmark = pytest.mark.anyio

FAILURES = 1000


class Death(BaseException):
    """The agent dies at this moment."""


async def scenario(world: World) -> None:
    """Places, ends and replaces pods; each line must hold at every repetition."""
    if "a" not in world.entries:
        world.place("a", share("nvidia-0", "3g", 0), share("ascend-0", "vir05"), granted=True)
    await world.live("a")
    if "b" not in world.entries:
        world.place("b", share("cambricon-0"), share("nvidia-0", "1g", 6))
    await world.live("b")
    if "c" not in world.entries:
        world.leave("a")
        world.release("a")
        world.place("c", share("nvidia-0", "2g", 2), share("ascend-0", "vir10"))
    await world.live("c")
    await world.settle(lambda: len(world.parts()) == 4)


async def run_scenario(world: World, *, tries: int) -> int:
    """Run the scenario, with a new agent after each death; return the number of deaths."""
    for deaths in range(tries):
        try:
            async with world.agent():
                await scenario(world)
        except BaseExceptionGroup as group:
            dead, rest = group.split(Death)
            assert rest is None, rest
            assert dead is not None
        else:
            return deaths
    pytest.fail("the scenario does not end")


async def test_death_at_any_point_leaves_nothing_wrong(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked: list[str] = []

    def note(point: str) -> Act:
        asked.append(point)
        return ""

    world.hook = note
    assert await run_scenario(world, tries=1) == 0
    world.check()
    points = len(asked)
    assert {"journal.begin", "create.half", "create.made", "destroy.done"} <= set(asked)
    died_at: set[str] = set()
    for place in range(points):
        world = World(tmp_path)
        world.hook = dying(place, died_at)
        assert await run_scenario(world, tries=2) == 1
        world.check()
        board = world.site.picture.partitions
        for entry in world.entries.values():
            assert entry.record.op == "release" or board.are_all_there(entry)
    assert died_at == set(asked)


def dying(place: int, died_at: set[str]) -> Callable[[str], Act]:
    """Death at one point, counted from the beginning."""
    points = count()

    def hook(point: str) -> Act:
        if next(points) == place:
            died_at.add(point)
            raise Death
        return ""

    return hook


async def test_a_thousand_failures_leave_no_orphan_and_touch_nothing_owned(tmp_path: Path) -> None:
    seed = 20_260_324
    chance = random.Random(seed)
    world = World(tmp_path)
    world.settings = {"tries": 1_000_000, "retry_s": 0.0, "retry_most_s": 0.0}
    hand = world.plant("nvidia-1", "1g", 0, memory_mib=1000)
    failures = 0

    def hook(point: str) -> Act:
        nonlocal failures
        if failures >= FAILURES or chance.random() < 0.35:
            return ""
        failures += 1
        can_leave = point in {"create.half", "create.made"}
        return "leave" if can_leave and chance.random() < 0.5 else "fail"

    world.hook = hook
    watch_removals(world)
    numbers = count()
    while failures < FAILURES:
        async with world.agent():
            await churn(world, chance, numbers)
    async with world.agent() as partitions:
        live = [uid for uid, entry in world.entries.items() if entry.record.op != "release"]
        await world.live(live)
        await world.settle(lambda: len(world.parts()) == len(live) + 1 and partitions.is_idle)
        world.check(foreign=[hand])
    assert failures == FAILURES


def watch_removals(world: World) -> None:
    """Fail as soon as an instance with an owner is removed."""

    def on_destroy(instance: Instance) -> None:
        file = world.journal.load_partitions()
        assert file is not None
        owners = [
            note.owner
            for note in file.notes
            if (note.wanted.uuid, note.instance_id) == (instance.uuid, instance.instance_id)
        ]
        assert owners, f"{instance} was made by somebody else"
        for owner in owners:
            entry = world.entries[owner.pod_uid]
            is_half = not instance.profile and not instance.handles
            assert is_half or entry.record.op == "release" or owner != owner_of(entry, "main", 0)

    for one in world.hardware.values():
        one.on_destroy = on_destroy


async def churn(world: World, chance: random.Random, numbers: Iterator[int]) -> None:
    """Add and remove pods at random, within the capacity."""
    rooms: dict[str, Callable[[], Share]] = {
        "grid-low": lambda: share("nvidia-0", *chance.choice([("3g", 0), ("2g", 2), ("1g", 1)])),
        "grid-high": lambda: share("nvidia-0", *chance.choice([("2g", 4), ("1g", 5)])),
        "grid-other": lambda: share("nvidia-1", *chance.choice([("3g", 4), ("2g", 2)])),
        "half": lambda: share("ascend-0", chance.choice(["vir05", "vir10"])),
        "other half": lambda: share("ascend-0", chance.choice(["vir05", "vir10"])),
        "any": lambda: share("cambricon-0", memory_mib=chance.choice([500, 1500])),
    }
    for _ in range(4):
        for room, make in rooms.items():
            held = [u for u, e in world.entries.items() if u.startswith(room) and is_live(world, u)]
            for uid in held:
                if chance.random() < 0.7:
                    world.release(uid)
                    held = []
            if not held and chance.random() < 0.8:
                world.place(f"{room}-{next(numbers)}", make())
        await anyio.sleep(0.002)
    await settle_some(world)


def is_live(world: World, uid: str) -> bool:
    return world.entries[uid].record.op != "release"


async def settle_some(world: World) -> None:
    """Half of the time the agent dies before all is settled."""
    live = [uid for uid in world.entries if is_live(world, uid)]
    if len(live) % 2:
        await world.live(live)
