# SPDX-License-Identifier: Apache-2.0
"""Chooses the hardware partition for a request, and checks the capacity of a device for it.

A ``Division`` is shared by all devices with the same table of sizes. The request alone decides the
size: the smallest profile that fits it; the profile without a name is the whole device. Free
capacity depends on the existing partitions: memory and compute are the ledger's sums, all else is
counted here, as amounts of named resources and as positions on the device's grid. A grid's state is
a bit mask, bit i set when position i is taken.

``choose_start`` is the one rule that decides where on the grid a partition goes. Memory in MiB,
compute in percent of one device. Independent of devices, pods and vendors' words.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hami_common.bounds import RESOURCE_MOST
from hami_common.model.device import Profile
from hami_common.model.request import DeviceRequest
from hami_common.units import whole

GRID_LIMIT: Final = 16
"""Most positions that a grid may have."""
AMOUNTS_LIMIT: Final = 12
"""Most named resources that a division may count."""
FULL_PCT: Final = 100
NO_START: Final = -1

Shorts = NDArray[np.int16]
Amounts = NDArray[np.int16]


class Grant(NamedTuple):
    """Partition for a request on a device of one division."""

    profile: int
    """Index in ``Division.profiles``."""
    memory_mib: int
    core_pct: int
    exclusive: bool
    kind: str
    spare_mib: int = 0
    """Memory beyond the request; 0 where the request names the partition."""
    spare_pct: int = 0
    """Compute beyond the request, likewise."""


def mask_of(profile: Profile, start: int) -> int:
    """The positions that an instance at ``start`` takes."""
    return ((1 << profile.size) - 1) << start


def choose_start(profile: Profile, taken: int, profiles: Sequence[Profile]) -> int:
    """Return the start for an instance on a grid in state ``taken``; ``NO_START`` when it is full.

    Chooses the place that leaves space for the most instances of the other profiles, counted for
    each profile by itself and weighted by its size; the highest such place among equals, because
    large profiles may start at low positions only.
    """
    best, chosen = -1, NO_START
    for start in profile.starts:
        if mask_of(profile, start) & taken:
            continue
        after = taken | mask_of(profile, start)
        left = sum(other.size * _room(other, after) for other in profiles if other.starts)
        best, chosen = max((best, chosen), (left, start))
    return chosen


def _room(profile: Profile, taken: int) -> int:
    """Count the free legal places for ``profile``, each one independently."""
    return sum(not mask_of(profile, start) & taken for start in profile.starts)


class Division:
    """A table of sizes, and all data derived from it."""

    def __init__(self, profiles: tuple[Profile, ...], totals: Mapping[str, int]) -> None:
        """``totals`` of the named resources of one device; ``check`` validates them."""
        self.profiles = profiles
        self.by_name = {profile.name: number for number, profile in enumerate(profiles)}
        self.positions = max((max(p.starts) + p.size for p in profiles if p.starts), default=0)
        limits = {f"limit {p.name}": p.limit for p in profiles if p.limit}
        self.totals = {**totals, **limits}
        self.names = tuple(sorted(self.totals))
        self.capacity = self._amounts(self.totals)
        self.needs = tuple(self._amounts(profile.need()) for profile in profiles)
        self._order = sorted(range(len(profiles)), key=lambda n: _size(profiles[n]))
        self._starts: dict[int, Shorts] = {}

    def _amounts(self, amounts: Mapping[str, int]) -> Amounts:
        line = np.zeros(AMOUNTS_LIMIT, np.int16)
        for place, name in enumerate(self.names):
            line[place] = amounts.get(name, 0)
        return line

    @staticmethod
    def check(profiles: Sequence[Profile], totals: Mapping[str, int]) -> str:
        """Return the error that makes a table unusable; empty when it is valid."""
        positions = max((max(p.starts) + p.size for p in profiles if p.starts), default=0)
        if positions > GRID_LIMIT:
            return f"a grid of {positions} positions, at most {GRID_LIMIT} are possible"
        names = {*totals, *(f"limit {p.name}" for p in profiles if p.limit)}
        if len(names) > AMOUNTS_LIMIT:
            return f"{len(names)} resources, at most {AMOUNTS_LIMIT} are possible"
        if len({profile.name for profile in profiles}) != len(profiles):
            return "two partitions with one name"
        for profile in profiles:
            unknown = profile.resources.keys() - totals.keys()
            if unknown:
                return f"partition {profile.name!r} takes {min(unknown)}, which the device has not"
            if profile.memory_mib < 0 or bool(profile.starts) != bool(profile.size):
                return f"partition {profile.name!r} has no possible size"
        return ""

    def grant(self, request: DeviceRequest) -> Grant | None:
        """Partition for ``request``; ``None`` when no profile fits.

        Percentages are of the largest profile's memory.
        """
        largest = max((p.memory_mib for p in self.profiles), default=0)
        memory_mib = request.memory_mib_on(largest)
        for number in self._order:
            profile = self.profiles[number]
            if request.profile:
                suits = profile.name == request.profile
            elif request.exact:
                suits = all(profile.resources.get(name) == n for name, n in request.exact)
            elif request.exclusive:
                suits = profile.memory_mib == largest and not profile.by_name_only
            else:
                suits = not profile.by_name_only
            if suits and profile.memory_mib >= memory_mib and profile.core_pct >= request.core_pct:
                is_named = bool(request.profile or request.exact)
                return Grant(
                    profile=number,
                    memory_mib=profile.memory_mib,
                    core_pct=profile.core_pct,
                    exclusive=request.exclusive or not profile.name,
                    kind=request.kind or profile.kind,
                    spare_mib=0 if is_named else profile.memory_mib - memory_mib,
                    spare_pct=0 if is_named else profile.core_pct - request.core_pct,
                )
        return None

    def spent(self, parts: Mapping[str, int]) -> tuple[int, Amounts]:
        """(positions taken, amounts taken) by partitions, given by ``Share.part``.

        A partition whose name is not in the table counts as nothing.
        """
        taken = 0
        sums = np.zeros(AMOUNTS_LIMIT, np.int64)
        for part, count in parts.items():
            name, _, start = part.partition("@")
            number = self.by_name.get(name)
            if number is None:
                continue
            sums += self.needs[number].astype(np.int64) * count
            place = whole(start, most=GRID_LIMIT)
            if place is not None:
                taken |= mask_of(self.profiles[number], place)
        # Amounts beyond any capacity remain so in 16 bits, with headroom for one more profile's
        # need.
        amounts = np.minimum(sums, RESOURCE_MOST + 1).astype(np.int16)
        return taken & ((1 << self.positions) - 1), amounts

    def is_over(self, parts: Mapping[str, int]) -> bool:
        """True when partitions exceed the capacity, or overlap."""
        taken, amounts = self.spent(parts)
        sizes = 0
        for part, count in parts.items():
            name, _, start = part.partition("@")
            if start and name in self.by_name:
                sizes += count * self.profiles[self.by_name[name]].size
        return bool((amounts > self.capacity).any()) or sizes > taken.bit_count()

    def starts(self, profile: int) -> Shorts:
        """By state of the grid: the start of an instance of the profile, else ``NO_START``."""
        known = self._starts.get(profile)
        if known is None:
            known = self._starts[profile] = _start_table(
                self.profiles[profile], self.profiles, self.positions
            )
        return known


def _size(profile: Profile) -> tuple[int, int, int, int, str]:
    return (
        profile.memory_mib,
        profile.core_pct,
        profile.size,
        sum(profile.resources.values()),
        profile.name,
    )


def _start_table(profile: Profile, profiles: Sequence[Profile], positions: int) -> Shorts:
    """``choose_start`` for every state of the grid at once."""
    states = np.arange(1 << positions)
    best = np.full(len(states), -1, np.int64)
    chosen = np.full(len(states), NO_START, np.int16)
    for start in profile.starts:
        mask = mask_of(profile, start)
        after = states | mask
        left = np.zeros(len(states), np.int64)
        for other in profiles:
            for at in other.starts:
                left += other.size * ((mask_of(other, at) & after) == 0)
        better = ((mask & states) == 0) & (left * GRID_LIMIT + start > best)
        best[better] = left[better] * GRID_LIMIT + start
        chosen[better] = start
    return chosen


def assign_starts(
    division: Division, taken: int, wanted: Sequence[int]
) -> tuple[int | None, ...] | None:
    """Starts for one pod's partitions on one device, given as indexes in the table of profiles.

    The first by ``choose_start`` if that leaves space for those after it. ``None``: no choice fits.
    """
    if not wanted:
        return ()
    profile = division.profiles[wanted[0]]
    if not profile.starts:
        rest = assign_starts(division, taken, wanted[1:])
        return None if rest is None else (None, *rest)
    first = choose_start(profile, taken, division.profiles)
    for start in dict.fromkeys((first, *profile.starts)):
        if start == NO_START or mask_of(profile, start) & taken:
            continue
        rest = assign_starts(division, taken | mask_of(profile, start), wanted[1:])
        if rest is not None:
            return (start, *rest)
    return None
