# SPDX-License-Identifier: Apache-2.0
"""Evaluates a canary: figures of its pods in a window, against bounds and the control group.

A pure function of what was noted: the same notes give the same verdict. Each pod counts once in the
window of its last note. ``refused_pct``: pods that were refused at least once, in percent.
``refusals_per_min``: refusals, retries included. ``wait_p95_s``: 95th percentile, of the pods that
were refused, of the time from the first refusal to the bind, or to now; 0 without one.
``packing_pct``: booked memory in percent of the memory of the devices on which the group has
shares, mean of the notes. Times in seconds of one clock.
"""

from collections import deque
from collections.abc import Iterable
from math import ceil
from typing import Final, Literal

from msgspec import Struct

from hami_core.replay.policies import Canary, CanaryMeasure, Objective
from hami_core.table.table import DeviceTable

PODS_MOST: Final = 50_000
"""Pods of a window; beyond, those noted longest ago are left out."""
REFUSALS_MOST: Final = 200_000
_P95: Final = 0.95
_MINUTE_S: Final = 60.0

Group = Literal["canary", "control"]


class GroupFigures(Struct, frozen=True, kw_only=True):
    """Figures of one group in the window."""

    pods: int
    refused_pct: float
    refusals_per_min: float
    wait_p95_s: float
    packing_pct: float | None
    """``None``: the group held no device."""

    def figure(self, measure: CanaryMeasure) -> float | None:
        """Return one of them."""
        found: float | None = getattr(self, measure)
        return found


class CanaryVerdict(Struct, frozen=True, kw_only=True):
    """State of a canary at one time."""

    canary: GroupFigures
    control: GroupFigures
    is_decidable: bool
    """Both groups have enough pods."""
    missed: str
    """The first objective that is missed, with its figures; empty: none."""


class _Pod(Struct):
    group: Group
    noted_s: float
    refused_s: float | None = None
    """Time of the first refusal."""
    bound_s: float | None = None


class Window:
    """Notes of both groups; old ones are dropped when it is evaluated."""

    def __init__(self) -> None:
        """Start without notes."""
        self._pods: dict[str, _Pod] = {}
        """By uid, the one noted longest ago first."""
        self._refusals: dict[Group, deque[float]] = {
            "canary": deque(maxlen=REFUSALS_MOST),
            "control": deque(maxlen=REFUSALS_MOST),
        }
        self._packings: dict[Group, deque[tuple[float, float]]] = {
            "canary": deque(),
            "control": deque(),
        }
        self._begin_s: float | None = None

    def asked(self, uid: str, group: Group, *, is_refused: bool, now_s: float) -> None:
        """Note a filter decision about a pod."""
        pod = self._noted(uid, group, now_s)
        if is_refused:
            self._refusals[group].append(now_s)
            if pod.refused_s is None:
                pod.refused_s = now_s

    def bound(self, uid: str, *, now_s: float) -> None:
        """Note that a pod of a group has its devices."""
        if (pod := self._pods.get(uid)) is not None:
            self._noted(uid, pod.group, now_s).bound_s = now_s

    def ended(self, uid: str) -> None:
        """Drop a pod that was deleted before it was placed."""
        if (pod := self._pods.get(uid)) is not None and pod.bound_s is None:
            del self._pods[uid]

    def waiting(self, *, noted_by_s: float) -> list[str]:
        """Return the pods that were refused and have no devices yet, noted last by a time."""
        return [
            uid
            for uid, pod in self._pods.items()
            if pod.refused_s is not None and pod.bound_s is None and pod.noted_s <= noted_by_s
        ]

    def packed(self, group: Group, packing_pct: float | None, *, now_s: float) -> None:
        """Note the packing of a group's devices."""
        if packing_pct is not None:
            self._packings[group].append((now_s, packing_pct))

    def _noted(self, uid: str, group: Group, now_s: float) -> _Pod:
        if self._begin_s is None:
            self._begin_s = now_s
        pod = self._pods.pop(uid, None)
        if pod is None or pod.group != group:
            pod = _Pod(group=group, noted_s=now_s)
        pod.noted_s = now_s
        self._pods[uid] = pod
        if len(self._pods) > PODS_MOST:
            del self._pods[next(iter(self._pods))]
        return pod

    def verdict(self, canary: Canary, *, now_s: float) -> CanaryVerdict:
        """Evaluate the canary over its window up to now."""
        from_s = now_s - canary.window_s
        self._forget(from_s)
        length_s = min(canary.window_s, now_s - (now_s if self._begin_s is None else self._begin_s))
        of_canary = self._figures("canary", length_s, now_s)
        of_control = self._figures("control", length_s, now_s)
        is_decidable = min(of_canary.pods, of_control.pods) >= canary.pods_least
        missed = ""
        if is_decidable:
            texts = (_missed(one, of_canary, of_control) for one in canary.objectives)
            missed = next(filter(None, texts), "")
        return CanaryVerdict(
            canary=of_canary, control=of_control, is_decidable=is_decidable, missed=missed
        )

    def _forget(self, from_s: float) -> None:
        while self._pods:
            uid = next(iter(self._pods))
            if self._pods[uid].noted_s >= from_s:
                break
            del self._pods[uid]
        for times in self._refusals.values():
            while times and times[0] < from_s:
                times.popleft()
        for packings in self._packings.values():
            while packings and packings[0][0] < from_s:
                packings.popleft()

    def _figures(self, group: Group, length_s: float, now_s: float) -> GroupFigures:
        pods = [pod for pod in self._pods.values() if pod.group == group]
        waits_s = sorted(
            (now_s if pod.bound_s is None else pod.bound_s) - pod.refused_s
            for pod in pods
            if pod.refused_s is not None
        )
        packings = [value for _, value in self._packings[group]]
        return GroupFigures(
            pods=len(pods),
            refused_pct=round(100 * len(waits_s) / len(pods), 3) if pods else 0.0,
            refusals_per_min=round(len(self._refusals[group]) / max(length_s / _MINUTE_S, 1.0), 3),
            wait_p95_s=round(waits_s[ceil(_P95 * len(waits_s)) - 1], 3) if waits_s else 0.0,
            packing_pct=round(sum(packings) / len(packings), 3) if packings else None,
        )


def _missed(one: Objective, canary: GroupFigures, control: GroupFigures) -> str:
    """Return how the objective is missed; empty: it is met, or a figure is missing."""
    value, other = canary.figure(one.measure), control.figure(one.measure)
    if value is None:
        return ""
    if one.most is not None and value > one.most:
        return f"{one.measure} is {value:g}, at most {one.most:g}"
    if one.least is not None and value < one.least:
        return f"{one.measure} is {value:g}, at least {one.least:g}"
    if other is None:
        return ""
    most, least = one.most_pct_of_control, one.least_pct_of_control
    if most is not None and value > other * most / 100:
        return f"{one.measure} is {value:g}, at most {most:g} % of the control group's {other:g}"
    if least is not None and value < other * least / 100:
        return f"{one.measure} is {value:g}, at least {least:g} % of the control group's {other:g}"
    return ""


def memory_of(table: DeviceTable, node: str, uuids: Iterable[str]) -> tuple[int, int]:
    """Return booked memory and memory of those devices of a node that are in the table, in MiB."""
    booked = capacity = 0
    place = table.place(node)
    for uuid in uuids:
        row = None if place is None else place.rows.get(uuid)
        if place is None or row is None:
            continue
        booked += int(place.block.used_mib[row, place.column])
        capacity += int(place.block.capacity_mib[row, place.column])
    return booked, capacity
