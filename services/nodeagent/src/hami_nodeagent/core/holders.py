# SPDX-License-Identifier: Apache-2.0
"""Lists the containers that hold shares of this node's devices, and the enforcement of each.

A container holds a share while its grant exists, its pod is alive and the ledger's newest record of
the pod names the share: the record's figures count, so a resized share counts with its new size.
A prepared ResourceClaim is held by the containers that use it.
Containers that hold only whole devices are not limited (design D33). HAMi's limiter distributes
compute by its own rules, so for pods that HAMi placed only memory is compared, as for shares of
devices in a mode without compute limits by the library. Memory in MiB,
compute in percent of one device (0: no limit).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from hami_common.dra.podclaims import request_name
from hami_common.events.allocation import AllocationRecord, is_of_claim
from hami_common.model.device import RECALL, Device
from hami_common.model.placement import Share
from hami_common.pods.visibility import VARIABLE_BY_VENDOR
from hami_common.vendors.ascend import is_soft_share
from hami_common.vendors.handles import is_divisible, needs_instance
from hami_common.vendors.protocol import (
    LIMITED_VENDORS as LIMITED_VENDORS,  # noqa: PLC0414 - the shell imports it here
)
from hami_nodeagent.core.claims import Claim, Code, Entry, Refuse
from hami_nodeagent.core.grants import Grant, GrantBook, shares_of
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.core.podfacts import PodFacts

Enforcement = Literal["libvgpu", "hami", "none"]


class Holder(Struct, frozen=True, kw_only=True):
    """One container's share of one device."""

    pod_uid: str
    namespace: str
    pod: str
    container: str
    vendor: str
    uuid: str
    number: int
    """Position of the device in the container."""
    place: int = 0
    """Position among the container's shares, over all vendors."""
    limit_mib: int
    """Booked memory."""
    memory_limit_mib: int = 0
    """Most memory that may be granted beyond it (``core.bursts``); 0: nothing beyond it."""
    core_pct: int = 0
    is_whole: bool = False
    needs_grant: bool = False
    """Only a library given with the grant enforces the share."""
    priority: int | None = None
    allocation_id: str = ""
    volume: str = ""
    """Name of the pod's volume that holds the usage region; empty when there is none."""
    claimed: tuple[str, str] | None = None
    """Owner of the share if a ResourceClaim gave it; ``None``: the device plugin did.

    The uid and request of a claim that a user wrote, or for a claim of the pod its uid and the
    container that the share is of. Containers that use the same request have one share together.
    """
    claim: str = ""
    """Name of that ResourceClaim."""
    request: str = ""
    """Its request; of several that the container names together, the first."""

    @property
    def owner(self) -> tuple[str, str]:
        """Owner of the share in the ledger, in grants and in the names of files."""
        return self.claimed or (self.pod_uid, self.container)

    @property
    def most_mib(self) -> int:
        """Return the most memory that the container may be granted."""
        return max(self.limit_mib, self.memory_limit_mib)

    @property
    def has_region(self) -> bool:
        """Return whether the container may have a usage region."""
        return bool(self.volume or self.claimed)

    @property
    def is_borrowed(self) -> bool:
        """Return whether the share, and so the usage region, is another container's of the pod."""
        return self.claimed not in (None, (self.pod_uid, self.container)) and (
            self.owner[0] == self.pod_uid
        )


def is_whole(share: Share, device: Device | None) -> bool:
    """Return whether the share is the whole device and therefore needs no limit."""
    return share.exclusive and device is not None and share.memory_mib >= device.memory_mib


def needs_library(shares: Sequence[Share], devices: Sequence[Device]) -> bool:
    """Return whether a container with these shares of one vendor needs the in-container library.

    A hardware partition limits its share by itself.
    """
    return any(
        share.vendor in LIMITED_VENDORS and not share.profile and not is_whole(share, device)
        for share, device in zip(shares, devices, strict=True)
    )


def uses_managed_memory(devices: Sequence[Device]) -> bool:
    """Return whether allocations beyond the devices' own memory use CUDA managed memory.

    A process with managed memory cannot be recalled, so one recalled device excludes it.
    """
    return any(device.capacity_mib > device.memory_mib for device in devices) and not any(
        device.overcommit == RECALL for device in devices
    )


def is_recalled(claim: Claim) -> bool:
    """Return whether the container's device memory is moved to the host while it is idle.

    Without a usage region nothing reports that it waits, so it keeps its memory on the device.
    """
    has_region = claim.container in claim.pod.region_volumes
    return has_region and any(device.overcommit == RECALL for device in claim.devices)


def may_thrash(claim: Claim) -> bool:
    """Return whether the container's managed memory can be moved out by other containers."""
    return claim.container in claim.pod.region_volumes and uses_managed_memory(claim.devices)


def needs_grant(share: Share) -> bool:
    """Return whether only a library given with the grant enforces a share that is not whole."""
    return (share.vendor in LIMITED_VENDORS and not share.profile) or is_soft_share(share)


def hindrance_of(claim: Claim, vendor: str, *, is_limited: bool) -> Refuse | None:
    """Refuse a claim whose pod would lift the limit; ``None`` where it would not.

    ``is_limited``: the in-container library limits the container. Mounts count only for a part of a
    device: a whole device has no limits file that a mount could hide.
    """
    if text := claim.pod.own_devices.get(claim.container, ""):
        return Refuse(code=Code.DEVICES_OVERRIDDEN, text=f"pod {claim.pod.title}: {text}")
    is_part = is_limited or (
        vendor not in LIMITED_VENDORS
        and not all(is_whole(*pair) for pair in zip(claim.own, claim.devices, strict=True))
    )
    if is_part and (text := claim.pod.hidden_limits.get(claim.container, "")):
        return Refuse(code=Code.LIMITS_HIDDEN, text=f"pod {claim.pod.title}: {text}")
    return None


def is_of_hami(record: AllocationRecord) -> bool:
    """Return whether HAMi placed the pod, whose limiter then enforces the shares."""
    return bool(record.origin) and not is_of_claim(record)


def enforcement_of(
    record: AllocationRecord, grants: GrantBook, pod: PodFacts | None = None
) -> Enforcement:
    """Return the enforcement of the pod's shares, for the state record.

    ``libvgpu`` where a container was given the library and the variables of all containers with
    shares are known; ``hami`` for a pod that HAMi placed.
    """
    if is_of_hami(record):
        return "hami"
    if unseen_containers(grants, record.pod_uid, pod):
        return "none"
    given = any(
        grant.library for grant in grants.of_pod(record.pod_uid) if grant.vendor in LIMITED_VENDORS
    )
    return "libvgpu" if given else "none"


def unseen_containers(grants: GrantBook, pod_uid: str, pod: PodFacts | None) -> tuple[str, ...]:
    """Return containers with devices whose ``envFrom`` may select others, sorted by name."""
    if pod is None:
        return ()
    return tuple(
        sorted(
            {
                grant.container
                for grant in grants.of_pod(pod_uid)
                if VARIABLE_BY_VENDOR.get(grant.vendor) in pod.unseen_env.get(grant.container, ())
            }
        )
    )


def unheld_vendors(
    record: AllocationRecord,
    grants: GrantBook,
    devices_by_uuid: Mapping[str, Device],
    holding: Callable[[str], str],
) -> tuple[str, ...]:
    """Return vendors of which the pod has a part of a device without enforcement.

    ``holding`` returns the memory enforcement of a vendor's containers; empty: none. Where that is
    the in-container library, or hami-vnpu-core for a soft share of an Ascend chip, the library must
    have been mounted with the grant. A pod that HAMi placed has HAMi's limiter, whose state this
    agent cannot read.
    """
    if is_of_hami(record):
        return ()
    has_library = {
        (name, g.vendor)
        for g in grants.of_pod(record.pod_uid)
        if g.library
        for name in g.requests or (g.container,)
    }
    found = set()
    for container in record.containers:
        for share in container.shares:
            device = devices_by_uuid.get(share.uuid)
            if share.exclusive and (device is None or share.memory_mib >= device.memory_mib):
                continue
            if share.profile and share.vendor in LIMITED_VENDORS:
                continue  # its MIG instance enforces the share
            if needs_grant(share):
                is_held = (container.name, share.vendor) in has_library
            else:
                is_held = bool(holding(share.vendor)) and _is_carried(share, device)
            if not is_held:
                found.add(share.vendor)
    return tuple(sorted(found))


def _is_carried(share: Share, device: Device | None) -> bool:
    """Return whether a partition carries the share, for vendors whose shares need a partition."""
    return device is None or not is_divisible(share.vendor) or needs_instance(share, device)


def holders_of(
    entries_by_uid: Mapping[str, Entry],
    pods: PodBook,
    grants: GrantBook,
    devices_by_uuid: Mapping[str, Device],
) -> tuple[Holder, ...]:
    """Return all holders, in order of namespace, pod, container and device."""
    users = _claim_users(pods) if any(grant.is_by_claim for grant in grants) else {}
    found: list[Holder] = []
    for grant in grants:
        entry = entries_by_uid.get(grant.pod_uid)
        if entry is None or entry.record.op == "release":
            continue
        shown = shares_of(grant, entry.record.containers)
        if shown is None:
            continue
        own = [
            (place, share)
            for place, share in enumerate(shown.shares)
            if share.vendor == grant.vendor
        ]
        for pod, container in _users_of(grant, pods, users):
            found.extend(
                Holder(
                    pod_uid=pod.uid,
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container,
                    vendor=share.vendor,
                    uuid=share.uuid,
                    number=number,
                    place=place,
                    limit_mib=share.memory_mib,
                    memory_limit_mib=0 if is_of_hami(entry.record) else share.memory_limit_mib,
                    core_pct=0 if is_of_hami(entry.record) or share.mode else share.core_pct,
                    is_whole=is_whole(share, devices_by_uuid.get(share.uuid)),
                    needs_grant=needs_grant(share),
                    priority=shown.priority,
                    allocation_id=entry.record.allocation_id,
                    volume="" if grant.is_by_claim else pod.region_volumes.get(container, ""),
                    claimed=(grant.pod_uid, grant.container) if grant.is_by_claim else None,
                    claim=(grant.claim or grant.pod) if grant.is_by_claim else "",
                    request=_request_of(grant) if grant.is_by_claim else "",
                )
                for number, (place, share) in enumerate(own)
            )
    return tuple(sorted(found, key=lambda one: (one.namespace, one.pod, one.container, one.number)))


_Users = Mapping[tuple[str, str], Sequence[tuple[PodFacts, str, str]]]
"""(namespace, claim) → pods and containers that use it, with the request; empty: all requests."""


def _claim_users(pods: PodBook) -> _Users:
    found: dict[tuple[str, str], list[tuple[PodFacts, str, str]]] = {}
    for pod in pods:
        if not pods.is_alive(pod.uid):
            continue
        for container, uses in pod.claims_by_container.items():
            for use in uses:
                user = (pod, container, use.request)
                found.setdefault((pod.namespace, use.claim), []).append(user)
    return found


def _request_of(grant: Grant) -> str:
    """Return the request of a claim that a grant is of."""
    return request_name(grant.container, grant.vendor) if grant.claim else grant.container


def _users_of(grant: Grant, pods: PodBook, users: _Users) -> Sequence[tuple[PodFacts, str]]:
    """Return the living pods and containers that have what was granted."""
    if grant.is_by_claim:
        claim = grant.claim or grant.pod
        names = grant.requests or (_request_of(grant),)
        found = {
            (pod.uid, container): (pod, container)
            for pod, container, request in users.get((grant.namespace, claim), ())
            if request in ("", *names) and (grant.is_claim or pod.uid == grant.pod_uid)
        }
        return list(found.values())
    pod = pods.find(grant.pod_uid)
    return [(pod, grant.container)] if pod is not None and pods.is_alive(pod.uid) else []
