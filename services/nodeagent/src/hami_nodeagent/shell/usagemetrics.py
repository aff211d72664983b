# SPDX-License-Identifier: Apache-2.0
"""Every metric of containers and devices; the catalogue with meanings is docs/limiter-agent.md.

Names and labels are those of HAMi's node monitor where it has the same figure. A series exists
while its container holds its share, with 0 rather than nothing, and vanishes with it: a scrape
shows the last look, nothing is kept per series. Labels come from the ledger and the API server,
never from what a tenant wrote. Sizes in bytes, shares of a device in percent.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hami_common.model.device import Device
from hami_nodeagent.core.breach import Breach
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.usage import ContainerRow, Row
from hami_nodeagent.drivers.protocol import DeviceUsage

_MIB = 1 << 20
_FULL_PCT = 100
_NS = 1e-9
_DEVICE_LABELS = ("namespace", "pod", "container", "vdevice_index", "device_uuid")
_CONTAINER_LABELS = ("namespace", "pod", "container")
_HOST_LABELS = ("node", "device_index", "device_uuid", "device_type")
_BREACH_LABELS = ("namespace", "pod", "container", "device_uuid", "kind")

_BY_DEVICE: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
    (
        "hami_vgpu_memory_limit_bytes",
        "Memory of the device that the container may use.",
        lambda row: row.holder.limit_mib * _MIB,
    ),
    (
        "hami_vgpu_memory_used_bytes",
        "Memory of the device that the container uses.",
        lambda row: row.used_bytes,
    ),
    (
        "hami_vgpu_memory_context_bytes",
        "Of it, contexts of the driver.",
        lambda row: row.context_bytes,
    ),
    ("hami_vgpu_memory_module_bytes", "Of it, loaded code.", lambda row: row.module_bytes),
    (
        "hami_vgpu_memory_buffer_bytes",
        "Of it, what the program asked for.",
        lambda row: max(0, row.used_bytes - row.context_bytes - row.module_bytes),
    ),
    (
        "hami_vgpu_memory_driver_bytes",
        "The same as the driver sees it from outside.",
        lambda row: row.driver_bytes,
    ),
    (
        "hami_vgpu_memory_over",
        "1 while more is used than the limit allows since it was lowered.",
        lambda row: row.is_over,
    ),
    (
        "hami_vgpu_core_limit_ratio",
        "Percent of the device's time that the container may use; 100: no limit.",
        lambda row: row.holder.core_pct or _FULL_PCT,
    ),
    (
        "hami_container_device_utilization_ratio",
        "Percent of the device's time that the driver saw the container use last.",
        lambda row: row.core_pct,
    ),
)
_BY_CONTAINER: tuple[tuple[str, str, Callable[[ContainerRow], float]], ...] = (
    ("hami_vgpu_launches", "Launches of work on devices.", lambda row: row.counted.launches),
    (
        "hami_vgpu_wait_seconds",
        "Time that launches waited for the compute limit or for higher priorities.",
        lambda row: row.counted.waited_ns * _NS,
    ),
    (
        "hami_vgpu_device_seconds",
        "Time of devices that launches took, measured or estimated.",
        lambda row: row.counted.device_time_ns * _NS,
    ),
    (
        "hami_vgpu_refused_allocations",
        "Allocations refused because they did not fit the limit.",
        lambda row: row.counted.refusals,
    ),
)
_BY_HOST: tuple[tuple[str, str, Callable[[DeviceUsage], float | None]], ...] = (
    (
        "hami_host_gpu_memory_used_bytes",
        "Memory of the device in use, by anybody.",
        lambda usage: None if usage.used_mib is None else usage.used_mib * _MIB,
    ),
    (
        "hami_host_gpu_utilization_ratio",
        "Percent of time in which the device did anything.",
        lambda usage: usage.core_pct,
    ),
    (
        "hami_host_gpu_memory_controller_utilization_ratio",
        "Percent of time in which the device's memory was read or written.",
        lambda usage: usage.memory_bus_pct,
    ),
)


class Look(Struct, frozen=True, kw_only=True):
    """What the last look showed."""

    rows: Sequence[Row] = ()
    containers: Sequence[ContainerRow] = ()
    devices: Sequence[tuple[Device, DeviceUsage]] = ()
    breaches: Sequence[tuple[Breach, str, str]] = ()
    """With namespace and name of the pod; empty for processes of the host."""


class UsageMetrics(Collector):
    """Shows the last look at every scrape."""

    def __init__(self, node: str) -> None:
        self._node = node
        self.look = Look()

    def collect(self) -> Iterable[Metric]:
        """All families, those without a series too."""
        look = self.look
        for name, text, value in _BY_DEVICE:
            family = GaugeMetricFamily(name, text, labels=_DEVICE_LABELS)
            for row in look.rows:
                family.add_metric(_device_labels(row.holder), value(row))
            yield family
        for name, text, counted in _BY_CONTAINER:
            counter = CounterMetricFamily(name, text, labels=_CONTAINER_LABELS)
            for one in look.containers:
                counter.add_metric(_container_labels(one.holder), counted(one))
            yield counter
        processes = GaugeMetricFamily(
            "hami_vgpu_processes",
            "Processes of the container that use its devices.",
            labels=_CONTAINER_LABELS,
        )
        idle = GaugeMetricFamily(
            "hami_container_last_kernel_elapsed_seconds",
            "Since the container's last launch; absent before the first.",
            labels=_CONTAINER_LABELS,
        )
        for one in look.containers:
            processes.add_metric(_container_labels(one.holder), one.processes)
            if one.idle_s is not None:
                idle.add_metric(_container_labels(one.holder), one.idle_s)
        yield processes
        yield idle
        for name, text, figure in _BY_HOST:
            family = GaugeMetricFamily(name, text, labels=_HOST_LABELS)
            for device, usage in look.devices:
                shown = figure(usage)
                if shown is not None:
                    labels = (self._node, str(device.index), device.uuid, device.type)
                    family.add_metric(labels, shown)
            yield family
        breaches = GaugeMetricFamily(
            "hami_vgpu_breach",
            "1 while a process uses a device beyond the container's share, or without one.",
            labels=_BREACH_LABELS,
        )
        for breach, namespace, pod in look.breaches:
            breaches.add_metric((namespace, pod, breach.container, breach.uuid, breach.kind), 1)
        yield breaches


def _device_labels(holder: Holder) -> tuple[str, ...]:
    return (*_container_labels(holder), str(holder.number), holder.uuid)


def _container_labels(holder: Holder) -> tuple[str, ...]:
    return (holder.namespace, holder.pod, holder.container)
