# SPDX-License-Identifier: Apache-2.0
"""Claims of pods are created, and have the devices of the pod's record when it is bound."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.dra.names import device_name
from hami_common.pods import annotations as keys
from hami_core.ledger.podclaim import FINALIZER
from hami_scheduler.settings import DraSettings
from tests.support import claims
from tests.support.bindings import binding
from tests.support.claims import by_claim, result
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_bindadmission import bind as bind_as_another
from tests.unit.scheduler.shell.test_claims import report
from tests.unit.scheduler.shell.world import Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

DRA = DraSettings(enabled=True)
GPU, OTHER = "GPU-n1-0", "GPU-n1-1"
Obj = dict[str, Any]


@asynccontextmanager
async def running_world(
    *, world: World | None = None, count: int = 2, **settings: Any
) -> AsyncIterator[tuple[World, Running]]:
    """One scheduler, and node n1 with devices of 16,000 MiB."""
    if world is None:
        world = World()
        await world.add_devices(builders.devices("n1", count=count))
    async with world.scheduler(**{"dra": DRA, **settings}) as running:
        yield world, running


async def add(world: World, name: str = "p", *, at_bind: bool = False, **more: Any) -> Obj:
    """A pod in allocation mode ``dra``."""
    pod = world.add_pod(by_claim(builders.pod(name, **more), at_bind=at_bind))
    await quiet()
    return pod


def claim(world: World, name: str = "p") -> Obj:
    return world.kube.objects[claims.path(f"hami-{name}")]


def allocate(world: World, pod: Obj, *results: Obj) -> None:
    """Store an allocation as kube-scheduler does before it asks for the bind."""
    name = pod["metadata"]["name"]
    world.kube.change(
        claims.path(f"hami-{name}"),
        metadata={"finalizers": [FINALIZER]},
        status={
            "allocation": claims.allocation(*results),
            "reservedFor": [claims.consumer(name)],
        },
    )


def given(world: World, name: str = "p") -> list[tuple[str, str, str, str]]:
    """Request, device, memory and compute of each result."""
    allocation = (claim(world, name).get("status") or {}).get("allocation") or {}
    return [
        (
            one["request"],
            one["device"],
            one["consumedCapacity"]["memory"],
            one["consumedCapacity"]["cores"],
        )
        for one in allocation.get("devices", {}).get("results", [])
    ]


def writes(running: Running) -> dict[str, float]:
    """Number of writes by kind, without those that never happened."""
    found = {
        write: running.value("hami_scheduler_claim_writes_total", write=write)
        for write in ("create", "finalizer", "clear", "allocate", "reserve", "amounts")
    }
    return {write: number for write, number in found.items() if number}


async def test_claim_is_created_as_soon_as_the_pod_is_seen() -> None:
    async with running_world() as (world, running):
        pod = await add(world, annotated={"nvidia.com/use-gputype": "H100"})
        made = claim(world)
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("Pod", "uid-p", True)
        assert made["metadata"]["labels"] == {keys.MANAGED_LABEL: "true"}
        (request,) = made["spec"]["devices"]["requests"]
        assert request["name"] == "main-nvidia"
        exactly = request["exactly"]
        assert (exactly["deviceClassName"], exactly["count"]) == ("hami-share", 1)
        assert exactly["capacity"]["requests"] == {"memory": "1000Mi", "cores": "10"}
        assert pod["spec"]["resourceClaims"][0]["resourceClaimName"] == "hami-p"
        await world.advance(60, "n1")
        assert writes(running) == {"create": 1}
        assert running.value("hami_scheduler_claims_total", outcome="created") == 1


async def test_pods_that_wait_at_the_start_get_their_claims() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(by_claim(builders.pod("p")))
    async with running_world(world=world):
        await quiet()
        assert claim(world)["metadata"]["ownerReferences"][0]["uid"] == "uid-p"


async def test_one_of_two_replicas_creates_the_claim() -> None:
    async with running_world() as (world, first), world.scheduler("s2", dra=DRA) as second:
        await add(world)
        assert claim(world)
        assert writes(first) == {"create": 1}
        assert not writes(second)


async def test_claim_of_another_owner_is_an_event_of_the_pod_and_left_alone() -> None:
    async with running_world() as (world, running):
        world.kube.put(claims.path("hami-p"), claims.claim("hami-p"))
        before = claim(world)
        pod = await add(world)
        assert claim(world) == before
        (event,) = world.kube.events
        assert (event["involvedObject"]["name"], event["reason"]) == ("p", "ClaimNotCreated")
        assert "not controlled by the pod" in event["message"]
        assert "not controlled by the pod" in await running.bind(pod, "n1")
        assert not world.live()
        world.kube.remove(claims.path("hami-p"))
        await world.advance(7, "n1")
        assert claim(world)["metadata"]["ownerReferences"]


async def test_request_that_cannot_be_met_is_an_event_as_no_filter_is_called() -> None:
    async with running_world() as (world, _):
        pod = by_claim(builders.pod("p"))
        del pod["spec"]["containers"][0]["resources"]["claims"]
        world.add_pod(pod)
        await world.advance(60, "n1")
        assert claims.path("hami-p") not in world.kube.objects
        (event,) = world.kube.events
        assert event["reason"] == "ClaimNotCreated"
        assert "lacks request main-nvidia of claim hami" in event["message"]


async def test_deleted_claim_of_a_waiting_pod_is_created_again() -> None:
    async with running_world() as (world, running):
        await add(world)
        before = claim(world)["metadata"]["resourceVersion"]
        world.kube.remove(claims.path("hami-p"))
        await quiet()
        assert claim(world)["metadata"]["resourceVersion"] != before
        assert writes(running) == {"create": 2}


async def test_bind_creates_a_claim_again_whose_deletion_the_watch_has_not_delivered() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        world.kube.is_blind = True
        world.kube.remove(claims.path("hami-p"))
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]


@pytest.mark.parametrize("at_bind", [False, True])
async def test_claim_that_is_being_deleted_refuses_the_bind_and_leaves_no_record(
    *, at_bind: bool
) -> None:
    async with running_world() as (world, running):
        pod = await add(world, at_bind=at_bind)
        if at_bind:
            assert await running.bind(pod, "no-such-node")
        world.kube.put(claims.path("hami-p"), claims.claim("hami-p", **owned("p")))
        world.kube.change(
            claims.path("hami-p"), metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}
        )
        await quiet()
        assert "is being deleted; it is created again" in await running.bind(pod, "n1")
        assert not world.live()
        assert running.value("hami_scheduler_binds_total", outcome="claim-deleted") == 1


def owned(pod: str) -> Obj:
    """Metadata of a claim that the pod controls."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": f"uid-{pod}"}
    return {
        "labels": {keys.MANAGED_LABEL: "true"},
        "ownerReferences": [{**owner, "controller": True}],
    }


async def test_claim_at_the_bind_is_created_and_allocated_before_the_binding() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world, at_bind=True)
        await world.advance(60, "n1")
        assert claims.path("hami-p") not in world.kube.objects
        running.seen.calls.clear()
        assert await running.bind(pod, "n1") == ""
        done = [call for call in running.seen.calls if "hami_" not in call]
        assert done == ["post resourceclaims", "patch hami-p", "post binding"]
        made = claim(world)
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert made["metadata"]["finalizers"] == [FINALIZER]
        assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-p"
        assert made["status"]["reservedFor"] == [claims.consumer("p")]
        (record,) = world.live()
        assert (record.pod_uid, record.claim) == ("uid-p", "hami-p")
        running.seen.calls.clear()
        await world.advance(60, "n1")
        assert claim(world) == made
        assert not {"post resourceclaims", "patch hami-p"}.intersection(running.seen.calls)
        assert writes(running) == {"create": 1, "allocate": 1}
        assert running.value("hami_scheduler_claims_total", outcome="written") == 1


@pytest.mark.parametrize("point", ["post resourceclaims", "patch hami-p", "post binding"])
async def test_bind_that_was_killed_is_finished_by_another_replica(point: str) -> None:
    """Before or after any write of the claim; the second bind repeats none that was done."""
    async with running_world(count=1) as (world, running):
        pod = await add(world, at_bind=True)
        number = len(running.seen.calls)
        for ahead in range(10):
            running.seen.before[number + ahead] = _hanging(running, number + ahead, point)
        async with anyio.create_task_group() as group:
            group.start_soon(running.bind, pod, "n1")
            await quiet()
            assert [one.pod for one in world.live()] == ["p"]
            group.cancel_scope.cancel()
        async with world.scheduler("s2", dra=DRA) as second:
            assert await second.bind(pod, "n1") == ""
            assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
            assert claim(world)["status"]["reservedFor"] == [claims.consumer("p")]
            done = {"post resourceclaims": 0, "patch hami-p": 1, "post binding": 2}[point]
            assert sum(writes(second).values()) == 2 - done
            await world.advance(60, "n1")
            (record,) = world.live()
            assert record.pod == "p"


async def test_bind_that_was_killed_after_the_allocation_leaves_none_after_the_lease() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world, at_bind=True)
        number = len(running.seen.calls)
        for ahead in range(10):
            running.seen.before[number + ahead] = _hanging(running, number + ahead)
        async with anyio.create_task_group() as group:
            group.start_soon(running.bind, pod, "n1")
            await quiet()
            group.cancel_scope.cancel()
        running.seen.before.clear()
        assert given(world)
        await world.advance(60, "n1")
        assert not world.live()
        assert not given(world)
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert writes(running) == {"create": 1, "clear": 1, "allocate": 2}


async def test_claim_is_created_while_the_reservation_is_appended() -> None:
    """A bind that ends before the append leaves a claim without devices for the next one."""
    async with running_world(count=1) as (world, running):
        pod = await add(world, at_bind=True)
        number = len(running.seen.calls)
        for ahead in range(4):
            running.seen.before[number + ahead] = _hanging(
                running, number + ahead, "append hami_alloc"
            )
        async with anyio.create_task_group() as group:
            group.start_soon(running.bind, pod, "n1")
            await quiet()
            assert not world.live()
            assert claim(world)["metadata"]["ownerReferences"][0]["uid"] == "uid-p"
            group.cancel_scope.cancel()
        running.seen.before.clear()
        assert not given(world)
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert writes(running) == {"create": 1, "allocate": 1}


async def test_refused_bind_of_a_claim_that_does_not_exist_asks_nothing_about_it() -> None:
    async with running_world(count=1) as (world, running):
        big = world.add_pod(builders.pod("big", mem_mib=15_500))
        assert await running.bind(big, "n1") == ""
        pod = await add(world, at_bind=True)
        running.seen.calls.clear()
        assert "CardInsufficientMemory" in await running.bind(pod, "n1")
        assert not [call for call in running.seen.calls if "hami_" not in call]


async def test_claim_at_the_bind_by_the_name_of_another_owner_refuses_the_bind() -> None:
    async with running_world() as (world, running):
        world.kube.put(claims.path("hami-p"), claims.claim("hami-p"))
        before = claim(world)
        pod = await add(world, at_bind=True)
        assert "not controlled by the pod" in await running.bind(pod, "n1")
        assert claim(world) == before
        assert not world.live()
        assert running.value("hami_scheduler_binds_total", outcome="claim-foreign") == 1


async def test_lost_claim_of_a_bound_pod_is_created_again_after_a_lease() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world, at_bind=True)
        assert await running.bind(pod, "n1") == ""
        world.kube.remove(claims.path("hami-p"))
        await world.advance(7, "n1")
        assert claims.path("hami-p") not in world.kube.objects
        await world.advance(60, "n1")
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]


async def test_same_choice_needs_no_write() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        allocate(world, pod, result(GPU, request="main-nvidia"))
        before = claim(world)
        assert await running.bind(pod, "n1") == ""
        assert claim(world) == before
        (record,) = world.live()
        assert (record.pod_uid, record.claim, record.origin) == ("uid-p", "hami-p", "")
        await world.advance(30, "n1")
        assert writes(running) == {"create": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        result(OTHER, request="main-nvidia"),
        result(GPU, request="main-nvidia", memory="16000Mi"),
        result("GPU-n2-0", "n2", request="main-nvidia"),
        result(GPU, request="main-nvidia", consumedCapacity={}),
    ],
)
async def test_other_choice_is_cleared_and_written_before_the_binding(wrong: Obj) -> None:
    async with running_world() as (world, running):
        pod = await add(world, annotated={"nvidia.com/use-gpuuuid": GPU})
        allocate(world, pod, wrong)
        running.seen.calls.clear()
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert writes(running) == {"create": 1, "clear": 1, "allocate": 1}
        patched = [call for call in running.seen.calls if "patch" in call or "post" in call]
        assert patched == ["patch hami-p", "patch hami-p", "post binding"]
        status = claim(world)["status"]
        assert status["reservedFor"] == [claims.consumer("p")]
        (term,) = status["allocation"]["nodeSelector"]["nodeSelectorTerms"]
        assert term["matchFields"][0]["values"] == ["n1"]
        assert running.value("hami_scheduler_claims_total", outcome="re-picked") == 1


async def test_claim_that_was_never_allocated_is_written_with_its_finalizer() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert claim(world)["metadata"]["finalizers"] == [FINALIZER]
        assert writes(running) == {"create": 1, "finalizer": 1, "allocate": 1}


async def test_configuration_of_the_allocation_is_kept() -> None:
    async with running_world() as (world, running):
        pod = await add(world, annotated={"nvidia.com/use-gpuuuid": GPU})
        allocate(world, pod, result(OTHER, request="main-nvidia"))
        config = [{"source": "FromClass", "requests": [], "opaque": {"driver": "x"}}]
        path = claims.path("hami-p")
        stored = world.kube.objects[path]
        stored["status"]["allocation"]["devices"]["config"] = config
        world.kube.put(path, stored)
        assert await running.bind(pod, "n1") == ""
        assert claim(world)["status"]["allocation"]["devices"]["config"] == config


async def test_lost_precondition_is_read_again() -> None:
    async with running_world() as (world, running):
        pod = await add(world, annotated={"nvidia.com/use-gpuuuid": GPU})
        allocate(world, pod, result(OTHER, request="main-nvidia"))

        async def touch() -> None:
            world.kube.change(claims.path("hami-p"), metadata={"labels": {"x": "y"}})

        number = len(running.seen.calls)
        for ahead in range(20):
            running.seen.before[number + ahead] = _once(running, number + ahead, touch)
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert writes(running)["clear"] == 2


def _once(running: Running, number: int, work: Any) -> Any:
    async def act() -> None:
        if running.seen.calls[number] == "patch hami-p":
            running.seen.before.clear()
            await work()

    return act


async def test_refused_bind_clears_what_kube_scheduler_allocated() -> None:
    async with running_world(count=1) as (world, running):
        big = world.add_pod(builders.pod("big", mem_mib=15_500))
        assert await running.bind(big, "n1") == ""
        pod = await add(world)
        allocate(world, pod, result(GPU, request="main-nvidia"))
        assert "CardInsufficientMemory" in await running.bind(pod, "n1")
        assert not given(world)
        assert not claim(world)["status"].get("reservedFor")
        assert [record.pod for record in world.live()] == ["big"]
        assert running.value("hami_scheduler_claims_total", outcome="cleared") == 1


async def test_claim_of_a_pod_is_not_booked_as_a_claim() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        allocate(world, pod, result(GPU, request="main-nvidia"))
        await world.advance(7, "n1")
        assert not world.live()
        assert await running.bind(pod, "n1") == ""
        await world.advance(60, "n1")
        (record,) = world.live()
        assert record.pod_uid == "uid-p"


async def test_allocation_that_no_bind_follows_is_cleared_after_a_lease() -> None:
    async with running_world(count=1) as (world, _):
        pod = await add(world)
        allocate(world, pod, result(GPU, request="main-nvidia"))
        await world.advance(20, "n1")
        assert given(world)
        await world.advance(40, "n1")
        assert not given(world)


async def test_pod_whose_containers_differ_from_its_claim_is_settled_again() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        assert await running.bind(pod, "n1") == ""
        world.kube.change(claims.path("hami-p"), status={"allocation": None, "reservedFor": None})
        await world.advance(7, "n1")
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]


async def test_claim_only_has_devices_that_are_published() -> None:
    world = World()
    plain = builders.devices("n1", count=2)
    first = replace(plain.devices[0], overcommit="recall", capacity_mib=32_000)
    await world.add_devices(replace(plain, devices=(first, plain.devices[1])))
    async with running_world(world=world) as (_, running):
        pod = await add(world)
        assert await running.bind(pod, "n1") == ""
        assert given(world) == [("main-nvidia", device_name(OTHER), "1000Mi", "10")]


async def test_binding_of_another_scheduler_is_followed_by_the_claim() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        before = claim(world)
        assert await bind_as_another(world, running, binding("p", "n1")) == ""
        assert claim(world) == before
        await quiet()
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        assert claim(world)["status"]["reservedFor"] == [claims.consumer("p")]
        assert pod_path(pod) in world.kube.objects


async def test_claim_of_a_prepared_share_is_brought_back_to_its_devices() -> None:
    async with running_world() as (world, running):
        pod = await add(world, annotated={"nvidia.com/use-gpuuuid": GPU})
        assert await running.bind(pod, "n1") == ""
        (record,) = world.live()
        await report(world, record, "prepared")
        wrong = claims.allocation(result(OTHER, request="main-nvidia"))
        world.kube.change(claims.path("hami-p"), status={"allocation": wrong})
        await world.advance(30, "n1")
        assert given(world)[0][1] == device_name(GPU)


async def test_resize_of_a_prepared_share_leaves_the_allocation_and_shows_the_amounts() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        assert await running.bind(pod, "n1") == ""
        (record,) = world.live()
        await report(world, record, "running")
        less = replace(record.containers[0].shares[0], memory_mib=500)
        containers = (replace(record.containers[0], shares=(less,)),)
        await world.record(replace(record, op="resize", containers=containers))
        await world.advance(14, "n1")
        assert given(world) == [("main-nvidia", device_name(GPU), "1000Mi", "10")]
        (entry,) = claim(world)["status"]["devices"]
        assert entry["data"] == {"memory": "500Mi", "cores": "10"}
        assert entry["device"] == device_name(GPU)
        assert writes(running)["amounts"] == 1


async def test_expired_reservation_takes_the_allocation_back() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        allocate(world, pod, result(GPU, request="main-nvidia"))
        number = len(running.seen.calls)
        for ahead in range(10):
            running.seen.before[number + ahead] = _hanging(running, number + ahead)
        async with anyio.create_task_group() as group:
            group.start_soon(running.bind, pod, "n1")
            await quiet()
            assert [one.pod for one in world.live()] == ["p"]
            group.cancel_scope.cancel()
        running.seen.before.clear()
        await world.advance(20, "n1")
        assert given(world)
        await world.advance(30, "n1")
        assert not world.live()
        assert not given(world)
        assert running.value("hami_scheduler_releases_total", cause="lease-expired") == 1


def _hanging(running: Running, number: int, point: str = "post binding") -> Any:
    async def hang() -> None:
        if running.seen.calls[number] == point:
            await anyio.sleep_forever()

    return hang


async def test_wiped_bus_is_rebuilt_with_the_claim() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with running_world(world=world) as (_, running):
        pod = await add(world)
        assert await running.bind(pod, "n1") == ""
        (before,) = world.live()
        world.bus.wipe()
        await world.add_devices(builders.devices("n1"))
        await world.advance(200, "n1")
        (after,) = world.live()
        assert (after.claim, after.containers) == ("hami-p", before.containers)
        assert writes(running) == {"create": 1, "finalizer": 1, "allocate": 1}


async def test_released_when_the_pod_ends() -> None:
    async with running_world(count=1) as (world, running):
        pod = await add(world)
        assert await running.bind(pod, "n1") == ""
        world.kube.remove(pod_path(pod))
        await quiet()
        assert not world.live()
