# SPDX-License-Identifier: Apache-2.0
"""Laws of exclusive quanta under any workload: one holder per device, leases, no starvation."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_nodeagent.core.thrash import LEASE_S, QUANTUM_MOST, Thrash
from tests.property.nodeagent.paging_model import MEMORY_MIB, STEP_S, World, random_world

SEEDS = st.integers(0, 2**48)
STEPS = 1200
DISTURBED = 0.01


def disturb(world: World, chance: random.Random) -> None:
    """Change the work of a container, end one, or restart the agent."""
    box = chance.choice(world.boxes)
    what = chance.randrange(5)
    if what < 2:
        box.works = not box.works
    elif what == 2:
        box.used_mib = chance.randint(1, MEMORY_MIB)
    elif what == 3 and len(world.boxes) > 1:
        world.boxes.remove(box)
    else:
        world.thrash = Thrash()


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_one_container_has_each_device_with_quanta(seed: int) -> None:
    chance = random.Random(seed)
    world = random_world(chance)
    for _ in range(STEPS):
        world.step()
        holders = world.thrash.holders
        for uuid, holder in holders.items():
            running = [
                box.key for box in world.boxes if uuid in box.uuids and not box.is_held(world.now_s)
            ]
            assert set(running) <= {holder}
        for box in world.held():
            assert box.uuids & holders.keys(), "only containers of such devices are held back"
            assert box.closed_until_s is not None
            assert box.closed_until_s <= world.now_s + LEASE_S
        if chance.random() < DISTURBED:
            disturb(world, chance)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_highest_level_waits_no_longer_than_the_quanta_of_all_others(seed: int) -> None:
    chance = random.Random(seed)
    world = random_world(chance)
    longest_s = QUANTUM_MOST * world.rules.quantum_s * len(world.boxes) + 10 * STEP_S
    for _ in range(STEPS):
        world.step()
        working = [box for box in world.boxes if box.works]
        highest = min((box.level for box in working), default=0)
        for box in working:
            assert box.level > highest or box.waited_s <= longest_s


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_containers_that_fit_their_devices_are_never_held_back(seed: int) -> None:
    chance = random.Random(seed)
    world = random_world(chance)
    for box in world.boxes:
        box.used_mib = MEMORY_MIB // len(world.boxes)
    world.other_mib_s = chance.choice((0.0, 50_000.0))
    for _ in range(STEPS // 4):
        world.step()
        assert not world.held()
        if chance.random() < DISTURBED:
            box = chance.choice(world.boxes)
            box.works = not box.works
