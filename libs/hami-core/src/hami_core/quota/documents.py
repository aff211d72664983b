# SPDX-License-Identifier: Apache-2.0
"""Quotas, queues and who waits for them as documents hold them: snapshots and stimulus logs.

A resource is written as its text, ``memory_mib`` or ``nvidia/memory_mib``, because keys of JSON are
texts. What is read back decides as what was written. ``Quotas`` is for those who ask what would be
decided (``hami_core.planning.whatif``), ``QuotaMemory`` all that a quota ledger knows, for another
one to go on with (``hami_core.replay.rerun``). Amounts as in ``quota``.
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
    """One ResourceQuota, as far as it limits what we hand out."""

    namespace: str
    name: str
    limits: tuple[WrittenLimit, ...]
    scopes: tuple[Scope, ...] = ()


class WrittenClaim(Struct, frozen=True, kw_only=True):
    """A pod that could be placed and waits for what its queue may borrow."""

    pod_uid: str
    queue: str
    wanted: dict[str, int]


class Quotas(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What limits pods beside room on devices, and what that looks at in pods that wait."""

    objects: tuple[WrittenQuota, ...] = ()
    queues: tuple[QueueConfig, ...] = ()
    claims: tuple[WrittenClaim, ...] = ()
    askers: dict[str, Asker] = {}
    """Pods that wait, by uid; one that is absent counts under its namespace and nothing else."""


class QuotaMemory(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a quota ledger knows, see ``QuotaLedger.memory``."""

    seq: int = 0
    generation: int = 0
    is_exact: bool = False
    objects: tuple[WrittenQuota, ...] = ()
    queues: tuple[QueueConfig, ...] = ()
    records: tuple[AllocationRecord, ...] = ()
    """Live ones."""
    refused: tuple[tuple[int, NodeRefusal], ...] = ()
    """Records that are beyond a quota, by sequence."""
    coming: tuple[AllocationRecord, ...] = ()
    claims: tuple[WrittenClaim, ...] = ()


def written(quota: Quota) -> WrittenQuota:
    """The quota as a document holds it."""
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
    """The quota of a document."""
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
    """Amounts as a document holds them."""
    return {str(resource): amount for resource, amount in amounts.items()}


def amounts_of_text(amounts: Mapping[str, int]) -> dict[Resource, int]:
    """The amounts of a document."""
    return {resource_of(text): amount for text, amount in amounts.items()}


def resource_of(text: str) -> Resource:
    """The resource that ``str`` of it gave; ``WireInvalid`` when it is none."""
    vendor, _, word = text.rpartition("/")
    kind = next((kind for kind in KINDS if kind == word), None)
    if kind is None:
        problem = f"{text!r} is none; write one of {', '.join(KINDS)}, or <vendor>/ and one of them"
        raise WireInvalid(what="resource of a quota", problem=problem)
    return Resource(vendor, kind)


def written_claims(claims: Mapping[str, Claim]) -> tuple[WrittenClaim, ...]:
    """Claims by the uid of their pods, as a document holds them."""
    return tuple(
        WrittenClaim(pod_uid=uid, queue=claim.queue, wanted=written_amounts(claim.wanted))
        for uid, claim in claims.items()
    )


def claims_of(documents: Iterable[WrittenClaim]) -> dict[str, Claim]:
    """The claims of a document."""
    return {
        one.pod_uid: Claim(queue=one.queue, wanted=amounts_of_text(one.wanted)) for one in documents
    }


def tree_of(queues: Iterable[QueueConfig]) -> QueueTree:
    """The tree of queues that were checked where they come from."""
    queues = tuple(queues)
    words = [word for queue in queues for word in (*queue.guaranteed, *queue.limit)]
    return QueueTree(queues, vendors={word.rpartition("/")[0] for word in words})
