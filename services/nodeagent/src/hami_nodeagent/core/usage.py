# SPDX-License-Identifier: Apache-2.0
"""Joins shares, usage regions and driver data into one row per container and device.

The region contains the usage that the container's processes record, exact to the byte; the driver
reports usage in MiB. The region's figure is used where a region exists; a container without limits
(a whole device, or a node without enforcement) has only the driver's. A container that never used
its device has zeros. Counters sum over the lives of all processes, so that they do not fall when a
process ends. Sizes in bytes, times in seconds unless the name has another unit.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hami_nodeagent.core.breach import Process
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.region import DeviceUse, Region

_MIB_SHIFT = 20
_NS = 1e-9
_FULL_PCT = 100
ContainerKey = tuple[str, str]
"""(pod uid, container)."""
ShareKey = tuple[str, str, int]
"""(pod uid, container, position among the container's shares)."""


class Part(Struct, frozen=True, kw_only=True):
    """Hardware partition that carries a share, and its use as the driver reports it."""

    instance: Instance
    is_told: bool = False
    """The driver reports each partition; otherwise the fields below are unknown."""
    used_mib: int | None = None
    core_pct: int | None = None
    """Percent of the partition."""


NO_PARTS: Mapping[ShareKey, Part] = {}


class Counted(Struct, frozen=True, kw_only=True):
    """Counters of a container's processes, ended processes included."""

    launches: int = 0
    waited_ns: int = 0
    refusals: int = 0
    device_time_ns: int = 0

    def plus(self, other: "Counted") -> "Counted":
        """Return the sum of both."""
        return Counted(
            launches=self.launches + other.launches,
            waited_ns=self.waited_ns + other.waited_ns,
            refusals=self.refusals + other.refusals,
            device_time_ns=self.device_time_ns + other.device_time_ns,
        )

    def since(self, earlier: "Counted") -> "Counted":
        """Return the increase; a figure that fell was reset or tampered with and adds nothing."""
        return Counted(
            launches=max(0, self.launches - earlier.launches),
            waited_ns=max(0, self.waited_ns - earlier.waited_ns),
            refusals=max(0, self.refusals - earlier.refusals),
            device_time_ns=max(0, self.device_time_ns - earlier.device_time_ns),
        )


class Row(Struct, frozen=True, kw_only=True):
    """One container on one device."""

    holder: Holder
    used_bytes: int = 0
    context_bytes: int = 0
    module_bytes: int = 0
    driver_bytes: int = 0
    """Usage of the container's processes as the driver reports it."""
    core_pct: int = 0
    """The driver's last sample of the container's part of the device."""
    bound_mib: int | None = None
    """Memory granted now, of a share with a limit above its request."""
    is_over: bool = False
    """Usage has exceeded the limit since the limit was lowered."""
    starved_ns: int = 0
    """Time for which processes waited for higher priorities beyond the first second."""
    part: Part | None = None
    """Partition that carries the share, if any."""
    dram_pct: float | None = None
    """Estimate of the container's part of the device's memory bandwidth, in percent of it."""
    pcie_mib_s: float | None = None
    """Estimate of its PCIe traffic, in MiB per second."""

    @property
    def is_load_known(self) -> bool:
        """Return whether ``core_pct`` is valid: the card's own figures exclude partitions."""
        return self.part is None or not self.part.is_told or self.part.core_pct is not None


class ContainerRow(Struct, frozen=True, kw_only=True):
    """Figures of a container as a whole."""

    holder: Holder
    """First share of the container; names the container."""
    counted: Counted = Counted()
    processes: int = 0
    idle_s: float | None = None
    """Seconds since the last launch; ``None`` before the first."""


class Counters:
    """Last counter values of each process."""

    def __init__(self) -> None:
        self._total: dict[ContainerKey, Counted] = {}
        self._seen: dict[ContainerKey, dict[Owner, Counted]] = {}

    def add(self, key: ContainerKey, region: Region | None) -> Counted:
        """Add the increase in the region; return the total so far."""
        total = self._total.get(key, Counted())
        if region is not None:
            seen = self._seen.get(key, {})
            now: dict[Owner, Counted] = {}
            for process in (*region.processes, *region.ended):
                name = process.owner
                now[name] = Counted(
                    launches=process.launches,
                    waited_ns=process.waited_ns,
                    refusals=process.refusals,
                    device_time_ns=process.device_time_ns,
                )
                total = total.plus(now[name].since(seen.get(name, Counted())))
            self._seen[key] = now
            self._total[key] = total
        return total

    def keep_only(self, keys: frozenset[ContainerKey]) -> None:
        """Drop containers that are not in ``keys``."""
        for book in (self._total, self._seen):
            for key in [key for key in book if key not in keys]:
                del book[key]


def rows_of(
    holders: Sequence[Holder],
    region_by_container: Mapping[ContainerKey, Region],
    processes_by_uuid: Mapping[str, Sequence[Process]],
    parts: Mapping[ShareKey, Part] = NO_PARTS,
) -> tuple[Row, ...]:
    """Return one row per holder; all usage in a partition belongs to its container."""
    rows = []
    for holder in holders:
        key = (holder.pod_uid, holder.container)
        own = [
            process
            for process in processes_by_uuid.get(holder.uuid, ())
            if (process.pod_uid, process.container) == key
        ]
        driver_bytes = sum(process.used_mib for process in own) << _MIB_SHIFT
        core_pct = sum(process.core_pct for process in own)
        part = parts.get((*holder.owner, holder.place))
        if part is not None and part.used_mib is not None:
            driver_bytes = part.used_mib << _MIB_SHIFT
        if part is not None and part.core_pct is not None:
            core_pct = round(part.core_pct * (holder.core_pct or _FULL_PCT) / _FULL_PCT)
        region = region_by_container.get(key)
        used = region.devices.get(holder.uuid) if region is not None else None
        if used is None:
            used = DeviceUse(used_bytes=driver_bytes)
        rows.append(
            Row(
                holder=holder,
                used_bytes=used.used_bytes,
                context_bytes=used.context_bytes,
                module_bytes=used.module_bytes,
                driver_bytes=driver_bytes,
                core_pct=core_pct,
                is_over=used.over_since_ns > 0,
                starved_ns=used.starved_ns,
                part=part,
            )
        )
    return tuple(rows)


def containers_of(
    holders: Sequence[Holder],
    region_by_container: Mapping[ContainerKey, Region],
    counters: Counters,
    *,
    now_ns: int,
) -> tuple[ContainerRow, ...]:
    """Return one row per container; ``now_ns`` by CLOCK_MONOTONIC, as the regions.

    ``Counters.keep_only`` drops containers that ended.
    """
    first: dict[ContainerKey, Holder] = {}
    for holder in holders:
        first.setdefault((holder.pod_uid, holder.container), holder)
    rows = []
    for key, holder in first.items():
        region = region_by_container.get(key)
        last_ns = region.last_launch_ns if region is not None else 0
        rows.append(
            ContainerRow(
                holder=holder,
                counted=counters.add(key, region),
                processes=len(region.processes) if region is not None else 0,
                idle_s=max(0, now_ns - last_ns) * _NS if last_ns else None,
            )
        )
    return tuple(rows)
