# SPDX-License-Identifier: Apache-2.0
"""Single entry point of the scheduling core: ``Core.answer`` takes every input.

An input is a message of ``hami_core.ledger.stimuli``. The parts (ledger, inventory, quotas, table)
may be read from outside, but only ``answer`` changes them or calls them for a decision, so wrapping
this one function records every input of a scheduler (``hami_core.replay``). Deterministic: the same
inputs in the same order give the same answers. Must not use I/O, clocks or Kubernetes objects.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from hami_common.errors import InvariantBroken
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import NodeScore
from hami_common.model.request import PodRequest
from hami_core.ledger import stimuli
from hami_core.ledger.ledger import Hold, Ledger
from hami_core.ledger.stimuli import Input
from hami_core.placement.comparison import Comparison
from hami_core.placement.details import Details
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.verdicts import Filtered, Verdicts
from hami_core.quota import documents as quota_memory
from hami_core.quota.accounts import QuotaLedger
from hami_core.quota.resourcequota import Asker
from hami_core.quota.verdicts import Allowed, QuotaVerdicts
from hami_core.table.inventory import Inventory

Answer = TypeVar("Answer")


class Core:
    """Ledger, inventory and quotas over one device table, and the decisions made from them."""

    def __init__(self, *, ledger: Ledger, inventory: Inventory, quota: QuotaLedger) -> None:
        """Decide from these parts; ``inventory`` fills the table of ``ledger``."""
        self.ledger = ledger
        self.inventory = inventory
        self.quota = quota
        self.table = ledger.table
        self._verdicts = Verdicts(self.table)
        self._quota_verdicts = QuotaVerdicts(self.table, quota)
        self._filtered: Filtered | None = None
        self._left: NodeNames | None = None

    def answer(self, asked: Input[Answer], names: NodeNames | None = None) -> Answer:
        """Apply one input and return its answer.

        ``names`` are the candidate nodes of ``FilterAsked`` and ``PrioritizeAsked``.
        ``InvariantBroken``: the input contradicts the state; nothing was applied.
        """
        call = _ANSWERS.get(type(asked))
        if call is not None:
            return cast("Answer", call(self, asked))
        if isinstance(asked, stimuli.FilterAsked):
            return cast("Answer", self._filter(asked, names))
        if isinstance(asked, stimuli.PrioritizeAsked):
            scored = self._verdicts.prioritize(asked.request, _required(names), near=asked.near)
            return cast("Answer", scored)
        return cast("Answer", self.ledger.handle(cast("stimuli.Stimulus", asked)))

    def governs(self, namespace: str, asker: Asker) -> bool:
        """Return whether any quota or queue limits pods of ``asker``; changes nothing."""
        return self._quota_verdicts.governs(namespace, asker)

    def details(self, request: PodRequest, verdict: Filtered | Allowed) -> Details:
        """Return the state of the nodes closest to taking the pod; changes nothing.

        ``verdict``: the answer of the filter just made for it.
        """
        filtered = verdict.filtered if isinstance(verdict, Allowed) else verdict
        return self._verdicts.details(request, filtered, self._records_of)

    def _records_of(self, node: str) -> list[AllocationRecord]:
        return [holding.record for holding in self.ledger.holdings_of_node(node)]

    def comparison(
        self, request: PodRequest, best: Sequence[NodeScore], *, near: Sequence[str] = ()
    ) -> Comparison | None:
        """Return the state of the first nodes, to compare them later; changes nothing.

        ``best``: those of the prioritize just made for the pod, with the same ``near``.
        """
        return self._verdicts.comparison(request, best, near=near)

    def _filter(self, asked: stimuli.FilterAsked, names: NodeNames | None) -> Filtered:
        self._filtered = filtered = self._verdicts.filter(asked.request, _required(names))
        self._left = filtered.left
        return filtered

    def _allowed(self, asked: stimuli.QuotaAsked) -> Filtered | Allowed:
        if self._filtered is None:
            raise InvariantBroken(what="quotas are asked before any filter")
        allowed = self._quota_verdicts.allowed(
            asked.request, self._filtered, asked.asker, waiting=asked.waiting
        )
        self._left = allowed.left
        return allowed

    def _shortlist(self, asked: stimuli.ShortlistAsked) -> NodeNames:
        if self._left is None:
            raise InvariantBroken(what="a shortlist is asked before any filter")
        return self._verdicts.shortlist(asked.request, self._left, asked.count, near=asked.near)


def _required(names: NodeNames | None) -> NodeNames:
    if names is None:
        raise InvariantBroken(what="no candidate nodes were passed")
    return names


_ANSWERS: Final[Mapping[type[Input[Any]], Callable[[Core, Any], object]]] = MappingProxyType(
    {
        stimuli.DevicesPut: lambda core, it: core.inventory.put(
            it.devices, revision=it.revision, now_s=it.now_s
        ),
        stimuli.DevicesRemoved: lambda core, it: core.inventory.remove(it.node, it.vendor),
        stimuli.DevicesBegin: lambda core, _: core.inventory.begin_again(),
        stimuli.DevicesEnd: lambda core, _: core.inventory.end_again(),
        stimuli.HeartbeatHeard: lambda core, it: core.inventory.hear(it.heartbeat, now_s=it.now_s),
        stimuli.BusUnheard: lambda core, it: core.inventory.deaf(now_s=it.now_s),
        stimuli.SilenceJudged: lambda core, it: core.inventory.tick(now_s=it.now_s),
        stimuli.FaultHeard: lambda core, it: core.inventory.take_fault(it.fault),
        stimuli.NodeWithheld: lambda core, it: core.table.set_withheld(
            it.node, it.vendor, withheld=it.withheld
        ),
        stimuli.NodeStands: lambda core, it: core.table.set_domain(it.node, it.path),
        stimuli.Forgotten: lambda core, it: core.ledger.forget(it.node, it.pod_uid),
        stimuli.ShortlistAsked: lambda core, it: core._shortlist(it),  # noqa: SLF001
        stimuli.BindPlanned: lambda core, it: core.ledger.plan_bind(
            it.request,
            it.node,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            fenced=it.fenced,
        ),
        stimuli.HoldPlanned: lambda core, it: core.ledger.plan_hold(
            it.request,
            it.node,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            hold=Hold(held_for=it.held_for, lease_s=it.lease_s, awaits=it.awaits, keeps=it.keeps),
            fenced=it.fenced,
        ),
        stimuli.TakePlanned: lambda core, it: core.ledger.plan_take(
            it.request,
            it.node,
            held_uid=it.held_uid,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            fenced=it.fenced,
        ),
        stimuli.RestorePlanned: lambda core, it: core.ledger.plan_restore(
            it.signed, now_s=it.now_s, must=it.must
        ),
        stimuli.AdoptPlanned: lambda core, it: core.ledger.plan_adopt(
            node=it.node,
            pod=(it.pod_uid, it.namespace, it.pod),
            containers=it.containers,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            origin=it.origin,
            reason=it.reason,
        ),
        stimuli.ClaimPlanned: lambda core, it: core.ledger.plan_claim(
            node=it.node,
            claim=(it.claim_uid, it.namespace, it.name),
            containers=it.containers,
            allocation_id=it.allocation_id,
            now_s=it.now_s,
            account=it.account,
            must=it.must,
        ),
        stimuli.ResizePlanned: lambda core, it: core.ledger.plan_resize(
            it.holding, it.placement, now_s=it.now_s, reason=it.reason, limits=it.limits
        ),
        stimuli.RenewPlanned: lambda core, it: core.ledger.plan_renew(it.holding, now_s=it.now_s),
        stimuli.ReleasePlanned: lambda core, it: core.ledger.plan_release(
            it.holding, now_s=it.now_s, reason=it.reason
        ),
        stimuli.StatePlanned: lambda core, it: core.ledger.plan_state(
            it.holding, it.state, now_s=it.now_s, code=it.code, reason=it.reason
        ),
        stimuli.FailurePlanned: lambda core, it: core.ledger.plan_failed(
            it.signed, it.refusal, now_s=it.now_s
        ),
        stimuli.QuotaPut: lambda core, it: core.quota.put_quota(quota_memory.quota_of(it.quota)),
        stimuli.QuotaDropped: lambda core, it: core.quota.drop_quota(it.namespace, it.name),
        stimuli.QueuesSet: lambda core, it: core.quota.set_tree(quota_memory.tree_of(it.queues)),
        stimuli.QuotaFolded: lambda core, it: core.quota.fold(it.seq, it.record),
        stimuli.QuotaSynced: lambda core, _: core.quota.synced(),
        stimuli.QuotaReset: lambda core, _: core.quota.reset(),
        stimuli.QuotaExpected: lambda core, it: core.quota.expect(it.record),
        stimuli.QuotaUnexpected: lambda core, it: core.quota.stop_expecting(it.allocation_id),
        stimuli.QuotaAsked: lambda core, it: core._allowed(it),  # noqa: SLF001
        stimuli.QuotaLooked: lambda core, it: core.quota.first_look(
            it.namespace, it.account, quota_memory.amounts_of_text(it.wanted), own=it.own
        ),
        stimuli.QuotaJudged: lambda core, it: core.quota.verdict(it.seq),
    }
)
