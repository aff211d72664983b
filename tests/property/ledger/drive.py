# SPDX-License-Identifier: Apache-2.0
"""Drives a cluster through rounds of random operations, each followed by a rest and a judgment.

In a rest no new faults occur and time passes until leases have ended and ledger and pods were
compared; then all views must agree. Seconds of the clock that the test moves, unless stated
otherwise.
"""

import random
import time
from collections import Counter

import anyio

from tests.property.ledger.chaos import SLOTS, Chaos
from tests.property.ledger.judge import Judge
from tests.support.ledger_world import LEASE_S, RECONCILE_S, LedgerWorld

ROUND = 2_000
"""Operations between two rests."""
STEP_S = 5.0
REST_S = LEASE_S + RECONCILE_S
"""In this time every lease ends and every replica compares ledger and pods once."""
LONGEST_REST_S = 10 * REST_S
LONGEST_REST_LOOP_S = 90.0
"""A rest lasts at least this much loop time: a rebuild on a real server takes real time."""
TURN_S = 0.02
"""Loop time that each step leaves to other tasks."""


class Drive:
    """A cluster, its random operations, and its judge."""

    def __init__(self, world: LedgerWorld, seed: int) -> None:
        random.seed(seed)  # spreads the schedulers' own pauses between two attempts
        self.world = world
        self.seed = seed
        self.chaos = Chaos(world, world.rng)
        self.judge = Judge(world, random.Random(seed))
        self._began_s = time.monotonic()

    async def start(self) -> None:
        """Start a scheduler in each slot."""
        for slot in SLOTS:
            await self.world.start(slot)
        await self.rest()

    async def run(self, operations: int) -> None:
        """Execute the operations in rounds, and judge after each."""
        left = operations
        while left > 0:
            self.world.troubles.calm = False
            await self.chaos.run(min(left, ROUND))
            left -= ROUND
            await self.rest()

    async def rest(self) -> None:
        """Let all operations settle; fails when the judge found a violation."""
        self.chaos.mend()
        rested_s = 0.0
        give_up_s = anyio.current_time() + LONGEST_REST_LOOP_S
        differences = ["nothing was compared"]
        while differences and (rested_s < LONGEST_REST_S or anyio.current_time() < give_up_s):
            await self.world.pass_time(STEP_S)
            await anyio.sleep(TURN_S)
            rested_s += STEP_S
            if rested_s >= REST_S and not self.world.troubles.under_way:
                await self.judge.absorb()
                differences = self.judge.differences() + await self.judge.event_differences()
        found = "\n  ".join(self.judge.problems + differences)
        assert not found, (
            f"seed {self.seed}, after {self.chaos.done.total()} operations:\n  {found}"
        )

    def report(self) -> str:
        """Summarize the operations, for people."""
        took_s = time.monotonic() - self._began_s
        count = self.chaos.done.total()
        metrics: Counter[str] = Counter()
        for replica in self.world.all_replicas:
            for name in ("fence_conflicts", "binding_conflicts", "lost_acks"):
                metrics[name] += int(replica.value(f"hami_scheduler_{name}_total"))
        parts = {
            "operations": self.chaos.done,
            "outcomes": self.chaos.outcomes,
            "troubles": self.world.troubles.met,
            "schedulers": metrics,
            "stored": self.judge.stored,
            "events": self.judge.events,
        }
        lines = [f"{count} operations in {took_s:.1f} s, {count / took_s:.0f} per second"]
        lines += [
            f"{name}: " + ", ".join(f"{what} {n}" for what, n in counts.most_common())
            for name, counts in parts.items()
        ]
        return "\n".join(lines)
