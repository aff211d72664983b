# SPDX-License-Identifier: Apache-2.0
"""Lists which containers hold which shares of this node's devices now, and who holds them to it.

A container holds a share while its grant stands, its pod is alive and the ledger's newest record of
the pod names the share: the record's figures count, so a resized share counts with its new size.
Containers that hold only whole devices are not limited at all (design D33). How HAMi's limiter
shares out compute is its own affair: of pods that HAMi placed only memory is compared. Memory in
MiB, compute in percent of one device (0: no limit).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from hami_common.events.allocation import AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import Share
from hami_common.vendors.handles import is_divisible, needs_instance
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.podbook import PodBook

Enforcement = Literal["libvgpu", "hami", "none"]
LIMITED_VENDORS = frozenset({"nvidia"})
"""Vendors whose shares the in-container library enforces."""


class Holder(Struct, frozen=True, kw_only=True):
    """One container's share of one device."""

    pod_uid: str
    namespace: str
    pod: str
    container: str
    vendor: str
    uuid: str
    number: int
    """Position of the device as the container sees it."""
    place: int = 0
    """Place among the container's shares, over all vendors."""
    limit_mib: int
    core_pct: int = 0
    is_whole: bool = False
    priority: int | None = None
    allocation_id: str = ""
    volume: str = ""
    """Name of the pod's volume that holds the usage region; empty when there is none."""


def is_whole(share: Share, device: Device | None) -> bool:
    """Whether the share is the whole device, so that nothing is to be limited."""
    return share.exclusive and device is not None and share.memory_mib >= device.memory_mib


def needs_library(shares: Sequence[Share], devices: Sequence[Device]) -> bool:
    """Whether a container with these shares of one vendor must be held to them from inside.

    A hardware partition bounds its share by itself.
    """
    return any(
        share.vendor in LIMITED_VENDORS and not share.profile and not is_whole(share, device)
        for share, device in zip(shares, devices, strict=True)
    )


def enforcement_of(record: AllocationRecord, grants: GrantBook) -> Enforcement:
    """What the state record says: whether any container of the pod was given the library."""
    if record.origin:
        return "hami"
    given = any(grant.library for grant in grants.of_pod(record.pod_uid))
    return "libvgpu" if given else "none"


def unheld_vendors(
    record: AllocationRecord,
    grants: GrantBook,
    devices_by_uuid: Mapping[str, Device],
    holding: Callable[[str], str],
) -> tuple[str, ...]:
    """Vendors of which the pod has a part of a device that nothing keeps it from exceeding.

    ``holding`` tells what holds a vendor's containers to their memory, empty: nothing does. Where
    that is the in-container library, it must have been given with the grant. A pod that HAMi placed
    has HAMi's limiter, of which we know nothing.
    """
    if record.origin:
        return ()
    has_library = {(g.container, g.vendor) for g in grants.of_pod(record.pod_uid) if g.library}
    found = set()
    for container in record.containers:
        for share in container.shares:
            device = devices_by_uuid.get(share.uuid)
            if share.exclusive and (device is None or share.memory_mib >= device.memory_mib):
                continue
            if share.profile and share.vendor in LIMITED_VENDORS:
                continue  # its MIG instance holds it
            is_held = (
                (container.name, share.vendor) in has_library
                if share.vendor in LIMITED_VENDORS
                else bool(holding(share.vendor)) and _is_carried(share, device)
            )
            if not is_held:
                found.add(share.vendor)
    return tuple(sorted(found))


def _is_carried(share: Share, device: Device | None) -> bool:
    """Whether a partition carries it, where it takes one to hold shares of the vendor."""
    return device is None or not is_divisible(share.vendor) or needs_instance(share, device)


def holders_of(
    entries_by_uid: Mapping[str, Entry],
    pods: PodBook,
    grants: GrantBook,
    devices_by_uuid: Mapping[str, Device],
) -> tuple[Holder, ...]:
    """All holders, in order of namespace, pod, container and device."""
    found: list[Holder] = []
    for grant in grants:
        entry, pod = entries_by_uid.get(grant.pod_uid), pods.find(grant.pod_uid)
        if pod is None or entry is None or entry.record.op == "release":
            continue
        if not pods.is_alive(grant.pod_uid):
            continue
        for container in entry.record.containers:
            if container.name != grant.container:
                continue
            own = [
                (place, share)
                for place, share in enumerate(container.shares)
                if share.vendor == grant.vendor
            ]
            found.extend(
                Holder(
                    pod_uid=grant.pod_uid,
                    namespace=grant.namespace,
                    pod=grant.pod,
                    container=grant.container,
                    vendor=share.vendor,
                    uuid=share.uuid,
                    number=number,
                    place=place,
                    limit_mib=share.memory_mib,
                    core_pct=0 if entry.record.origin else share.core_pct,
                    is_whole=is_whole(share, devices_by_uuid.get(share.uuid)),
                    priority=container.priority,
                    allocation_id=entry.record.allocation_id,
                    volume=pod.region_volumes.get(container.name, ""),
                )
                for number, (place, share) in enumerate(own)
            )
    return tuple(sorted(found, key=lambda one: (one.namespace, one.pod, one.container, one.number)))
