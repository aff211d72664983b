# SPDX-License-Identifier: Apache-2.0
"""Metrics of all devices and of the pods that use them, under the names of HAMi's scheduler.

Computed from table and ledger at each scrape without state per series, so a series exists exactly
as long as its device is registered or its pod has a share. Each set of names costs about seven
series per device and two per pod and device. A scrape of a large cluster is written ``CHUNK`` nodes
at a time and lets calls of kube-scheduler in between. Before ledger and pods agree none of these
metrics is exported: zeros would be wrong. Sizes in bytes where the name contains the unit, else in
MiB; compute in percent of one device. Every replica exports the same.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Final, NamedTuple, TypeVar

import anyio.lowlevel
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from hami_common.metrics.families import ZONE, Family, Group, NameSet, add_samples, head
from hami_common.runtime.httpd import Handler, Request, Response
from hami_core.ledger.holding import Holding
from hami_core.quota.accounts import QuotaRow
from hami_core.quota.resourcequota import LIMITS_PREFIX
from hami_core.table.table import DeviceTable
from hami_scheduler.shell.isolation import METRICS
from hami_scheduler.shell.quota import QuotaKeeper, tightest
from hami_scheduler.shell.state import State

T = TypeVar("T")

CHUNK: Final = 32
"""Nodes between two pauses: some milliseconds of work."""
_MIB: Final = 1 << 20


class DeviceRow(NamedTuple):
    """One registered device and its booked amounts."""

    node: str
    uuid: str
    number: int
    type: str
    capacity_mib: int
    capacity_core: int
    used_mib: int
    used_core: int
    sharers: int


class ShareRow(NamedTuple):
    """Share of one container of a pod in one device."""

    node: str
    namespace: str
    pod: str
    container: int
    uuid: str
    memory_mib: int
    core_pct: int


class PodRow(NamedTuple):
    """Shares of the pods of one name in one device: Volcano's names have no namespaces."""

    node: str
    pod: str
    uuid: str
    memory_mib: int
    core_pct: int


def _device(row: DeviceRow) -> tuple[str, ...]:
    return (row.node, row.uuid, str(row.number), row.type, ZONE)


def _percentage(row: DeviceRow) -> float | None:
    return row.used_mib / row.capacity_mib if row.capacity_mib else None


_NODE_LABELS = ("node", "device_uuid", "device_index", "device_type", "zone")
_OLD_LABELS = ("nodeid", "deviceuuid", "deviceidx", "devicetype", "zone")

DEVICE_GROUPS: Final[tuple[Group[DeviceRow], ...]] = (
    Group(
        names="hami",
        labels=_NODE_LABELS,
        values=_device,
        families=(
            (
                Family(
                    name="hami_gpu_memory_limit_bytes",
                    text="Memory of the device that may be handed out.",
                    replaces="GPUDeviceMemoryLimit",
                ),
                lambda row: row.capacity_mib * _MIB,
            ),
            (
                Family(
                    name="hami_gpu_core_limit_ratio",
                    text="Compute of the device that may be handed out, in percent.",
                    replaces="GPUDeviceCoreLimit",
                ),
                lambda row: row.capacity_core,
            ),
            (
                Family(
                    name="hami_gpu_shared_count",
                    text="Containers that hold a share of the device.",
                    replaces="GPUDeviceSharedNum",
                ),
                lambda row: row.sharers,
            ),
            (
                Family(
                    name="hami_gpu_core_allocated_ratio",
                    text="Compute of the device that is handed out, in percent.",
                    replaces="GPUDeviceCoreAllocated",
                ),
                lambda row: row.used_core,
            ),
            (
                Family(
                    name="hami_node_gpu_memory_allocated_ratio",
                    text="Part of the device's memory that is handed out, 0 to 1.",
                    replaces="nodeGPUMemoryPercentage",
                ),
                _percentage,
            ),
        ),
    ),
    Group(
        names="hami",
        labels=(*_NODE_LABELS, "device_cores"),
        values=lambda row: (*_device(row), str(row.used_core)),
        families=(
            (
                Family(
                    name="hami_gpu_memory_allocated_bytes",
                    text="Memory of the device that is handed out; device_cores: so much compute.",
                    replaces="GPUDeviceMemoryAllocated",
                ),
                lambda row: row.used_mib * _MIB,
            ),
        ),
    ),
    Group(
        names="hami",
        labels=(*_NODE_LABELS, "device_cores", "device_memory_limit"),
        values=lambda row: (*_device(row), str(row.capacity_core), str(row.capacity_mib)),
        families=(
            (
                Family(
                    name="hami_node_gpu_overview",
                    text="Memory of the device that is handed out, in bytes, with its capacity "
                    "(compute in percent, memory in MiB) as labels.",
                    replaces="nodeGPUOverview",
                ),
                lambda row: row.used_mib * _MIB,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=_OLD_LABELS,
        values=_device,
        families=(
            (
                Family(name="GPUDeviceMemoryLimit", text="As hami_gpu_memory_limit_bytes."),
                lambda row: row.capacity_mib * _MIB,
            ),
            (
                Family(name="GPUDeviceCoreLimit", text="As hami_gpu_core_limit_ratio."),
                lambda row: row.capacity_core,
            ),
            (
                Family(name="GPUDeviceSharedNum", text="As hami_gpu_shared_count."),
                lambda row: row.sharers,
            ),
            (
                Family(name="GPUDeviceCoreAllocated", text="As hami_gpu_core_allocated_ratio."),
                lambda row: row.used_core,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=("nodeid", "deviceuuid", "deviceidx", "zone"),
        values=lambda row: (row.node, row.uuid, str(row.number), ZONE),
        families=(
            (
                Family(
                    name="nodeGPUMemoryPercentage", text="As hami_node_gpu_memory_allocated_ratio."
                ),
                _percentage,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=(*_OLD_LABELS, "devicecores"),
        values=lambda row: (*_device(row), str(row.used_core)),
        families=(
            (
                Family(name="GPUDeviceMemoryAllocated", text="As hami_gpu_memory_allocated_bytes."),
                lambda row: row.used_mib * _MIB,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=(*_OLD_LABELS, "devicecores", "devicememorylimit"),
        values=lambda row: (*_device(row), str(row.capacity_core), str(row.capacity_mib)),
        families=(
            (
                Family(name="nodeGPUOverview", text="As hami_node_gpu_overview."),
                lambda row: row.used_mib * _MIB,
            ),
        ),
    ),
    Group(
        names="volcano",
        labels=("devID", "NodeName"),
        values=lambda row: (row.uuid, row.node),
        families=(
            (
                Family(
                    name="volcano_vgpu_device_shared_number",
                    text="Containers that hold a share of the device.",
                ),
                lambda row: row.sharers,
            ),
            (
                Family(
                    name="volcano_vgpu_device_allocated_memory",
                    text="Memory of the device that is handed out, in MiB.",
                ),
                lambda row: row.used_mib,
            ),
            (
                Family(
                    name="volcano_vgpu_device_allocated_cores",
                    text="Compute of the device that is handed out, in percent.",
                ),
                lambda row: row.used_core,
            ),
            (
                Family(
                    name="volcano_vgpu_device_memory_limit",
                    text="Memory of the device that may be handed out, in MiB.",
                ),
                lambda row: row.capacity_mib,
            ),
        ),
    ),
)


def _share_labels(row: ShareRow) -> tuple[str, ...]:
    return row.namespace, row.node, row.pod, str(row.container), row.uuid, ZONE


SHARE_GROUPS: Final[tuple[Group[ShareRow], ...]] = (
    Group(
        names="hami",
        labels=("namespace", "node", "pod", "container_index", "device_uuid", "zone"),
        values=_share_labels,
        families=(
            (
                Family(
                    name="hami_vgpu_memory_allocated_bytes",
                    text="Memory of the device that the container was given.",
                    replaces="vGPUMemoryAllocated",
                ),
                lambda row: row.memory_mib * _MIB,
            ),
            (
                Family(
                    name="hami_vgpu_core_allocated_ratio",
                    text="Compute of the device that the container was given, in percent; "
                    "0: no limit.",
                    replaces="vGPUCoreAllocated",
                ),
                lambda row: row.core_pct,
            ),
        ),
    ),
    Group(
        names="legacy",
        labels=("podnamespace", "nodename", "podname", "containeridx", "deviceuuid", "zone"),
        values=_share_labels,
        families=(
            (
                Family(name="vGPUMemoryAllocated", text="As hami_vgpu_memory_allocated_bytes."),
                lambda row: row.memory_mib * _MIB,
            ),
            (
                Family(name="vGPUCoreAllocated", text="As hami_vgpu_core_allocated_ratio."),
                lambda row: row.core_pct,
            ),
        ),
    ),
)

POD_GROUPS: Final[tuple[Group[PodRow], ...]] = (
    Group(
        names="volcano",
        labels=("devID", "NodeName", "podName"),
        values=lambda row: (row.uuid, row.node, row.pod),
        families=(
            (
                Family(
                    name="volcano_vgpu_device_memory_allocation_for_a_certain_pod",
                    text="Memory of the device that the pod was given, in MiB.",
                ),
                lambda row: row.memory_mib,
            ),
            (
                Family(
                    name="volcano_vgpu_device_core_allocation_for_a_certain_pod",
                    text="Compute of the device that the pod was given, in percent.",
                ),
                lambda row: row.core_pct,
            ),
        ),
    ),
)

QUOTA_GROUPS: Final[tuple[Group[QuotaRow], ...]] = (
    Group(
        names="legacy",
        labels=("quotanamespace", "quotaName", "limit", "zone"),
        values=lambda row: (
            row.namespace,
            row.key.removeprefix(LIMITS_PREFIX),
            str(row.limit),
            ZONE,
        ),
        families=(
            (Family(name="QuotaUsed", text="As hami_resource_quota_used."), lambda row: row.used),
        ),
    ),
)


class ClusterMetrics:
    """The metrics page of one scheduler: its own metrics, then those of the cluster."""

    def __init__(
        self,
        *,
        state: State,
        quota: QuotaKeeper,
        registry: CollectorRegistry,
        sets: Collection[NameSet],
    ) -> None:
        """Export the sets of names ``sets``, and all of ``registry``."""
        self._state = state
        self._quarantine = state.quarantine
        self._quota = quota
        self._registry = registry
        self._devices = tuple(group for group in DEVICE_GROUPS if group.is_shown(sets))
        self._shares = tuple(group for group in SHARE_GROUPS if group.is_shown(sets))
        self._pods = tuple(group for group in POD_GROUPS if group.is_shown(sets))
        self._quotas = tuple(group for group in QUOTA_GROUPS if group.is_shown(sets))

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {("GET", "/metrics"): self.answer}

    async def answer(self, request: Request) -> Response:
        """Return the whole page."""
        del request
        pieces = [piece async for piece in self.cluster()]
        own = generate_latest(self._registry)
        return Response(body=b"".join((own, *pieces)), content_type=CONTENT_TYPE_LATEST)

    async def cluster(self) -> AsyncIterator[bytes]:
        """Yield the cluster's families, one after the other; empty while ledger and pods differ."""
        if not self._state.is_complete:
            return
        lines = heads(self._devices) | heads(self._shares) | heads(self._pods)
        lines |= heads(self._quotas)
        for number, node in enumerate(self._state.table.nodes()):
            if number % CHUNK == 0:
                await anyio.lowlevel.checkpoint()
            self._quarantine.call(METRICS, node, partial(self._add_node, node, lines))
        if self._quotas:
            for row in tightest(self._quota.ledger.quota_rows()):
                self._quarantine.call(
                    METRICS, f"{row.namespace}/{row.key}", partial(self._add_quota, row, lines)
                )
        for family in lines.values():
            await anyio.lowlevel.checkpoint()
            yield "".join(family).encode()

    def _add_quota(self, row: QuotaRow, lines: Mapping[str, list[str]]) -> None:
        for group in self._quotas:
            add_samples(group, row, lines)

    def _add_node(self, node: str, lines: Mapping[str, list[str]]) -> None:
        for device, group in product(device_rows(self._state.table, node), self._devices):
            add_samples(group, device, lines)
        if not (self._shares or self._pods):
            return
        shares = [
            row
            for holding in self._state.ledger.holdings_of_node(node)
            for row in share_rows(holding)
        ]
        for share, of_share in product(shares, self._shares):
            add_samples(of_share, share, lines)
        for pod, of_pod in product(pod_rows(shares), self._pods):
            add_samples(of_pod, pod, lines)


def heads(groups: Iterable[Group[T]]) -> dict[str, list[str]]:
    """Return the first lines of every family, by name."""
    return {family.name: [head(family)] for group in groups for family, _ in group.families}


def device_rows(table: DeviceTable, node: str) -> Iterator[DeviceRow]:
    """Yield the registered devices of a node; none when the node was removed meanwhile."""
    place = table.place(node)
    if place is None:
        return
    block, column = place.block, place.column
    for uuid, row in place.rows.items():
        at = (row, column)
        if block.known[at]:
            yield DeviceRow(
                node=node,
                uuid=uuid,
                number=int(block.index[at]),
                type=table.types.words[block.type[at]],
                capacity_mib=int(block.capacity_mib[at]),
                capacity_core=int(block.capacity_core[at]),
                used_mib=int(block.used_mib[at]),
                used_core=int(block.used_core[at]),
                sharers=int(block.used_slots[at]),
            )


def share_rows(holding: Holding) -> Iterator[ShareRow]:
    """Yield each container's share of each device; init containers only where no other has one.

    They run before the others, within the pod's booked amounts.
    """
    record = holding.record
    numbered = [(number, one) for number, one in enumerate(record.containers) if one.shares]
    lasting = [(number, one) for number, one in numbered if one.kind != "init"]
    for number, container in lasting or numbered:
        for uuid in dict.fromkeys(share.uuid for share in container.shares):
            own = [share for share in container.shares if share.uuid == uuid]
            yield ShareRow(
                node=record.node,
                namespace=record.namespace,
                pod=record.pod,
                container=number,
                uuid=uuid,
                memory_mib=sum(share.memory_mib for share in own),
                core_pct=sum(share.core_pct for share in own),
            )


def pod_rows(shares: Iterable[ShareRow]) -> list[PodRow]:
    """Sum the shares by device and name of the pod."""
    found: dict[tuple[str, str, str], PodRow] = {}
    for share in shares:
        key = (share.node, share.pod, share.uuid)
        known = found.get(key, PodRow(*key, memory_mib=0, core_pct=0))
        found[key] = known._replace(
            memory_mib=known.memory_mib + share.memory_mib,
            core_pct=known.core_pct + share.core_pct,
        )
    return list(found.values())
