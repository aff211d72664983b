# SPDX-License-Identifier: Apache-2.0
"""Divides memory that no share books among the containers with a memory limit above their request.

ADR 52. The bound of a container is the memory that the in-container library grants it now: at least
its request, at most its limit. The memory that a device has left (``left_mib``) is divided equally,
and the part that one container cannot take goes to the others. Per device, with U the memory in
use or leased by processes, at most the limit::

    sum over these containers of (max(bound, U) - request)  <=  memory left

unless memory that is in use already exceeds it: then no bound is above its request. A tenant writes
its own U, and what the driver shows beyond the limit is foreign use. A process may
act on an older bound for up to ``SETTLE_S``, so a bound is raised only into memory that no bound of
that time covers. Lowering takes effect at once. Memory in MiB, times in seconds of the caller's
clock.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from hami_common.model.device import RECALL, Burst, Device
from hami_common.model.placement import booked_by_device
from hami_nodeagent.core.claims import Entry, is_before
from hami_nodeagent.core.holders import LIMITED_VENDORS, Holder
from hami_nodeagent.core.podbook import PodBook

SETTLE_S = 0.5
"""Time after which every process of a container has read a lowered bound: twice the period of the
library's watcher."""
STEP_MIB = 256
"""Reported amounts are multiples of it, rounded up, or the memory granted."""
FALL_S = 2.0
"""Time for which less must be used before a lower amount is reported."""
ShareKey = tuple[tuple[str, str], str]
"""Owner of the share (``Holder.owner``) and UUID of the device."""


class Want(Struct, frozen=True, kw_only=True):
    """One container on one device."""

    request_mib: int
    limit_mib: int
    used_mib: int = 0
    leased_mib: int = 0
    """Memory that processes may use without a further check of the bound, with all of the used."""
    bound_mib: int = 0
    """Present bound; 0: none was granted."""
    granted_mib: int = 0
    """Highest bound on which a process may still act."""

    @property
    def most_mib(self) -> int:
        """Return the most memory above the request."""
        return max(0, self.limit_mib - self.request_mib)

    @property
    def present_mib(self) -> int:
        """Return the present bound above the request."""
        return max(0, self.bound_mib - self.request_mib)

    @property
    def used_above_mib(self) -> int:
        """Return the memory in use above the request."""
        return max(0, self.used_mib - self.request_mib)

    @property
    def taken_mib(self) -> int:
        """Return the memory above the request that is used or leased, within the limit."""
        return min(self.most_mib, max(self.used_above_mib, self.leased_mib - self.request_mib))

    @property
    def held_mib(self) -> int:
        """Return the memory above the request that it has taken, or may take at any time."""
        return max(self.taken_mib, self.granted_mib - self.request_mib)


def may_burst(device: Device) -> bool:
    """Return whether shares of the device can have memory above their request."""
    return (
        device.vendor in LIMITED_VENDORS
        and device.mode == "soft"
        and not device.partitions
        and device.overcommit != RECALL
        and device.capacity_mib <= device.memory_mib
    )


def left_mib(device: Device, booked_mib: int, foreign_mib: int) -> int:
    """Return the memory that is neither booked nor in foreign use, without what is reserved.

    Never more than the scheduler finds free, which subtracts ``Device.foreign_mib``.
    """
    offered_mib = device.capacity_mib - device.foreign_mib
    return max(0, min(offered_mib, device.memory_mib - foreign_mib) - booked_mib)


def booked_mib(entries_by_uid: Mapping[str, Entry], pods: PodBook) -> dict[str, int]:
    """Return the booked memory by device, with reservations that have no container yet.

    Records of pods that were bound while the bus was unavailable may arrive late: until then the
    pods' signed annotations count.
    """
    shares_by_uid = {
        uid: entry.record.containers
        for uid, entry in entries_by_uid.items()
        if entry.record.op != "release"
    }
    for pod in pods:
        if pod.signed is not None and pods.is_alive(pod.uid):
            entry = entries_by_uid.get(pod.uid)
            if entry is None or is_before(entry, pod.signed):
                shares_by_uid[pod.uid] = pod.signed.placement.containers
    found: dict[str, int] = {}
    for containers in shares_by_uid.values():
        for uuid, booked in booked_by_device(containers).items():
            found[uuid] = found.get(uuid, 0) + booked.memory_mib
    return found


def wanting(holders: Iterable[Holder], pods: PodBook) -> dict[ShareKey, Holder]:
    """Return the shares with a memory limit above the request; one per owner and device.

    Containers that use one request of a claim have one share together. An init container has ended
    once an application container has started: others get its part.
    """
    return {
        (one.owner, one.uuid): one
        for one in holders
        if one.memory_limit_mib > one.limit_mib
        and one.needs_grant
        and one.has_region
        and not one.is_whole
        and not _has_ended(one, pods)
    }


def _has_ended(holder: Holder, pods: PodBook) -> bool:
    pod = pods.find(holder.pod_uid)
    if pod is None or pod.kind_by_container.get(holder.container) != "init":
        return False
    return any(pod.kind_by_container.get(name) == "app" for name in pod.started)


def bounds_of(left_mib: int, wants: Sequence[Want]) -> tuple[int, ...]:
    """Return the new bound of each container of one device, which has ``left_mib`` left."""
    fair = _level(left_mib, [(one.most_mib, one.taken_mib) for one in wants])
    target = [min(one.most_mib, fair) for one in wants]
    rises = [mib > one.present_mib for mib, one in zip(target, wants, strict=True)]
    free = left_mib
    rising = []
    for mib, one, is_rising in zip(target, wants, rises, strict=True):
        if is_rising:
            rising.append((mib, one.held_mib))
        else:
            free -= max(mib, one.held_mib)
    reached = _level(free, rising)
    return tuple(
        one.request_mib + (max(one.present_mib, min(mib, reached)) if is_rising else mib)
        for mib, one, is_rising in zip(target, wants, rises, strict=True)
    )


def _level(left_mib: int, wants: Sequence[tuple[int, int]]) -> int:
    """Return the largest amount that each of (most, held) can have at least, up to its most."""
    top = max((most for most, _ in wants), default=0)

    def sum_mib(level: int) -> int:
        return sum(max(min(most, level), held) for most, held in wants)

    return max(0, bisect_right(range(top + 1), left_mib, key=sum_mib) - 1)


class Grants:
    """Bounds of the containers of one node."""

    def __init__(self) -> None:
        """Start without bounds."""
        self._written: dict[ShareKey, deque[tuple[float, int]]] = {}
        """Bounds with the time since which another one is in force, oldest first; the last one is
        the present."""

    def adopt(self, key: ShareKey, bound_mib: int, now_s: float) -> None:
        """Take over a bound that the previous agent granted."""
        self._written.setdefault(key, deque([(now_s, bound_mib)]))

    def divide(
        self, left_by_uuid: Mapping[str, int], wants: Mapping[ShareKey, Want], now_s: float
    ) -> dict[ShareKey, int]:
        """Return the bounds from now on; devices that ``left_by_uuid`` lacks have nothing left."""
        self._written = {key: one for key, one in self._written.items() if key in wants}
        keys_by_uuid: dict[str, list[ShareKey]] = {}
        for key in wants:
            keys_by_uuid.setdefault(key[1], []).append(key)
        found: dict[ShareKey, int] = {}
        for uuid, keys in keys_by_uuid.items():
            own = [self._with_past(key, wants[key], now_s) for key in keys]
            bounds = bounds_of(left_by_uuid.get(uuid, 0), own)
            for key, bound_mib in zip(keys, bounds, strict=True):
                found[key] = bound_mib
                self._written[key].append((now_s, bound_mib))
        return found

    def _with_past(self, key: ShareKey, want: Want, now_s: float) -> Want:
        past = self._written.setdefault(key, deque([(now_s, want.request_mib)]))
        while len(past) > 1 and past[1][0] <= now_s - SETTLE_S:
            past.popleft()
        return Want(
            request_mib=want.request_mib,
            limit_mib=want.limit_mib,
            used_mib=want.used_mib,
            leased_mib=want.leased_mib,
            bound_mib=past[-1][1],
            granted_mib=max(bound for _, bound in past),
        )


class _Sample(NamedTuple):
    """Memory of a pod above its request."""

    time_s: float
    used_mib: int
    most_mib: int
    """Most to report."""

    def with_request(self, growth_mib: int) -> "_Sample":
        """Return the sample under a larger request."""
        used_mib, most_mib = self.used_mib - growth_mib, self.most_mib - growth_mib
        return self._replace(used_mib=max(0, used_mib), most_mib=max(0, most_mib))

    def reported_mib(self) -> int:
        return min(-(-self.used_mib // STEP_MIB) * STEP_MIB, self.most_mib)


class BurstBook:
    """Amounts above the requests to report, by device and owner in the ledger."""

    def __init__(self) -> None:
        """Start without samples."""
        self._samples: dict[tuple[str, str], deque[_Sample]] = {}
        self._request_mib: dict[tuple[str, str], int] = {}

    def look(
        self, wants: Mapping[ShareKey, Want], bounds: Mapping[ShareKey, int], now_s: float
    ) -> dict[str, tuple[Burst, ...]]:
        """Return what to report after a sample: by device, ordered by uid.

        A higher amount counts at once, a lower one after ``FALL_S``, or at once if a grown request
        covers it. Use beyond the limit is a breach and no burst. An amount is rounded up to the
        bounds at most, so that a device is short of memory only if the use itself exceeds what is
        left.
        """
        used_mib: dict[tuple[str, str], int] = {}
        granted_mib: dict[tuple[str, str], int] = {}
        request_mib: dict[tuple[str, str], int] = {}
        for key, want in wants.items():
            pod = (key[1], key[0][0])
            burst_mib = min(want.used_above_mib, want.most_mib)
            bound_mib = max(burst_mib, bounds[key] - want.request_mib)
            used_mib[pod] = used_mib.get(pod, 0) + burst_mib
            granted_mib[pod] = granted_mib.get(pod, 0) + bound_mib
            request_mib[pod] = request_mib.get(pod, 0) + want.request_mib
        self._samples = {key: one for key, one in self._samples.items() if key in used_mib}
        found: dict[str, list[Burst]] = {}
        for (uuid, uid), mib in sorted(used_mib.items()):
            samples = self._samples.setdefault((uuid, uid), deque())
            while samples and samples[0].time_s <= now_s - FALL_S:
                samples.popleft()
            requested_mib = request_mib[uuid, uid]
            growth_mib = requested_mib - self._request_mib.get((uuid, uid), requested_mib)
            if growth_mib > 0:
                grown = [sample.with_request(growth_mib) for sample in samples]
                samples = self._samples[uuid, uid] = deque(grown)
            samples.append(_Sample(now_s, mib, granted_mib[uuid, uid]))
            most_mib = max(sample.reported_mib() for sample in samples)
            if most_mib:
                found.setdefault(uuid, []).append(Burst(pod_uid=uid, memory_mib=most_mib))
        self._request_mib = request_mib
        return {uuid: tuple(bursts) for uuid, bursts in found.items()}


def reason_of(device: Device | None, booked_mib: int, foreign_mib: int, sharing: int) -> str:
    """Return why a bound is below what a container uses, for the Event of its pod."""
    if device is None or not may_burst(device):
        return "the device gives no memory above requests"
    parts = [f"{booked_mib} of {device.capacity_mib} MiB are booked"]
    if foreign_mib:
        parts.append(f"{foreign_mib} MiB are in foreign use")
    if sharing > 1:
        parts.append(f"{sharing} containers share the rest")
    return ", ".join(parts)
