# SPDX-License-Identifier: Apache-2.0
"""Decides which containers are active on each device, and at which priority (design D31).

A container counts as active for a while after the last launch that its region showed. Its level is
that of its allocation, 0 (highest) to 7, and ``DEFAULT_LEVEL`` without one. A tenant that writes
into its region can only make its own container look active, which is allowed at any time. Times in
seconds of the caller's clock.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from hami_nodeagent.core.holders import Holder

LOWEST = 7
NOBODY = 255
DEFAULT_LEVEL = 1
ContainerKey = tuple[str, str]
"""(pod uid, container)."""


class Standing(Struct, frozen=True, kw_only=True):
    """Active priority levels of a device."""

    highest_active: int = NOBODY
    active_tenants: int = 0


def level_of(holder: Holder) -> int:
    """Return the container's priority."""
    return DEFAULT_LEVEL if holder.priority is None else min(max(holder.priority, 0), LOWEST)


class Activity:
    """Time of each container's last observed launch."""

    def __init__(self, *, hold_s: float) -> None:
        """A container stays active for ``hold_s`` after its last launch."""
        self._hold_s = hold_s
        self._seen: dict[ContainerKey, int] = {}
        self._active_until_s: dict[ContainerKey, float] = {}

    def note(self, seen_by_container: Mapping[ContainerKey, int], *, now_s: float) -> None:
        """Record the activity numbers of all readable regions."""
        for key, seen in seen_by_container.items():
            if key in self._seen and self._seen[key] != seen:
                self._active_until_s[key] = now_s + self._hold_s
        self._seen = dict(seen_by_container)
        self._active_until_s = {
            key: until_s for key, until_s in self._active_until_s.items() if until_s > now_s
        }

    @property
    def is_any_active(self) -> bool:
        """Return whether a container was active at the last ``note``."""
        return bool(self._active_until_s)

    def standings(self, holders: Collection[Holder], uuids: Collection[str]) -> dict[str, Standing]:
        """Return the active levels of each of these devices."""
        standings = {uuid: Standing() for uuid in uuids}
        for holder in holders:
            if holder.uuid not in standings:
                continue
            if (holder.pod_uid, holder.container) not in self._active_until_s:
                continue
            known = standings[holder.uuid]
            standings[holder.uuid] = Standing(
                highest_active=min(known.highest_active, level_of(holder)),
                active_tenants=known.active_tenants + 1,
            )
        return standings


def has_rivals(holders: Collection[Holder]) -> bool:
    """Return whether containers of different priority share a device."""
    levels: dict[str, set[int]] = {}
    for holder in holders:
        levels.setdefault(holder.uuid, set()).add(level_of(holder))
    return any(len(found) > 1 for found in levels.values())


def has_neighbours(holders: Collection[Holder]) -> bool:
    """Return whether any device has more than one holder."""
    return len({holder.uuid for holder in holders}) < len(holders)
