# SPDX-License-Identifier: Apache-2.0
"""Partitions are created when shares are placed, kept while in use, and then removed."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.events.allocation import CLAIM
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.core.partitions import owner_of
from hami_nodeagent.drivers.simulated.partitioner import Act, Turn
from tests.support.partitions_world import World, share

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_all_partitions_of_a_pod_exist_before_it_is_bound(world: World) -> None:
    async with world.agent() as partitions:
        world.place(
            "a",
            share("nvidia-0", "1g", 6),
            share("nvidia-1", "3g", 0),
            share("ascend-0", "vir05"),
            share("cambricon-0"),
            bound=False,
        )
        await world.live("a")
        world.check()
        board = world.site.picture.partitions
        carried = board.carried[owner_of(world.entries["a"], "main", 2)]
        assert (carried.uuid, carried.profile) == ("ascend-0", "vir05")
        assert board.handles(board.owners(world.entries["a"], "main", "ascend")) == {
            "ascend-0": {"vnpu_id": "100"}
        }
        await world.settle(lambda: partitions.is_idle)


async def test_each_of_several_partitions_of_a_device_has_its_own_handles(world: World) -> None:
    async with world.agent():
        shares = (
            share("nvidia-0", "1g", 5),
            share("nvidia-0", "1g", 6),
            share("nvidia-1", "1g", 0),
        )
        world.place("a", *shares)
        await world.live("a")
        world.check()
        board = world.site.picture.partitions
        owners = board.owners(world.entries["a"], "main", "nvidia")
        handles = board.handles(owners, shares)
        assert sorted(handles) == ["nvidia-0/1g@5", "nvidia-0/1g@6", "nvidia-1"]
        assert len({one["mig_uuid"] for one in handles.values()}) == 3
        # Where one is not known, the other does not stand for it.
        known = {owner: uuid for owner, uuid in owners.items() if owner.number == 1}
        assert list(board.handles(known, shares)) == ["nvidia-0/1g@6"]


async def test_partition_of_an_ended_pod_is_replaced_by_the_next(world: World) -> None:
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0), granted=True)
        await world.live("a")
        world.leave("a")
        world.release("a")
        world.place("b", share("nvidia-0", "2g", 2))
        await world.live("b")
        world.check()


async def test_partition_of_a_container_that_may_still_run_is_not_touched(world: World) -> None:
    world.settings = {"tries": 1000}
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0), granted=True)
        await world.live("a")
        world.release("a")  # deleted by force: kubelet still has it
        world.place("b", share("nvidia-0", "3g", 0))
        world.place("c", share("nvidia-0", "1g", 6))
        await world.live("c")
        assert world.hardware["nvidia"].removed == []
        world.leave("a")
        await world.live("b")


async def test_recreated_pod_of_the_same_name_gets_the_place_of_the_first(world: World) -> None:
    world.settings = {"tries": 1000}
    async with world.agent():
        world.place("web", share("nvidia-0", "3g", 0), granted=True)
        await world.live(["web"])
        world.release("web")
        world.leave("web")
        assert world.kubelet.pods is not None
        world.kubelet.pods.append(
            ListedPod(namespace="default", name="web", ids_by_container={"main": {}})
        )
        world.place("web-2", share("nvidia-0", "3g", 0), pod="web")
        await world.live(["web-2"])


async def test_reserved_share_gets_its_partition_when_bound(world: World) -> None:
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0), bound=False, held_for="preemption")
        world.place("b", share("nvidia-0", "1g", 6))
        await world.live("b")
        assert [part.profile for part in world.parts()] == ["1g"]
        world.place("a", share("nvidia-0", "3g", 0), held_for="preemption")
        await world.live("a")


async def test_no_partition_is_removed_before_ledger_and_pods_are_synced(world: World) -> None:
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0))
        await world.live("a")
    world.release("a")
    async with world.agent(knows_ledger=False, knows_pods=False) as partitions:
        world.place("b", share("nvidia-1", "1g", 0))
        await world.settle(lambda: partitions.is_idle)
        assert [part.profile for part in world.parts()] == ["3g"]
        world.site.picture.ledger_known = world.site.picture.pods_known = True
        world.tell()
        await world.live("b")
        await world.settle(lambda: [part.profile for part in world.parts()] == ["1g"])


async def test_after_a_reboot_partitions_are_made_again_without_the_ledger(world: World) -> None:
    async with world.agent():
        world.place("a", share("nvidia-0", "2g", 4), granted=True)
        await world.live("a")
    world.reboot()
    async with world.agent(knows_ledger=False, knows_pods=False) as partitions:
        (grant,) = world.site.picture.grants.of_pod("a")
        assert partitions.owners_of(grant)
        assert await partitions.ensure([grant]) == ""
        assert [(part.profile, part.start) for part in world.parts()] == [("2g", 4)]


async def test_lost_journal_is_learnt_from_hardware_and_ledger(world: World) -> None:
    async with world.agent():
        for start in range(3):
            world.place(f"p{start}", share("nvidia-0", "1g", start), granted=True)
        world.place("n", share("ascend-0", "vir05"), granted=True)
        await world.live([*world.entries])
    before = world.parts()
    world.journal.data = None
    async with world.agent():
        await world.live([*world.entries])
        world.check()
    assert sorted(world.parts(), key=repr) == sorted(before, key=repr)


async def test_indistinguishable_instances_are_left_alone(world: World) -> None:
    async with world.agent():
        first = world.place("a", share("ascend-0", "vir05"), granted=True)
        world.place("b", share("ascend-0", "vir05"), granted=True)
        await world.live("ab")
        given = world.site.picture.partitions.carried[owner_of(first, "main", 0)].instance_id
    before = world.parts()
    world.journal.data = None
    async with world.agent() as partitions:
        owner = owner_of(first, "main", 0)
        trouble = world.site.picture.partitions.trouble
        await world.settle(lambda: "the journal is lost" in trouble.get(owner, ""))
        await world.settle(lambda: partitions.is_idle)
        assert world.parts() == before
        partitions.given[owner] = given  # what its container was given is known after all
        (grant,) = world.site.picture.grants.of_pod("a")
        assert await partitions.ensure([grant]) == ""
        await world.live("ab")
        carried = world.site.picture.partitions.carried
        assert carried[owner].instance_id == given
        world.check()


async def test_foreign_partition_stays_and_is_reported(world: World) -> None:
    hand = world.plant("nvidia-0", "1g", 6, memory_mib=1000)
    async with world.agent():
        world.place("a", share("nvidia-0", "1g", 0))
        await world.live("a")
        world.check(foreign=[hand])
        assert [one.start for one in world.site.picture.partitions.foreign_by_uuid["nvidia-0"]] == [
            6
        ]
        world.release("a")
        await world.settle(lambda: world.parts() == [hand])


async def test_foreign_partition_is_removed_with_collect_foreign(world: World) -> None:
    world.settings = {"collect_foreign": True}
    busy = world.plant("nvidia-0", "1g", 6, memory_mib=1000, busy=True)
    world.plant("nvidia-0", "2g", 0, memory_mib=2000)
    async with world.agent():
        await world.settle(lambda: world.parts() == [busy])


async def test_partition_with_processes_is_not_removed_under_them(world: World) -> None:
    async with world.agent() as partitions:
        world.place("a", share("nvidia-0", "3g", 0))
        await world.live("a")
        (part,) = world.parts()
        world.change(part, busy=True)
        world.release("a")
        world.place("b", share("nvidia-0", "1g", 6))
        await world.live("b")
        await world.settle(lambda: partitions.is_idle)
        assert replace(part, busy=True) in world.parts()


async def test_allocation_fails_when_its_partition_cannot_be_made(world: World) -> None:
    hand = world.plant("nvidia-0", "1g", 0, memory_mib=1000)
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0), share("nvidia-1", "1g", 0))
        failures = world.site.picture.failures_by_uid
        await world.settle(lambda: "a" in failures)
        assert failures["a"].code == "partition-refused"
        assert "partitions that were not made by this agent" in failures["a"].reason
        # The other one is of no use any more.
        await world.settle(lambda: world.parts() == [hand])


async def test_transient_error_fails_no_pod(world: World) -> None:
    inner = world.hardware["nvidia"].inner
    points = ("create.half", "create.made", "instances", "create.begin")
    script = tuple(Turn(at=point, do="fail") for point in points)
    inner.store(replace(inner.stored(), script=script))
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0))
        await world.live("a")
        world.check()
        assert world.site.picture.failures_by_uid == {}
        assert inner.stored().script == ()


async def test_vanished_partition_is_recreated_without_a_limit_of_retries(world: World) -> None:
    world.settings = {"tries": 1}
    async with world.agent() as partitions:
        world.place("a", share("nvidia-0", "3g", 0), granted=True)
        await world.live("a")
        (part,) = world.parts()
        world.change(part, gone=True)
        hand = world.plant("nvidia-0", "1g", 0, memory_mib=1000)
        (grant,) = world.site.picture.grants.of_pod("a")
        owner = owner_of(world.entries["a"], "main", 0)
        partitions.check_soon("nvidia-0")
        trouble = world.site.picture.partitions.trouble
        await world.settle(lambda: "taken" in trouble.get(owner, ""))
        world.change(hand, gone=True)
        assert await partitions.ensure([grant]) == ""
        world.check()
        assert world.site.picture.failures_by_uid == {}


async def test_journal_that_cannot_be_stored_leaves_the_hardware_alone(world: World) -> None:
    full = True
    world.hook = lambda point: "fail" if full and point == "journal.begin" else ""
    async with world.agent() as partitions:
        world.place("a", share("nvidia-0", "3g", 0))
        registry = world.site.metrics.registry
        name = "hami_nodeagent_checkpoint_failures_total"
        await world.settle(lambda: (registry.get_sample_value(name) or 0) >= 3)
        assert world.parts() == []
        full = False
        await world.live("a")
        await world.settle(lambda: partitions.is_idle)
        world.check()


async def test_start_is_refused_with_the_reason_after_a_bounded_wait(world: World) -> None:
    world.settings = {"pre_start_wait_s": 0.05, "tries": 1000}
    world.plant("nvidia-0", "1g", 0, memory_mib=1000)
    async with world.agent() as partitions:
        world.place("a", share("nvidia-0", "3g", 0))
        grant = world.grant("a")
        world.tell()
        assert "positions [0] are taken" in await partitions.ensure([grant])


async def test_new_reservation_of_the_same_container_keeps_its_partition(world: World) -> None:
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 0))
        await world.live("a")
        before = world.parts()
        world.place("a", share("nvidia-0", "3g", 0))
        await world.live("a")
        world.check()
        assert world.parts() == before
        assert world.hardware["nvidia"].removed == []


async def test_partition_of_a_claim_stays_until_the_claim_is_unprepared(world: World) -> None:
    async with world.agent() as partitions:
        world.place("a", share("nvidia-0", "3g", 0), bound=False, origin=CLAIM)
        await world.live("a")
        grant = replace(world.grant("a"), ids=(), is_claim=True)
        world.grants[:] = [grant]
        world.leave("a")  # kubelet lists no pod of a claim's name
        world.release("a")
        world.place("b", share("nvidia-0", "1g", 6))
        await world.live("b")
        await world.settle(lambda: partitions.is_idle)
        assert world.hardware["nvidia"].removed == []
        world.grants.clear()
        world.site.picture.grants.drop_pod("a")
        world.tell()
        await world.settle(lambda: [part.profile for part in world.parts()] == ["1g"])


async def test_claim_whose_partition_cannot_be_made_does_not_fail(world: World) -> None:
    hand = world.plant("nvidia-0", "1g", 6)
    attempts: list[str] = []

    def hook(point: str) -> Act:
        attempts.extend([point] if point == "create.begin" else [])
        return ""

    world.hook = hook
    async with world.agent():
        world.place("a", share("nvidia-0", "3g", 4), bound=False, origin=CLAIM)
        await world.settle(lambda: len(attempts) > 10)
        assert world.site.picture.failures_by_uid == {}
        world.change(hand, gone=True)
        await world.live("a")
