# SPDX-License-Identifier: Apache-2.0
"""A replica with a stale view must not act on it: cases found by random operations.

Each case has two schedulers on one bus; updates of the bus or of the pods for ``beta`` are held
back, while its calls go through.
"""

import random
from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationOp, AllocationRecord, StateRecord
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.pods import annotations
from hami_common.pods.signing import SignedPlacement
from hami_core.ledger.repair import Restore
from hami_scheduler.shell.extender_wire import BindArgs
from hami_sim.apiserver.errors import Obj
from tests.property.ledger.drive import STEP_S, TURN_S, Drive
from tests.support.builders import as_admitted
from tests.support.ledger_outside import MemoryOutside, SteppedLoop
from tests.support.ledger_troubles import SteppedClock
from tests.support.ledger_world import RECONCILE_S, Replica, ledger_world

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

NODE = "n1"
MEMORY_MIB = 10_000


class Case(Struct):
    """Two replicas, a node with one device."""

    drive: Drive
    alpha: Replica
    beta: Replica

    def add_pod(self, name: str, *, memory_mib: int) -> Obj:
        limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib)}
        return self.drive.world.kube.add_pod(
            as_admitted(
                {
                    "metadata": {
                        "name": name,
                        "namespace": "default",
                        "uid": f"uid-{name}",
                        "labels": {annotations.MANAGED_LABEL: "true"},
                    },
                    "spec": {
                        "containers": [{"name": "c", "image": "x", "resources": {"limits": limits}}]
                    },
                }
            )
        )

    async def bind(self, replica: Replica, pod: Obj) -> str:
        meta = pod["metadata"]
        return await replica.bind(
            BindArgs(
                pod_name=meta["name"],
                pod_namespace=meta["namespace"],
                pod_uid=meta["uid"],
                node=NODE,
            )
        )

    async def settle(self) -> None:
        """Let all operations in flight finish; the clock stands still."""
        await anyio.sleep(TURN_S)

    async def compare(self) -> None:
        """Let the replicas compare ledger and pods."""
        for _ in range(int(RECONCILE_S / STEP_S) + 1):
            await self.drive.world.pass_time(STEP_S)
            await self.settle()

    async def record(self, op: AllocationOp) -> None:
        """A third scheduler writes to the ledger for a pod that never gets its Binding."""
        record = AllocationRecord(
            op=op,
            allocation_id="ghost",
            node=NODE,
            pod_uid="uid-ghost",
            namespace="default",
            pod="ghost",
            containers=() if op == "release" else (_share(8_000),),
            lease_s=10 * RECONCILE_S,
        )
        key = subjects.allocation_key(NODE, record.pod_uid)
        await self.drive.world.records.append(key, codec.encode(record))
        await self.settle()

    def signed(self, pod: Obj) -> SignedPlacement:
        """Placement with which the pod was bound."""
        meta = pod["metadata"]
        found = self.drive.world.kube.pod(meta["namespace"], meta["name"])
        assert found is not None
        return self.drive.world.verifier.verify(
            found["metadata"]["annotations"][annotations.ALLOCATION], pod_uid=meta["uid"], node=NODE
        )

    async def states(self) -> list[StateRecord]:
        """Every state ever reported."""
        stored = await self.drive.world.outside.read(subjects.STATE_BUCKET, after=0)
        return [codec.decode(entry.value, StateRecord, what=entry.key) for entry in stored]

    def holders(self) -> list[str]:
        """Pods with a share, as beta sees it."""
        return [holding.record.pod for holding in self.beta.scheduler.state.ledger.holdings()]


def _share(memory_mib: int) -> ContainerShares:
    share = Share(vendor="nvidia", uuid="GPU-1", memory_mib=memory_mib)
    return ContainerShares(name="c", kind="app", shares=(share,))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


@pytest.fixture
async def case(anyio_backend: object) -> AsyncIterator[Case]:
    device = Device(
        uuid="GPU-1",
        vendor="nvidia",
        index=0,
        type="NVIDIA H100",
        memory_mib=MEMORY_MIB,
        capacity_mib=MEMORY_MIB,
    )
    node = NodeDevices(
        node=NODE,
        vendor="nvidia",
        boot_id="b",
        seq=1,
        time_s=0.0,
        config_generation=1,
        devices=(device,),
    )
    clock = SteppedClock()
    async with ledger_world(
        MemoryOutside(clock), clock=clock, nodes=[node], rng=random.Random(1)
    ) as world:
        drive = Drive(world, 1)
        await drive.start()
        yield Case(drive, world.replicas["alpha"], world.replicas["beta"])


async def test_share_is_not_called_lost_because_the_ledger_feed_lags(case: Case) -> None:
    await case.record("reserve")
    case.beta.records.news.become("hanging")
    await case.record("release")
    assert await case.bind(case.alpha, case.add_pod("a", memory_mib=8_000)) == "bound"
    await case.compare()
    case.beta.records.news.become("up")
    await case.drive.rest()
    assert case.holders() == ["a"]
    assert [(state.state, state.code) for state in await case.states()] == [("bound", "")]


async def test_pod_that_finished_unseen_does_not_win_its_share_back(case: Case) -> None:
    kube = case.drive.world.kube
    first = case.add_pod("first", memory_mib=8_000)
    assert await case.bind(case.alpha, first) == "bound"
    await kube.set_status(first, phase="Running")
    await case.settle()
    case.beta.kube.news.become("hanging")
    await kube.set_status(first, phase="Succeeded")
    await case.settle()
    assert await case.bind(case.alpha, case.add_pod("second", memory_mib=8_000)) == "bound"
    await case.settle()
    # A comparison that began while the first pod ran continues.
    case.beta.scheduler.tasks.add(Restore(signed=case.signed(first), must=True))
    await case.settle()
    case.beta.kube.news.become("up")
    await case.drive.rest()
    assert case.holders() == ["second"]


async def test_running_pod_wins_back_a_share_that_was_given_away(case: Case) -> None:
    kube = case.drive.world.kube
    first = case.add_pod("first", memory_mib=8_000)
    assert await case.bind(case.alpha, first) == "bound"
    await kube.set_status(first, phase="Running")
    await case.settle()
    record = case.beta.scheduler.state.ledger.holdings_of_pod("uid-first")[0].record
    release = msgspec.structs.replace(record, op="release", containers=())
    await case.drive.world.records.append(
        subjects.allocation_key(NODE, record.pod_uid), codec.encode(release)
    )
    await case.settle()
    assert await case.bind(case.alpha, case.add_pod("second", memory_mib=8_000)) == "bound"
    await case.compare()
    assert sorted(case.holders()) == ["first", "second"]
    assert case.beta.value("hami_scheduler_over_bookings_total") > 0


async def test_rebuild_believes_the_list_although_the_pod_watch_lags(case: Case) -> None:
    pod = case.add_pod("a", memory_mib=8_000)
    await case.settle()
    case.beta.kube.news.become("hanging")
    assert await case.bind(case.alpha, pod) == "bound"
    await case.settle()
    await case.drive.world.stop("alpha")
    await case.drive.world.wipe()
    case.drive.judge.begin_again()
    await case.compare()
    assert case.beta.scheduler.state.is_complete
    assert case.holders() == ["a"]
    case.beta.kube.news.become("up")
    await case.drive.rest()


async def test_rebuild_is_not_done_before_every_waiting_pod_was_moved(case: Case) -> None:
    case.add_pod("a", memory_mib=8_000)
    await case.settle()
    await case.drive.world.stop("alpha")
    case.beta.kube.lost_patches = 1
    await case.drive.world.wipe()
    case.drive.judge.begin_again()
    await case.compare()
    assert case.beta.kube.lost_patches == 0
    assert case.beta.scheduler.state.is_complete
    pod = case.drive.world.kube.pod("default", "a")
    assert pod is not None
    assert pod["metadata"]["annotations"][annotations.FENCE].startswith("rebuilt-")
