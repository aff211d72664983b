# SPDX-License-Identifier: Apache-2.0
"""Laws of recall under any interleaving of calls, failures, restarts and ends of processes.

The model raises where a rule of the driver would be broken, and checks after each step that the
limits of the containers with an open gate fit their devices.
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.nodeagent.recall_model import World

MOMENTS, DISTURBED = 300, 0.25
CALM_STEPS = 400
LOCKED_STEPS = 15
"""Longest time for which an operation in progress keeps a process locked, in steps of 0.3 s."""
SEEDS = st.integers(0, 2**48)


def live_through(seed: int) -> World:
    """Disturb a node, and return it before it becomes calm."""
    world = World(seed)
    for _ in range(MOMENTS):
        world.look()
        if world.chance.random() < DISTURBED:
            world.disturb()
        else:
            world.go_on()
    return world


@settings(max_examples=400, deadline=None)
@given(SEEDS)
def test_calm_node_serves_all_that_wait_and_leaves_nothing_locked(seed: int) -> None:
    world = live_through(seed)
    world.calm_down()
    for _ in range(CALM_STEPS):
        world.step_calmly()
        if all(map(world.is_blocked, world.waiting())):
            break
    left = [box for box in world.waiting() if not box.is_evicted and not world.is_blocked(box)]
    assert not left, f"{left} still wait beside {list(world.boxes.values())}"
    locked_steps: Counter[int] = Counter()
    for _ in range(40):
        world.step_calmly()
        for box in world.boxes.values():
            for pid, proc in box.procs.items():
                locked_steps[pid] = locked_steps[pid] + 1 if proc.state == "locked" else 0
                is_left = locked_steps[pid] > LOCKED_STEPS and not box.is_evicted
                assert not is_left, f"{box} was left locked"
                assert proc.state == "running" or not box.may_call


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_failed_restore_evicts_and_nothing_else_does(seed: int) -> None:
    world = live_through(seed)
    failures = world.counts.get("restore failed", 0)
    assert world.counts.get("evicted", 0) <= failures


def test_model_parks_returns_and_fails() -> None:
    """The laws above are not empty."""
    counts: Counter[str] = Counter()
    for seed in range(150):
        counts.update(live_through(seed).counts)
    for what in ("lock", "checkpoint", "restore", "unlock", "RecallParked", "RecallReturned"):
        assert counts[what] > 20, counts
    assert counts["RecallRefused"] > 20
    assert counts["evicted"] > 0
