# SPDX-License-Identifier: Apache-2.0
"""Estimates how much of a device's traffic each of its containers causes, and finds heavy ones.

The driver reports the bandwidth of memory and PCIe per device, never per process, and no class but
hardware partitions limits them. While the contexts of a device take turns, a container's traffic is
a rate times its device time. The rates are those that explain the last ``WINDOWS`` samples best
(least squares), drawn towards one rate for all containers while samples do not distinguish them.
Containers with several devices count with an equal part of their device time on each.

An estimate is for operators; nothing is enforced by it. Bandwidth in percent of the device's
memory bandwidth, PCIe in MiB per second, times in seconds.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from hami_nodeagent.core.usage import ContainerKey

WINDOWS = 60
"""Samples that an estimate considers."""
_PRIOR_WINDOWS = 1.0
"""Weight of the common rate, in samples of average device time."""
_BUSY = 0.01
"""Part of the time above which a container counts as active."""
HIGH_PCT = 80.0
"""Part of a device's memory bandwidth above which its containers slow each other down."""
HIGH_S = 30.0
"""Time for which it must be so high."""
REPEAT_S = 300.0
_MOST_CONTAINERS = 16
"""Containers of a device with an estimate of their own: those with most device time."""
_NS = 1e-9


class Seen(Struct, frozen=True, kw_only=True):
    """Traffic of a device since the last sample; ``None``: not reported."""

    dram_pct: float | None = None
    pcie_mib_s: float | None = None


class Traffic(Struct, frozen=True, kw_only=True):
    """Estimate of one container's part of it."""

    dram_pct: float | None = None
    pcie_mib_s: float | None = None


class Heavy(Struct, frozen=True, kw_only=True):
    """A device whose memory bandwidth is nearly used up, and the container with most of it."""

    uuid: str
    container: ContainerKey
    dram_pct: float
    """Estimate for the container."""
    device_pct: float

    @property
    def text(self) -> str:
        """Return the sentence for operators."""
        return (
            f"container {self.container[1]} uses an estimated {self.dram_pct:.0f} % of the memory "
            f"bandwidth of device {self.uuid}, of which {self.device_pct:.0f} % are in use: its "
            "neighbors run slower; only hardware partitions limit bandwidth"
        )


class _Window(Struct, frozen=True):
    seen: Seen
    busy: Mapping[ContainerKey, float]
    """Part of the time since the last sample in which each container used the device."""


class _Device(Struct, kw_only=True):
    windows: deque[_Window]
    dram_pct: Mapping[ContainerKey, float] = {}
    pcie_mib_s: Mapping[ContainerKey, float] = {}
    high_since_s: float | None = None
    reported_s: float | None = None


class TrafficBook:
    """Samples of all devices."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._device_time_ns: dict[ContainerKey, int] = {}
        self._last_s: float | None = None

    def look(
        self,
        seen_by_uuid: Mapping[str, Seen],
        device_time_ns: Mapping[ContainerKey, int],
        uuids_by_container: Mapping[ContainerKey, Collection[str]],
        *,
        now_s: float,
    ) -> tuple[Heavy, ...]:
        """Take a sample; return heavy containers that are due for a report.

        ``device_time_ns``: counters that grow over a container's life.
        """
        elapsed_s = None if self._last_s is None else now_s - self._last_s
        known, self._device_time_ns = self._device_time_ns, dict(device_time_ns)
        self._last_s = now_s
        self._devices = {uuid: one for uuid, one in self._devices.items() if uuid in seen_by_uuid}
        if elapsed_s is None or elapsed_s <= 0:
            return ()
        busy = {
            key: max(0, ns - known[key]) * _NS / elapsed_s / max(1, len(uuids_by_container[key]))
            for key, ns in device_time_ns.items()
            if key in known and key in uuids_by_container
        }
        heavy = []
        for uuid, seen in seen_by_uuid.items():
            device = self._devices.setdefault(uuid, _Device(windows=deque(maxlen=WINDOWS)))
            own = {key: part for key, part in busy.items() if uuid in uuids_by_container[key]}
            device.windows.append(_Window(seen, own))
            device.dram_pct = _estimates(
                device.windows, [one.seen.dram_pct for one in device.windows]
            )
            device.pcie_mib_s = _estimates(
                device.windows, [one.seen.pcie_mib_s for one in device.windows]
            )
            found = self._heavy(uuid, device, now_s)
            if found is not None:
                heavy.append(found)
        return tuple(heavy)

    def of(self, uuid: str, container: ContainerKey) -> Traffic | None:
        """Return the estimate for a container on a device; ``None`` without one."""
        device = self._devices.get(uuid)
        if device is None:
            return None
        return Traffic(
            dram_pct=device.dram_pct.get(container), pcie_mib_s=device.pcie_mib_s.get(container)
        )

    def _heavy(self, uuid: str, device: _Device, now_s: float) -> Heavy | None:
        last = device.windows[-1]
        active = [key for key, part in last.busy.items() if part > _BUSY]
        device_pct = last.seen.dram_pct
        if device_pct is None or device_pct < HIGH_PCT or len(active) < 2:  # noqa: PLR2004 - neighbors
            device.high_since_s = None
            return None
        if device.high_since_s is None:
            device.high_since_s = now_s
        is_recent = device.reported_s is not None and now_s - device.reported_s < REPEAT_S
        if now_s - device.high_since_s < HIGH_S or is_recent:
            return None
        device.reported_s = now_s
        parts = device.dram_pct
        container = max(active, key=lambda key: (parts.get(key, 0.0), key))
        return Heavy(
            uuid=uuid,
            container=container,
            dram_pct=parts.get(container, 0.0),
            device_pct=device_pct,
        )


def _estimates(
    windows: Sequence[_Window], figures: Sequence[float | None]
) -> dict[ContainerKey, float]:
    """Return each container's part of the newest figure; empty if that is not reported."""
    newest = figures[-1]
    if newest is None:
        return {}
    busy = windows[-1].busy
    if not any(busy.values()):
        return dict.fromkeys(busy, 0.0)
    keys = sorted(busy, key=lambda key: (-busy[key], key))[:_MOST_CONTAINERS]
    pairs = [(one.busy, y) for one, y in zip(windows, figures, strict=True) if y is not None]
    rates = _rates(keys, pairs)
    parts = {key: max(0.0, rate) * busy[key] for key, rate in zip(keys, rates, strict=True)}
    total = sum(parts.values())
    return {key: part * min(1.0, newest / total) if total else 0.0 for key, part in parts.items()}


def _rates(
    keys: Sequence[ContainerKey], pairs: Sequence[tuple[Mapping[ContainerKey, float], float]]
) -> list[float]:
    """Return the traffic per device time of each container, by ridge regression."""
    time = sum(busy.get(key, 0.0) for busy, _ in pairs for key in keys)
    common = sum(figure for _, figure in pairs) / time if time else 0.0
    squares = sum(busy.get(key, 0.0) ** 2 for busy, _ in pairs for key in keys)
    weight = _PRIOR_WINDOWS * squares / max(1, len(pairs) * len(keys)) or 1.0
    rows = [
        [
            sum(busy.get(a, 0.0) * busy.get(b, 0.0) for busy, _ in pairs)
            + (weight if a == b else 0.0)
            for b in keys
        ]
        + [sum(busy.get(a, 0.0) * figure for busy, figure in pairs) + weight * common]
        for a in keys
    ]
    return _solved(rows)


def _solved(rows: list[list[float]]) -> list[float]:
    """Solve the linear system of a positive definite matrix with its right side, in place."""
    count = len(rows)
    for place in range(count):
        pivot = rows[place][place]
        rows[place] = [value / pivot for value in rows[place]]
        for other in range(count):
            if other != place and rows[other][place]:
                factor = rows[other][place]
                rows[other] = [
                    value - factor * own
                    for value, own in zip(rows[other], rows[place], strict=True)
                ]
    return [row[-1] for row in rows]
