# SPDX-License-Identifier: Apache-2.0
"""Folds the usage records of a node into the use of one pod's containers over time.

Records are folded in stream order. Series are reduced to ``POINTS_MOST`` points by equal intervals:
the largest memory and the mean compute of each. Counters grow over the life of a container, so
their increase is taken. Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from hami_common.events.usage import ShareUsage, UsageRecord
from hami_common.model.placement import Share
from hami_registry.core.pressure import ContainerPressure
from hami_registry.core.projection import AllocationView
from hami_registry.core.rightsize import RightSize, Use, percentile
from hami_registry.core.timeline import Entry

POINTS_MOST: Final = 300
_P95: Final = 0.95
_GAP: Final = 3.0
"""Intervals of the agent after which the time between two records is not counted as sampled."""


class Series(Struct, frozen=True, kw_only=True):
    """Use over time, as columns: the *n*-th values belong together."""

    time_s: tuple[float, ...]
    memory_mib: tuple[int, ...]
    """Largest of the interval."""
    core_pct: tuple[float, ...]
    """Mean of the interval."""


class DeviceWorkload(Struct, frozen=True, kw_only=True):
    """One container on one device."""

    vendor: str
    uuid: str
    model: str
    """Empty: the device is not known any more."""
    limit_mib: int
    limit_core_pct: int
    """0: no compute limit."""
    exclusive: bool
    profile: str
    """Hardware partition that carries the share; empty: none."""
    used_mib: int
    """Newest value; 0 without a record."""
    core_pct: int
    """Newest value."""
    peak_mib: int
    peak_s: float
    """Time of the peak; 0: no record."""
    mean_core_pct: float
    p95_core_pct: int
    series: Series


class ContainerWorkload(Struct, frozen=True, kw_only=True):
    """One container of the pod."""

    name: str
    kind: str
    """``app``, ``init`` or ``sidecar``."""
    priority: int | None
    processes: int
    seen_s: float
    """Time of the newest usage record; 0: none has it."""
    devices: tuple[DeviceWorkload, ...]
    pressure: ContainerPressure | None
    """Waiting and refusals in the time; ``None``: neither."""
    right_size: tuple[RightSize, ...]
    """Recommended request, by vendor; empty with less than an hour of samples."""


class Workload(Struct, frozen=True, kw_only=True):
    """A pod with its limits, use and history."""

    namespace: str
    pod: str
    allocation: AllocationView
    from_s: float
    until_s: float
    sampled_s: float
    """Time that usage records cover."""
    every_s: float
    """Interval of the records."""
    containers: tuple[ContainerWorkload, ...]
    entries: tuple[Entry, ...]
    """Events of the pod, by time."""
    cut: str
    """Reason for which the answer is incomplete; empty: it is complete."""


class _Line(Struct, kw_only=True):
    time_s: list[float] = []
    memory_mib: list[int] = []
    core_pct: list[int] = []
    last: ShareUsage | None = None


class WorkloadFold:
    """Folds usage records for one pod."""

    def __init__(self, pod_uid: str) -> None:
        self._pod_uid = pod_uid
        self._lines: dict[tuple[str, str], _Line] = {}
        """By container and UUID."""
        self._processes: dict[str, tuple[float, int]] = {}
        self._last_s = 0.0
        self.sampled_s = 0.0
        self.every_s = 0.0

    def seen(self, record: UsageRecord) -> None:
        """Fold a record of the pod's node."""
        shares = [one for one in record.shares if one.pod_uid == self._pod_uid]
        if not shares:
            return
        every_s = record.every_s
        if every_s:
            gap_s = record.time_s - self._last_s
            self.sampled_s += gap_s if 0 < gap_s <= _GAP * every_s else every_s
        self.every_s, self._last_s = every_s, record.time_s
        for share in shares:
            line = self._lines.setdefault((share.container, share.uuid), _Line())
            if line.last is not None and line.time_s[-1] == record.time_s:
                line.memory_mib[-1] += share.used_mib  # another part of the same device
                line.core_pct[-1] += share.core_pct
            else:
                line.time_s.append(record.time_s)
                line.memory_mib.append(share.used_mib)
                line.core_pct.append(share.core_pct)
            line.last = share
        for one in record.containers:
            if one.pod_uid == self._pod_uid:
                self._processes[one.container] = (record.time_s, one.processes)

    def processes(self, container: str) -> int:
        """Return the newest number of processes."""
        return self._processes.get(container, (0.0, 0))[1]

    def seen_s(self, container: str) -> float:
        """Return the time of the newest record with the container; 0: none."""
        return max(
            (line.time_s[-1] for (name, _), line in self._lines.items() if name == container),
            default=0.0,
        )

    def device(self, container: str, share: Share, *, model: str) -> DeviceWorkload:
        """Return the use of one share."""
        line = self._lines.get((container, share.uuid), _Line())
        peak = max(range(len(line.time_s)), key=lambda at: line.memory_mib[at], default=None)
        return DeviceWorkload(
            vendor=share.vendor,
            uuid=share.uuid,
            model=model,
            limit_mib=share.memory_mib,
            limit_core_pct=share.core_pct,
            exclusive=share.exclusive,
            profile=share.profile,
            used_mib=line.memory_mib[-1] if line.time_s else 0,
            core_pct=line.core_pct[-1] if line.time_s else 0,
            peak_mib=0 if peak is None else line.memory_mib[peak],
            peak_s=0.0 if peak is None else line.time_s[peak],
            mean_core_pct=_mean(line.core_pct),
            p95_core_pct=percentile(line.core_pct, _P95),
            series=downsampled(line.time_s, line.memory_mib, line.core_pct),
        )

    def use(self, devices: Sequence[DeviceWorkload], *, is_throttled: bool) -> Use:
        """Return the largest use of the devices of one vendor; a request is the same for each."""
        return Use(
            peak_mib=max(one.peak_mib for one in devices),
            p95_core_pct=max(one.p95_core_pct for one in devices),
            limit_mib=max(one.limit_mib for one in devices),
            limit_core_pct=max(one.limit_core_pct for one in devices),
            is_throttled=is_throttled,
            sampled_s=self.sampled_s,
        )


def right_sizes(
    devices: Sequence[DeviceWorkload],
    recommend: Callable[[str, Sequence[DeviceWorkload]], RightSize | None],
) -> tuple[RightSize, ...]:
    """Return the recommendation for each vendor of a container."""
    vendors = sorted({one.vendor for one in devices})
    found = (
        recommend(vendor, [one for one in devices if one.vendor == vendor]) for vendor in vendors
    )
    return tuple(one for one in found if one is not None)


def downsampled(
    time_s: Sequence[float], memory_mib: Sequence[int], core_pct: Sequence[int]
) -> Series:
    """Return at most ``POINTS_MOST`` points of equal intervals, at times of their last samples."""
    if not time_s:
        return Series(time_s=(), memory_mib=(), core_pct=())
    begin_s, length_s = time_s[0], max(time_s[-1] - time_s[0], 1e-9)
    groups: dict[int, list[int]] = {}
    for at, one in enumerate(time_s):
        part = at if len(time_s) <= POINTS_MOST else int((one - begin_s) / length_s * POINTS_MOST)
        groups.setdefault(min(part, POINTS_MOST - 1), []).append(at)
    rows = [groups[part] for part in sorted(groups)]
    return Series(
        time_s=tuple(time_s[row[-1]] for row in rows),
        memory_mib=tuple(max(memory_mib[at] for at in row) for row in rows),
        core_pct=tuple(_mean([core_pct[at] for at in row]) for row in rows),
    )


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 1) if values else 0.0
