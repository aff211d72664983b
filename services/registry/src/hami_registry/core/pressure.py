# SPDX-License-Identifier: Apache-2.0
"""Evaluates which containers waited, were refused memory or were moved to the host, and for whom.

Input are usage records of nodes in the order of their stream; their counters grow over the life of
a container, so differences are taken. A launch waits for one of two reasons (limiter-compute.md):
the container's own compute limit, or a container of a higher priority (a lower number) on the same
device. Without one of the two, the other is the cause. Device time of a container is that on all
its devices. Times in seconds, compute in percent of one device.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.usage import ContainerUsage, RecallUse, ShareUsage, UsageRecord

Cause = Literal["", "limit", "priority", "both"]
"""Reason of waiting: the own compute limit, higher priorities, or both are possible."""
DEFAULT_PRIORITY: Final = 1
_FULL_PCT: Final = 100
_MOSTLY: Final = 0.5
_AT_LIMIT: Final = 0.9


class Neighbor(Struct, frozen=True, kw_only=True):
    """Another container that had a share of the same device in the time."""

    namespace: str
    """Empty together with pod and container: it is in a namespace that the caller may not read."""
    pod: str
    container: str
    priority: int
    """0 is the highest."""
    device_time_s: float
    """Increase in the time."""
    core_pct: float
    """Mean of the driver's samples on this device."""
    used_mib: int
    """Newest value on this device."""


class DevicePressure(Struct, frozen=True, kw_only=True):
    """One device of a container."""

    vendor: str
    uuid: str
    limit_core_pct: int
    """0: no compute limit."""
    core_pct: float
    """Mean of the driver's samples of the container."""
    starved_s: float
    """Time for which it waited for higher priorities beyond the first second."""
    neighbors: tuple[Neighbor, ...]
    """Most device time first."""


class Recalled(Struct, frozen=True, kw_only=True):
    """Moves of a container's device memory to the host for one reason."""

    is_requested: bool
    """No container waited for the memory: an idle container was parked by request."""
    namespace: str
    """Of the container that waited for the memory. Empty together with pod and container where none
    did, or where it is in a namespace that the caller may not read."""
    pod: str
    container: str
    moves: int
    moved_mib: int


class ContainerPressure(Struct, frozen=True, kw_only=True):
    """One container, with the increase of its counters in the time that was read."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    node: str
    priority: int
    """0 is the highest."""
    seconds: float
    """Time between the first and the last record with the container."""
    waited_s: float
    """Time that launches waited, summed over processes."""
    starved_s: float
    launches: int
    refusals: int
    """Requests for memory that the limit refused."""
    device_time_s: float
    cause: Cause
    """Reason for which launches waited; empty: none did."""
    devices: tuple[DevicePressure, ...]
    recalls: int = 0
    """Moves of its device memory to the host."""
    recalled_for: tuple[Recalled, ...] = ()
    """The same by the container that waited for the memory, most moves first."""


class _Counted(Struct, kw_only=True):
    """A container's counters: the last ones, and their increase."""

    last: ContainerUsage
    first_s: float
    last_s: float
    waited_s: float = 0.0
    launches: int = 0
    refusals: int = 0
    device_time_s: float = 0.0


class _Shared(Struct, kw_only=True):
    """A container's share of a device."""

    last: ShareUsage
    starved_s: float = 0.0
    core_sum_pct: int = 0
    samples: int = 0


class _Moved(Struct, kw_only=True):
    """Moves of one container for another one."""

    last: RecallUse
    moves: int = 0
    moved_mib: int = 0


Key = tuple[str, str]
"""Pod UID and container."""


class _Node(Struct, kw_only=True):
    is_known: bool = False
    """A record was seen, so a container that appears later began after it."""
    containers: dict[Key, _Counted] = {}
    shares: dict[str, dict[Key, _Shared]] = {}
    """By UUID."""
    moved: dict[Key, dict[Key, _Moved]] = {}
    """By moved and waiting container."""


class PressureFold:
    """Folds usage records."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def seen(self, record: UsageRecord) -> None:
        """Fold a record; those of one node in order."""
        node = self._nodes.setdefault(record.node, _Node())
        for one in record.containers:
            _count(node, one, record.time_s)
        for share in record.shares:
            _sample(node, share)
        for use in record.recalls:
            _move(node, use)
        node.is_known = True

    def items(
        self, *, priority: Callable[[str, str], int | None], namespace: str = ""
    ) -> list[ContainerPressure]:
        """Return the containers that waited, were refused or moved, the longest waiting first.

        ``priority`` returns that of a container by pod UID and name. With ``namespace`` only its
        containers; neighbors of others keep their amounts and lose their names.
        """
        found = [
            one
            for name, node in self._nodes.items()
            for one in _evaluated(name, node, priority, namespace)
            if one.waited_s > 0 or one.refusals > 0 or one.recalls > 0
        ]
        return sorted(
            found,
            key=lambda one: (-one.waited_s, -one.refusals, -one.recalls, one.namespace, one.pod),
        )


def _rise(last: float, now: float) -> float:
    """Return the increase of a counter; one that fell was reset with its container."""
    return now - last if now >= last else now


def _count(node: _Node, now: ContainerUsage, time_s: float) -> None:
    key = (now.pod_uid, now.container)
    known = node.containers.get(key)
    if known is None:
        zero = replace(now, waited_s=0.0, launches=0, refusals=0, device_time_s=0.0)
        known = _Counted(last=zero if node.is_known else now, first_s=time_s, last_s=time_s)
        node.containers[key] = known
    last = known.last
    known.waited_s += _rise(last.waited_s, now.waited_s)
    known.device_time_s += _rise(last.device_time_s, now.device_time_s)
    known.launches += int(_rise(last.launches, now.launches))
    known.refusals += int(_rise(last.refusals, now.refusals))
    known.last, known.last_s = now, time_s


def _sample(node: _Node, now: ShareUsage) -> None:
    key = (now.pod_uid, now.container)
    shares = node.shares.setdefault(now.uuid, {})
    known = shares.get(key)
    if known is None:
        known = shares[key] = _Shared(last=replace(now, starved_s=0.0) if node.is_known else now)
    known.starved_s += _rise(known.last.starved_s, now.starved_s)
    known.core_sum_pct += now.core_pct
    known.samples += 1
    known.last = now


def _move(node: _Node, now: RecallUse) -> None:
    by_cause = node.moved.setdefault((now.pod_uid, now.container), {})
    cause = (now.for_pod_uid, now.for_container)
    known = by_cause.get(cause)
    if known is None:
        first = replace(now, moves=0, moved_mib=0) if node.is_known else now
        known = by_cause[cause] = _Moved(last=first)
    known.moves += int(_rise(known.last.moves, now.moves))
    known.moved_mib += int(_rise(known.last.moved_mib, now.moved_mib))
    known.last = now


def _recalled(by_cause: Mapping[Key, _Moved], namespace: str) -> tuple[Recalled, ...]:
    found = []
    for one in by_cause.values():
        is_shown = namespace in ("", one.last.for_namespace)
        if one.moves:
            found.append(
                Recalled(
                    is_requested=not one.last.for_pod_uid,
                    namespace=one.last.for_namespace if is_shown else "",
                    pod=one.last.for_pod if is_shown else "",
                    container=one.last.for_container if is_shown else "",
                    moves=one.moves,
                    moved_mib=one.moved_mib,
                )
            )
    return tuple(sorted(found, key=lambda one: (-one.moves, -one.moved_mib, one.pod)))


def _evaluated(
    name: str, node: _Node, priority: Callable[[str, str], int | None], namespace: str
) -> Iterator[ContainerPressure]:
    def level(key: Key) -> int:
        found = priority(*key)
        return DEFAULT_PRIORITY if found is None else found

    for key, counted in node.containers.items():
        last = counted.last
        if namespace not in ("", last.namespace):
            continue
        devices = tuple(
            DevicePressure(
                vendor=shares[key].last.vendor,
                uuid=uuid,
                limit_core_pct=shares[key].last.limit_core_pct,
                core_pct=_mean(shares[key]),
                starved_s=shares[key].starved_s,
                neighbors=_neighbors(key, shares, node.containers, level, namespace),
            )
            for uuid, shares in sorted(node.shares.items())
            if key in shares
        )
        recalled = _recalled(node.moved.get(key, {}), namespace)
        yield ContainerPressure(
            namespace=last.namespace,
            pod=last.pod,
            pod_uid=last.pod_uid,
            container=last.container,
            node=name,
            priority=level(key),
            seconds=counted.last_s - counted.first_s,
            waited_s=counted.waited_s,
            starved_s=sum(one.starved_s for one in devices),
            launches=counted.launches,
            refusals=counted.refusals,
            device_time_s=counted.device_time_s,
            cause=cause_of(counted.waited_s, level(key), devices),
            devices=devices,
            recalls=sum(one.moves for one in recalled),
            recalled_for=recalled,
        )


def _mean(share: _Shared) -> float:
    return round(share.core_sum_pct / share.samples, 1) if share.samples else 0.0


def _neighbors(
    own: Key,
    shares: Mapping[Key, _Shared],
    counted: Mapping[Key, _Counted],
    level: Callable[[Key], int],
    namespace: str,
) -> tuple[Neighbor, ...]:
    found = []
    for key, share in shares.items():
        if key == own:
            continue
        last = share.last
        is_shown = namespace in ("", last.namespace)
        found.append(
            Neighbor(
                namespace=last.namespace if is_shown else "",
                pod=last.pod if is_shown else "",
                container=last.container if is_shown else "",
                priority=level(key),
                device_time_s=counted[key].device_time_s if key in counted else 0.0,
                core_pct=_mean(share),
                used_mib=last.used_mib,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.device_time_s, -one.core_pct, one.pod)))


def cause_of(waited_s: float, priority: int, devices: tuple[DevicePressure, ...]) -> Cause:
    """Return why launches of a container waited."""
    if waited_s <= 0:
        return ""
    limited = [one for one in devices if 0 < one.limit_core_pct < _FULL_PCT]
    if not limited:
        return "priority"
    is_below = any(other.priority < priority for one in devices for other in one.neighbors)
    if not is_below:
        return "limit"
    if sum(one.starved_s for one in devices) >= waited_s * _MOSTLY:
        return "priority"
    if all(one.core_pct >= one.limit_core_pct * _AT_LIMIT for one in limited):
        return "limit"
    return "both"
