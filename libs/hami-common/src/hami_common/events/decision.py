# SPDX-License-Identifier: Apache-2.0
"""Decision and admission messages: why a pod was placed, refused or changed.

Published on ``hami.v1.event.{decision,admission}.<namespace>.<pod>``.

A decision is compact (design D14): refused nodes are grouped into classes with one reason text
each, and a class lists its nodes only up to ``NODES_LISTED``; the full per-node explanation is
computed again from the snapshot on request. What an attempt to place a pod decided travels in one
message: the bind carries the filter and the prioritize before it.
"""

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.placement import ContainerShares

NODES_LISTED = 64


class RefusalClass(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes that refused the pod for the same reason."""

    code: str
    """Stable word from ``hami_scheduler.core.reasons``."""
    text: str
    """What was wanted and the best free value among these nodes: the text kube-scheduler shows."""
    count: int
    nodes: tuple[str, ...] = ()
    """At most ``NODES_LISTED`` of them, sorted."""


class NodeScore(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """A node that fits, with its score 0..100."""

    node: str
    score: float


class Victim(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod that was evicted, or was to be, for one with a higher priority."""

    namespace: str
    pod: str
    pod_uid: str
    node: str
    priority: int = 0


class DecisionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision of the scheduler about one pod."""

    verb: Literal["filter", "prioritize", "bind", "preempt", "gang"]
    namespace: str
    pod: str
    pod_uid: str
    time_s: float
    verdict: Literal["placed", "feasible", "refused", "error"]
    snapshot_id: str
    """Names the table the decision was made on: ``<ledger sequence>.<inventory revision>``."""
    nodes_considered: int = 0
    nodes_feasible: int = 0
    nodes_named: int = 0
    """Of ``filter``: how many of these kube-scheduler was told; 0 where that is all of them."""
    feasible: tuple[NodeScore, ...] = ()
    """Best nodes first, at most ``NODES_LISTED``."""
    refusals: tuple[RefusalClass, ...] = ()
    node: str = ""
    allocation_id: str = ""
    ledger_seq: int = 0
    containers: tuple[ContainerShares, ...] = ()
    victims: tuple[Victim, ...] = ()
    """Of ``preempt``: who had to go, by uid."""
    error: str = ""
    duration_ms: float = 0.0
    writer: str = ""
    before: tuple["DecisionRecord", ...] = ()
    """Decisions of the same attempt that led to this one, oldest first: the filter and the
    prioritize before a bind. They have no message of their own."""

    def unfolded(self) -> Iterator["DecisionRecord"]:
        """Every decision that the message tells of, oldest first, each by itself."""
        yield from self.before
        yield replace(self, before=()) if self.before else self


class AdmissionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the webhook did with a pod that asks for our resources."""

    namespace: str
    pod: str
    """Name, or the generateName prefix when the API server has not made the name yet."""
    operation: str
    request_uid: str
    time_s: float
    allowed: bool
    message: str = ""
    warnings: tuple[str, ...] = ()
    patch_operations: int = 0
    dry_run: bool = False
