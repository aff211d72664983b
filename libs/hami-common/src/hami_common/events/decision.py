# SPDX-License-Identifier: Apache-2.0
"""Decision and admission messages: why a pod was placed, refused or changed.

Published on ``hami.v1.event.{decision,admission}.<namespace>.<pod>``.

A decision is compact (design D14): refused nodes are grouped into classes with one reason text
each, and a class lists its nodes only up to ``NODES_LISTED``; the full per-node explanation is
computed again from the snapshot on request. All decisions of one attempt to place a pod travel in
one message: the bind carries the filter and the prioritize before it.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import (
    BEFORE_MOST,
    CONTAINERS_MOST,
    LIST_MOST,
    Count,
    Duration,
    Label,
    Name,
    Score,
    Sequence,
    SignedInt32,
    Text,
    Uid,
    UnixS,
    Word,
)
from hami_common.model.placement import ContainerShares

NODES_LISTED = 64


class RefusalClass(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes that refused the pod for the same reason."""

    code: Word
    """Stable word from ``hami_core.placement.reasons``."""
    text: Text
    """Requested amount and best free value among these nodes, as kube-scheduler shows it."""
    count: Count
    nodes: Annotated[tuple[Name, ...], Meta(max_length=NODES_LISTED)] = ()
    """At most ``NODES_LISTED`` of them, sorted."""


class NodeScore(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A node that fits, with its score 0..100."""

    node: Name
    score: Score


class Victim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod that was evicted, or selected for eviction, for one with a higher priority."""

    namespace: Label
    pod: Name
    pod_uid: Uid
    node: Name
    priority: SignedInt32 = 0


class DecisionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision of the scheduler about one pod."""

    verb: Literal["filter", "prioritize", "bind", "preempt", "gang"]
    namespace: Label
    pod: Name
    pod_uid: Uid
    time_s: UnixS
    verdict: Literal["placed", "feasible", "refused", "error"]
    snapshot_id: Word
    """Names the table the decision was made on: ``<ledger sequence>.<inventory revision>``."""
    nodes_considered: Count = 0
    nodes_feasible: Count = 0
    nodes_named: Count = 0
    """For ``filter``: number of these nodes returned to kube-scheduler; 0 if all were returned."""
    feasible: Annotated[tuple[NodeScore, ...], Meta(max_length=NODES_LISTED)] = ()
    """Best nodes first, at most ``NODES_LISTED``."""
    refusals: Annotated[tuple[RefusalClass, ...], Meta(max_length=LIST_MOST)] = ()
    node: Name = ""
    allocation_id: Uid = ""
    ledger_seq: Sequence = 0
    containers: Annotated[tuple[ContainerShares, ...], Meta(max_length=CONTAINERS_MOST)] = ()
    victims: Annotated[tuple[Victim, ...], Meta(max_length=LIST_MOST)] = ()
    """Pods that ``preempt`` selected for eviction, by uid."""
    error: Text = ""
    duration_ms: Duration = 0.0
    writer: Word = ""
    before: Annotated[tuple["DecisionRecord", ...], Meta(max_length=BEFORE_MOST)] = ()
    """Decisions of the same attempt that led to this one, oldest first: the filter and the
    prioritize before a bind. They have no message of their own."""

    def unfolded(self) -> Iterator["DecisionRecord"]:
        """Return every decision in the message, oldest first, each as a record of its own."""
        yield from self.before
        yield replace(self, before=()) if self.before else self


class AdmissionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Outcome of the webhook for a pod that requests resources of HAMi."""

    namespace: Label
    pod: Name
    """Name, or the generateName prefix when the API server has not made the name yet."""
    operation: Word
    request_uid: Uid
    time_s: UnixS
    allowed: bool
    message: Text = ""
    warnings: Annotated[tuple[Text, ...], Meta(max_length=LIST_MOST)] = ()
    patch_operations: Count = 0
    dry_run: bool = False
