# SPDX-License-Identifier: Apache-2.0
"""Documents of the ResourceClaim through which a pod gets the devices of its limits (ADR 0039).

Outside document: ``resource.k8s.io/v1``, ResourceClaim (Kubernetes 1.37). The claim asks for what
kube-scheduler can check: an amount per device, and the constraints on devices that a selector
states exactly. Where it cannot, the claim asks for less: the bind chooses the devices by all rules
and writes them with their amounts. Builds and compares; sends nothing. Memory in MiB, compute in
percent of one device.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import OBJECT_LIST_MOST, MapKey
from hami_common.dra.claims import ResourceClaim, containers_of, is_published
from hami_common.dra.names import (
    CORES,
    DRIVER,
    FULL,
    GROUP,
    MEMORY,
    SHARE_CLASS,
    SLOTS,
    VERSION,
    device_name,
    pool_name,
)
from hami_common.dra.podclaims import POD_CLAIM, ShareRequest, by_request
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares
from hami_common.model.request import DeviceRequest, DeviceSelector, PodRequest
from hami_common.pods import annotations as keys
from hami_core.ledger.podfacts import PodFacts

FINALIZER: Final = "resource.kubernetes.io/delete-protection"
"""Finalizer of an allocated claim: kube-controller-manager deallocates no claim without it."""
_OF_POD: Final = "resource.kubernetes.io/pod-claim-name"
"""Annotation: name by which the spec of the owning pod calls the claim."""
_WHOLE_PCT: Final = 100
_EXPRESSION_MOST: Final = 8192
"""Characters of a selector; the API server's limit is 10 KiB."""
_ATTRIBUTES: Final = f'device.attributes["{DRIVER}"]'

_encoder = msgspec.json.Encoder()
_Shares = dict[str, list[tuple[str, int, int]]]
_Obj = dict[str, Any]


class _Metadata(Struct, frozen=True, kw_only=True):
    finalizers: Annotated[tuple[MapKey, ...], Meta(max_length=OBJECT_LIST_MOST)] | None = None


class _Devices(Struct, frozen=True, kw_only=True):
    config: msgspec.Raw = msgspec.Raw(b"null")


class _Allocation(Struct, frozen=True, kw_only=True):
    devices: _Devices = _Devices()


class _Status(Struct, frozen=True, kw_only=True):
    allocation: _Allocation | None = None


class _Kept(Struct, frozen=True, kw_only=True):
    metadata: _Metadata = _Metadata()
    status: _Status | None = None


class StoredClaim(Struct, frozen=True, kw_only=True):
    """One version of a claim, with what a write must keep."""

    claim: ResourceClaim
    is_allocated: bool
    finalizers: tuple[str, ...]
    config: msgspec.Raw
    """Configuration that the allocation carries, as JSON."""

    @classmethod
    def of(cls, raw: bytes) -> "StoredClaim":
        """Decode a claim; ``WireInvalid`` names the field that cannot be read."""
        kept = decode(raw, _Kept, what="ResourceClaim")
        allocation = kept.status.allocation if kept.status else None
        return cls(
            claim=decode(raw, ResourceClaim, what="ResourceClaim"),
            is_allocated=allocation is not None,
            finalizers=kept.metadata.finalizers or (),
            config=(allocation or _Allocation()).devices.config,
        )

    def is_older_than(self, other: "StoredClaim") -> bool:
        """Return whether this is an earlier version of the same claim.

        Since Kubernetes 1.35, resource versions are decimal numbers that grow for each object:
        https://www.kubernetes.dev/resources/keps/5504/. Claims need 1.36.2 (docs/dra.md). Any other
        version counts as newer; each write is conditional on the exact version, so a wrong order
        costs a conflict and a read.
        """
        versions = [one.claim.metadata.resource_version for one in (self, other)]
        if self.claim.uid != other.claim.uid or not all(map(str.isdecimal, versions)):
            return False
        own, others = map(int, versions)
        return own < others

    def is_in_use(self) -> bool:
        """Return whether the claim has an allocation or consumers."""
        return self.is_allocated or bool(self.claim.consumers())


# --------------------------------------------------------------------------------------- creation


def claim_document(pod: PodFacts, devices: Iterable[Device]) -> bytes:
    """Return the claim of a waiting pod, which the pod controls.

    One that is created at the bind has the finalizer of an allocated claim from the beginning,
    because the allocation follows at once. ``devices``: those of the cluster. Of a share in percent
    the claim asks for the least amount on any of them, because amounts differ by type and the
    allocation gets the exact one.
    """
    request = pod.request
    selectors = {} if request is None else request.selectors
    usable = [one for one in devices if is_published(one)]
    protection = {"finalizers": [FINALIZER]} if pod.claim_at_bind else {}
    return _encoder.encode(
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "ResourceClaim",
            "metadata": {
                "name": pod.claim,
                "namespace": pod.namespace,
                "labels": {keys.MANAGED_LABEL: "true"},
                "annotations": {_OF_POD: POD_CLAIM},
                **protection,
                "ownerReferences": [
                    {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "name": pod.name,
                        "uid": pod.uid,
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {
                "devices": {
                    "requests": [
                        _request(one, selectors.get(one.asked.vendor, DeviceSelector()), usable)
                        for one in pod.claim_requests
                    ]
                }
            },
        }
    )


def _request(share: ShareRequest, selector: DeviceSelector, devices: list[Device]) -> _Obj:
    asked = share.asked
    exactly: _Obj = {
        "deviceClassName": SHARE_CLASS,
        "allocationMode": "ExactCount",
        "count": asked.count,
        "selectors": [{"cel": {"expression": one}} for one in _expressions(asked, selector)],
        # A device may be full because the ledger holds it for this pod: the bind decides.
        "tolerations": [{"key": FULL, "operator": "Exists"}],
    }
    amounts = {}
    if memory_mib := _least_mib(asked, devices):
        amounts[MEMORY] = f"{memory_mib}Mi"
    if asked.core_pct:
        amounts[CORES] = str(asked.core_pct)
    if amounts:
        exactly["capacity"] = {"requests": amounts}
    return {"name": share.name, "exactly": exactly}


def _least_mib(asked: DeviceRequest, devices: list[Device]) -> int:
    """Return the memory to ask for; 0 for a whole device, which is the default of the capacity."""
    if asked.memory_mib:
        return asked.memory_mib
    if asked.exclusive and asked.memory_pct == _WHOLE_PCT:
        return 0
    amounts = [
        asked.memory_mib_on(one.memory_mib)
        for one in devices
        if one.vendor == asked.vendor and (not asked.types or one.type in asked.types)
    ]
    return max(1, min(amounts, default=1))


def _expressions(asked: DeviceRequest, selector: DeviceSelector) -> list[str]:
    """Return CEL expressions that are true for every device which may serve the request.

    A device without the attribute passes: attributes that are too long are not published.
    """
    type_, uuid = f"{_ATTRIBUTES}.type", f"{_ATTRIBUTES}.uuid"
    found = [
        f"has({_ATTRIBUTES}.vendor) && {_ATTRIBUTES}.vendor == {_text(asked.vendor)}",
    ]
    if asked.types:
        found.append(f"!has({type_}) || {type_} in {_list(asked.types)}")
    if selector.allow_types:
        found.append(f"!has({type_}) || {_contains_any(type_, selector.allow_types)}")
    if selector.deny_types:
        found.append(f"!has({type_}) || !({_contains_any(type_, selector.deny_types)})")
    if selector.allow_uuids:
        found.append(f"!has({uuid}) || {uuid} in {_list(selector.allow_uuids)}")
    if selector.deny_uuids:
        found.append(f"!has({uuid}) || !({uuid} in {_list(selector.deny_uuids)})")
    return [one for one in found if one.isascii() and len(one) <= _EXPRESSION_MOST]


def _contains_any(field: str, words: Iterable[str]) -> str:
    """Return an expression as ``DeviceSelector.accepts_type``: substrings, whatever their case."""
    tests = [f"{field}.lowerAscii().contains({_text(word.lower())})" for word in words]
    return f"({' || '.join(tests)})"


def _list(words: Iterable[str]) -> str:
    return f"[{', '.join(_text(word) for word in words)}]"


def _text(word: str) -> str:
    """Return a CEL string literal; CEL reads the escapes of JSON."""
    return _encoder.encode(word).decode()


# ------------------------------------------------------------------------------------- allocation


def on_published(request: PodRequest, devices: Iterable[Device]) -> PodRequest:
    """Return a pod's request without the devices of a node that claims cannot have.

    The request of a pod without a claim is returned as it is.
    """
    if not request.claim:
        return request
    hidden: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        if device.vendor in request.selectors and not is_published(device):
            hidden[device.vendor].append(device.uuid)
    if not hidden:
        return request
    selectors = {
        vendor: replace(selector, deny_uuids=(*selector.deny_uuids, *hidden[vendor]))
        if vendor in hidden
        else selector
        for vendor, selector in request.selectors.items()
    }
    return replace(request, selectors=selectors)


def holds(claim: ResourceClaim, record: AllocationRecord) -> bool:
    """Return whether the claim's allocation has exactly the devices and amounts of the record."""
    devices = [
        Device(
            uuid=share.uuid,
            vendor=share.vendor,
            index=0,
            type="",
            memory_mib=share.memory_mib,
            capacity_mib=share.memory_mib,
        )
        for container in record.containers
        for share in container.shares
    ]
    try:
        given = containers_of(claim, devices)
    except RequestInvalid:  # another device, or no amount
        return False
    is_there = all(one.pool == pool_name(record.node) for one in claim.results())
    return is_there and _amounts(given) == _amounts(by_request(record.containers))


def has_devices(claim: ResourceClaim, record: AllocationRecord) -> bool:
    """Return whether each request has the devices of the record, whatever the amounts."""
    given = sorted((one.request, one.pool, one.device) for one in claim.results())
    pool = pool_name(record.node)
    return given == sorted(
        (container.name, pool, device_name(share.uuid))
        for container in by_request(record.containers)
        for share in container.shares
    )


def _amounts(containers: Iterable[ContainerShares]) -> _Shares:
    return {
        container.name: sorted(
            (share.uuid, share.memory_mib, share.core_pct) for share in container.shares
        )
        for container in containers
    }


def is_reserved_for(claim: ResourceClaim, pod_uid: str) -> bool:
    """Return whether the claim names the pod as its only consumer."""
    return [one.uid for one in claim.consumers()] == [pod_uid]


def finalizer_document(stored: StoredClaim) -> bytes:
    """Return a merge patch that protects the claim while it is allocated."""
    finalizers = [*stored.finalizers, FINALIZER]
    return _encoder.encode({"metadata": {**_version(stored.claim), "finalizers": finalizers}})


def clear_document(claim: ResourceClaim) -> bytes:
    """Return a merge patch of the status that takes the allocation back.

    The API server changes no allocation, and clears one only together with its consumers.
    """
    status = {"allocation": None, "reservedFor": None, "devices": None}
    return _encoder.encode({"metadata": _version(claim), "status": status})


def reserve_document(claim: ResourceClaim, record: AllocationRecord) -> bytes:
    """Return a merge patch of the status that makes the pod the consumer."""
    status = {"reservedFor": [_consumer(record)]}
    return _encoder.encode({"metadata": _version(claim), "status": status})


def allocate_document(
    claim: ResourceClaim,
    record: AllocationRecord,
    *,
    config: msgspec.Raw,
    at: str,
    share_ids: Callable[[], str],
) -> bytes:
    """Return a merge patch of the status with the record's devices, for a claim without any.

    ``config``: of the allocation that it replaces. ``at``: the time as Kubernetes writes it.
    ``share_ids`` makes UUIDs.
    """
    pool = pool_name(record.node)
    results = [
        {
            "request": container.name,
            "driver": DRIVER,
            "pool": pool,
            "device": device_name(share.uuid),
            "shareID": share_ids(),
            "consumedCapacity": {
                MEMORY: f"{share.memory_mib}Mi",
                CORES: str(share.core_pct),
                SLOTS: "1",
            },
        }
        for container in by_request(record.containers)
        for share in container.shares
    ]
    devices: _Obj = {"results": results}
    if bytes(config) != b"null":
        devices["config"] = config
    name_is = {"key": "metadata.name", "operator": "In", "values": [record.node]}
    allocation = {
        "devices": devices,
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [name_is]}]},
        "allocationTimestamp": at,
    }
    status = {"allocation": allocation, "reservedFor": [_consumer(record)]}
    return _encoder.encode({"metadata": _version(claim), "status": status})


def _version(claim: ResourceClaim) -> dict[str, str]:
    return {"uid": claim.uid, "resourceVersion": claim.metadata.resource_version}


def _consumer(record: AllocationRecord) -> dict[str, str]:
    return {"resource": "pods", "name": record.pod, "uid": record.pod_uid}
