# SPDX-License-Identifier: Apache-2.0
"""Chooses the pods whose eviction returns memory that a device lacks because pods burst (ADR 52).

A device is short when its shares, foreign use and bursts together exceed its capacity. Pods that
leave anyway do not count: those that end, those that a reservation awaits, and pods whose use is
still reported after their release. Pods with more than an equal part of the memory that is left are
evicted first: the agent grants equal parts, so a pod within its part has not taken that of others.
The choice depends only on records and pods, so all replicas choose the same pods. Memory in MiB.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec import Struct

from hami_common.model.placement import NOTHING, booked_by_device
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodFacts


class Burst(Struct, frozen=True, kw_only=True):
    """A pod with a burst on a device that is short."""

    pod: PodFacts
    burst_mib: int
    """Beyond its request."""
    freed_mib: int
    """Memory of the device that its end returns: its share and its burst."""
    leaves: tuple[PodFacts, ...]
    """Pods to evict: the pod, or all members of its gang."""


class Shortage(Struct, frozen=True, kw_only=True):
    """A device with less memory than its shares and the uses of its memory need."""

    node: str
    uuid: str
    short_mib: int
    bursts: tuple[Burst, ...]
    """Pods with bursts on it, the first to evict first: those beyond an equal part of the memory
    that is left, then the lowest priority, then the largest burst."""

    def victims(self, spared: Callable[[PodFacts], bool]) -> tuple[Burst, ...]:
        """Return the bursts to end; ``spared`` pods stay, and with them their gangs."""
        chosen: list[Burst] = []
        left_mib = self.short_mib
        for burst in self.bursts:
            if left_mib <= 0:
                break
            if not any(spared(pod) for pod in burst.leaves):
                chosen.append(burst)
                left_mib -= burst.freed_mib
        return tuple(chosen)


def shortages(
    ledger: Ledger,
    *,
    pod_of: Callable[[str], PodFacts | None],
    members_of: Callable[[str], Iterable[PodFacts]],
) -> list[Shortage]:
    """Return the devices with bursts that are short, by node and UUID."""
    found: list[Shortage] = []
    for node in sorted(ledger.table.bursting):
        place = ledger.table.place(node)
        short = [u for u in place.bursts if place.free_mib(u) < 0] if place else []
        each = (_shortage(ledger, node, uuid, pod_of, members_of) for uuid in sorted(short))
        found += [shortage for shortage in each if shortage is not None]
    return found


def _shortage(
    ledger: Ledger,
    node: str,
    uuid: str,
    pod_of: Callable[[str], PodFacts | None],
    members_of: Callable[[str], Iterable[PodFacts]],
) -> Shortage | None:
    place = ledger.table.place(node)
    if place is None:
        return None
    holdings = ledger.holdings_of_node(node)
    booked_mib = {
        one.record.pod_uid: booked_by_device(one.record.containers).get(uuid, NOTHING).memory_mib
        for one in holdings
    }
    awaited = {uid for one in holdings for uid in one.record.awaits}
    short_mib = -place.free_mib(uuid)
    bursts: list[Burst] = []
    used_mib = place.bursts[uuid]
    for uid in sorted(booked_mib.keys() | used_mib.keys()):
        pod, burst_mib = pod_of(uid), used_mib.get(uid, 0)
        freed_mib = booked_mib.get(uid, 0) + burst_mib
        is_leaving = uid in awaited or (pod is not None and (pod.is_deleting or pod.is_finished))
        if is_leaving or uid not in booked_mib:
            short_mib -= freed_mib
        elif pod is not None and pod.node == node and burst_mib:
            members = [one for one in members_of(pod.group) if _stays(one)] if pod.group else []
            leaves = (pod, *(one for one in members if one.uid != pod.uid))
            bursts.append(Burst(pod=pod, burst_mib=burst_mib, freed_mib=freed_mib, leaves=leaves))
    if short_mib <= 0 or not bursts:
        return None
    part_mib = _equal_part([one.burst_mib for one in bursts], short_mib)
    bursts.sort(key=partial(_turn, part_mib=part_mib))
    return Shortage(node=node, uuid=uuid, short_mib=short_mib, bursts=tuple(bursts))


def _stays(pod: PodFacts) -> bool:
    return bool(pod.node) and not pod.is_deleting and not pod.is_finished


def _equal_part(bursts_mib: Sequence[int], short_mib: int) -> int:
    """Return the memory that each burst could have if the device were not short."""
    left_mib, count = sum(bursts_mib) - short_mib, len(bursts_mib)
    for burst_mib in sorted(bursts_mib):
        if burst_mib * count > left_mib:
            break
        left_mib -= burst_mib
        count -= 1
    return max(0, left_mib) // count if count else max(bursts_mib)


def _turn(burst: Burst, *, part_mib: int) -> tuple[bool, int, int, str]:
    """Return the key that orders bursts by the cost of their end."""
    highest = max(pod.eviction_priority() for pod in burst.leaves)
    return burst.burst_mib <= part_mib, highest, -burst.burst_mib, burst.pod.uid
