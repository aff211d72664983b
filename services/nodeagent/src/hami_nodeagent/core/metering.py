# SPDX-License-Identifier: Apache-2.0
"""Meters device time by namespace: the held part of this node's devices, and its idle time.

Between two samples every device contributes exactly the elapsed seconds. A pod's part of a device
is the larger of its memory part and its compute part, as the ledger books them; the whole device
where the pod holds it alone. Where the parts of a device add up to more than one (memory of one,
compute of another; scaled capacity), all are scaled down together. Memory and compute are metered
separately in the same way. So no sum over a device ever exceeds the elapsed time. A pod is metered
from the first sample that shows it to the first that does not. Times in seconds.

Idle is the time of a part whose pod did nothing on the device: it launched no work, and the driver
reported no activity. A pod without visible activity data does not count as idle.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import Booked
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.usage import ContainerKey, ContainerRow, Row

FORGET_S: Final = 3600.0
"""Retention of the sums of a namespace that holds nothing any more; longer than any scrape
interval, but bounded."""

_FULL_PCT: Final = 100
_WHOLE: Final = 1.0


class Part(Struct, frozen=True, kw_only=True):
    """Part of one device that one pod holds, as a fraction of the whole device."""

    pod_uid: str
    namespace: str
    uuid: str
    slice: float
    memory: float
    core: float


class Account(NamedTuple):
    """Key of the sums; contains the device type, because device hours differ in cost by type."""

    namespace: str
    vendor: str
    type: str


class Kind(NamedTuple):
    """Devices of one type."""

    vendor: str
    type: str


class Sums(Struct, kw_only=True):
    """Device seconds accumulated so far."""

    slice_s: float = 0.0
    memory_s: float = 0.0
    core_s: float = 0.0
    idle_s: float = 0.0
    held_at_s: float = 0.0
    """Time when the account last held anything, by the clock of the samples."""


def part_of(pod_uid: str, namespace: str, device: Device, booked: Booked) -> Part:
    """Return a pod's part of a device from its booking."""
    memory = booked.memory_mib / device.memory_mib if device.memory_mib else 0.0
    core = booked.core_pct / _FULL_PCT
    return Part(
        pod_uid=pod_uid,
        namespace=namespace,
        uuid=device.uuid,
        slice=_WHOLE if booked.exclusive else max(memory, core),
        memory=memory,
        core=core,
    )


class Meter:
    """Sums of one agent since its start."""

    def __init__(self) -> None:
        self.sums: dict[Account, Sums] = {}
        self.devices_s: dict[Kind, float] = {}
        """Time of all devices, held or not."""
        self._last_s: float | None = None
        self._parts: Sequence[Part] = ()

    def look(
        self,
        devices: Mapping[str, Device],
        parts: Sequence[Part],
        idle: Collection[tuple[str, str]],
        *,
        now_s: float,
    ) -> None:
        """Distribute the time since the last sample among the holders at that sample.

        ``idle``: (pod uid, device) of pods that did nothing since then. ``now_s`` is monotonic.
        """
        passed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        for device in devices.values():
            kind = Kind(device.vendor, device.type)
            self.devices_s[kind] = self.devices_s.get(kind, 0.0) + passed_s
        by_uuid: dict[str, list[Part]] = {}
        for part in self._parts:
            by_uuid.setdefault(part.uuid, []).append(part)
        for uuid, held in by_uuid.items():
            if uuid in devices:
                self._share_out(devices[uuid], held, idle, passed_s)
        self._parts = tuple(parts)
        for part in parts:
            if part.uuid in devices:
                self._sums_of(devices[part.uuid], part).held_at_s = now_s
        for account, sums in list(self.sums.items()):
            if now_s - sums.held_at_s > FORGET_S:
                del self.sums[account]

    def _share_out(
        self,
        device: Device,
        held: Sequence[Part],
        idle: Collection[tuple[str, str]],
        passed_s: float,
    ) -> None:
        slice_s = passed_s / max(_WHOLE, _total(held, lambda part: part.slice))
        memory_s = passed_s / max(_WHOLE, _total(held, lambda part: part.memory))
        core_s = passed_s / max(_WHOLE, _total(held, lambda part: part.core))
        for part in held:
            sums = self._sums_of(device, part)
            sums.slice_s += part.slice * slice_s
            sums.memory_s += part.memory * memory_s
            sums.core_s += part.core * core_s
            if (part.pod_uid, part.uuid) in idle:
                sums.idle_s += part.slice * slice_s

    def _sums_of(self, device: Device, part: Part) -> Sums:
        return self.sums.setdefault(Account(part.namespace, device.vendor, device.type), Sums())


def idle_parts(
    rows: Iterable[Row],
    containers: Iterable[ContainerRow],
    launches_before: Mapping[ContainerKey, int],
    *,
    with_region: Collection[ContainerKey],
    seen_uuids: Collection[str],
) -> set[tuple[str, str]]:
    """Return (owner's uid, device) of pods and claims without observed activity on the device.

    ``launches_before``: counts of the previous sample. ``with_region``: containers whose region
    reports their activity. ``seen_uuids``: devices whose processes the driver lists.
    """
    busy_containers = {
        key
        for one in containers
        if one.counted.launches > launches_before.get(key := _key(one.holder), 0)
    }
    idle: set[tuple[str, str]] = set()
    busy: set[tuple[str, str]] = set()
    for row in rows:
        holder = row.holder
        key = _key(holder)
        at = (holder.owner[0], holder.uuid)
        is_seen = key in with_region or holder.uuid in seen_uuids
        is_seen = is_seen and row.is_load_known
        if is_seen and not row.core_pct and key not in busy_containers:
            idle.add(at)
        else:
            busy.add(at)
    return idle - busy


def _key(holder: Holder) -> ContainerKey:
    return (holder.pod_uid, holder.container)


def _total(parts: Iterable[Part], of: Callable[[Part], float]) -> float:
    return sum(of(part) for part in parts)
