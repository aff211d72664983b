# SPDX-License-Identifier: Apache-2.0
"""Hardware partitions as devices of claims: one for each place at which a card may have one.

A card in MIG mode serves nothing but partitions, so it is published as these and in no other form
(ADR 40). Sizes and places are those of ``Device.partitions``. Other vendors' divided devices have
no places, or need what CDI cannot set. Memory in MiB, compute in percent of the whole device.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from hami_common.dra.names import partition_name
from hami_common.model.device import Device, Profile
from hami_common.model.placement import Share
from hami_common.model.request import PARTITION_MODES
from hami_common.units import whole

_POSITIONS_MOST = 16


class Place(Struct, frozen=True, kw_only=True):
    """One possible partition."""

    device: Device
    profile: Profile
    start: int

    @property
    def name(self) -> str:
        """Name of the device that stands for it in slices and claims."""
        return partition_name(self.device.uuid, self.profile.name, self.start)


def is_divided(device: Device) -> bool:
    """Return whether claims may have partitions of the device."""
    return device.mode in PARTITION_MODES and any(_sizes(device))


def _sizes(device: Device) -> Iterator[Profile]:
    return (one for one in device.partitions if one.name and one.starts)


def places_of(devices: Iterable[Device]) -> list[Place]:
    """Return the places of partitions in the order in which kube-scheduler shall try them.

    Smallest size first, so that a request by memory gets no larger one than it needs; sizes that
    requests have to name last. Of one size the places of one card after the other, the highest
    first: large sizes start at low positions.
    """
    found = [
        Place(device=device, profile=profile, start=start)
        for device in devices
        if is_divided(device)
        for profile in _sizes(device)
        for start in sorted(profile.starts, reverse=True)
    ]
    return sorted(found, key=lambda one: _order(one.profile))


def _order(profile: Profile) -> tuple[bool, int, int, int, str]:
    return (
        profile.by_name_only,
        profile.memory_mib,
        profile.core_pct,
        profile.size,
        profile.name,
    )


def share_of(name: str, devices: Iterable[Device]) -> Share | None:
    """Return the share that a partition's name stands for; ``None`` if no card has its size.

    Also for a place that the card does not offer now, because the partition at it is faulty.
    """
    start = whole(name.rpartition("-")[2], most=_POSITIONS_MOST - 1)
    if start is None:
        return None
    for device in devices:
        if not is_divided(device):
            continue
        for profile in _sizes(device):
            if partition_name(device.uuid, profile.name, start) == name:
                return Share(
                    vendor=device.vendor,
                    uuid=device.uuid,
                    memory_mib=profile.memory_mib,
                    core_pct=profile.core_pct,
                    profile=profile.name,
                    start=start,
                    kind=profile.kind,
                )
    return None
