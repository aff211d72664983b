# SPDX-License-Identifier: Apache-2.0
"""Pods of HAMi or Volcano are booked before any allocation on their node, if listed there."""

import json
from typing import Any

import pytest

from hami_common.compat import adoption, hamiformat, volcano
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import StateRecord
from hami_common.pods import annotations
from hami_common.vendors.catalog import VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_core.planning.resizing import ResizeRequest
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World, pod_path

pytestmark = pytest.mark.anyio

NODE = "/api/v1/nodes/n1"
KEY = "hami.io/vgpu-devices-allocated"
Obj = dict[str, Any]


def hami_pod(name: str, *, device: int = 0, mem_mib: int = 6000, text: str | None = None) -> Obj:
    """A pod that HAMi placed on ``n1``."""
    pod = builders.pod(name, mem_mib=mem_mib, managed=False)
    pod["spec"]["nodeName"] = "n1"
    pod["status"]["phase"] = "Running"
    pod["metadata"]["annotations"] = {
        KEY: f"GPU-n1-{device},NVIDIA,{mem_mib},10:;" if text is None else text,
        hamiformat.NODE: "n1",
        hamiformat.BIND_PHASE: hamiformat.BOUND,
    }
    return pod


def mark(world: World, *pods: str) -> None:
    """The annotation that an operator writes on the node."""
    text = adoption.encode_mark(adoption.TakenOver(pods=tuple(f"uid-{pod}" for pod in pods)))
    notes = {annotations.TAKEN_OVER: text} if pods else {}
    world.kube.put(NODE, {"metadata": {"name": "n1", "annotations": notes}})


async def test_listed_pods_are_booked_signed_and_released_when_they_end() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    for name in ("h1", "h2"):
        world.add_pod(hami_pod(name))
    mark(world, "h1", "h2")
    async with world.scheduler(take_over=True, tick_s=1.0) as running:
        await world.advance(14, "n1")
        assert {record.origin for record in world.live()} == {"hami"}
        assert {state.state for state in world.states().values()} == {"bound"}
        new = world.add_pod(builders.pod("new", mem_mib=5000))
        assert "CardInsufficientMemory" in await running.bind(new, "n1")
        world.check(builders.devices("n1"))
        h1 = world.kube.pod("h1")
        assert h1["metadata"]["labels"][annotations.MANAGED_LABEL] == "true"
        assert h1["metadata"]["annotations"][KEY].startswith("GPU-n1-0,")
        assert annotations.limits("main") not in h1["metadata"]["annotations"]
        world.kube.change(pod_path(h1), status={"phase": "Succeeded"})
        await world.advance(7, "n1")
        assert await running.bind(new, "n1") == ""
        assert sorted(record.pod for record in world.live()) == ["h2", "new"]
        world.check(builders.devices("n1"))


async def test_bind_is_refused_beside_a_pod_missing_from_the_list() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(hami_pod("listed", mem_mib=1000))
    world.add_pod(hami_pod("other", mem_mib=1000))
    mark(world, "listed")
    async with world.scheduler(take_over=True, tick_s=1.0) as running:
        await world.advance(7, "n1")
        new = world.add_pod(builders.pod("new"))
        error = await running.bind(new, "n1")
        assert "default/other" in error
        assert "hamictl migrate node n1" in error
        # The node is not offered either, so that the pod goes elsewhere.
        assert (await running.filter(new, ["n1"]))["NodeNames"] == []
        mark(world, "listed", "other")
        await world.advance(14, "n1")
        assert (await running.filter(new, ["n1"]))["NodeNames"] == ["n1"]
        assert await running.bind(new, "n1") == ""


async def test_nothing_of_hami_is_read_without_the_setting() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(hami_pod("h1"))
    mark(world, "h1")
    async with world.scheduler() as running:
        await world.advance(7, "n1")
        assert not world.live()
        assert await running.bind(world.add_pod(builders.pod("new")), "n1") == ""


async def test_annotations_of_an_unlisted_pod_have_no_effect() -> None:
    world = World()
    await world.add_devices(builders.devices("n1", count=2))
    forged = hami_pod("forged", text="GPU-n1-0,NVIDIA,16000,100:GPU-n1-1,NVIDIA,16000,100:;")
    del forged["spec"]["containers"][0]["resources"]
    world.add_pod(forged)
    mark(world, "somebody-else")
    async with world.scheduler(take_over=True) as running:
        await world.advance(14, "n1")
        assert not world.live()
        assert await running.bind(world.add_pod(builders.pod("new")), "n1") == ""


async def test_doubtful_share_counts_on_every_device_with_a_reason() -> None:
    world = World()
    await world.add_devices(builders.devices("n1", count=2))
    world.add_pod(hami_pod("h1", mem_mib=9000, text="GPU-elsewhere,NVIDIA,9000,10:;"))
    mark(world, "h1")
    async with world.scheduler(take_over=True):
        await world.advance(7, "n1")
        (record,) = world.live()
        assert [share.uuid for share in record.containers[0].shares] == ["GPU-n1-0", "GPU-n1-1"]
        assert "no device GPU-elsewhere" in record.reason


async def test_pods_taken_over_survive_the_loss_of_the_ledger_and_of_their_annotations() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(hami_pod("h1"))
    mark(world, "h1")
    async with world.scheduler(take_over=True):
        await world.advance(7, "n1")
    before = world.live()
    bare = world.kube.pod("h1")
    bare["metadata"]["annotations"] = {
        annotations.ALLOCATION: bare["metadata"]["annotations"][annotations.ALLOCATION]
    }
    world.kube.put(pod_path(bare), bare)
    mark(world)
    world.bus.wipe()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler("s2", take_over=True):
        await world.advance(7, "n1")
        (record,) = world.live()
        assert (record.origin, record.containers) == ("hami", before[0].containers)


async def test_two_schedulers_take_a_pod_over_once() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(hami_pod("h1"))
    mark(world, "h1")
    async with (
        world.scheduler("s1", take_over=True),
        world.scheduler("s2", take_over=True),
    ):
        await world.advance(7, "n1")
        (record,) = world.live()
        signed = json.loads(world.kube.pod("h1")["metadata"]["annotations"][annotations.ALLOCATION])
        assert signed["payload"]["allocation_id"] == record.allocation_id


async def test_pod_cut_off_between_ledger_and_signature_keeps_its_share() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(hami_pod("h1"))
    mark(world, "h1")
    async with world.scheduler("s1", take_over=True):
        await world.advance(7, "n1")
    stripped = world.kube.pod("h1")
    del stripped["metadata"]["annotations"][annotations.ALLOCATION]
    stripped["metadata"]["labels"] = {}
    world.kube.put(pod_path(stripped), stripped)
    async with world.scheduler("s2", take_over=True):
        await world.advance(60, "n1")
        assert [record.pod for record in world.live()] == ["h1"]
        pod = world.kube.pod("h1")
        assert annotations.ALLOCATION in pod["metadata"]["annotations"]
        assert pod["metadata"]["labels"][annotations.MANAGED_LABEL] == "true"


async def test_share_of_a_pod_of_hamis_is_not_resized() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(hami_pod("h1"))
    mark(world, "h1")
    async with world.scheduler(take_over=True) as running:
        await world.advance(7, "n1")
        (record,) = world.live()
        await world.report_state(
            StateRecord(
                state="running",
                allocation_id=record.allocation_id,
                node="n1",
                pod_uid=record.pod_uid,
                namespace="default",
                pod="h1",
                ledger_seq=1,
            )
        )
        await world.advance(7, "n1")
        with pytest.raises(RequestInvalid, match="placed by HAMi"):
            await running.scheduler.resizer.resize(
                ResizeRequest(namespace="default", pod="h1", memory_mib=2000)
            )


IN_GIB = VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",), memory_factor=1024))


def volcano_pod(name: str, text: str = "GPU-n1-0,NVIDIA,6,10:") -> Obj:
    """A pod to which Volcano's device plugin gave 6 GiB and 10 % of a device."""
    pod = builders.pod(name, gpu=None, managed=False)
    limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "6"}
    limits["volcano.sh/vgpu-cores"] = "10"
    pod["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": limits}
    pod["spec"]["nodeName"], pod["spec"]["schedulerName"] = "n1", "volcano"
    pod["status"]["phase"] = "Running"
    pod["metadata"]["annotations"] = {
        volcano.POD_IDS: text,
        volcano.TO_ALLOCATE: ";",
        volcano.POD_NODE: "n1",
        volcano.BIND_PHASE: volcano.BOUND,
    }
    return pod


def volcano_mark(world: World, *pods: str) -> None:
    found = adoption.TakenOver(origin="volcano", pods=tuple(f"uid-{pod}" for pod in pods))
    notes = {annotations.TAKEN_OVER: adoption.encode_mark(found)}
    world.kube.put(NODE, {"metadata": {"name": "n1", "annotations": notes}})


async def test_pods_of_volcano_are_booked_counted_by_it_and_released_when_they_end() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(volcano_pod("v1"))
    volcano_mark(world, "v1")
    async with world.scheduler(take_over=True, tick_s=1.0, vendors=IN_GIB) as running:
        await world.advance(14, "n1")
        (record,) = world.live()
        (share,) = record.containers[0].shares
        assert (record.origin, record.reason) == ("volcano", "")
        assert (share.uuid, share.memory_mib, share.core_pct) == ("GPU-n1-0", 6144, 10)
        world.check(builders.devices("n1"))
        v1 = world.kube.pod("v1")
        notes = v1["metadata"]["annotations"]
        assert v1["metadata"]["labels"][annotations.MANAGED_LABEL] == "true"
        assert annotations.limits("main") not in notes
        assert notes[volcano.POD_IDS] == "GPU-n1-0,NVIDIA,6,10:"
        assert (notes[volcano.TO_ALLOCATE], notes[volcano.BIND_PHASE]) == ("", volcano.BOUND)
        new = world.add_pod(builders.pod("new", mem_mib=12))
        assert "CardInsufficientMemory" in await running.bind(new, "n1")
        world.kube.change(pod_path(v1), status={"phase": "Succeeded"})
        await world.advance(7, "n1")
        assert not world.live()
        assert await running.bind(new, "n1") == ""


async def test_bind_is_refused_beside_a_pod_of_volcano_missing_from_the_list() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.add_pod(volcano_pod("v1"))
    async with world.scheduler(take_over=True, tick_s=1.0, vendors=IN_GIB) as running:
        await world.advance(7, "n1")
        error = await running.bind(world.add_pod(builders.pod("new", mem_mib=1)), "n1")
        assert "default/v1" in error
        assert "placed by Volcano" in error
        assert "hamictl migrate node n1 --from volcano" in error
