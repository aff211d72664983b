# SPDX-License-Identifier: Apache-2.0
"""Candidates for preemption: turns pods and holdings of a node into units for ``victims``.

A pod may be evicted for another one if it is ours and bound, has a lower priority or a queue that
borrows what the other's queue is guaranteed, has run for its minimum runtime and is covered by at
most one PodDisruptionBudget (the eviction API refuses others). No queue falls below its guarantee
for a pod of another queue. Pods of class spot are evicted for any pod of another class, before all
others. Pods that use more memory than they request are evicted whatever their priority and class,
since a burst may be ended at any time (ADR 52); a pod that may be evicted for no other reason
offers its burst only. Else pods of equal priority would evict each other for their shares in turn.
A member of a gang is evicted only with all members of the gang. A pod that is already terminating
costs nothing: the plan waits for its capacity. Times are Unix seconds, durations seconds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from hami_common.skus.expansion import SPOT
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodFacts
from hami_core.planning.victims import NOTHING, Cost, Leaving, Pod, Shares, Unit, least_of
from hami_core.quota.accounts import Uses

BurstOf = Callable[[PodFacts], int]
"""Memory (MiB) that a pod uses beyond its request."""
UsesOf = Callable[[PodFacts, int], Uses | None]
"""``Lenders.uses`` of a pod's record, for a pod with this priority."""

NEVER = "Never"
"""``preemptionPolicy`` of a pod that never preempts others."""


class Rules(Struct, frozen=True, kw_only=True):
    """Protection of pods besides their priority."""

    now_s: float
    min_runtime_s: float = 0.0
    """Minimum run time of every pod before it may be evicted."""
    min_runtime_most_s: float = 0.0
    """The maximum that a pod may claim by its annotation."""
    budgets: Mapping[str, tuple[str, ...]] = {}
    """PodDisruptionBudgets by uid of the pods they cover."""
    spared: frozenset[str] = frozenset()
    """Pods whose recent eviction failed."""
    uses_of: UsesOf | None = None
    """``None``: there are no queues; only pods with a lower priority may be evicted."""
    burst_of: BurstOf | None = None
    """``None``: no pod uses more than it requests."""
    is_spot: bool = False
    """The preempting pod is of class spot: it evicts other pods only by priority."""

    def uses(self, pod: PodFacts, *, priority: int) -> Uses | None:
        """Return what evicting the pod for one of ``priority`` uses; ``None``: it must stay."""
        uses = self._uses_of_share(pod, priority)
        return () if uses is None and self._may_end_burst(pod) else uses

    def keeps_share(self, pod: PodFacts, *, priority: int) -> bool:
        """Return whether the pod may be evicted for its burst alone.

        Its share is not offered then, so that it can start again beside the other pod.
        """
        return self._uses_of_share(pod, priority) is None and self._may_end_burst(pod)

    def _uses_of_share(self, pod: PodFacts, priority: int) -> Uses | None:
        if not self.is_spot and pod.service_class == SPOT:
            return ()
        if self.uses_of is not None:
            return self.uses_of(pod, priority)
        return () if pod.priority < priority else None

    def _may_end_burst(self, pod: PodFacts) -> bool:
        return not self.is_spot and self.burst_mib(pod) > 0

    def burst_mib(self, pod: PodFacts) -> int:
        """Return the memory that the pod uses beyond its request."""
        return 0 if self.burst_of is None else self.burst_of(pod)


class Site(Struct, frozen=True, kw_only=True):
    """Candidates that one node offers to a pod with a higher priority."""

    units: tuple[Unit, ...] = ()
    leaving: tuple[Holding, ...] = ()

    def without(self) -> tuple[Leaving, ...]:
        """Return the pods that leave in any case, with their shares."""
        return tuple(Leaving.of(holding) for holding in self.leaving)


def least_cost(
    ledger: Ledger,
    node: str,
    *,
    priority: int,
    pod_of: Callable[[str], PodFacts | None],
    rules: Rules,
) -> Cost | None:
    """Return a lower bound of the cost of victims on ``node``.

    ``None`` without candidates there.
    """
    lowest: int | None = None
    for uid in ledger.uids_of_node(node):
        pod = pod_of(uid)
        if pod is None or pod.node != node:
            continue
        if pod.is_finished or pod.is_deleting:
            if ledger.holding(node, uid) is not None:
                return NOTHING  # its capacity alone may suffice
            continue
        cost = pod.eviction_priority()
        if (lowest is None or cost < lowest) and (
            pod.priority < priority or rules.uses(pod, priority=priority) is not None
        ):
            lowest = cost
    return None if lowest is None else least_of(lowest)


def site(
    ledger: Ledger,
    node: str,
    *,
    priority: int,
    pod_of: Callable[[str], PodFacts | None],
    members_of: Callable[[str], Iterable[PodFacts]],
    rules: Rules,
) -> Site:
    """Return the candidates that could leave ``node`` for a pod of ``priority``."""
    units: list[Unit] = []
    leaving: list[Holding] = []
    gangs: dict[str, list[Holding]] = {}
    for holding in ledger.holdings_of_node(node):
        pod = pod_of(holding.record.pod_uid)
        if pod is None or pod.node != node:
            continue  # only reserved, or its pod is unknown
        if pod.is_finished or (pod.is_deleting and rules.uses(pod, priority=priority) is not None):
            leaving.append(holding)
        elif pod.group:
            gangs.setdefault(pod.group, []).append(holding)
        elif is_evictable(pod, priority=priority, rules=rules):
            units.append(_unit([pod], [holding], priority, rules))
    for group, holdings in gangs.items():
        members = [pod for pod in members_of(group) if pod.node and not pod.is_finished]
        staying = [pod for pod in members if not pod.is_deleting]
        if staying and all(is_evictable(pod, priority=priority, rules=rules) for pod in staying):
            units.append(_unit(staying, holdings, priority, rules))
    return Site(units=tuple(units), leaving=tuple(leaving))


def is_evictable(pod: PodFacts, *, priority: int, rules: Rules) -> bool:
    """Return whether the pod may be evicted for one of ``priority``."""
    if rules.uses(pod, priority=priority) is None or pod.uid in rules.spared:
        return False
    if len(rules.budgets.get(pod.uid, ())) > 1:
        return False
    return not is_protected(pod, rules)


def is_protected(pod: PodFacts, rules: Rules) -> bool:
    """Return whether the pod has not run for its minimum run time yet.

    A pod that has not started yet is protected for its whole minimum run time.
    """
    claimed_s = min(pod.min_runtime_s, rules.min_runtime_most_s)
    protected_s = max(rules.min_runtime_s, claimed_s)
    return bool(protected_s) and not 0 < pod.start_s <= rules.now_s - protected_s


def _unit(
    pods: Iterable[PodFacts], holdings: Iterable[Holding], priority: int, rules: Rules
) -> Unit:
    """Return pods that leave together; ``holdings``: their shares on the node."""
    ordered = tuple(_pod(pod, priority, rules) for pod in sorted(pods, key=lambda pod: pod.uid))
    keeping = {pod.uid for pod in ordered if pod.keeps_share}
    here: list[Shares] = []
    kept: list[Shares] = []
    for holding in holdings:
        record = holding.record
        (kept if record.pod_uid in keeping else here).append(record.containers)
    return Unit(pods=ordered, here=tuple(here), kept=tuple(kept))


def _pod(pod: PodFacts, priority: int, rules: Rules) -> Pod:
    return Pod(
        uid=pod.uid,
        priority=pod.eviction_priority(),
        start_s=pod.start_s or rules.now_s,
        budgets=rules.budgets.get(pod.uid, ()),
        uses=rules.uses(pod, priority=priority) or (),
        keeps_share=rules.keeps_share(pod, priority=priority),
    )


def wanted_grace_s(pods: Sequence[PodFacts]) -> float:
    """Return the longest grace period of ``pods``."""
    return max((pod.grace_s for pod in pods), default=0.0)
