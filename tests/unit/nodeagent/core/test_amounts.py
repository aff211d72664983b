# SPDX-License-Identifier: Apache-2.0
"""Totals that a node advertises, and the patch of its status."""

from collections.abc import Collection
from typing import Any

import msgspec

from hami_common.events.codec import decode
from hami_common.model.device import Device
from hami_common.model.placement import Booked
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.vendors.cambricon import Cambricon, CambriconSettings
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.iluvatar import Iluvatar
from hami_common.vendors.metax import Metax
from hami_common.vendors.mthreads import Mthreads
from hami_common.vendors.nvidia import Nvidia, NvidiaSettings
from hami_common.vendors.protocol import Vendor
from hami_nodeagent.core.amounts import (
    HeldPod,
    NodeAmounts,
    change,
    of_ended_plugin,
    resources_of,
    totals,
)
from hami_nodeagent.core.podfacts import requests_of
from tests.unit.nodeagent.core.builders import device

MEMORY = "nvidia.com/gpumem"
CORES = "nvidia.com/gpucores"
KEY = annotations.advertised_amounts("nvidia")


def total(
    *devices: Device,
    vendor: Vendor | None = None,
    pods: Collection[HeldPod] = (),
    unusable: Collection[str] = (),
) -> dict[str, int]:
    return totals(
        vendor or Nvidia(),
        devices,
        is_usable=lambda one: one.uuid not in unusable,
        pods=pods,
    )


def large(number: int, **more: Any) -> Device:
    return device(number, memory_mib=40000, **{"capacity_mib": 40000, **more})


def test_totals_are_capacity_after_scaling_in_units_of_requests() -> None:
    scaled = large(1, capacity_mib=60000, capacity_core_pct=200, slots=4)
    assert total(large(0), scaled) == {
        MEMORY: 100000,
        CORES: 300,
        "nvidia.com/gpumem-percentage": 1400,
        "nvidia.com/priority": 98,
    }


def test_units_are_those_of_the_vendor() -> None:
    factor = Nvidia(NvidiaSettings(memory_factor=1024))
    assert total(large(0), large(1), vendor=factor)[MEMORY] == 2 * 39
    mthreads = total(large(0, vendor="mthreads"), vendor=Mthreads())
    assert mthreads == {"mthreads.com/sgpu-memory": 78, "mthreads.com/sgpu-core": 16}
    percent = Cambricon(CambriconSettings(memory_unit="percent"))
    found = total(large(0, vendor="cambricon", slots=6), vendor=percent)
    assert found["cambricon.com/mlu.smlu.vmemory"] == 600
    # A pod may write 4 (GiB) or 4Gi: kubelet reads the second as bytes.
    metax = total(large(0, vendor="metax"), vendor=Metax())
    assert metax["metax-tech.com/vmemory"] == 40000 << 20


def test_families_are_those_that_the_devices_serve() -> None:
    found = total(device(0, vendor="iluvatar", type="BI-V150"), vendor=Iluvatar())
    assert "iluvatar.ai/BI-V150.vMem" in found
    assert "iluvatar.ai/MR-V100.vMem" not in found
    assert total(vendor=Iluvatar()) == {}


def test_count_resources_and_aliases_are_not_advertised() -> None:
    for vendor in Catalog.from_settings().vendors:
        counts = {names.count for names in vendor.families}
        assert not resources_of(vendor) & (counts | vendor.resources.aliases.keys())


def test_unusable_device_counts_what_is_booked_on_it() -> None:
    pods = [HeldPod(requests={MEMORY: 3000}, booked={"nvidia-0": Booked(memory_mib=3000)})]
    assert total(large(0), large(1), pods=pods, unusable=["nvidia-0"])[MEMORY] == 43000
    assert total(large(0, cordoned=True))[MEMORY] == 40000


def test_device_that_shrank_below_its_pods_counts_what_they_hold() -> None:
    pods = [HeldPod(requests={MEMORY: 60000}, booked={"nvidia-0": Booked(memory_mib=60000)})]
    assert total(large(0), pods=pods)[MEMORY] == 60000


def test_foreign_use_is_no_part_of_the_total_but_never_lowers_it_below_the_bookings() -> None:
    used = large(0, foreign_mib=12_032)
    assert total(used)[MEMORY] == 27_968
    held = HeldPod(booked={used.uuid: Booked(memory_mib=30_000, slots=1)})
    assert total(used, pods=[held])[MEMORY] == 30_000


def test_amounts_that_the_ledger_has_not_booked_are_added() -> None:
    resized = HeldPod(requests={MEMORY: 8000}, booked={"nvidia-0": Booked(memory_mib=2000)})
    of_another_scheduler = HeldPod(requests={MEMORY: 500, "nvidia.com/gpu": 3})
    found = total(large(0), pods=[resized, of_another_scheduler])
    assert found[MEMORY] == 40000 + 6000 + 500
    assert "nvidia.com/gpu" not in found


def test_request_on_several_devices_is_less_in_the_sum_than_in_the_ledger() -> None:
    """``gpu: 2, gpumem: 3000``: sums are necessary, never sufficient."""
    booked = {f"nvidia-{number}": Booked(memory_mib=3000, slots=1) for number in range(2)}
    pod = HeldPod(requests={MEMORY: 3000}, booked=booked)
    found = total(large(0, capacity_mib=3000), large(1, capacity_mib=3000), pods=[pod])
    assert found[MEMORY] == 6000
    assert found[MEMORY] - pod.requests[MEMORY] == 3000, "the sum shows free memory; there is none"


def test_status_that_is_right_is_not_written() -> None:
    wanted = {"nvidia": {MEMORY: 40000, CORES: 100}}
    written = {MEMORY: "40k", CORES: "100", "nvidia.com/gpu": "10"}
    node = NodeAmounts(
        capacity=written, allocatable=written, annotations={KEY: f"{CORES},{MEMORY}"}
    )
    assert change(node, wanted).patch is None
    zeroed = NodeAmounts(
        capacity={**written, MEMORY: "0"},
        allocatable={**written, MEMORY: "0"},
        annotations=node.annotations,
    )
    amounts = {MEMORY: "40000"}
    assert change(zeroed, wanted).patch == {"status": {"capacity": amounts, "allocatable": amounts}}


def test_total_is_raised_at_once_and_lowered_when_it_is_due() -> None:
    known = {MEMORY: "50000", CORES: "100"}
    node = NodeAmounts(capacity=known, allocatable=known, annotations={KEY: f"{CORES},{MEMORY}"})
    wanted = {"nvidia": {MEMORY: 40000, CORES: 200}}
    first = change(node, wanted)
    assert first.above == {MEMORY}
    assert first.patch is not None
    assert first.patch["status"]["capacity"] == {CORES: "200"}
    due = change(node, wanted, due=[MEMORY])
    assert due.above == frozenset()
    assert due.patch is not None
    assert due.patch["status"]["capacity"] == {CORES: "200", MEMORY: "40000"}


def test_withdrawal_removes_what_the_annotation_names_and_no_more() -> None:
    known = {MEMORY: "50000", "nvidia.com/gpu": "10", "cpu": "8", CORES: "3"}
    node = NodeAmounts(
        capacity=known,
        allocatable=known,
        annotations={KEY: f"{MEMORY},cpu,kubernetes.io/batch-cpu,nvidia.com/old"},
    )
    removed = {MEMORY: None}
    assert change(node, {"nvidia": {}}).patch == {
        "metadata": {"annotations": {KEY: None}},
        "status": {"capacity": removed, "allocatable": removed},
    }
    assert change(NodeAmounts(capacity=known, allocatable=known), {"nvidia": {}}).patch is None


def test_agents_of_other_vendors_are_left_alone() -> None:
    other = annotations.advertised_amounts("ascend")
    known = {"huawei.com/Ascend910B2-memory": "65536"}
    node = NodeAmounts(
        capacity=known, allocatable=known, annotations={other: "huawei.com/Ascend910B2-memory"}
    )
    patch = change(node, {"nvidia": {MEMORY: 1}}).patch
    assert patch is not None
    assert patch["metadata"]["annotations"] == {KEY: MEMORY}
    assert patch["status"]["capacity"] == {MEMORY: "1"}


def test_requests_of_a_pod_are_kubelets() -> None:
    def container(memory: int, **more: str) -> dict[str, Any]:
        return {"name": "c", "resources": {"limits": {MEMORY: str(memory)}}, **more}

    document = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {
            "initContainers": [
                container(7000),
                container(1000, restartPolicy="Always"),
                container(6500),
            ],
            "containers": [container(2000), container(4000)],
        },
    }
    pod = decode(msgspec.json.encode(document), PodView, what="pod")
    assert requests_of(pod, [MEMORY, CORES]) == {MEMORY: 7500}


def test_amounts_of_an_ended_device_plugin_are_kubelets() -> None:
    """Kubelet rejects pods that request them, while it knows the plugin or a pod holds its ids."""
    asked = {"volcano.sh/vgpu-memory": 3000}
    node = NodeAmounts(
        capacity={"volcano.sh/vgpu-cores": "200", MEMORY: "5", CORES: "0", "nvidia.com/gpu": "20"},
        allocatable={"volcano.sh/vgpu-cores": "0", MEMORY: "0", CORES: "0", "nvidia.com/gpu": "9"},
        annotations={KEY: f"{MEMORY},{CORES}"},
    )
    assert of_ended_plugin(node, [HeldPod(requests=asked)]) == {"volcano.sh/vgpu-cores"}
    adopted = HeldPod(requests=asked, holds_ids=True)
    assert of_ended_plugin(NodeAmounts(), [adopted]) == asked.keys()
