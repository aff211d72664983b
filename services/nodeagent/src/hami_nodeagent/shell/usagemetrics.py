# SPDX-License-Identifier: Apache-2.0
"""Exports the metrics of containers, devices and device time; docs/metrics.md lists them.

Names and labels are those of HAMi's node monitor where it has the same figure, and its older ones
where the operator selects them. A series exists while its container holds its share, with the value
0 if there is no usage, and ends with the share: a scrape shows the last sample, and only device
time is accumulated here. Labels come from the ledger and the API server, never from data that a
tenant wrote. Sizes in bytes, shares of a device in percent.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hami_common.metrics.families import ZONE, Family, Group, NameSet
from hami_common.model.device import Device
from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.breach import Breach
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.metering import Account, Kind, Meter, Sums
from hami_nodeagent.core.usage import ContainerKey, ContainerRow, Row
from hami_nodeagent.drivers.protocol import DeviceUsage

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_FULL_PCT: Final = 100
_NS: Final = 1e-9


class DeviceLine(NamedTuple):
    """One container on one device."""

    row: Row
    idle_s: float | None
    """Seconds since the container's last launch; ``None`` before the first."""


class HostLine(NamedTuple):
    """One device as the driver reports it."""

    node: str
    device: Device
    usage: DeviceUsage


class PartLine(NamedTuple):
    """One container on the MIG instance that carries its share."""

    share: DeviceLine
    instance: Instance


class InstanceLine(NamedTuple):
    """One MIG instance, made by the agent or by others."""

    node: str
    device: Device
    instance: Instance


class BreachLine(NamedTuple):
    """One ongoing breach; the pod's names are empty for processes of the host."""

    breach: Breach
    namespace: str
    pod: str


class MeterLine(NamedTuple):
    """Device time that one namespace held of one device type, in seconds."""

    node: str
    account: Account
    sums: Sums


class CapacityLine(NamedTuple):
    """Total time that devices of one type were present, in seconds."""

    node: str
    kind: Kind
    seconds: float


def _container(holder: Holder) -> tuple[str, ...]:
    return (holder.namespace, holder.pod, holder.container)


def _share(line: DeviceLine) -> tuple[str, ...]:
    holder = line.row.holder
    return (*_container(holder), str(holder.number), holder.uuid, ZONE)


def _buffer_bytes(line: DeviceLine) -> int:
    row = line.row
    return max(0, row.used_bytes - row.context_bytes - row.module_bytes)


def _host(line: HostLine) -> tuple[str, ...]:
    return (line.node, str(line.device.index), line.device.uuid, line.device.type, ZONE)


def _host_used(line: HostLine) -> float | None:
    used = line.usage.used_mib
    return None if used is None else used * _MIB


def _bytes(mib: float | None) -> float | None:
    return None if mib is None else mib * _MIB


def _mig(instance: Instance) -> tuple[str, ...]:
    handles = instance.handles
    return (
        handles.get(_MIG_UUID, ""),
        instance.profile,
        handles.get("gpu_instance", ""),
        handles.get("compute_instance", ""),
    )


def _length(line: InstanceLine) -> int:
    sizes = {one.name: one.size for one in line.device.partitions}
    return sizes.get(line.instance.profile, 0)


_MIG_UUID: Final = "mig_uuid"
"""Handle that only MIG instances have."""
_MIG_LABELS = ("mig_uuid", "profile", "gpu_instance_id", "compute_instance_id")
_SHARE_LABELS = ("namespace", "pod", "container", "vdevice_index", "device_uuid", "zone")
_OLD_SHARE_LABELS = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid", "zone")
_HOST_LABELS = ("node", "device_index", "device_uuid", "device_type", "zone")

DEVICE_GROUPS: Final[tuple[Group[DeviceLine], ...]] = (
    Group(
        names="hami",
        labels=_SHARE_LABELS,
        values=_share,
        families=(
            (
                Family(
                    name="hami_vgpu_memory_limit_bytes",
                    text="Memory of the device that the container may use.",
                    replaces="vGPU_device_memory_limit_in_bytes",
                ),
                lambda line: line.row.holder.limit_mib * _MIB,
            ),
            (
                Family(
                    name="hami_vgpu_memory_used_bytes",
                    text="Memory of the device that the container uses: its region's word to the "
                    "byte, the driver's for whole devices and MIG instances.",
                    replaces="vGPU_device_memory_usage_in_bytes",
                ),
                lambda line: line.row.used_bytes,
            ),
            (
                Family(
                    name="hami_container_device_memory_bytes",
                    text="The same; HAMi shows it twice.",
                    replaces="Device_memory_desc_of_container",
                ),
                lambda line: line.row.used_bytes,
            ),
            (
                Family(
                    name="hami_vgpu_memory_context_bytes",
                    text="Of the memory used, contexts of the driver.",
                ),
                lambda line: line.row.context_bytes,
            ),
            (
                Family(
                    name="hami_vgpu_memory_module_bytes",
                    text="Of the memory used, loaded code.",
                ),
                lambda line: line.row.module_bytes,
            ),
            (
                Family(
                    name="hami_vgpu_memory_buffer_bytes",
                    text="Of the memory used, what the program asked for.",
                ),
                _buffer_bytes,
            ),
            (
                Family(
                    name="hami_container_device_utilization_ratio",
                    text="Percent of the device's time that the driver saw the container use last.",
                    replaces="Device_utilization_desc_of_container",
                ),
                lambda line: line.row.core_pct,
            ),
            (
                Family(
                    name="hami_container_last_kernel_elapsed_seconds",
                    text="Since the container's last launch; absent before the first.",
                    replaces="Device_last_kernel_of_container",
                ),
                lambda line: line.idle_s,
            ),
        ),
    ),
    Group(
        labels=_SHARE_LABELS,
        values=_share,
        families=(
            (
                Family(
                    name="hami_vgpu_memory_driver_bytes",
                    text="Memory that the container uses as the driver sees it from outside.",
                ),
                lambda line: line.row.driver_bytes,
            ),
            (
                Family(
                    name="hami_vgpu_memory_bound_bytes",
                    text="Memory that the container may use now, of a share with a memory limit "
                    "above its request; absent for others.",
                ),
                lambda line: _bytes(line.row.bound_mib),
            ),
            (
                Family(
                    name="hami_vgpu_memory_over",
                    text="1 while more is used than the limit, or the present bound, allows "
                    "since it was lowered.",
                ),
                lambda line: line.row.is_over,
            ),
            (
                Family(
                    name="hami_starved_seconds_total",
                    kind="counter",
                    text="Time that processes waited for higher priorities beyond the first "
                    "second, after which they get `priority.min_share_pct` of the device.",
                ),
                lambda line: line.row.starved_ns * _NS,
            ),
            (
                Family(
                    name="hami_vgpu_core_limit_ratio",
                    text="Percent of the device's time that the container may use; 100: no limit.",
                ),
                lambda line: line.row.holder.core_pct or _FULL_PCT,
            ),
            (
                Family(
                    name="hami_vgpu_memory_bandwidth_estimate_ratio",
                    text="Estimate of the container's part of the device's memory bandwidth, in "
                    "percent of it; from the device's figure and device time.",
                ),
                lambda line: line.row.dram_pct,
            ),
            (
                Family(
                    name="hami_vgpu_pcie_estimate_bytes_per_second",
                    text="Estimate of the container's PCIe traffic in both directions.",
                ),
                lambda line: _bytes(line.row.pcie_mib_s),
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=_OLD_SHARE_LABELS,
        values=_share,
        families=(
            (
                Family(
                    name="vGPU_device_memory_limit_in_bytes",
                    text="As hami_vgpu_memory_limit_bytes.",
                ),
                lambda line: line.row.holder.limit_mib * _MIB,
            ),
            (
                Family(
                    name="vGPU_device_memory_usage_in_bytes", text="As hami_vgpu_memory_used_bytes."
                ),
                lambda line: line.row.used_bytes,
            ),
            (
                Family(
                    name="Device_utilization_desc_of_container",
                    text="As hami_container_device_utilization_ratio.",
                ),
                lambda line: line.row.core_pct,
            ),
            (
                Family(
                    name="Device_last_kernel_of_container",
                    text="As hami_container_last_kernel_elapsed_seconds.",
                ),
                lambda line: line.idle_s,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=(*_OLD_SHARE_LABELS, "context", "module", "data", "offset"),
        values=lambda line: (
            *_share(line),
            str(line.row.context_bytes),
            str(line.row.module_bytes),
            str(_buffer_bytes(line)),
            "0",
        ),
        families=(
            (
                Family(
                    name="Device_memory_desc_of_container",
                    text="As hami_container_device_memory_bytes. Its figures are labels too, as "
                    "HAMi's users know them: a new series with each change.",
                ),
                lambda line: line.row.used_bytes,
            ),
        ),
    ),
)

CLAIM_GROUPS: Final[tuple[Group[DeviceLine], ...]] = (
    Group(
        names="hami",
        labels=(*_SHARE_LABELS, "claim", "request"),
        values=lambda line: (*_share(line), line.row.holder.claim, line.row.holder.request),
        families=(
            (
                Family(
                    name="hami_claim_device_info",
                    text="1 for the ResourceClaim and request by which a container has a device.",
                ),
                lambda _: 1,
            ),
        ),
    ),
)

MIG_GROUPS: Final[tuple[Group[PartLine], ...]] = (
    Group(
        names="hami",
        labels=(*_SHARE_LABELS, *_MIG_LABELS),
        values=lambda line: (*_share(line.share), *_mig(line.instance)),
        families=(
            (
                Family(
                    name="hami_mig_device_info",
                    text="1 for the MIG instance that carries the container's share.",
                    replaces="MigInfo",
                ),
                lambda _: 1,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=(*_OLD_SHARE_LABELS, "instanceid"),
        values=lambda line: (
            *_share(line.share),
            line.instance.handles.get("gpu_instance", ""),
        ),
        families=((Family(name="MigInfo", text="As hami_mig_device_info."), lambda _: 1),),
    ),
)

INSTANCE_GROUPS: Final[tuple[Group[InstanceLine], ...]] = (
    Group(
        names="hami",
        labels=(
            "node",
            "device_uuid",
            "device_index",
            *_MIG_LABELS,
            "placement_start",
            "placement_size",
            "zone",
        ),
        values=lambda line: (
            line.node,
            line.device.uuid,
            str(line.device.index),
            *_mig(line.instance),
            str(line.instance.start),
            str(_length(line)),
            ZONE,
        ),
        families=(
            (
                Family(
                    name="hami_node_gpu_mig_instance_info",
                    text="1 for each MIG instance of the node, whether HAMi created it or not.",
                    replaces="nodeGPUMigInstance",
                ),
                lambda _: 1,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=("nodeid", "deviceuuid", "deviceidx", "migname", "zone"),
        values=lambda line: (
            line.node,
            line.device.uuid,
            str(line.device.index),
            f"{line.instance.profile}-{line.instance.handles.get('gpu_instance', '')}",
            ZONE,
        ),
        families=(
            (
                Family(name="nodeGPUMigInstance", text="As hami_node_gpu_mig_instance_info."),
                lambda _: 1,
            ),
        ),
    ),
)

CONTAINER_GROUPS: Final[tuple[Group[ContainerRow], ...]] = (
    Group(
        labels=("namespace", "pod", "container"),
        values=lambda row: _container(row.holder),
        families=(
            (
                Family(
                    name="hami_vgpu_launches_total",
                    kind="counter",
                    text="Launches of work on devices.",
                ),
                lambda row: row.counted.launches,
            ),
            (
                Family(
                    name="hami_vgpu_wait_seconds_total",
                    kind="counter",
                    text="Time that launches waited for the compute limit or for higher "
                    "priorities.",
                ),
                lambda row: row.counted.waited_ns * _NS,
            ),
            (
                Family(
                    name="hami_vgpu_device_seconds_total",
                    kind="counter",
                    text="Time of devices that launches took, measured or estimated.",
                ),
                lambda row: row.counted.device_time_ns * _NS,
            ),
            (
                Family(
                    name="hami_vgpu_refused_allocations_total",
                    kind="counter",
                    text="Allocations refused because they did not fit the limit.",
                ),
                lambda row: row.counted.refusals,
            ),
            (
                Family(
                    name="hami_vgpu_processes",
                    text="Processes of the container that use its devices.",
                ),
                lambda row: row.processes,
            ),
        ),
    ),
)

HOST_GROUPS: Final[tuple[Group[HostLine], ...]] = (
    Group(
        names="hami",
        labels=_HOST_LABELS,
        values=_host,
        families=(
            (
                Family(
                    name="hami_host_gpu_memory_used_bytes",
                    text="Memory of the device in use, by anybody.",
                    replaces="HostGPUMemoryUsage",
                ),
                _host_used,
            ),
            (
                Family(
                    name="hami_host_gpu_utilization_ratio",
                    text="Percent of time in which the device did anything.",
                    replaces="HostCoreUtilization",
                ),
                lambda line: line.usage.core_pct,
            ),
            (
                Family(
                    name="hami_host_gpu_memory_controller_utilization_ratio",
                    text="Percent of time in which the device's memory was read or written.",
                ),
                lambda line: line.usage.memory_bus_pct,
            ),
            (
                Family(
                    name="hami_host_gpu_memory_bandwidth_ratio",
                    text="Percent of the bandwidth of the device's memory in use; absent before "
                    "Hopper, and where the driver reserves samples for administrators.",
                ),
                lambda line: line.usage.dram_pct,
            ),
            (
                Family(
                    name="hami_host_gpu_pcie_bytes_per_second",
                    text="PCIe traffic of the device in both directions; absent as the above.",
                ),
                lambda line: _bytes(line.usage.pcie_mib_s),
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=("nodeid", "deviceidx", "deviceuuid", "devicetype", "zone"),
        values=_host,
        families=(
            (
                Family(name="HostGPUMemoryUsage", text="As hami_host_gpu_memory_used_bytes."),
                _host_used,
            ),
            (
                Family(name="HostCoreUtilization", text="As hami_host_gpu_utilization_ratio."),
                lambda line: line.usage.core_pct,
            ),
        ),
    ),
)

BREACH_GROUPS: Final[tuple[Group[BreachLine], ...]] = (
    Group(
        labels=("namespace", "pod", "container", "device_uuid", "kind"),
        values=lambda line: (
            line.namespace,
            line.pod,
            line.breach.container,
            line.breach.uuid,
            line.breach.kind,
        ),
        families=(
            (
                Family(
                    name="hami_vgpu_breach",
                    text="1 while a process uses a device beyond the container's share, or "
                    "without one.",
                ),
                lambda _: 1,
            ),
        ),
    ),
)

METER_GROUPS: Final[tuple[Group[MeterLine], ...]] = (
    Group(
        labels=("node", "namespace", "vendor", "device_type"),
        values=lambda line: (line.node, *line.account),
        families=(
            (
                Family(
                    name="hami_metering_slice_seconds_total",
                    kind="counter",
                    text="Device time that pods of the namespace held: the larger of their parts "
                    "of memory and compute, never more per device than went by.",
                ),
                lambda line: line.sums.slice_s,
            ),
            (
                Family(
                    name="hami_metering_memory_seconds_total",
                    kind="counter",
                    text="The same by their part of the device's memory alone.",
                ),
                lambda line: line.sums.memory_s,
            ),
            (
                Family(
                    name="hami_metering_core_seconds_total",
                    kind="counter",
                    text="The same by their part of the device's compute alone; pods without a "
                    "compute limit hold none.",
                ),
                lambda line: line.sums.core_s,
            ),
            (
                Family(
                    name="hami_metering_idle_seconds_total",
                    kind="counter",
                    text="Of the slice seconds, those in which the pod was seen to do nothing on "
                    "the device.",
                ),
                lambda line: line.sums.idle_s,
            ),
        ),
    ),
)

CAPACITY_GROUPS: Final[tuple[Group[CapacityLine], ...]] = (
    Group(
        labels=("node", "vendor", "device_type"),
        values=lambda line: (line.node, *line.kind),
        families=(
            (
                Family(
                    name="hami_metering_device_seconds_total",
                    kind="counter",
                    text="Time of all devices, held or not: what slice seconds are a part of.",
                ),
                lambda line: line.seconds,
            ),
        ),
    ),
)


class Look(Struct, frozen=True, kw_only=True):
    """Result of the last sample."""

    rows: Sequence[Row] = ()
    containers: Sequence[ContainerRow] = ()
    devices: Sequence[tuple[Device, DeviceUsage]] = ()
    breaches: Sequence[tuple[Breach, str, str]] = ()
    """Breaches with namespace and name of the pod; empty for processes of the host."""
    instances: Sequence[tuple[Device, Instance]] = ()
    """Hardware partitions of a known size."""
    asked_s: float = -math.inf
    """Time of the clock at which a driver last answered."""


class UsageMetrics(Collector):
    """Exports the last sample at every scrape."""

    def __init__(self, node: str, *, sets: Collection[NameSet]) -> None:
        """Export the name sets ``sets``, and the metrics that HAMi does not have."""
        self._node = node
        # Volcano's agents export some of HAMi's older names.
        self._sets = {"legacy" if name == "volcano" else name for name in sets}
        self.look = Look()
        self.meter = Meter()

    def collect(self) -> Iterable[Metric]:
        """Yield all families, including those without a series."""
        look, node, meter = self.look, self._node, self.meter
        idle_by_container = {_key(one.holder): one.idle_s for one in look.containers}
        lines = [DeviceLine(row, idle_by_container.get(_key(row.holder))) for row in look.rows]
        hosts = [HostLine(node, device, usage) for device, usage in look.devices]
        meters = [MeterLine(node, *one) for one in meter.sums.items()]
        devices = [CapacityLine(node, *one) for one in meter.devices_s.items()]
        parts = [
            PartLine(line, part.instance)
            for line in lines
            if (part := line.row.part) is not None and _is_mig(part.instance)
        ]
        migs = [InstanceLine(node, *one) for one in look.instances if _is_mig(one[1])]
        yield from self._families(DEVICE_GROUPS, lines)
        yield from self._families(CLAIM_GROUPS, [one for one in lines if one.row.holder.claim])
        yield from self._families(MIG_GROUPS, parts)
        yield from self._families(INSTANCE_GROUPS, migs)
        yield from self._families(CONTAINER_GROUPS, look.containers)
        yield from self._families(HOST_GROUPS, hosts)
        yield from self._families(BREACH_GROUPS, [BreachLine(*one) for one in look.breaches])
        yield from self._families(METER_GROUPS, meters)
        yield from self._families(CAPACITY_GROUPS, devices)

    def _families(self, groups: Sequence[Group[T]], things: Sequence[T]) -> Iterable[Metric]:
        for group in groups:
            if not group.is_shown(self._sets):
                continue
            for family, figure in group.families:
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                shown = kind(family.name, family.text, labels=group.labels)
                # One failing series must not remove all others from every scrape.
                values, failed = sift(things, partial(_series, group, figure))
                for _, (labels, value) in values:
                    if value is not None:
                        shown.add_metric(labels, value)
                for _, error in failed:
                    _log.error("series not shown", extra={"metric": family.name}, exc_info=error)
                yield shown


def _series(
    group: Group[T], figure: Callable[[T], float | None], thing: T
) -> tuple[Sequence[str], float | None]:
    return group.values(thing), figure(thing)


def _is_mig(instance: Instance) -> bool:
    return _MIG_UUID in instance.handles


def _key(holder: Holder) -> ContainerKey:
    return (holder.pod_uid, holder.container)
