# SPDX-License-Identifier: Apache-2.0
"""Ledger and pods are reconciled: at start, after a wiped bus, and periodically."""

import anyio.lowlevel
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.pods import annotations
from hami_common.pods.signing import Signer
from hami_core.ledger import binding
from hami_core.ledger.stimuli import RecordSeen
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_binder import foreign_record
from tests.unit.scheduler.shell.world import LEASE_S, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1", count=2)


async def world_with_bound(*names: str, mem_mib: int = 3000) -> World:
    """A cluster in which these pods are bound, with a scheduler that has ended since."""
    world = World()
    await world.add_devices(NODE)
    async with world.scheduler("s0") as s:
        for name in names:
            pod = world.add_pod(builders.pod(name, mem_mib=mem_mib))
            assert await s.bind(pod, "n1") == ""
        await s.scheduler.drain(limit_s=1)
    return world


def carry(world: World, name: str, record: AllocationRecord, *, seq: int, phase: str) -> None:
    """Add a bound pod that carries ``record`` as its allocation."""
    pod = builders.pod(name)
    pod["spec"]["nodeName"] = record.node
    pod["status"]["phase"] = phase
    pod["metadata"]["annotations"] |= binding.allocation_annotations(
        record, ledger_seq=seq, signer=world.signer
    )
    world.add_pod(pod)


async def test_wiped_ledger_is_rebuilt_equal_but_for_sequences() -> None:
    world = await world_with_bound("a", "b", "c", "d")
    before = {r.pod_uid: (r.allocation_id, r.containers) for r in world.live()}
    world.bus.wipe()
    await world.add_devices(NODE)
    async with world.scheduler("s1") as s:
        assert {r.pod_uid: (r.allocation_id, r.containers) for r in world.live()} == before
        assert {state.state for state in world.states().values()} == {"bound"}
        assert s.value("hami_scheduler_ledger_rebuilds_total") == 1
        s.state.ledger.check()
    world.check_settled(NODE)


async def test_wiped_ledger_is_rebuilt_before_any_bind() -> None:
    world = await world_with_bound("a", "b", "c", "d", mem_mib=7000)
    async with world.scheduler("s1") as s:
        world.bus.wipe()
        await quiet()
        await world.add_devices(NODE)
        await quiet()
        assert len(world.live()) == 4
        error = await s.bind(world.add_pod(builders.pod("e", mem_mib=7000)), "n1")
        assert "CardInsufficientMemory" in error
    world.check_settled(NODE)


@pytest.mark.parametrize("call", range(4))
async def test_storage_that_is_lost_again_during_a_rebuild_is_rebuilt_again(call: int) -> None:
    world = await world_with_bound("a", "b", "c", "d", mem_mib=7000)
    async with world.scheduler("s1") as s:

        async def lose_again() -> None:
            world.bus.wipe()
            await world.add_devices(NODE)
            # The feeds see the loss and the end of their new delivery, as if this call were slow.
            for _ in range(100):
                await anyio.lowlevel.checkpoint()

        s.seen.after[len(s.seen.calls) + call] = lose_again
        await lose_again()
        await world.advance(200.0, "n1")
        assert s.seen.calls[call:], "the rebuild came to this call"
        assert {record.pod for record in world.live()} == {"a", "b", "c", "d"}
        error = await s.bind(world.add_pod(builders.pod("e", mem_mib=7000)), "n1")
        assert "CardInsufficientMemory" in error
    world.check_settled(NODE)


async def test_ledger_ahead_of_the_bus_is_rebuilt() -> None:
    world = await world_with_bound("a")
    async with world.scheduler("s1") as s:
        ghost = RecordSeen(seq=999, record=foreign_record("uid-ghost"), now_s=0.0)
        assert s.state.tell(ghost)
        pod = world.add_pod(builders.pod("b"))
        assert "records of node n1 are gone" in await s.bind(pod, "n1")
        await world.advance(10.0, "n1")
        assert await s.bind(pod, "n1") == ""
        assert s.value("hami_scheduler_ledger_rebuilds_total") == 1
    world.check_settled(NODE)


async def test_restart_without_differences_writes_nothing() -> None:
    world = await world_with_bound("a", "b")
    async with world.scheduler("s1") as s:
        await s.scheduler.drain(limit_s=1)
        assert s.seen.calls == []


async def test_rebuild_moves_waiting_pods_so_that_late_bindings_fail() -> None:
    world = await world_with_bound("a")
    late = world.add_pod(builders.pod("late"))
    version = late["metadata"]["resourceVersion"]
    world.bus.wipe()
    async with world.scheduler("s1"):
        assert world.kube.pod("late")["metadata"]["resourceVersion"] != version
    stuck = {"metadata": {"uid": "uid-late", "resourceVersion": version}, "target": {"name": "n1"}}
    with pytest.raises(Exception, match="ResourceVersion"):
        world.kube.bind(pod_path(late), stuck)


async def test_pods_that_ended_meanwhile_are_released_at_start() -> None:
    world = await world_with_bound("gone", "done", "runs")
    world.kube.remove(pod_path(world.kube.pod("gone")))
    world.kube.change(pod_path(world.kube.pod("done")), status={"phase": "Succeeded"})
    async with world.scheduler("s1"):
        await quiet()
    assert [record.pod for record in world.live()] == ["runs"]


async def test_pod_without_its_label_keeps_its_share_over_a_restart() -> None:
    world = await world_with_bound("a")
    path = pod_path(world.kube.pod("a"))
    world.kube.change(path, metadata={"labels": {annotations.MANAGED_LABEL: None}})
    async with world.scheduler("s1"):
        await quiet()
    assert [record.pod for record in world.live()] == ["a"]
    assert world.kube.pod("a")["metadata"]["labels"] == {annotations.MANAGED_LABEL: "true"}


async def test_older_commitment_wins_a_share_that_two_pods_carry() -> None:
    world = World()
    await world.add_devices(builders.devices("n1", memory_mib=10000))
    for seq, name in ((7, "late"), (3, "early")):
        carry(world, name, foreign_record(f"uid-{name}", memory_mib=8000), seq=seq, phase="Pending")
    async with world.scheduler("s1") as s:
        assert [record.pod for record in world.live()] == ["early"]
        state = world.states()["n1.uid-late"]
        assert (state.state, state.code) == ("failed", "share-lost")
        assert s.value("hami_scheduler_repairs_total", action="share-lost") == 1


async def test_pod_that_runs_wins_its_share_even_over_capacity() -> None:
    world = World()
    await world.add_devices(builders.devices("n1", memory_mib=10000))
    for seq, name in ((3, "early"), (7, "late")):
        carry(world, name, foreign_record(f"uid-{name}", memory_mib=8000), seq=seq, phase="Running")
    async with world.scheduler("s1") as s:
        await s.scheduler.drain(limit_s=1)
        assert {record.pod for record in world.live()} == {"early", "late"}
        assert s.value("hami_scheduler_over_bookings_total") == 1


async def test_allocation_signed_with_an_untrusted_key_is_not_restored() -> None:
    world = World()
    await world.add_devices(NODE)
    world.signer = Signer.generate()
    carry(world, "forged", foreign_record("uid-forged"), seq=3, phase="Running")
    async with world.scheduler("s1"):
        await quiet()
    assert world.records() == {}


async def test_record_of_a_pod_with_an_unreadable_signature_is_kept() -> None:
    world = await world_with_bound("a")
    path = pod_path(world.kube.pod("a"))
    world.kube.change(path, metadata={"annotations": {annotations.ALLOCATION: "{}"}})
    async with world.scheduler("s1"):
        await world.advance(LEASE_S + 12, "n1")
    assert [record.pod for record in world.live()] == ["a"]


async def test_reservation_of_the_former_self_is_examined_at_once() -> None:
    world = World()
    await world.add_devices(NODE)
    world.add_pod(builders.pod("mine"))
    world.add_pod(builders.pod("others"))
    own = foreign_record("uid-mine")
    await world.record(replace(own, writer="s1"))
    await world.record(foreign_record("uid-others"))
    async with world.scheduler("s1"):
        await quiet()
        assert [record.pod for record in world.live()] == ["others"]
        await world.advance(LEASE_S + 12, "n1")
        assert world.live() == []


async def test_bind_that_another_replica_ended_without_its_state_is_confirmed() -> None:
    world = await world_with_bound("a")
    world.bus.stream(subjects.STATE_BUCKET).wipe()
    async with world.scheduler("s1"):
        await quiet()
    assert [state.state for state in world.states().values()] == ["bound"]


async def test_state_that_the_agent_wrote_is_not_overwritten() -> None:
    world = await world_with_bound("a")
    (record,) = world.live()
    await world.report_state(
        StateRecord(
            state="running",
            allocation_id=record.allocation_id,
            node="n1",
            pod_uid="uid-a",
            namespace="default",
            pod="a",
            ledger_seq=1,
        )
    )
    async with world.scheduler("s1", reconcile_s=20.0):
        await world.advance(60.0, "n1")
    assert [state.state for state in world.states().values()] == ["running"]


async def test_start_waits_for_an_unavailable_api_server() -> None:
    world = await world_with_bound("a")
    world.bus.wipe()
    await world.add_devices(NODE)
    inner = world.kube.list_pages
    failures = 3

    async def away(*args: object, **more: object) -> object:
        nonlocal failures
        if failures:
            failures -= 1
            raise Unavailable(peer="API server", detail="away")
        return await inner(*args, **more)  # type: ignore[arg-type]  # passed on as it came

    world.kube.list_pages = away  # type: ignore[method-assign, assignment]  # an API server in trouble
    async with world.scheduler("s1", wait=False) as s:
        await quiet()
        assert s.state.missing() == ["comparison of ledger and pods"]
        await world.clock.advance(20.0)
        assert s.state.missing() == []
    assert [record.pod for record in world.live()] == ["a"]


async def test_differences_that_appear_later_are_found_by_the_periodic_comparison() -> None:
    world = await world_with_bound("a")
    async with world.scheduler("s1", reconcile_s=60.0) as s:
        carry(world, "b", foreign_record("uid-b"), seq=9, phase="Running")
        await world.record(foreign_record("uid-nobody"))
        await quiet()
        await world.advance(70.0, "n1")
        await s.scheduler.drain(limit_s=1)
    assert {record.pod for record in world.live()} == {"a", "b"}


async def test_old_tombstones_are_removed_except_the_newest_record_of_a_node() -> None:
    world = await world_with_bound("a", "b", "c")
    async with world.scheduler("s1", reconcile_s=100.0, tombstone_s=150.0) as s:
        for name in ("a", "b", "c"):
            world.kube.remove(pod_path(world.kube.pod(name)))
            await quiet()
        assert len(world.records()) == 3
        await world.advance(320.0, "n1")
        (key,) = world.records()
        assert world.records()[key][0] == s.state.ledger.fence("n1") == 6
        assert await s.bind(world.add_pod(builders.pod("d")), "n1") == ""
