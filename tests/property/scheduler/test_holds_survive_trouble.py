# SPDX-License-Identifier: Apache-2.0
"""Gangs and preemptions of two schedulers that are cut off at random, on one bus in memory.

After every step: no device is allocated twice, and each scheduler's table equals its records. A
member of a gang gets a node only while its gang has its whole reservation. In the end, once the
pods are gone, no hold is left; and before that, all fitting pods have been placed. Judged from pods
and records, never from a table of ours, but for each ledger's check of itself.
"""

import random
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.support.ledger_outside import SteppedLoop
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, quiet

pytestmark = pytest.mark.anyio

NODES = ["n1", "n2", "n3"]
DEVICES = [builders.devices(node, count=2, memory_mib=10_000) for node in NODES]
SEEDS = (0, 1, 2, 5)
STEPS = 40


class Drive:
    """Random steps on one world."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        self.running: dict[str, Running] = {}
        self.cut: dict[str, anyio.Event] = {}
        self.made = 0
        self.cuts = 0
        self.sizes: dict[str, int] = {}

    async def live(self, writer: str) -> None:
        """Run one scheduler, restarted whenever it was cut off."""
        while True:
            self.cut[writer] = anyio.Event()
            async with self.world.scheduler(
                writer, wait=False, preempt_retry_s=1.0, gang_retry_s=1.0, retry_s=0.5
            ) as s:
                self.running[writer] = s
                await self.cut[writer].wait()

    def waiting(self) -> list[builders.Obj]:
        return [
            pod
            for pod in self.world.kube.pods()
            if not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp")
        ]

    def add_gang(self) -> None:
        self.made += 1
        gang, size = f"g{self.made}", self.random.randint(2, 4)
        self.sizes[gang] = size
        for number in range(size):
            told = {"hami.io/gang": gang, "hami.io/gang-size": str(size)}
            self.add_pod(f"{gang}-{number}", annotated=told)

    def add_single(self) -> None:
        self.made += 1
        self.add_pod(f"p{self.made}", priority=self.random.choice([0, 5, 10]))

    def add_pod(self, name: str, *, priority: int = 0, **more: Any) -> None:
        mem_mib = self.random.choice([4000, 9000])
        pod = builders.pod(name, mem_mib=mem_mib, cores=0, **more)
        pod["spec"]["priority"] = priority
        self.world.add_pod(pod)

    async def ask(self) -> None:
        """Filter for a waiting pod, and mostly a bind where it may go."""
        if not (pods := self.waiting()):
            return
        pod, s = self.random.choice(pods), self.random.choice(list(self.running.values()))
        answer = await s.filter(pod, self.random.sample(NODES, 3))
        gang = pod["metadata"]["annotations"].get("hami.io/gang")
        if not answer["NodeNames"]:
            return
        if gang is not None:
            members = [r for r in self.world.live() if r.pod.startswith(f"{gang}-")]
            assert len(members) >= self.sizes[gang] - 1, "a part of a gang was told its nodes"
        if self.random.random() < 0.9:
            await s.bind(pod, self.random.choice(answer["NodeNames"]))

    async def evicted_pods_leave(self) -> None:
        for pod in self.world.kube.pods():
            if pod["metadata"].get("deletionTimestamp"):
                self.remove(pod)

    def remove(self, pod: builders.Obj) -> None:
        meta = pod["metadata"]
        self.world.kube.remove(f"/api/v1/namespaces/default/pods/{meta['name']}")

    async def someone_ends(self) -> None:
        pods = [pod for pod in self.world.kube.pods() if pod["spec"].get("nodeName")]
        if pods:
            self.remove(self.random.choice(pods))

    async def cut_off(self) -> None:
        """Stop one scheduler at any point, also in the middle of a gang or of evictions."""
        writer = self.random.choice(list(self.cut))
        s = self.running[writer]

        async def stop() -> None:
            self.cuts += 1
            self.cut[writer].set()
            await anyio.sleep_forever()

        s.seen.before[len(s.seen.calls) + self.random.randint(0, 8)] = stop

    async def time_passes(self) -> None:
        await self.world.advance(7 * self.random.randint(1, 6), *NODES)

    def check(self) -> None:
        self.world.check(*DEVICES)
        for s in self.running.values():
            s.state.ledger.check()

    async def step(self, group: TaskGroup) -> None:
        """Run some operations at the same time, or let some time pass."""
        steps: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (20, self.ask),
            (3, self.evicted_pods_leave),
            (1, self.someone_ends),
            (2, self.cut_off),
            (2, self.time_passes),
        ]
        for _ in range(self.random.randint(1, 4)):
            (_, step) = self.random.choices(steps, [weight for weight, _ in steps])[0]
            if step == self.time_passes:
                await step()
            else:
                group.start_soon(step)

    async def finish(self) -> None:
        """Let both schedulers place the fitting pods, without faults."""
        for _ in range(12):
            await self.time_passes()
            await self.evicted_pods_leave()
            for pod in self.waiting():
                s = self.running["s1"]
                answer = await s.filter(pod, NODES)
                await quiet()
                if answer["NodeNames"]:
                    await s.bind(pod, answer["NodeNames"][0])
                await quiet()
            self.check()

    async def run(self) -> None:
        """All steps, in the time of two schedulers."""
        for _ in range(STEPS):
            if len(self.waiting()) < 6:
                (self.add_gang if self.random.random() < 0.4 else self.add_single)()
            await self.world.agents_beat()
            async with anyio.create_task_group() as group:
                await self.step(group)
                await quiet()
                group.cancel_scope.cancel()
            await quiet()
            self.check()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Use a loop whose time stands still while any task can run, so that a seed is repeated
    exactly.
    """
    return "asyncio", {"loop_factory": SteppedLoop}


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_doubled_nor_stuck(seed: int) -> None:
    drive = Drive(seed)
    world = drive.world
    for devices in DEVICES:
        await world.add_devices(devices)
    async with anyio.create_task_group() as group:
        for writer in ("s1", "s2"):
            group.start_soon(drive.live, writer)
        await quiet()
        await drive.run()
        await drive.finish()
        for pod in drive.waiting():
            if "hami.io/gang" not in pod["metadata"]["annotations"]:
                assert not (await drive.running["s2"].filter(pod, NODES))["NodeNames"]
        for pod in world.kube.pods():
            drive.remove(pod)
        await world.advance(200, *NODES)
        assert world.live() == []
        group.cancel_scope.cancel()
    assert drive.cuts, "no scheduler was cut off"
    assert {r.verdict for r in world.decisions("gang")} == {"placed"}
    assert "placed" in {r.verdict for r in world.decisions("preempt")}
    assert world.kube.evictions
