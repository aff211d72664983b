# SPDX-License-Identifier: Apache-2.0
"""Names and labels of the node's metrics are those that HAMi's users know."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.core import Metric

from hami_common.metrics.families import NameSet
from hami_common.model.device import Device, Profile
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.metering import FORGET_S, Meter, Part
from hami_nodeagent.core.usage import ContainerRow, Row
from hami_nodeagent.core.usage import Part as Carrier
from hami_nodeagent.drivers.protocol import DeviceUsage
from hami_nodeagent.settings import PrioritySettings, Settings, UsageSettings
from hami_nodeagent.shell.usagemetrics import Look, UsageMetrics
from tests.unit.nodeagent.core.test_breach import GPU, holder

PAGE = Path(__file__).parents[4] / "docs" / "limiter-agent.md"
POD = {"namespace", "pod", "container", "vdevice_index", "device_uuid", "zone"}
OLD_POD = {"podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid", "zone"}
HOST = {"node", "device_index", "device_uuid", "device_type", "zone"}
OLD_HOST = {"nodeid", "deviceidx", "deviceuuid", "devicetype", "zone"}
NEW = {
    "hami_host_gpu_memory_used_bytes": HOST,
    "hami_host_gpu_utilization_ratio": HOST,
    "hami_host_gpu_memory_controller_utilization_ratio": HOST,
    "hami_vgpu_memory_used_bytes": POD,
    "hami_vgpu_memory_limit_bytes": POD,
    "hami_container_device_memory_bytes": POD,
    "hami_vgpu_memory_context_bytes": POD,
    "hami_vgpu_memory_module_bytes": POD,
    "hami_vgpu_memory_buffer_bytes": POD,
    "hami_container_device_utilization_ratio": POD,
    "hami_container_last_kernel_elapsed_seconds": POD,
}
OLD = {
    "HostGPUMemoryUsage": OLD_HOST,
    "HostCoreUtilization": OLD_HOST,
    "vGPU_device_memory_usage_in_bytes": OLD_POD,
    "vGPU_device_memory_limit_in_bytes": OLD_POD,
    "Device_memory_desc_of_container": OLD_POD | {"context", "module", "data", "offset"},
    "Device_utilization_desc_of_container": OLD_POD,
    "Device_last_kernel_of_container": OLD_POD,
}
"""Names and labels that dashboards of HAMi's users rely on."""


def device() -> Device:
    return Device(uuid=GPU, vendor="nvidia", index=0, type="T4", memory_mib=1000, capacity_mib=1000)


def shown(*sets: NameSet) -> dict[str, Metric]:
    metrics = UsageMetrics("node-a", sets=sets)
    usage = DeviceUsage(uuid=GPU, used_mib=1, core_pct=2, memory_bus_pct=3)
    metrics.look = Look(
        rows=[Row(holder=holder(), used_bytes=10, context_bytes=3, module_bytes=2)],
        containers=[ContainerRow(holder=holder(), idle_s=1.5)],
        devices=[(device(), usage)],
    )
    return {family.name: family for family in metrics.collect()}


@pytest.mark.parametrize(
    ("sets", "names"),
    [(("hami",), NEW), (("legacy",), OLD), (("volcano",), OLD), (("hami", "legacy"), NEW | OLD)],
)
def test_every_name_of_a_set_has_its_labels(
    sets: tuple[NameSet, ...], names: dict[str, set[str]]
) -> None:
    families = shown(*sets)
    for name, labels in names.items():
        (sample,) = families[name].samples
        assert set(sample.labels) == labels, name
        assert sample.labels["zone"] == "vGPU"
    others = (NEW.keys() | OLD.keys()) - names.keys()
    assert not others & families.keys()
    assert families["hami_vgpu_launches"].samples, "what HAMi has no name for is always there"


def test_older_names_show_the_same_figures() -> None:
    families = shown("hami", "legacy")

    def value(name: str) -> float:
        return float(families[name].samples[0].value)

    used = value("hami_vgpu_memory_used_bytes")
    assert value("vGPU_device_memory_usage_in_bytes") == used == 10
    assert value("HostGPUMemoryUsage") == value("hami_host_gpu_memory_used_bytes") == 1 << 20
    assert value("Device_last_kernel_of_container") == 1.5
    labels = families["Device_memory_desc_of_container"].samples[0].labels
    assert (labels["context"], labels["module"], labels["data"]) == ("3", "2", "5")


def test_bound_is_shown_of_shares_with_a_limit_above_their_request() -> None:
    metrics = UsageMetrics("node-a", sets=["hami"])
    metrics.look = Look(rows=[Row(holder=holder()), Row(holder=holder("b"), bound_mib=300)])
    families = {family.name: family for family in metrics.collect()}
    (bound,) = families["hami_vgpu_memory_bound_bytes"].samples
    assert (bound.labels["pod"], bound.value) == ("b", 300 << 20)
    limits = families["hami_vgpu_memory_limit_bytes"].samples
    assert [one.value for one in limits] == [100 << 20, 100 << 20], "the request"


def test_share_by_a_claim_names_the_claim_and_its_request() -> None:
    metrics = UsageMetrics("node-a", sets=["hami"])
    by_claim = replace(
        holder(container="b"), claimed=("uid-c", "main"), claim="train-gpu", request="main"
    )
    metrics.look = Look(rows=[Row(holder=holder()), Row(holder=by_claim)])
    families = {family.name: family for family in metrics.collect()}
    (info,) = families["hami_claim_device_info"].samples
    assert info.labels.keys() == POD | {"claim", "request"}
    assert (info.labels["claim"], info.labels["request"]) == ("train-gpu", "main")
    used = families["hami_vgpu_memory_used_bytes"].samples
    assert [one.labels["container"] for one in used] == [holder().container, "b"]


MIG = Instance(
    uuid=GPU,
    instance_id="MIG-a",
    profile="2g.10gb",
    start=2,
    handles={"mig_uuid": "MIG-a", "gpu_instance": "3", "compute_instance": "0"},
)


def test_mig_instances_are_shown_by_their_known_names() -> None:
    metrics = UsageMetrics("node-a", sets=("hami", "legacy"))
    size = Profile(name="2g.10gb", memory_mib=400, size=2, starts=(0, 2, 4))
    card = replace(device(), partitions=(size,))
    other = replace(MIG, instance_id="MIG-b", start=4, handles={**MIG.handles, "gpu_instance": "5"})
    no_mig = Instance(uuid=GPU, instance_id="100", profile="vir05", handles={"vnpu_id": "100"})
    metrics.look = Look(
        rows=[
            Row(holder=holder(), part=Carrier(instance=MIG)),
            Row(holder=holder(container="b"), part=Carrier(instance=no_mig)),
            Row(holder=holder(container="c")),
        ],
        instances=[(card, MIG), (card, other), (card, no_mig)],
    )
    families = {family.name: family for family in metrics.collect()}
    (info,) = families["hami_mig_device_info"].samples
    known = {"mig_uuid", "profile", "gpu_instance_id", "compute_instance_id"}
    assert info.labels.keys() == POD | known
    assert (info.labels["mig_uuid"], info.labels["profile"]) == ("MIG-a", "2g.10gb")
    (old,) = families["MigInfo"].samples
    assert old.labels.keys() == OLD_POD | {"instanceid"}
    assert old.labels["instanceid"] == "3"
    first, second = families["hami_node_gpu_mig_instance_info"].samples
    where = {"node", "device_uuid", "device_index", "placement_start", "placement_size", "zone"}
    assert first.labels.keys() == where | known
    assert (first.labels["placement_start"], first.labels["placement_size"]) == ("2", "2")
    assert second.labels["gpu_instance_id"] == "5"
    names = [one.labels["migname"] for one in families["nodeGPUMigInstance"].samples]
    assert names == ["2g.10gb-3", "2g.10gb-5"]


def test_removed_namespaces_leave_no_series() -> None:
    metrics = UsageMetrics("node-a", sets=("hami", "legacy"))
    metrics.meter = Meter()
    sizes = []
    for number in range(20):
        one = Part(pod_uid="u", namespace=f"ci-{number}", uuid=GPU, slice=1, memory=1, core=0)
        metrics.meter.look({GPU: device()}, [one], (), now_s=2 * FORGET_S * number)
        sizes.append(sum(len(family.samples) for family in metrics.collect()))
    assert sizes[0] == sizes[-1] == 5


def test_documented_defaults_are_those_of_the_settings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    settings = Settings(node_name="n", nats_urls=["nats://localhost"])
    for name in ("enforcement", "library", "library_dir", "pods_dir", "host_proc"):
        assert f"| `{name}` | `{getattr(settings, name)}` |" in text
    usage, priority = UsageSettings(), PrioritySettings()
    assert f"| `usage.look_s` | {usage.look_s:g} |" in text
    assert f"| `usage.breach.memory_margin_mib` | {usage.breach.memory_margin_mib} |" in text
    periods = (priority.rivals_s, priority.neighbours_s, priority.idle_s)
    assert ", ".join(f"{period:g}" for period in periods) in text
    assert f"{priority.hold_s:g}, {priority.lease_s:g} |" in text
