# SPDX-License-Identifier: Apache-2.0
"""Attacks the scheduler over the bus, in process: the input of its feeds, in memory and fast.

The messages are those of ``messages`` that the scheduler receives or watches. ``bus`` sends all
kinds to all services over a real server, at a hundredth of the pace.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hami_common.bus import subjects
from tests.attack.fuzz import messages
from tests.attack.fuzz.laws import DETAIL, Case, Told, chance_of, resident_mib
from tests.support.memorybus import MemoryBucket, MemoryBus, MemoryPublisher
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

KINDS = ("heartbeat", "fault", "record", "state", "devices")
LET_PASS_EVERY = 500
TRIES = 12
"""Reconciliations, of ten seconds each, within which a good pod has to be placed."""


class _Scheduler:
    def __init__(self, world: World, running: Running) -> None:
        self._world = world
        self._running = running
        self._publisher = MemoryPublisher(world.bus)
        self._buckets = {name: MemoryBucket(world.bus, name) for name in subjects.BUCKETS}
        self._cases = 0

    async def take(self, case: Case) -> Told:
        self._cases += 1
        kind = next(kind for kind in KINDS if messages.is_of(kind, case.kind))
        if case.kind.startswith("$KV."):
            _, name, key = case.kind.split(".", 2)
            await self._buckets[name].append(key, case.body)
        else:
            await self._publisher.publish(case.kind, case.body)
        await quiet()
        if self._cases % LET_PASS_EVERY == 0:
            await self._world.advance(1.0, messages.OTHER)
            for seen in (
                self._world.bus.published,
                self._running.seen.calls,
                self._world.kube.events,
                self._world.kube.node_touches,
            ):
                seen.clear()
        return Told(outcome=kind)

    async def finish(self) -> str:
        """Place a good pod on the node that the sender has no login for."""
        pod = self._world.add_pod(builders.pod("good", mem_mib=1000))
        error = ""
        for _ in range(TRIES):
            await self._world.advance(10.0, messages.OTHER)
            error = await self._running.bind(pod, messages.OTHER)
            if not error:
                return ""
        return f"a good pod is not bound afterwards{DETAIL}{error}"

    def processor_s(self) -> float:
        return time.process_time()

    def resident_mib(self) -> float:
        return resident_mib()


class Feeds:
    """Messages that the scheduler reads from the bus."""

    name = "feeds"
    full = 100_000
    few = 2_500
    is_shrunk = True

    def make(self, seed: str, number: int) -> Case:
        """Make a message; its subject is the kind of the case."""
        return messages.make(chance_of(seed, self.name, number), KINDS)

    @asynccontextmanager
    async def service(self) -> AsyncIterator[_Scheduler]:
        """Run a scheduler with two nodes over a bus in memory."""
        world = World()
        # The server's memory is not the scheduler's: old values would count against it.
        world.bus = MemoryBus(clock=world.clock, history=1)
        for node in (messages.OTHER, messages.OWN):
            await world.add_devices(builders.devices(node, count=2))
        async with world.scheduler() as running:
            await world.heartbeat(messages.OTHER, messages.OWN)
            yield _Scheduler(world, running)
