# SPDX-License-Identifier: Apache-2.0
"""Joins ResourceClaims of our driver with their ledger records, for ``hamictl get claims``.

The Kubernetes API has claims, their devices and refusals; the registry has what is booked and what
agents reported. Memory in MiB and compute in percent, each summed over the devices of a claim.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Literal

import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.bounds import Name
from hami_common.dra.claims import UNPREPARED, ResourceClaim
from hami_common.dra.names import (
    CLASSES,
    CORES,
    GROUP,
    MEMORY,
    VERSION,
    node_of_pool,
)
from hami_common.events.allocation import CLAIM
from hami_common.events.codec import decode
from hami_common.model.placement import Share
from hami_common.ports import KubeApi
from hami_common.units import MIB_BYTES, parse_quantity
from hamictl.client import Allocation

ClaimState = Literal[
    "Pending", "Waiting", "Refused", "Booked", "Prepared", "Failed", "Unprepared", "Releasing"
]
"""Pending: without devices. Waiting: with devices that are not booked yet. Unprepared: no container
of the node uses it any more. Releasing: booked, though the claim or this allocation of it is gone.
"""
_STATES: dict[str, ClaimState] = {
    "reserved": "Booked",
    "bound": "Booked",
    "prepared": "Prepared",
    "running": "Prepared",
    "failed": "Failed",
}


_Records = dict[tuple[str, str], Allocation]
"""By uid of the claim and id of the allocation, or by namespace and name of the claim, where a pod
has its shares by the claim.
"""


class _Exactly(Struct, frozen=True, kw_only=True, rename="camel"):
    device_class_name: Name = ""


class _Request(Struct, frozen=True, kw_only=True, rename="camel"):
    exactly: _Exactly | None = None
    first_available: tuple[_Exactly, ...] | None = None


class _Devices(Struct, frozen=True, kw_only=True):
    requests: tuple[_Request, ...] | None = None


class _Spec(Struct, frozen=True, kw_only=True):
    devices: _Devices = _Devices()


class Claim(ResourceClaim, frozen=True, kw_only=True):
    """A claim with the classes that it requests."""

    spec: _Spec = _Spec()

    def names_our_class(self) -> bool:
        """Return whether a request names a DeviceClass of ours."""
        return any(
            exactly.device_class_name in CLASSES
            for request in self.spec.devices.requests or ()
            for exactly in (request.exactly, *(request.first_available or ()))
            if exactly is not None
        )


class _List(Struct, frozen=True, kw_only=True):
    items: list[Claim] | None = None


class ClaimView(Struct, frozen=True, kw_only=True):
    """One claim."""

    namespace: str
    claim: str
    uid: str
    state: ClaimState
    reason: str = ""
    """Reason for which it is refused, or has failed."""
    pods: tuple[str, ...] = ()
    """Pods for which it is reserved."""
    node: str = ""
    devices: tuple[str, ...] = ()
    """Names in ResourceSlices, which are UUIDs in lower case."""
    memory_mib: int = 0
    core_pct: int = 0


class Claims(Struct, frozen=True, kw_only=True):
    """Answer of ``hamictl get claims``."""

    items: tuple[ClaimView, ...]


async def read_claim(kube: KubeApi, namespace: str, name: str) -> Claim:
    """Return one claim; ``NotFound`` without it."""
    path = api_path("apis", GROUP, VERSION, "namespaces", namespace, "resourceclaims", name)
    return decode(await kube.get(path), Claim, what=f"ResourceClaim {namespace}/{name}")


async def read_claims(kube: KubeApi, namespace: str) -> list[Claim]:
    """Return the claims of a namespace, or of all if it is empty."""
    scope = ("namespaces", namespace) if namespace else ()
    pages = await kube.list_pages(api_path("apis", GROUP, VERSION, *scope, "resourceclaims"))
    return [item for page in pages for item in decode(page, _List, what="claims").items or ()]


def views(claims: Iterable[Claim], allocations: Iterable[Allocation]) -> Sequence[ClaimView]:
    """Return the claims of our driver or classes, and records whose claim is gone, by name."""
    records = {
        (one.namespace, one.claim) if one.claim else (one.pod_uid, one.allocation_id): one
        for one in allocations
        if (one.origin == CLAIM or one.claim) and one.state != "released"
    }
    found = list(_of_claims(claims, records))
    found += [_left(record) for record in records.values() if not record.claim]
    return sorted(found, key=lambda one: (one.namespace, one.claim, one.uid))


def _of_claims(claims: Iterable[Claim], records: _Records) -> Iterator[ClaimView]:
    """Take the records of the claims' allocations out of ``records``."""
    for claim in claims:
        results = claim.results()
        base = ClaimView(
            namespace=claim.namespace,
            claim=claim.metadata.name,
            uid=claim.uid,
            state="Pending",
            pods=tuple(one.name for one in claim.consumers() if one.resource == "pods"),
        )
        if not results:
            if claim.names_our_class():
                yield base
            continue
        record = _record_of(claim, records)
        state, reason = _state(claim, record)
        # Partitions consume no capacity: their amounts are those of the record.
        consumed = [one for one in results if one.consumed_capacity]
        shares = [] if consumed or record is None else _shares(record)
        yield msgspec.structs.replace(
            base,
            state=state,
            reason=reason,
            node=node_of_pool(results[0].pool),
            devices=tuple(one.device for one in results),
            memory_mib=sum(_amount(one.consumed(MEMORY), MIB_BYTES) for one in consumed)
            + sum(share.memory_mib for share in shares),
            core_pct=sum(_amount(one.consumed(CORES), 1) for one in consumed)
            + sum(share.core_pct for share in shares),
        )


def _record_of(claim: Claim, records: _Records) -> Allocation | None:
    of_pod = (claim.namespace, claim.metadata.name)
    return records.pop((claim.uid, claim.allocation_id()), None) or records.pop(of_pod, None)


def _shares(record: Allocation) -> list[Share]:
    return [share for container in record.containers for share in container.shares]


def _state(claim: Claim, record: Allocation | None) -> tuple[ClaimState, str]:
    if record is not None:
        if record.code == UNPREPARED:
            return "Unprepared", ""
        return _STATES.get(record.state, "Booked"), record.reason
    verdict = claim.verdict()
    if verdict.status == "False":
        return "Refused", verdict.message
    return "Waiting", ""


def _left(record: Allocation) -> ClaimView:
    shares = _shares(record)
    return ClaimView(
        namespace=record.namespace,
        claim=record.pod,
        uid=record.pod_uid,
        state="Releasing",
        node=record.node,
        devices=tuple(share.uuid for share in shares),
        memory_mib=sum(share.memory_mib for share in shares),
        core_pct=sum(share.core_pct for share in shares),
    )


def _amount(text: str | None, unit: int) -> int:
    value = None if text is None else parse_quantity(text)
    return 0 if value is None else ceil(value / unit)
