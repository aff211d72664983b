# SPDX-License-Identifier: Apache-2.0
"""Documents of quotas, queues and waiting pods in snapshots and stimulus logs.

A resource is written as its text, ``memory_mib`` or ``nvidia/memory_mib``, because keys of JSON are
texts. A loaded document gives the same decisions as the original. ``Quotas`` serves simulations of
decisions (``hami_core.planning.whatif``), ``QuotaMemory`` is the full state of a quota ledger, from
which another one can resume (``hami_core.replay.rerun``). Amounts as in ``quota``.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from hami_common.errors import WireInvalid
from hami_common.events.allocation import AllocationRecord
from hami_core.placement.reasons import NodeRefusal
from hami_core.quota.queues import Claim, QueueConfig, QueueTree
from hami_core.quota.resourcequota import KINDS, Amounts, Asker, Limit, Quota, Resource, Scope


class WrittenLimit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One limit of a ResourceQuota."""

    resource: str
    key: str
    most: int = 0
    problem: str = ""


class WrittenQuota(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ResourceQuota, as far as it limits our resources."""

    namespace: str
    name: str
    limits: tuple[WrittenLimit, ...]
    scopes: tuple[Scope, ...] = ()


class WrittenClaim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod that could be placed and waits for its queue to borrow."""

    pod_uid: str
    queue: str
    wanted: dict[str, int]
    is_spot: bool = False


class Quotas(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of pods besides device capacity, and the attributes of waiting pods they use."""

    objects: tuple[WrittenQuota, ...] = ()
    queues: tuple[QueueConfig, ...] = ()
    claims: tuple[WrittenClaim, ...] = ()
    askers: dict[str, Asker] = {}
    """Pods that wait, by uid; an absent pod counts only under its namespace."""


class QuotaMemory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Full state of a quota ledger, see ``QuotaLedger.memory``."""

    seq: int = 0
    generation: int = 0
    is_exact: bool = False
    objects: tuple[WrittenQuota, ...] = ()
    queues: tuple[QueueConfig, ...] = ()
    records: tuple[AllocationRecord, ...] = ()
    """Live records."""
    refused: tuple[tuple[int, NodeRefusal], ...] = ()
    """Records that exceed a quota, by sequence."""
    coming: tuple[AllocationRecord, ...] = ()
    claims: tuple[WrittenClaim, ...] = ()


def written(quota: Quota) -> WrittenQuota:
    """Return the quota as a document."""
    return WrittenQuota(
        namespace=quota.namespace,
        name=quota.name,
        limits=tuple(
            WrittenLimit(
                resource=str(resource), key=limit.key, most=limit.most, problem=limit.problem
            )
            for resource, limit in quota.limits.items()
        ),
        scopes=quota.scopes,
    )


def quota_of(document: WrittenQuota) -> Quota:
    """Return the quota of a document."""
    return Quota(
        namespace=document.namespace,
        name=document.name,
        limits={
            resource_of(one.resource): Limit(key=one.key, most=one.most, problem=one.problem)
            for one in document.limits
        },
        scopes=document.scopes,
    )


def written_amounts(amounts: Amounts) -> dict[str, int]:
    """Return the amounts as a document."""
    return {str(resource): amount for resource, amount in amounts.items()}


def amounts_of_text(amounts: Mapping[str, int]) -> dict[Resource, int]:
    """Return the amounts of a document."""
    return {resource_of(text): amount for text, amount in amounts.items()}


def resource_of(text: str) -> Resource:
    """Parse the resource from its ``str``; ``WireInvalid`` for any other text."""
    vendor, _, word = text.rpartition("/")
    kind = next((kind for kind in KINDS if kind == word), None)
    if kind is None:
        problem = f"{text!r} is none; write one of {', '.join(KINDS)}, or <vendor>/ and one of them"
        raise WireInvalid(what="resource of a quota", problem=problem)
    return Resource(vendor, kind)


def written_claims(claims: Mapping[str, Claim]) -> tuple[WrittenClaim, ...]:
    """Return the claims by the uid of their pods, as a document."""
    return tuple(
        WrittenClaim(
            pod_uid=uid,
            queue=claim.queue,
            wanted=written_amounts(claim.wanted),
            is_spot=claim.is_spot,
        )
        for uid, claim in claims.items()
    )


def claims_of(documents: Iterable[WrittenClaim]) -> dict[str, Claim]:
    """Return the claims of a document."""
    return {
        one.pod_uid: Claim(queue=one.queue, wanted=amounts_of_text(one.wanted), is_spot=one.is_spot)
        for one in documents
    }


def tree_of(queues: Iterable[QueueConfig]) -> QueueTree:
    """Build the tree of queues that were already validated at their source."""
    queues = tuple(queues)
    words = [word for queue in queues for word in (*queue.guaranteed, *queue.limit)]
    return QueueTree(queues, vendors={word.rpartition("/")[0] for word in words})
