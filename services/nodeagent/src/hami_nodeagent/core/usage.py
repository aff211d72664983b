# SPDX-License-Identifier: Apache-2.0
"""Joins shares, usage regions and the driver's view into one row per container and device.

The region says what the processes of a container say of themselves, exact to the byte; the driver
says what it sees, in MiB. The region's figure is shown where there is one; a container that is not
limited (a whole device, or a node without enforcement) has only the driver's. A container that
never used its device has zeros. Counters add up what processes counted over their lives, so that
they do not fall when a process ends. Sizes in bytes, times in seconds unless the name says so.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hami_nodeagent.core.breach import Process
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.region import DeviceUse, Region
from hami_nodeagent.drivers.partitioner import Instance

_MIB_SHIFT = 20
_NS = 1e-9
_FULL_PCT = 100
ContainerKey = tuple[str, str]
"""(pod uid, container)."""
ShareKey = tuple[str, str, int]
"""(pod uid, container, place among the container's shares)."""


class Part(Struct, frozen=True, kw_only=True):
    """The hardware partition that carries a share, and what the driver says of its use."""

    instance: Instance
    is_told: bool = False
    """The driver tells partitions apart; otherwise nothing below is known."""
    used_mib: int | None = None
    core_pct: int | None = None
    """Percent of the partition."""


NO_PARTS: Mapping[ShareKey, Part] = {}


class Counted(Struct, frozen=True, kw_only=True):
    """What the processes of a container counted so far, ended ones included."""

    launches: int = 0
    waited_ns: int = 0
    refusals: int = 0
    device_time_ns: int = 0

    def plus(self, other: "Counted") -> "Counted":
        """Both together."""
        return Counted(
            launches=self.launches + other.launches,
            waited_ns=self.waited_ns + other.waited_ns,
            refusals=self.refusals + other.refusals,
            device_time_ns=self.device_time_ns + other.device_time_ns,
        )

    def since(self, earlier: "Counted") -> "Counted":
        """What was added; a figure that fell was reset or tampered with and adds nothing."""
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
    """What the driver sees the container's processes use."""
    core_pct: int = 0
    """The driver's last sample of the container's part of the device."""
    is_over: bool = False
    """More is used than the limit allows since it was lowered."""
    part: Part | None = None
    """The partition that carries the share, where one does."""

    @property
    def is_load_known(self) -> bool:
        """Whether ``core_pct`` says anything: partitions hide from the card's own figures."""
        return self.part is None or not self.part.is_told or self.part.core_pct is not None


class ContainerRow(Struct, frozen=True, kw_only=True):
    """What is known of a container as a whole."""

    holder: Holder
    """Its first share: names the container."""
    counted: Counted = Counted()
    processes: int = 0
    idle_s: float | None = None
    """Since its last launch; ``None`` before the first."""


class Counters:
    """Remembers what each process had counted when it was last seen."""

    def __init__(self) -> None:
        self._total: dict[ContainerKey, Counted] = {}
        self._seen: dict[ContainerKey, dict[Owner, Counted]] = {}

    def add(self, key: ContainerKey, region: Region | None) -> Counted:
        """Count what is new in the region; the total so far."""
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
        """Forget containers that are over."""
        for book in (self._total, self._seen):
            for key in [key for key in book if key not in keys]:
                del book[key]


def rows_of(
    holders: Sequence[Holder],
    region_by_container: Mapping[ContainerKey, Region],
    processes_by_uuid: Mapping[str, Sequence[Process]],
    parts: Mapping[ShareKey, Part] = NO_PARTS,
) -> tuple[Row, ...]:
    """One row per holder; what is used in a partition of its own is all its container's."""
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
        part = parts.get((*key, holder.place))
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
    """One row per container; ``now_ns`` by CLOCK_MONOTONIC, as the regions.

    Containers that are over are forgotten by ``Counters.keep_only``.
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
