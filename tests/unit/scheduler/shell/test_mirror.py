# SPDX-License-Identifier: Apache-2.0
"""Pods and nodes carry what HAMi reads, exactly where the settings enable it."""

import json

import pytest
from msgspec.structs import replace

from hami_common.compat import adoption, hamiformat, volcano
from hami_common.events.allocation import CarriedShare, StateRecord
from hami_common.model.device import Profile
from hami_common.pods import annotations
from hami_common.vendors.catalog import VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from tests.support import hami_reader
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World

pytestmark = pytest.mark.anyio

NODE = "/api/v1/nodes/n1"
KEY = "hami.io/vgpu-devices-allocated"


async def test_bound_pods_are_mirrored_once_under_hamis_names() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    mark = adoption.TakenOver(devices={"nvidia": {"HAMI-0": 0}})
    notes = {annotations.TAKEN_OVER: adoption.encode_mark(mark)}
    world.kube.put(NODE, {"metadata": {"name": "n1", "annotations": notes}})
    async with world.scheduler(mirror_pods=True) as running:
        assert await running.bind(world.add_pod(builders.pod("p", mem_mib=3000)), "n1") == ""
        world.add_pod(builders.pod("waits"))
        await world.advance(7, "n1")
        pod = world.kube.pod("p")
        assert pod["metadata"]["annotations"][KEY] == "HAMI-0,NVIDIA,3000,10:;"
        assert pod["metadata"]["labels"][hamiformat.NODE] == "n1"
        assert hami_reader.used(world.kube.pods()) == {("n1", "HAMI-0"): (3000, 10, 1)}
        version = pod["metadata"]["resourceVersion"]
        await world.advance(21, "n1")
        assert world.kube.pod("p")["metadata"]["resourceVersion"] == version
        assert KEY not in world.kube.pod("waits")["metadata"]["annotations"]
        # The node's devices are HAMi's to register.
        assert (
            "hami.io/node-nvidia-register"
            not in world.kube.objects[NODE]["metadata"]["annotations"]
        )


async def test_mig_instance_is_named_once_its_node_has_made_it() -> None:
    world = World()
    plain = builders.devices("n1")
    grid = (Profile(name="1g.5gb", memory_mib=4864, core_pct=14, size=1, starts=(0, 1)),)
    cards = tuple(replace(one, mode="mig", partitions=grid) for one in plain.devices)
    await world.add_devices(replace(plain, devices=cards))
    async with world.scheduler(mirror_pods=True) as running:
        assert await running.bind(world.add_pod(builders.pod("p", mem_mib=3000)), "n1") == ""
        await world.advance(7, "n1")
        (placed,) = json.loads(world.kube.pod("p")["metadata"]["annotations"][hamiformat.MIG])
        assert (placed["profile"], "migUUID" in placed) == ("1g.5gb", False)
        ((sequence, record),) = world.records().values()
        names = {"mig_uuid": "MIG-1", "gpu_instance": "13", "compute_instance": "0"}
        state = StateRecord(
            state="prepared",
            allocation_id=record.allocation_id,
            node="n1",
            pod_uid=record.pod_uid,
            namespace=record.namespace,
            pod=record.pod,
            ledger_seq=sequence,
            carried=(CarriedShare(container="main", number=0, names=names),),
        )
        await world.report_state(state)
        await world.advance(7, "n1")
        pod = world.kube.pod("p")
        (made,) = json.loads(pod["metadata"]["annotations"][hamiformat.MIG])
        assert made == {
            **placed,
            "migUUID": "MIG-1",
            "gpuInstanceID": 13,
            "computeInstanceID": 0,
        }
        await world.advance(14, "n1")
        assert (
            world.kube.pod("p")["metadata"]["resourceVersion"]
            == (pod["metadata"]["resourceVersion"])
        )


async def test_mirror_of_an_earlier_run_is_not_rewritten() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler("s1", mirror_pods=True) as running:
        assert await running.bind(world.add_pod(builders.pod("p")), "n1") == ""
        await world.advance(7, "n1")
    version = world.kube.pod("p")["metadata"]["resourceVersion"]
    async with world.scheduler("s2", mirror_pods=True):
        await world.advance(21, "n1")
    assert world.kube.pod("p")["metadata"]["resourceVersion"] == version


async def test_nodes_register_their_devices_and_again_when_these_change() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.kube.put(NODE, {"metadata": {"name": "n1"}})
    async with world.scheduler(mirror_nodes=True):
        await world.advance(7, "n1")
        assert list(hami_reader.registered(world.kube.objects[NODE])) == ["GPU-n1-0"]
        patches = len(world.kube.node_touches)
        await world.advance(14, "n1")
        assert len(world.kube.node_touches) == patches
        await world.add_devices(builders.devices("n1", count=2, seq=2))
        await world.advance(7, "n1")
        assert list(hami_reader.registered(world.kube.objects[NODE])) == ["GPU-n1-0", "GPU-n1-1"]


async def test_nothing_is_mirrored_without_the_setting() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.kube.put(NODE, {"metadata": {"name": "n1"}})
    async with world.scheduler() as running:
        assert await running.bind(world.add_pod(builders.pod("p")), "n1") == ""
        await world.advance(14, "n1")
        assert not hami_reader.placed(world.kube.pods())
        assert not hami_reader.registered(world.kube.objects[NODE])


VOLCANO = VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",)))


async def test_bound_pods_carry_volcanos_annotations_from_the_binding_on() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler(vendors=VOLCANO) as running:
        assert await running.bind(world.add_pod(builders.pod("p", mem_mib=3000)), "n1") == ""
        pod = world.kube.pod("p")
        assert pod["metadata"]["annotations"][volcano.POD_IDS] == "GPU-n1-0,NVIDIA,3000,10:"
        version = pod["metadata"]["resourceVersion"]
        await world.advance(7, "n1")
        assert world.kube.pod("p")["metadata"]["resourceVersion"] == version
        assert KEY not in pod["metadata"]["annotations"], "HAMi's mirrors are another setting"
        # Someone else's value is not what the ledger holds; a restarted scheduler compares it.
        pod["metadata"]["annotations"][volcano.POD_IDS] = "GPU-n1-0,NVIDIA,1,1:"
    async with world.scheduler("s2", vendors=VOLCANO):
        await world.advance(7, "n1")
        shown = world.kube.pod("p")["metadata"]["annotations"][volcano.POD_IDS]
        assert shown == "GPU-n1-0,NVIDIA,3000,10:"


async def test_both_forms_can_be_mirrored() -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    world.kube.put(NODE, {"metadata": {"name": "n1", "annotations": {}}})
    async with world.scheduler(vendors=VOLCANO, mirror_pods=True) as running:
        assert await running.bind(world.add_pod(builders.pod("p", mem_mib=3000)), "n1") == ""
        await world.advance(7, "n1")
        notes = world.kube.pod("p")["metadata"]["annotations"]
        assert notes[KEY] == "GPU-n1-0,NVIDIA,3000,10:;"
        assert notes[volcano.POD_IDS] == "GPU-n1-0,NVIDIA,3000,10:"
