# SPDX-License-Identifier: Apache-2.0
"""500 nodes, 50,000 operations, a scheduler killed every 30 s: no device is ever over capacity.

Two schedulers are active on one in-memory bus and one simulated API server, on an event loop whose
time stands still while any task can run, so a run depends on its seed alone. Pods come, are bound
by either scheduler to a node that its own table offers (now and then to any node, or by both at
once), report states, finish and are deleted. In turn each scheduler is killed at any point, calls
in flight included, and a replacement starts from the data of the bus and the API server.

Two judges check every single change, and neither asks a scheduler: the first reads pods as the API
server assigns, finishes and removes them with their signed placements, the second the ledger's
records in the order in which they were stored. The suite executes a part of the operations, for its
time; HAMI_FLEET_OPS=50000 executes all, HAMI_FLEET_SEED sets another seed.

Memory in MiB, compute in percent of one device, times in seconds of the simulated clock.
"""

import logging
import os
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, Booked, ContainerShares, booked_by_device
from hami_common.pods import annotations
from hami_common.pods.signing import SignedPlacement
from hami_core.placement.verdicts import Verdicts
from hami_scheduler.shell.extender_wire import BindArgs
from hami_sim.apiserver.errors import Obj
from hami_sim.apiserver.store import Change
from tests.support.builders import as_admitted
from tests.support.ledger_outside import MemoryOutside, SteppedLoop
from tests.support.ledger_troubles import SteppedClock
from tests.support.ledger_world import LEASE_S, LedgerWorld, fold, ledger_world, rebuild

OPERATIONS = int(os.environ.get("HAMI_FLEET_OPS", "3000"))
SEED = int(os.environ.get("HAMI_FLEET_SEED", "5"))
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(max(120, OPERATIONS // 20))]

NODES = 500
DEVICES = 4
MEMORY_MIB = 40_000
SLOTS = ("alpha", "beta")
WORKERS = 8
KILL_S = 30.0
PER_S = 20
"""Operations in a second of simulated time."""
STEP = 20
"""Operations between two moves of the clock."""
CROWD = min(1_200, OPERATIONS // 5)
"""Pods that are there at most times."""
HOT = 40
"""Nodes that most pods are sent to, so that they are full and schedulers conflict there."""
FINISHED = ("Succeeded", "Failed")


def fleet() -> Iterator[NodeDevices]:
    for number in range(NODES):
        yield NodeDevices(
            node=f"node-{number:03d}",
            vendor="nvidia",
            boot_id="1750000000000-a",
            seq=1,
            time_s=0.0,
            config_generation=1,
            devices=tuple(
                Device(
                    uuid=f"GPU-{number}-{index}",
                    vendor="nvidia",
                    index=index,
                    type="NVIDIA H100",
                    memory_mib=MEMORY_MIB,
                    capacity_mib=MEMORY_MIB,
                    slots=3,
                    numa=index // 2,
                )
                for index in range(DEVICES)
            ),
        )


class Books:
    """Bookings of every device, derived from allocations and releases only."""

    def __init__(self, name: str) -> None:
        self.violations: list[str] = []
        self._name = name
        self._held: dict[str, dict[str, Booked]] = defaultdict(dict)
        self._by_holder: dict[str, tuple[str, ...]] = {}

    def take(self, holder: str, containers: tuple[ContainerShares, ...]) -> None:
        self.give_back(holder)
        booked = booked_by_device(containers)
        self._by_holder[holder] = tuple(booked)
        for uuid, share in booked.items():
            self._held[uuid][holder] = share
            total = NOTHING
            for some in self._held[uuid].values():
                total = total.plus(some)
            if (
                total.memory_mib > MEMORY_MIB
                or total.core_pct > 100
                or total.slots > 3
                or (total.exclusive and total.slots > 1)
            ):
                self.violations.append(f"{self._name}: {uuid} holds {self._held[uuid]}")

    def give_back(self, holder: str) -> None:
        for uuid in self._by_holder.pop(holder, ()):
            del self._held[uuid][holder]


class Fleet:
    """A cluster, its operations, and its judges."""

    def __init__(self, world: LedgerWorld, rng: random.Random) -> None:
        self.world = world
        self.done: Counter[str] = Counter()
        self.pods_books = Books("pods")
        self._rng = rng
        self._made = 0
        self._waiting: list[Obj] = []
        self._killed_s = 0.0
        self._since_step = 0
        self._verdicts: dict[str, Verdicts] = {}
        world.kube.on_change(self._watch)

    def _watch(self, resource: str, change: Change) -> None:
        """Track bookings as the first judge: a pod holds its placement until its end."""
        if resource != "pods":
            return
        pod = change.new.obj
        meta = pod["metadata"]
        is_gone = change.type == "DELETED" or pod["status"].get("phase") in FINISHED
        text = meta.get("annotations", {}).get(annotations.ALLOCATION)
        if is_gone:
            self.pods_books.give_back(meta["uid"])
        elif text and change.old is not None and not change.old.obj["spec"].get("nodeName"):
            signed: SignedPlacement = self.world.verifier.verify(
                text, pod_uid=meta["uid"], node=pod["spec"]["nodeName"]
            )
            self.pods_books.take(meta["uid"], signed.placement.containers)

    async def run(self, operations: int) -> None:
        """Execute so many operations, several at a time."""
        left = operations

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self._operate()

        async with anyio.create_task_group() as group:
            for _ in range(WORKERS):
                group.start_soon(work)

    async def _operate(self) -> None:
        self._since_step += 1
        if self._since_step >= STEP:
            self._since_step = 0
            await self.world.pass_time(STEP / PER_S)
            now_s = self.world.clock.monotonic_s()
            if now_s - self._killed_s >= KILL_S:
                self._killed_s = now_s
                slot = SLOTS[self.done["kill"] % len(SLOTS)]
                self.done["kill"] += 1
                await self.world.replace(slot)
        chance = self._rng.random()
        if chance < 0.5 or not self._made:
            await self._bind()
        elif chance < 0.55:
            await self._report()
        else:
            await self._end()

    # --- users and kube-scheduler ----------------------------------------------------------------

    def _new_pod(self) -> Obj:
        self._made += 1
        rng = self._rng
        limits = {"nvidia.com/gpu": rng.choice(("1", "1", "1", "2"))}
        if rng.random() < 0.1:
            limits["nvidia.com/gpucores"] = "100"
        else:
            limits["nvidia.com/gpumem"] = str(rng.randrange(2_000, 24_000, 500))
            limits["nvidia.com/gpucores"] = str(rng.choice((10, 25, 40, 60)))
        return self.world.kube.add_pod(
            as_admitted(
                {
                    "metadata": {
                        "name": f"p{self._made}",
                        "namespace": "default",
                        "uid": f"uid-{self._made}",
                        "labels": {annotations.MANAGED_LABEL: "true"},
                    },
                    "spec": {
                        "schedulerName": "hami-scheduler",
                        "containers": [
                            {"name": "main", "image": "x", "resources": {"limits": limits}}
                        ],
                    },
                }
            )
        )

    async def _bind(self) -> None:
        pod = self._waiting.pop() if len(self._waiting) > WORKERS else self._new_pod()
        slots = list(SLOTS) if self._rng.random() < 0.05 else [self._rng.choice(SLOTS)]
        async with anyio.create_task_group() as group:
            for slot in slots:
                group.start_soon(self._ask, pod, slot)
        current = self.world.kube.pod("default", pod["metadata"]["name"])
        if current is not None and not current["spec"].get("nodeName"):
            self._waiting.insert(0, current)

    async def _ask(self, pod: Obj, slot: str) -> None:
        replica = self.world.replicas[slot]
        meta = pod["metadata"]
        node = self._choose(pod, slot)
        args = BindArgs(
            pod_name=meta["name"], pod_namespace="default", pod_uid=meta["uid"], node=node
        )
        if self._rng.random() < 0.2:
            self.done[f"admit {await replica.admit(args)}"] += 1
        else:
            self.done[f"bind {await replica.bind(args)}"] += 1

    def _choose(self, pod: Obj, slot: str) -> str:
        """Return a node of this scheduler's filter, now and then any: views become stale."""
        state = self.world.replicas[slot].scheduler.state
        known = state.pods.get(pod["metadata"]["uid"])
        names = list(self.world.devices)
        if self._rng.random() < 0.7:
            names = names[:HOT]
        if self._rng.random() < 0.1 or known is None or known.request is None:
            return self._rng.choice(names)
        verdicts = self._verdicts.get(slot)
        if verdicts is None or verdicts._table is not state.table:  # noqa: SLF001 - its owner
            verdicts = self._verdicts[slot] = Verdicts(state.table)
        asked = self._rng.sample(names, 20)
        fitting = verdicts.filter(known.request, asked).feasible
        return self._rng.choice(fitting or asked)

    async def _report(self) -> None:
        """Report a pod as running."""
        pod = self._some_pod()
        if pod is not None and pod["spec"].get("nodeName"):
            self.done["running"] += 1
            await self.world.kube.set_status(pod, phase="Running")

    async def _end(self) -> None:
        """Finish a pod, or remove it."""
        pod = self._some_pod()
        if pod is None or len(self.world.kube.store.tables["pods"].rows) < CROWD:
            self.done["end put-off"] += 1
            return
        if self._rng.random() < 0.3 and pod["status"].get("phase") not in FINISHED:
            self.done["finished"] += 1
            await self.world.kube.set_status(pod, phase=self._rng.choice(FINISHED))
        else:
            self.done["removed"] += 1
            await self.world.kube.remove_pod(pod, grace_s=0)

    def _some_pod(self) -> Obj | None:
        """Return one of the last created pods, which most likely still exists."""
        for _ in range(20):
            number = self._rng.randrange(max(1, self._made - 2 * CROWD), self._made + 1)
            pod = self.world.kube.pod("default", f"p{number}")
            if pod is not None:
                return pod
        return None

    # --- the end ---------------------------------------------------------------------------------

    def log(self) -> list[tuple[int, AllocationRecord]]:
        """Every record that was stored, in order."""
        stored = self.world.acked[subjects.ALLOC_BUCKET]
        return [
            (seq, codec.decode(stored[seq].value, AllocationRecord, what=stored[seq].key))
            for seq in sorted(stored)
        ]

    async def settle(self) -> list[str]:
        """Let leases end; then ledger, pods and both schedulers must agree."""
        differences = ["nothing was compared"]
        waited_s = 0.0
        while differences and waited_s < 20 * LEASE_S:
            await self.world.pass_time(5.0)
            await anyio.sleep(0.02)
            waited_s += 5.0
            by_log = fold(self.log())
            differences = []
            if by_log != rebuild(self.world.kube.pods(), self.world.verifier):
                differences.append("ledger and pods differ")
            for slot, replica in self.world.replicas.items():
                held = {
                    (h.record.node, h.record.pod_uid): h.record.containers
                    for h in replica.scheduler.state.ledger.holdings()
                }
                if held != {key: one.containers for key, one in by_log.items()}:
                    differences.append(f"{slot} and the ledger differ")
        return differences


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@asynccontextmanager
async def open_fleet(seed: int) -> AsyncIterator[Fleet]:
    clock, rng = SteppedClock(), random.Random(seed)
    random.seed(seed)  # spreads the schedulers' own pauses between two attempts
    async with ledger_world(MemoryOutside(clock), clock=clock, nodes=fleet(), rng=rng) as world:
        built = Fleet(world, rng)
        for slot in SLOTS:
            await world.start(slot)
        await built.settle()
        yield built


async def test_no_device_ever_holds_too_much() -> None:
    async with open_fleet(SEED) as built:
        await built.run(OPERATIONS)
        differences = await built.settle()
        ledger_books = Books("ledger")
        for _, record in built.log():
            holder = subjects.allocation_key(record.node, record.pod_uid)
            if record.op == "release":
                ledger_books.give_back(holder)
            else:
                ledger_books.take(holder, record.containers)
        print(msgspec.json.encode(built.done).decode())
    assert built.pods_books.violations == []
    assert ledger_books.violations == []
    assert differences == []
    assert built.done["kill"] >= OPERATIONS / PER_S / KILL_S - 1
    assert built.done["bind bound"] > OPERATIONS / 5
    assert built.done["bind no-fit"] > 0
    assert built.done["admit admitted"] > OPERATIONS / 50
    assert built.done["admit no-fit"] > 0
    assert built.done["removed"] + built.done["finished"] > OPERATIONS / 20
