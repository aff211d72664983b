# SPDX-License-Identifier: Apache-2.0
"""Meters device time: how long each namespace held how much of this node's devices, and how idle.

Between two looks every device runs for the seconds that went by, and no more: that is what there is
to share out. A pod's part of a device is the larger of its memory's part and its compute's, as the
ledger books them; the whole where it holds the device alone. Where the parts of a device add up to
more than one (memory of one, compute of another; scaled capacity), they are scaled down together.
Memory and compute are metered apart the same way. So no sum over a device ever exceeds the time
that went by. A pod is metered from the look that shows it first to the one that does not. Seconds.

Idle is the time of a part whose pod was seen to do nothing on the device: no work begun in it and
no activity noticed by the driver. Who cannot be seen is not called idle.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import Booked
from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.usage import ContainerKey, ContainerRow, Row

FORGET_S: Final = 3600.0
"""How long the sums of a namespace that holds nothing any more are shown: longer than the time
between any two scrapes, and not for ever."""

_FULL_PCT: Final = 100
_WHOLE: Final = 1.0


class Part(Struct, frozen=True, kw_only=True):
    """What one pod holds of one device, as parts of the whole device."""

    pod_uid: str
    namespace: str
    uuid: str
    slice: float
    memory: float
    core: float


class Account(NamedTuple):
    """Whose sums these are; device types, because their hours cost differently."""

    namespace: str
    vendor: str
    type: str


class Kind(NamedTuple):
    """Devices of one type."""

    vendor: str
    type: str


class Sums(Struct, kw_only=True):
    """Device seconds so far."""

    slice_s: float = 0.0
    memory_s: float = 0.0
    core_s: float = 0.0
    idle_s: float = 0.0
    held_at_s: float = 0.0
    """When the account last held anything, by the clock of the looks."""


def part_of(pod_uid: str, namespace: str, device: Device, booked: Booked) -> Part:
    """What a pod holds of a device by what is booked for it."""
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
    """The sums of one agent since it started."""

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
        """Share out the time since the last look among those who held something then.

        ``idle``: (pod uid, device) of those that did nothing since then. ``now_s`` never falls.
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
    """(pod uid, device) of pods that did nothing on the device, as far as anybody sees.

    ``launches_before``: of the look before. ``with_region``: containers that tell what they do.
    ``seen_uuids``: devices whose processes the driver shows.
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
        at = (holder.pod_uid, holder.uuid)
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
