# SPDX-License-Identifier: Apache-2.0
"""Decides whether a ResourceClaim may be prepared on this node: the last gate before containers.

kube-scheduler allocates devices to claims from slices that may be stale, and the API server cannot
check the sum. So a claim is prepared only while the ledger's newest record of the claim names the
devices and amounts of ``status.allocation``, and only if all shares that were given on a device
fit into it (ADR 38). The record of a claim that a pod owns is the pod's (ADR 39): one container
for each of the pod's, whose share of one vendor is one request. ``Wait`` means that an update may
allow it; kubelet also retries every refused call. Refusals become ``hami: <code>: <sentence>`` in
the pod's Events.

Outside document: ``resource.k8s.io/v1``. Memory in MiB, compute in percent. No I/O and no clock.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from itertools import combinations
from typing import Final

from msgspec import Struct

from hami_common.dra import names
from hami_common.dra.claims import ResourceClaim, containers_of, is_published, node_of
from hami_common.dra.podclaims import by_request, owner_pod, request_name
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord, StateRecord, is_of_claim
from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, Booked, ContainerShares, Share, booked_by_device
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.grants import Grant, together
from hami_nodeagent.core.partitiondevices import overlap
from hami_nodeagent.core.podfacts import PodFacts


class Code(StrEnum):
    """Reason for a refusal: a word in Events of the pod whose meaning never changes."""

    CLAIM_UNKNOWN = "claim-unknown"
    """The API server has no claim of this name and uid."""
    NOT_ALLOCATED = "not-allocated"
    """The claim has no allocated devices of this node."""
    ALLOCATION_INVALID = "allocation-invalid"
    """The claim's allocation is no share of this node's devices; the text names the field."""
    NOT_OWNER = "not-owner"
    """The claim of a pod is reserved for another pod."""
    LEDGER_UNKNOWN = "ledger-unknown"
    """The ledger has no record for the claim."""
    LEDGER_MISMATCH = "ledger-mismatch"
    """The ledger's record and the claim's allocation differ in a device or an amount."""
    LEDGER_UNREADABLE = "ledger-unreadable"
    """The newest record or state of the claim cannot be read."""
    STATE_FAILED = "state-failed"
    """The allocation was marked as failed."""
    DEVICE_UNKNOWN = "device-unknown"
    """The claim has a device that this node does not give to claims, such as one in mode MPS."""
    DEVICE_UNHEALTHY = "device-unhealthy"
    """The allocated device is unhealthy."""
    DEVICE_FULL = "device-full"
    """The shares that containers were given leave too little of the device."""
    POD_UNKNOWN = "pod-unknown"
    """The API server has not shown a pod of this node that uses the claim."""
    SEVERAL_REQUESTS = "several-requests"
    """A container would have shares that cannot become one: by two claims, by a claim and resource
    limits, or by requests that another container names in another combination.
    """
    DEVICES_OVERRIDDEN = "devices-overridden"
    """A variable of a container selects devices that the node did not give."""
    LIMITS_HIDDEN = "limits-hidden"
    """A mount of a pod would hide or unhook the enforcement of the share."""
    PARTITION_NOT_READY = "partition-not-ready"
    """The hardware partition was not created in time, or lost again."""
    LIMITER_MISSING = "limiter-missing"
    """The library that enforces the share cannot be installed on this node."""
    API_UNAVAILABLE = "api-unavailable"
    """The API server does not answer."""
    HOST_FAILED = "host-failed"
    """The agent could not write its state on this host."""
    INTERNAL = "internal"
    """A bug of the agent."""


class Refuse(Struct, frozen=True, kw_only=True):
    """A refusal, with one sentence for the pod's Events."""

    code: Code
    text: str

    @property
    def message(self) -> str:
        """Return the text for kubelet."""
        return f"hami: {self.code}: {self.text}"


class Wait(Struct, frozen=True, kw_only=True):
    """No decision is possible yet. Refuse with this code if no update arrives in time."""

    code: Code
    text: str


class Facts(Struct, frozen=True, kw_only=True):
    """The node's state that a decision depends on."""

    node: str
    entry: Entry | None
    """Newest ledger record under the uid of ``record_owner``."""
    state: StateRecord | None
    unreadable: str = ""
    """Reason why record or state may be stale; empty if both are current."""
    devices: Collection[Device]
    faulty: Collection[str] = ()
    sound: Collection[str] = ()
    pods: Collection[PodFacts]
    """Pods of the node whose containers may run."""
    claims: Collection[str] = ()
    """Other claims of the claim's namespace, by name, that have shares on this node."""
    given: Callable[[], Mapping[str, Booked]] = dict
    """Returns the shares that other containers were given, by device: a sum over all of them."""
    prepared_id: str = ""
    """Allocation of the record for which the claim is prepared; empty: it is not."""


class Given(Struct, frozen=True, kw_only=True):
    """A claim that may be prepared."""

    record: AllocationRecord
    allocated: tuple[ContainerShares, ...]
    """Shares by the claim's allocation, by request."""
    devices_by_uuid: Mapping[str, Device]
    """Devices of the record's shares."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Requests that a container has together, in the order of the record: two or more each."""

    def containers(self) -> tuple[ContainerShares, ...]:
        """Return the record's shares, those of a group as one under the name of its first."""
        by_name = {one.name: one for one in self.record.containers}
        group_of = {name: group for group in self.groups for name in group}
        return tuple(
            together([by_name[name] for name in group])
            for one in self.record.containers
            for group in [group_of.get(one.name, (one.name,))]
            if group[0] == one.name
        )


def title_of(claim: ResourceClaim) -> str:
    """Return the claim's name for messages."""
    return f"{claim.namespace}/{claim.metadata.name}"


def record_owner(claim: ResourceClaim) -> str:
    """Return the uid under which the ledger and grants have the claim's shares."""
    return owner_pod(claim.metadata) or claim.uid


def request_of(container: str, vendor: str, *, is_of_pod: bool) -> str:
    """Return the request of a claim that gives the share of a record's container."""
    return request_name(container, vendor) if is_of_pod else container


def decide(claim: ResourceClaim, facts: Facts) -> Given | Wait | Refuse:
    """Return whether the claim may be prepared now."""
    title = title_of(claim)
    try:
        node = node_of(claim)
        if node != facts.node:
            return Refuse(
                code=Code.NOT_ALLOCATED, text=f"claim {title} has no devices of node {facts.node}"
            )
        containers = containers_of(claim, facts.devices)
    except RequestInvalid as error:
        return Refuse(code=Code.ALLOCATION_INVALID, text=f"claim {title}: {error}")
    by_uuid = {one.uuid: one for one in facts.devices}
    shares = [share for one in containers for share in one.shares]
    used = {share.uuid: by_uuid[share.uuid] for share in shares}
    for share in shares:
        refusal = _unusable(title, share, used[share.uuid], facts)
        if refusal is not None:
            return refusal
    lack = _foreign(claim) or _record_lack(claim, facts, containers)
    if lack is not None:
        return lack
    assert facts.entry is not None  # noqa: S101 - `_record_lack` found the record
    groups = _groups(claim, facts, facts.entry.record)
    if isinstance(groups, Wait | Refuse):
        return groups
    given = facts.given()
    for uuid, booked in booked_by_device(facts.entry.record.containers).items():
        if text := _excess(used[uuid], booked, given.get(uuid, NOTHING)):
            return Wait(code=Code.DEVICE_FULL, text=f"claim {title}: {text}")
    return Given(
        record=facts.entry.record, allocated=containers, devices_by_uuid=used, groups=groups
    )


def monitor_refusal(claim: ResourceClaim, node: str, *, is_on: bool) -> Refuse | None:
    """Return why a claim with admin access must not be prepared; ``None`` if it may.

    It has no share, so the ledger has no record of it. The API server lets only namespaces with the
    label ``resource.kubernetes.io/admin-access`` create such claims. ``is_on``: the setting
    ``dra.monitor``.
    """
    title = title_of(claim)
    if claim.results():
        return Refuse(
            code=Code.ALLOCATION_INVALID,
            text=f"claim {title} has shares beside the device {names.MONITOR}: use two claims",
        )
    if any(one.pool != names.monitor_pool(node) for one in claim.monitors()):
        return Refuse(code=Code.NOT_ALLOCATED, text=f"claim {title} has no devices of node {node}")
    if not is_on:
        return Refuse(
            code=Code.DEVICE_UNKNOWN,
            text=f"claim {title}: the agent's setting dra.monitor is off",
        )
    return None


def _unusable(title: str, share: Share, device: Device, facts: Facts) -> Refuse | None:
    if not (share.profile or is_published(device)):
        return Refuse(
            code=Code.DEVICE_UNKNOWN,
            text=f"claim {title}: device {device.uuid} is not shared by limits; delete the pod",
        )
    if device.uuid not in facts.sound and (not device.healthy or device.uuid in facts.faulty):
        return Refuse(
            code=Code.DEVICE_UNHEALTHY,
            text=f"claim {title}: device {device.uuid} is unhealthy: "
            f"{device.health_reason or 'a fault'}",
        )
    return None


def _foreign(claim: ResourceClaim) -> Refuse | None:
    """Refuse the claim of a pod that is reserved for another pod."""
    owner = owner_pod(claim.metadata)
    foreign = [one.name for one in claim.consumers() if owner and one.uid != owner]
    if not foreign:
        return None
    return Refuse(
        code=Code.NOT_OWNER,
        text=f"claim {title_of(claim)} belongs to another pod than {foreign[0]}, which names it; "
        f"create pod {foreign[0]} again without it",
    )


def _record_lack(
    claim: ResourceClaim, facts: Facts, containers: tuple[ContainerShares, ...]
) -> Wait | None:
    """Return why the ledger does not confirm the claim's allocation; ``None`` if it does."""
    title = title_of(claim)
    if facts.unreadable:
        return Wait(code=Code.LEDGER_UNREADABLE, text=f"claim {title}: {facts.unreadable}")
    record = facts.entry.record if facts.entry is not None else None
    owner = owner_pod(claim.metadata)
    if record is None or record.op == "release" or not _is_of(record, claim):
        what = "the pod that owns it" if owner else "the claim"
        return Wait(
            code=Code.LEDGER_UNKNOWN,
            text=f"the ledger has no record of claim {title}; Events of {what} give the reason",
        )
    state = facts.state
    if (
        state is not None
        and state.state == "failed"
        and state.allocation_id == record.allocation_id
    ):
        return Wait(
            code=Code.STATE_FAILED,
            text=f"the allocation of claim {title} failed: {state.code}: {state.reason}",
        )
    booked = by_request(record.containers) if owner else record.containers
    # The amounts of a claim never change, so those of a resized share are the ledger's alone.
    is_resized = record.op == "resize" or facts.prepared_id == record.allocation_id
    compared = _devices if is_resized else _amounts
    if compared(booked) != compared(containers):
        return Wait(
            code=Code.LEDGER_MISMATCH,
            text=f"claim {title}: the ledger has {_text(booked)}, the claim's "
            f"allocation is {_text(containers)}",
        )
    if not owner and record.allocation_id != claim.allocation_id():
        return Wait(
            code=Code.LEDGER_MISMATCH,
            text=f"claim {title}: the ledger has the record of an earlier allocation",
        )
    return None


def _is_of(record: AllocationRecord, claim: ResourceClaim) -> bool:
    """Return whether the record is of the claim, or of the pod that owns it and has it so."""
    if owner_pod(claim.metadata):
        return (record.namespace, record.claim) == (claim.namespace, claim.metadata.name)
    return is_of_claim(record)


def _shares_by_request(claim: ResourceClaim, record: AllocationRecord) -> dict[str, str]:
    """Return the container of the record whose share each request gives."""
    is_of_pod = bool(owner_pod(claim.metadata))
    return {
        request_of(one.name, share.vendor, is_of_pod=is_of_pod): one.name
        for one in record.containers
        for share in one.shares
    }


def _groups(
    claim: ResourceClaim, facts: Facts, record: AllocationRecord
) -> tuple[tuple[str, ...], ...] | Wait | Refuse:
    """Return the groups of requests that containers have together, or why a pod must not start.

    Each container has one limits file and one usage region, so requests that it names together
    become one share. That is possible where every container which names one of them names all.
    """
    namespace, name, owner = claim.namespace, claim.metadata.name, owner_pod(claim.metadata)
    shares_by_request = _shares_by_request(claim, record)
    groups: dict[frozenset[str], str] = {}
    for pod in facts.pods:
        for container, uses in pod.claims_by_container.items():
            own = {
                share
                for request, share in shares_by_request.items()
                for use in uses
                if use.covers(name, request)
            }
            if pod.namespace != namespace or not own or owner not in ("", pod.uid):
                continue
            title = f"pod {pod.title}: container {container}"
            if problem := _several(claim, pod, container, own, record=record, claims=facts.claims):
                return Refuse(code=Code.SEVERAL_REQUESTS, text=f"{title} {problem}")
            groups.setdefault(frozenset(own), title)
            if text := pod.own_devices.get(container, ""):
                return Refuse(code=Code.DEVICES_OVERRIDDEN, text=f"pod {pod.title}: {text}")
            if text := pod.hidden_limits.get(container, ""):
                return Refuse(code=Code.LIMITS_HIDDEN, text=f"pod {pod.title}: {text}")
    if not groups:
        return Wait(
            code=Code.POD_UNKNOWN,
            text=f"no container of a pod that the API server showed uses claim {title_of(claim)}",
        )
    for one, other in combinations(groups, 2):
        if one & other:
            return Refuse(
                code=Code.SEVERAL_REQUESTS,
                text=f"{groups[one]} and {groups[other]} name different sets of requests with"
                f" {min(one & other)} in both; name the same requests in both, or no common one",
            )
    order = [one.name for one in record.containers]
    return tuple(tuple(sorted(one, key=order.index)) for one in groups if len(one) > 1)


def _several(
    claim: ResourceClaim,
    pod: PodFacts,
    container: str,
    own: Collection[str],
    *,
    record: AllocationRecord,
    claims: Collection[str],
) -> str:
    """Return why the container's shares cannot be one; empty if they can."""
    if any(ask.container == container for asked in pod.asks_by_resource.values() for ask in asked):
        return "has shares by resource limits and by a claim; use one of them"
    others = {use.claim for use in pod.claims_by_container[container]} & set(claims)
    if others - {claim.metadata.name}:
        return (
            f"has shares by the claims {' and '.join(sorted({*others, claim.metadata.name}))};"
            " use one claim with several requests"
        )
    if len(own) > 1 and owner_pod(claim.metadata):
        return "names requests of several containers; create the pod again"
    shares = [share for one in record.containers if one.name in own for share in one.shares]
    if len(own) > 1 and any(share.profile for share in shares):
        return "names several requests, of which one is a hardware partition; name one request"
    return ""


def _amounts(containers: Iterable[ContainerShares]) -> list[tuple[object, ...]]:
    """Return devices and amounts, without what follows from the device's present configuration.

    The amounts of a partition follow from its size. Sorted, because the results of an allocation
    are in no order that the ledger keeps.
    """
    return sorted(
        (one.name, share.vendor, share.uuid, share.part, *amounts)
        for one in containers
        for share in one.shares
        for amounts in [() if share.profile else (share.memory_mib, share.core_pct)]
    )


def _devices(containers: Iterable[ContainerShares]) -> list[tuple[object, ...]]:
    return sorted((one.name, share.uuid, share.part) for one in containers for share in one.shares)


def _text(containers: Iterable[ContainerShares]) -> str:
    return "; ".join(
        f"{one.name}: "
        + ", ".join(
            f"{share.uuid} {share.part or f'{share.memory_mib} MiB {share.core_pct} %'}"
            for share in one.shares
        )
        for one in containers
    )


def _excess(device: Device, own: Booked, given: Booked) -> str:
    """Return what of the device is too little for a further share; empty if all fits."""
    total = own.plus(given)
    if own.parts and (position := overlap(device, total.parts)):
        return f"containers would have {position} of device {device.uuid} twice"
    if given.exclusive or (own.exclusive and given != NOTHING):
        return f"device {device.uuid} is given to one container alone"
    for what, value, most in (
        ("MiB of memory", total.memory_mib, device.capacity_mib),
        ("percent of compute", total.core_pct, device.capacity_core_pct),
        ("shares", total.slots, device.slots),
    ):
        if value > most:
            return f"containers would have {value} of {most} {what} of device {device.uuid}"
    return ""


def given_shares(containers_by_owner: Iterable[Iterable[ContainerShares]]) -> dict[str, Booked]:
    """Return the sum of the shares of all owners (pods and claims), by device."""
    found: dict[str, Booked] = {}
    for containers in containers_by_owner:
        for uuid, booked in booked_by_device(containers).items():
            found[uuid] = found[uuid].plus(booked) if uuid in found else booked
    return found


# ---------------------------------------------------------------------------- prepared claims

FILE_VERSION: Final = 1


class PreparedDevice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device as kubelet sees it."""

    request: str
    pool: str
    device: str
    share_id: str | None = None
    cdi_ids: tuple[str, ...] = ()


class Prepared(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prepared claim, as the agent keeps it until the claim is unprepared."""

    version: int = FILE_VERSION
    uid: str
    namespace: str
    name: str
    owner: str = ""
    """Pod that owns the claim, by uid; empty for a claim that a user wrote."""
    allocation_id: str
    containers: tuple[ContainerShares, ...]
    """Shares given: by request, or by container of the pod that owns the claim."""
    allocated: tuple[ContainerShares, ...] = ()
    """Shares by the claim's allocation, which a resize does not change."""
    devices: tuple[PreparedDevice, ...]
    grants: tuple[Grant, ...]
    spec: str
    """The CDI file: the same text again after a restart."""

    @property
    def record_owner(self) -> str:
        """Return the uid under which the ledger, grants, limits files and regions have it."""
        return self.owner or self.uid

    def is_of(self, record: AllocationRecord, groups: Collection[tuple[str, ...]] = ()) -> bool:
        """Return whether it was prepared for this reservation, with these groups of requests."""
        is_grouped = {one.requests for one in self.grants if one.requests} == set(groups)
        own = (self.allocation_id, self.containers)
        return is_grouped and own == (record.allocation_id, record.containers)


def prepared_devices(
    claim: ResourceClaim, cdi_ids: Mapping[str, tuple[str, ...]]
) -> tuple[PreparedDevice, ...]:
    """Return the claim's devices; ``cdi_ids``: by request, given with its first device.

    A container gets the CDI devices of all devices of a request, so others repeat none.
    """
    left = dict(cdi_ids)
    return tuple(
        PreparedDevice(
            request=request,
            pool=result.pool,
            device=result.device,
            share_id=result.share_id,
            cdi_ids=left.pop(request, ()),
        )
        for result in claim.results() or claim.monitors()
        for request in [result.request.partition("/")[0]]
    )


def own_of(container: ContainerShares, vendor: str) -> tuple[Share, ...]:
    """Return the shares of one vendor."""
    return tuple(share for share in container.shares if share.vendor == vendor)
