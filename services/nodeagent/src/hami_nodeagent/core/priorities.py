# SPDX-License-Identifier: Apache-2.0
"""Decides which containers are active on each device, and at which priority (design D31).

A container counts as active for a while after the last launch that its region showed, and not
longer than until all its processes declare themselves idle. Its level is that of its allocation,
0 (highest) to 7, and ``DEFAULT_LEVEL`` without one. A tenant that writes
into its region can only make its own container look active, which is allowed at any time. Times in
seconds of the caller's clock.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.region import Work

LOWEST = 7
NO_LEVEL = 255
"""Level where no container has one; ``PRIORITY_NO_LEVEL`` of priority.h."""
DEFAULT_LEVEL = 1
ContainerKey = tuple[str, str]
"""(pod uid, container), or (claim uid, request)."""


class Standing(Struct, frozen=True, kw_only=True):
    """Priority levels of a device's containers."""

    highest_active: int = NO_LEVEL
    active_tenants: int = 0
    """Active containers of the highest active level: those of lower levels are blocked."""
    highest_present: int = NO_LEVEL
    """Of all containers with a share."""
    lowest_present: int = 0
    """0 also without a container."""


def level_of(holder: Holder) -> int:
    """Return the container's priority."""
    return DEFAULT_LEVEL if holder.priority is None else min(max(holder.priority, 0), LOWEST)


class Activity:
    """Time of each container's last observed launch."""

    def __init__(self, *, hold_s: float, rung_hold_s: float) -> None:
        """A container stays active for ``hold_s`` after its last launch.

        One that rings reports when it is idle, and is seldom polled in between: ``rung_hold_s``.
        """
        self._hold_s = hold_s
        self._rung_hold_s = rung_hold_s
        self._ringing: set[ContainerKey] = set()
        self._seen: dict[ContainerKey, Work] = {}
        self._active_until_s: dict[ContainerKey, float] = {}

    def note(
        self,
        read: Collection[ContainerKey],
        seen: Mapping[ContainerKey, Work],
        *,
        now_s: float,
        has_rung: bool = False,
    ) -> None:
        """Record what was seen in the regions that were read; others keep their state.

        ``has_rung``: these containers rang, so that their first sight is activity, too.
        """
        if has_rung:
            self._ringing.update(read)
        for key in read:
            before, work = self._seen.pop(key, None), seen.get(key)
            if work is None:
                continue
            self._seen[key] = work
            if work.is_idle:
                self._active_until_s.pop(key, None)
            elif (before is None and has_rung) or (before is not None and before != work):
                hold_s = self._rung_hold_s if key in self._ringing else self._hold_s
                self._active_until_s[key] = now_s + hold_s
        self._active_until_s = {
            key: until_s for key, until_s in self._active_until_s.items() if until_s > now_s
        }

    def keep_only(self, keys: Collection[ContainerKey]) -> None:
        """Forget all other containers."""
        for known in (self._seen, self._active_until_s):
            for key in set(known) - set(keys):
                del known[key]
        self._ringing &= set(keys)

    def is_quiet(self, key: ContainerKey) -> bool:
        """Return whether the container rings before its next launch: it need not be polled."""
        work = self._seen.get(key)
        return work is None or work.is_idle

    def rings(self, key: ContainerKey) -> bool:
        """Return whether the container has rung, so that it also reports when it is idle."""
        return key in self._ringing

    @property
    def is_any_active(self) -> bool:
        """Return whether a container was active at the last ``note``."""
        return bool(self._active_until_s)

    def standings(self, holders: Collection[Holder], uuids: Collection[str]) -> dict[str, Standing]:
        """Return the active levels of each of these devices."""
        standings = {uuid: Standing() for uuid in uuids}
        # Containers that use one request of a claim have one region, so they count once.
        once = {(key_of(holder), holder.uuid): holder for holder in holders}
        for holder in once.values():
            if holder.uuid not in standings:
                continue
            known, level = standings[holder.uuid], level_of(holder)
            active = level if key_of(holder) in self._active_until_s else NO_LEVEL
            highest = min(known.highest_active, active)
            others = known.active_tenants if known.highest_active == highest else 0
            standings[holder.uuid] = Standing(
                highest_active=highest,
                active_tenants=others + (active == highest != NO_LEVEL),
                highest_present=min(known.highest_present, level),
                lowest_present=max(known.lowest_present, level),
            )
        return standings


def key_of(holder: Holder) -> ContainerKey:
    """Return the owner of the share: the container, or the request of a claim."""
    return holder.owner


def rivals_of(holders: Collection[Holder]) -> frozenset[ContainerKey]:
    """Return the containers that share a device with one of another priority."""
    levels: dict[str, set[int]] = {}
    for holder in holders:
        levels.setdefault(holder.uuid, set()).add(level_of(holder))
    return frozenset(key_of(one) for one in holders if len(levels[one.uuid]) > 1)


def has_neighbours(holders: Collection[Holder]) -> bool:
    """Return whether any device has more than one holder."""
    return len({holder.uuid for holder in holders}) < len(holders)
