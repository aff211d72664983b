# SPDX-License-Identifier: Apache-2.0
"""Updates of others reach decisions: devices, silence, faults, pods that end, poison."""

import pytest

from hami_common.bus import subjects
from hami_common.events.inventory import DeviceFault
from hami_common.pods import annotations
from tests.support.memorybus import MemoryBucket
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

NODE = builders.devices("n1")


def fault(*, healthy: bool, seq: int, boot_id: str = "boot-1") -> DeviceFault:
    return DeviceFault(
        node="n1",
        vendor="nvidia",
        uuid="GPU-n1-0",
        boot_id=boot_id,
        seq=seq,
        time_s=0.0,
        healthy=healthy,
        reason="test",
    )


async def world_with_node() -> World:
    world = World()
    await world.add_devices(NODE)
    return world


async def fits(s: Running, node: str = "n1") -> bool:
    return bool((await s.filter(builders.pod("probe"), [node]))["NodeNames"])


async def test_devices_that_appear_change_and_vanish_are_followed() -> None:
    world = World()
    async with world.scheduler() as s:
        assert not await fits(s)
        await world.add_devices(NODE)
        await quiet()
        assert await fits(s)
        await world.add_devices(builders.devices("n1", count=0, seq=2))
        await quiet()
        assert not await fits(s)


async def test_node_is_unusable_fifteen_seconds_after_its_last_heartbeat_and_recovers() -> None:
    world = await world_with_node()
    async with world.scheduler(tick_s=1.0) as s:
        await world.advance(28.0, "n1")
        assert await fits(s)
        await world.clock.advance(7.0)
        assert await fits(s)
        await world.clock.advance(9.0)
        answer = await s.filter(builders.pod("probe"), ["n1"])
        assert answer["FailedNodes"]["n1"].startswith("NodeAgentSilent")
        await world.heartbeat("n1")
        assert await fits(s)


async def test_fresh_scheduler_waits_one_timeout_for_agents() -> None:
    world = await world_with_node()
    async with world.scheduler(tick_s=1.0) as s:
        assert await fits(s)
        await world.clock.advance(16.0)
        assert not await fits(s)


async def test_fault_takes_a_device_out_at_once_until_a_newer_report() -> None:
    world = await world_with_node()
    async with world.scheduler() as s:
        await world.fault(fault(healthy=False, seq=5))
        assert not await fits(s)
        await world.add_devices(builders.devices("n1", seq=4))
        await quiet()
        assert not await fits(s), "a report older than the fault knows nothing of it"
        await world.add_devices(builders.devices("n1", seq=6))
        await quiet()
        assert await fits(s)


async def test_fault_older_than_the_report_or_another_fault_changes_nothing() -> None:
    world = World()
    await world.add_devices(builders.devices("n1", boot_id="boot-2", seq=3))
    async with world.scheduler() as s:
        await world.fault(fault(healthy=False, seq=9, boot_id="boot-1"))
        assert await fits(s)
        await world.fault(fault(healthy=True, seq=9, boot_id="boot-2"))
        await world.fault(fault(healthy=False, seq=8, boot_id="boot-2"))
        assert await fits(s)


async def test_poison_is_counted_and_does_not_stop_the_feed() -> None:
    world = await world_with_node()
    async with world.scheduler() as s:
        await MemoryBucket(world.bus, subjects.DEVICES_BUCKET).append("x", b"{")
        await MemoryBucket(world.bus, subjects.DEVICES_BUCKET).append("n2.nvidia", b"{")
        await MemoryBucket(world.bus, subjects.ALLOC_BUCKET).append("n2.u", b"[]")
        await MemoryBucket(world.bus, subjects.STATE_BUCKET).append("n2.u", b"\xff")
        await world.publish(subjects.heartbeat("n1"), b"beat")
        await world.publish(subjects.fault("n1"), b"fault")
        await quiet()
        sources = {"inventory": 2, "records": 1, "states": 1, "heartbeats": 1, "faults": 1}
        for source, times in sources.items():
            name = "hami_scheduler_undecodable_messages_total"
            assert s.value(name, source=source) == times, source
        assert await s.bind(world.add_pod(builders.pod("a")), "n1") == ""


async def test_node_with_an_unreadable_ledger_is_not_bound_to() -> None:
    world = await world_with_node()
    await world.add_devices(builders.devices("n2"))
    await MemoryBucket(world.bus, subjects.ALLOC_BUCKET).append("n2.u", b'{"op": "new-word"}')
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("a"))
        assert "NodeWithheld" in await s.bind(pod, "n2"), "nobody knows what is taken there"
        answer = await s.filter(pod, ["n1", "n2"])
        assert answer["NodeNames"] == ["n1"]
        assert await s.bind(pod, "n1") == ""


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_finished_pod_gives_its_share_back(phase: str) -> None:
    world = await world_with_node()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("a"))
        assert await s.bind(pod, "n1") == ""
        world.kube.change(pod_path(pod), status={"phase": phase})
        await quiet()
        assert world.live() == []
        assert s.value("hami_scheduler_releases_total", cause="pod-finished") == 1


async def test_terminating_pod_keeps_its_share_until_it_is_deleted() -> None:
    world = await world_with_node()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("a"))
        assert await s.bind(pod, "n1") == ""
        world.kube.change(pod_path(pod), metadata={"deletionTimestamp": "now"})
        await quiet()
        assert len(world.live()) == 1
        world.kube.remove(pod_path(pod))
        await quiet()
        assert world.live() == []
        assert s.value("hami_scheduler_releases_total", cause="pod-gone") == 1


async def test_pod_that_was_bound_and_went_while_the_watch_was_down_gives_its_share_back() -> None:
    world = await world_with_node()
    async with world.scheduler() as s:
        world.kube.is_blind = True
        pod = world.add_pod(builders.pod("a"))
        assert await s.bind(pod, "n1") == ""
        world.kube.remove(pod_path(pod))
        stays = world.add_pod(builders.pod("b"))
        assert await s.bind(stays, "n1") == ""
        await quiet()
        assert len(world.live()) == 2
        world.kube.list_again()
        await quiet()
        assert [record.pod for record in world.live()] == ["b"]


async def test_two_replicas_release_an_ended_pod_once() -> None:
    world = await world_with_node()
    async with world.scheduler("s1") as first, world.scheduler("s2") as second:
        pod = world.add_pod(builders.pod("a"))
        assert await first.bind(pod, "n1") == ""
        await quiet()
        world.kube.remove(pod_path(pod))
        await quiet()
        name = "hami_scheduler_releases_total"
        total = sum(s.value(name, cause="pod-gone") for s in (first, second))
        assert total == 1
        assert first.state.ledger.holding("n1", "uid-a") is None
        assert second.state.ledger.holding("n1", "uid-a") is None
    (revision, record) = world.records()["n1.uid-a"]
    assert record.op == "release"
    assert revision == 2


async def test_removed_label_is_restored_and_the_share_kept() -> None:
    world = await world_with_node()
    async with world.scheduler() as s:
        pod = world.add_pod(builders.pod("a"))
        assert await s.bind(pod, "n1") == ""
        world.kube.change(pod_path(pod), metadata={"labels": {annotations.MANAGED_LABEL: None}})
        await quiet()
        assert len(world.live()) == 1
        labels = world.kube.pod("a")["metadata"]["labels"]
        assert labels == {annotations.MANAGED_LABEL: "true"}
        world.kube.remove(pod_path(pod))
        await quiet()
        assert world.live() == []


async def test_waiting_pods_are_woken_within_a_second_of_every_release() -> None:
    """As shipped; kube-scheduler then waits for the pod's own pause, of 2 s at most."""
    world = await world_with_node()
    async with world.scheduler() as s:
        world.add_pod(builders.pod("waiting", mem_mib=99_000))
        for name in ("a", "b", "c"):
            pod = world.add_pod(builders.pod(name))
            assert await s.bind(pod, "n1") == ""
            await quiet()
            touched, waited_s = len(world.kube.node_touches), 0.0
            world.kube.remove(pod_path(pod))
            await quiet()
            while len(world.kube.node_touches) == touched and waited_s < 5.0:
                await world.clock.advance(0.25)
                waited_s += 0.25
            assert waited_s <= 1.0, name
    assert len(world.kube.node_touches) >= 3


async def test_node_is_touched_when_capacity_returns_while_pods_wait() -> None:
    world = await world_with_node()
    async with world.scheduler(capacity_touch_s=10.0) as s:
        first = world.add_pod(builders.pod("a", mem_mib=9000))
        assert await s.bind(first, "n1") == ""
        await quiet()
        world.kube.remove(pod_path(first))
        await quiet()
        assert world.kube.node_touches == [], "nobody waits"
        await world.advance(14.0, "n1")
        world.add_pod(builders.pod("waiting"))
        for name in ("b", "c", "d"):
            pod = world.add_pod(builders.pod(name))
            assert await s.bind(pod, "n1") == ""
            await quiet()
            world.kube.remove(pod_path(pod))
            await quiet()
        assert world.kube.node_touches == ["n1"], "not more often than set"
        await world.advance(14.0, "n1")
        assert world.kube.node_touches == ["n1", "n1"]
