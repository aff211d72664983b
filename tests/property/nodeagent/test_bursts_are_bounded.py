# SPDX-License-Identifier: Apache-2.0
"""Laws of memory above requests, under any history of reservations, releases and use.

Containers take memory at any time up to any bound on which a process may still act.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_nodeagent.core.bursts import SETTLE_S, BurstBook, Grants, ShareKey, Want

GPU = "GPU-0"
MEMORY_MIB = 10_000
TICK_S = 0.1
STEPS = 150
SEEDS = st.integers(0, 2**48)


class World:
    """One device with its containers, as the agent sees them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.grants = Grants()
        self.now_s = 0.0
        self.number = 0
        self.wants: dict[ShareKey, Want] = {}
        self.others_mib = 0
        self.past: dict[ShareKey, list[tuple[float, int]]] = {}
        """Bounds with the time until which they were in force."""
        self.bounds: dict[ShareKey, int] = {}
        self.fell_s = -1.0

    @property
    def left_mib(self) -> int:
        booked_mib = sum(one.request_mib for one in self.wants.values())
        return max(0, MEMORY_MIB - booked_mib - self.others_mib)

    @property
    def used_mib(self) -> int:
        return sum(one.used_above_mib for one in self.wants.values())

    def top_mib(self, key: ShareKey) -> int:
        """The highest bound on which a process may still act."""
        past = [mib for until_s, mib in self.past[key] if until_s > self.now_s - SETTLE_S]
        return max([self.bounds.get(key, self.wants[key].request_mib), *past])

    def disturb(self) -> None:
        chance, before = self.chance, self.left_mib
        what = chance.randrange(10)
        if what == 0 and len(self.wants) < 5:
            request = chance.randint(1, 3000)
            if request <= self.left_mib:
                key = ((f"uid-{self.number}", "main"), GPU)
                self.number += 1
                limit = chance.randint(request, MEMORY_MIB)
                self.wants[key] = Want(request_mib=request, limit_mib=limit)
                self.past[key] = []
        elif what == 1:
            self.others_mib = chance.randint(0, MEMORY_MIB)
        elif what == 2 and self.wants:
            key = chance.choice(list(self.wants))
            for book in (self.wants, self.past, self.bounds):
                book.pop(key, None)
        if self.left_mib < before:
            self.fell_s = self.now_s

    def use(self) -> None:
        for key, one in self.wants.items():
            if self.chance.random() < 0.5:
                used = one.used_mib
                if self.chance.random() < 0.3:
                    used = self.chance.randint(0, used)
                else:
                    used = max(used, self.chance.randint(0, self.top_mib(key)))
                self.wants[key] = Want(
                    request_mib=one.request_mib, limit_mib=one.limit_mib, used_mib=used
                )

    def divide(self) -> None:
        self.now_s += TICK_S
        held = {
            key: max(one.used_above_mib, self.top_mib(key) - one.request_mib)
            for key, one in self.wants.items()
        }
        bounds = self.grants.divide({GPU: self.left_mib}, self.wants, self.now_s)
        assert bounds.keys() == self.wants.keys()
        for key, one in self.wants.items():
            assert one.request_mib <= bounds[key] <= one.limit_mib
        most = max(self.left_mib, sum(held.values()))
        assert (
            sum(max(bounds[key] - one.request_mib, held[key]) for key, one in self.wants.items())
            <= most
        )
        reported = BurstBook().look(self.wants, bounds, self.now_s).get(GPU, ())
        total_mib = sum(one.memory_mib for one in reported)
        assert self.used_mib <= total_mib <= max(self.left_mib, self.used_mib)
        for key, mib in self.bounds.items():
            self.past[key].append((self.now_s, mib))
        self.bounds = bounds


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_bounds_never_promise_more_than_is_left(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(STEPS):
        world.disturb()
        world.divide()
        was_within = world.used_mib <= world.left_mib
        world.use()
        if was_within and world.now_s - world.fell_s > SETTLE_S + TICK_S:
            assert world.used_mib <= world.left_mib


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_settled_bounds_are_equal_parts_of_what_is_left(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(STEPS // 3):
        world.disturb()
        world.divide()
        world.use()
    for _ in range(20):
        world.divide()
    if not world.wants:
        return

    def taken_mib(level: int) -> int:
        return sum(
            max(min(one.most_mib, level), one.used_above_mib) for one in world.wants.values()
        )

    above = {key: world.bounds[key] - one.request_mib for key, one in world.wants.items()}
    level = max(above.values())
    assert all(above[key] == min(level, one.most_mib) for key, one in world.wants.items())
    assert level == 0 or taken_mib(level) <= world.left_mib
    if any(one.most_mib > level for one in world.wants.values()):
        assert taken_mib(level + 1) > world.left_mib, "what is left is granted"
