# SPDX-License-Identifier: Apache-2.0
"""Devices and shares in a scrape of the scheduler, under each set of names."""

from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import ContainerKind
from hami_common.runtime.httpd import Request, Response
from hami_core.ledger.holding import Holding
from hami_scheduler.shell.clustermetrics import share_rows
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.test_quota import pod, put_quota, quota
from tests.unit.scheduler.shell.world import Running, World, pod_path, quiet

pytestmark = pytest.mark.anyio

MIB = 1 << 20
ALL = ("hami", "legacy", "volcano")
OLD_DEVICE = {"nodeid", "deviceuuid", "deviceidx", "devicetype", "zone"}
OLD_POD = {"podnamespace", "nodename", "podname", "containeridx", "deviceuuid", "zone"}
DEVICE = {"node", "device_uuid", "device_index", "device_type", "zone"}
POD = {"namespace", "node", "pod", "container_index", "device_uuid", "zone"}
LABELS = {
    "hami_gpu_memory_limit_bytes": DEVICE,
    "hami_gpu_core_limit_ratio": DEVICE,
    "hami_gpu_shared_count": DEVICE,
    "hami_gpu_core_allocated_ratio": DEVICE,
    "hami_node_gpu_memory_allocated_ratio": DEVICE,
    "hami_gpu_memory_allocated_bytes": DEVICE | {"device_cores"},
    "hami_node_gpu_overview": DEVICE | {"device_cores", "device_memory_limit"},
    "hami_vgpu_memory_allocated_bytes": POD,
    "hami_vgpu_core_allocated_ratio": POD,
    "hami_resource_quota_used": {"namespace", "quota_name", "limit", "zone"},
    "hami_resource_quota_limit": {"namespace", "quota_name", "zone"},
    "GPUDeviceMemoryLimit": OLD_DEVICE,
    "GPUDeviceCoreLimit": OLD_DEVICE,
    "GPUDeviceSharedNum": OLD_DEVICE,
    "GPUDeviceCoreAllocated": OLD_DEVICE,
    "GPUDeviceMemoryAllocated": OLD_DEVICE | {"devicecores"},
    "nodeGPUOverview": OLD_DEVICE | {"devicecores", "devicememorylimit"},
    "nodeGPUMemoryPercentage": OLD_DEVICE - {"devicetype"},
    "QuotaUsed": {"quotanamespace", "quotaName", "limit", "zone"},
    "vGPUMemoryAllocated": OLD_POD,
    "vGPUCoreAllocated": OLD_POD,
    "volcano_vgpu_device_shared_number": {"devID", "NodeName"},
    "volcano_vgpu_device_allocated_memory": {"devID", "NodeName"},
    "volcano_vgpu_device_allocated_cores": {"devID", "NodeName"},
    "volcano_vgpu_device_memory_limit": {"devID", "NodeName"},
    "volcano_vgpu_device_memory_allocation_for_a_certain_pod": {"devID", "NodeName", "podName"},
    "volcano_vgpu_device_core_allocation_for_a_certain_pod": {"devID", "NodeName", "podName"},
}
"""Names and labels that dashboards of HAMi's and Volcano's users rely on."""


async def scrape(s: Running) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    handler = s.scheduler.cluster_metrics.routes()["GET", "/metrics"]
    answer = await handler(
        Request(method="GET", path="/metrics", query={}, headers={}, body=b"", params={})
    )
    assert isinstance(answer, Response)
    found = defaultdict(list)
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            found[sample.name].append((dict(sample.labels), sample.value))
    return found


async def test_every_name_of_each_set_has_its_labels_and_the_ledgers_figures() -> None:
    world = World()
    await world.add_devices(builders.devices("n1", count=2))
    put_quota(world, quota(9000))
    async with world.scheduler(metric_names=ALL) as s:
        assert await s.bind(world.add_pod(pod("a", mem_mib=3000, cores=25)), "n1") == ""
        await quiet()
        seen = await scrape(s)
    for name, labels in LABELS.items():
        assert seen[name], name
        assert all(set(found) == labels for found, _ in seen[name]), name
        assert {found.get("zone", "vGPU") for found, _ in seen[name]} == {"vGPU"}
    (held,) = (one for one in seen["hami_vgpu_memory_allocated_bytes"])
    assert held[0] == {
        "namespace": "team-a",
        "node": "n1",
        "pod": "a",
        "container_index": "0",
        "device_uuid": held[0]["device_uuid"],
        "zone": "vGPU",
    }
    uuid = held[0]["device_uuid"]

    def of(name: str, label: str = "device_uuid") -> float:
        (value,) = (value for found, value in seen[name] if found.get(label) == uuid)
        return value

    assert held[1] == of("hami_gpu_memory_allocated_bytes") == 3000 * MIB
    assert of("hami_gpu_memory_limit_bytes") == of("GPUDeviceMemoryLimit", "deviceuuid")
    assert of("hami_node_gpu_memory_allocated_ratio") == 3000 / 16000
    assert of("hami_vgpu_core_allocated_ratio") == of("hami_gpu_core_allocated_ratio") == 25
    assert of("volcano_vgpu_device_allocated_memory", "devID") == 3000
    assert of("GPUDeviceSharedNum", "deviceuuid") == 1
    assert len(seen["GPUDeviceSharedNum"]) == 2, "an idle device is shown with 0"
    assert seen["QuotaUsed"][0][1] == 3000


@pytest.mark.parametrize("chosen", [(), ("hami",), ("legacy",), ("volcano",)])
async def test_only_the_sets_of_the_settings_are_shown(chosen: tuple[str, ...]) -> None:
    world = World()
    await world.add_devices(builders.devices("n1"))
    async with world.scheduler(metric_names=chosen) as s:
        seen = await scrape(s)
    assert bool(seen["hami_gpu_shared_count"]) == ("hami" in chosen)
    assert bool(seen["GPUDeviceSharedNum"]) == ("legacy" in chosen)
    assert bool(seen["volcano_vgpu_device_shared_number"]) == ("volcano" in chosen)
    assert seen["hami_scheduler_ready"] == [({}, 1)]


async def test_series_follow_pods_and_all_other_labels_are_closed_sets() -> None:
    """A busy cluster: a hundred pods, most of them refused, leave no series behind."""
    world = World()
    for node in ("n1", "n2"):
        await world.add_devices(builders.devices(node, count=2, memory_mib=4000))

    def count(seen: dict[str, list[tuple[dict[str, str], float]]], prefix: str) -> int:
        return sum(len(rows) for name, rows in seen.items() if name.startswith(prefix))

    async with world.scheduler(metric_names=ALL) as s:
        before = after = await scrape(s)
        sizes: list[int] = []
        for turn in range(5):
            pods = [
                world.add_pod(pod(f"p-{turn}-{n}", namespace=f"ns-{turn}-{n}", mem_mib=1000))
                for n in range(20)
            ]
            for one in pods:
                answer = await s.filter(one, ["n1", "n2"])
                for node in answer["NodeNames"][:1]:
                    await s.bind(one, node)
            await quiet()
            busy = await scrape(s)
            assert count(busy, "hami_vgpu_") == 2 * 16
            assert busy["hami_scheduler_waiting_pods"] == [({}, 4)]
            for one in pods:
                world.kube.remove(pod_path(one))
            await quiet()
            after = await scrape(s)
            assert [count(after, p) for p in ("hami_vgpu_", "vGPU")] == [0, 0]
            assert count(after, "hami_gpu_") == count(before, "hami_gpu_")
            sizes.append(count(after, "hami_scheduler_"))
        assert sizes[0] == sizes[-1], "more pods make no more series"
        for name, rows in after.items():
            if name.startswith("hami_scheduler_"):
                words = {word for labels, _ in rows for word in labels.values()}
                assert not any(word.startswith(("p-", "ns-", "GPU-", "n1")) for word in words), name


async def test_scrape_of_a_large_cluster_yields_to_other_tasks() -> None:
    world = World()
    for number in range(100):
        await world.add_devices(builders.devices(f"n{number:03d}", count=2))
    async with world.scheduler() as s:
        pieces = s.scheduler.cluster_metrics.cluster()
        first = await anext(pieces)
        assert first.count(b"\n") == 2 + 200
        assert len([piece async for piece in pieces]) == 8


def test_init_containers_are_left_out_where_other_pods_hold_the_devices() -> None:
    def holding(*kinds: ContainerKind) -> Holding:
        shares = (Share(vendor="nvidia", uuid="GPU-1", memory_mib=10),)
        record = AllocationRecord(
            op="reserve",
            allocation_id="a",
            node="n1",
            pod_uid="uid",
            namespace="default",
            pod="p",
            containers=tuple(
                ContainerShares(name=f"c{number}", kind=kind, shares=shares)
                for number, kind in enumerate(kinds)
            ),
        )
        return Holding(record=record, revision=1)

    assert [row.container for row in share_rows(holding("init", "app", "app"))] == [1, 2]
    assert [row.container for row in share_rows(holding("init"))] == [0]
