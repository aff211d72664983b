# SPDX-License-Identifier: Apache-2.0
"""Preempts for pods with a high priority, and for guarantees that other queues borrow (D17).

Chooses victims, reserves their capacity, evicts them.

Filter only notes that a pod fits nowhere; everything else happens here, outside the calls. The
order leaves no stuck state after a crash at any point:

1. Victims are chosen on the table.
2. Their capacity is appended to the ledger as a reservation of the preemptor, on the node's fence,
   booked beyond the capacity of the devices while the victims run.
3. The node is written to the pod's status.
4. The victims are evicted through policy/v1, each by its uid.

The first reservation in the ledger wins: a second one of the same pod, by another scheduler, is
released before any pod is evicted for it. The reservation ends like any other: the pod's bind takes
it over, or the pod ends, or its lease expires. A scheduler that finds a reservation with victims
that are not evicted yet resumes from there.

No pod is ever evicted against a PodDisruptionBudget: the eviction API refuses, the capacity is
released, and the pods whose eviction failed are spared for a while. Seconds throughout.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import anyio.lowlevel
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import HamiError, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import DecisionRecord, Victim
from hami_common.model.request import PodRequest
from hami_common.pods import annotations
from hami_common.pods.podview import PodView
from hami_common.ports import Bucket, KubeApi
from hami_common.runtime.kubeio.recorder import EventRecorder
from hami_common.skus.expansion import SPOT, terms_of
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.stimuli import FilterAsked
from hami_core.placement.nodenames import NodeNames
from hami_core.planning.preempt import (
    NEVER,
    Rules,
    Site,
    UsesOf,
    is_evictable,
    least_cost,
    site,
    wanted_grace_s,
)
from hami_core.planning.victims import Cost, Leaving, Victims, find_victims, run
from hami_core.quota.accounts import Lenders, Uses
from hami_core.quota.resourcequota import least_amounts
from hami_core.quota.verdicts import wanted_on
from hami_scheduler.settings import Settings
from hami_scheduler.shell import extender_wire as wire
from hami_scheduler.shell.answer import Answer
from hami_scheduler.shell.binder import Binder, Refused
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.evictions import Covered, pod_reference
from hami_scheduler.shell.isolation import PREEMPTION
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

HELD_FOR = "preemption"
ASKED_MOST = 1024
"""Maximum pods remembered between two attempts."""
NODES_AT_ONCE = 64
"""Nodes that are ranked between two points where other tasks may run."""
PASSING = frozenset({"early", "contended", "unavailable"})
"""Outcomes of an attempt that do not depend on the pod: it is retried without a filter call.

``early``: filter was called for the pod before the watch delivered it.
"""
TRIES_MOST = 10
"""Maximum consecutive attempts with such an outcome; a later filter call starts again."""

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class _Asked(Struct, frozen=True, kw_only=True):
    """A pod that fits nowhere, and the nodes from which kube-scheduler would choose."""

    pod: PodView
    request: PodRequest
    names: NodeNames
    due_s: float
    """Earliest time of the next attempt, by the monotonic clock."""
    tries: int = 0
    """Attempts so far that ended with an outcome of ``PASSING``."""


class _Plan(Struct, frozen=True, kw_only=True):
    """Victims that must leave a node."""

    victims: Victims
    site: Site


class Preemption:
    """Chooses and evicts, one pod after another."""

    def __init__(
        self,
        *,
        state: State,
        binder: Binder,
        effects: Effects,
        records: Bucket,
        kube: KubeApi,
        decisions: Decisions,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Reserve capacity through ``binder``; report victims to ``decisions``."""
        self._state = state
        self._quarantine = state.quarantine
        self._binder = binder
        self._effects = effects
        self._records = records
        self._kube = kube
        self._evictions = effects.evictions
        self._decisions = decisions
        self._settings = settings
        self._metrics = metrics
        self._events = EventRecorder(
            kube, component="hami-scheduler", clock=state.clock, instance=decisions.writer
        )
        self._asked: dict[str, _Asked] = {}
        self._wake = anyio.Event()
        self._not_before_s: OrderedDict[str, float] = OrderedDict()

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    # --- called by filter ------------------------------------------------------------------------

    def consider(self, pod: PodView, request: PodRequest, names: NodeNames) -> None:
        """Queue a pod that fits on none of ``names``: soon try whether others can leave for it."""
        if not self._settings.preemption or pod.spec.preemption_policy == NEVER:
            return
        uid, priority = request.uid, pod.spec.priority or 0
        if not self._quarantine.is_due(PREEMPTION, uid):
            return
        lowest = self._state.pods.lowest_priority()
        if lowest is None or (
            lowest >= priority and not self._may_end_bursts(pod) and not self._may_reclaim(request)
        ):
            return
        if uid in self._asked or len(self._asked) >= ASKED_MOST:
            return
        # Kube-scheduler may not retry for minutes: an early attempt is postponed.
        due_s = max(self._not_before_s.get(uid, 0.0), self._state.clock.monotonic_s())
        self._asked[uid] = _Asked(pod=pod, request=request, names=names, due_s=due_s)
        self._wake.set()

    def room(self, pod: PodView, request: PodRequest, names: NodeNames) -> Answer | None:
        """Return the node whose capacity is reserved for the pod.

        ``None`` when it may go anywhere.
        """
        held = self._state.ledger.reserved_for(
            request.uid, fenced=pod.annotations().get(annotations.FENCE, "")
        )
        if held is None or held.record.held_for != HELD_FOR:
            return None
        node, waiting = held.record.node, len(self._state.ledger.awaited(held))
        if not waiting and node in names.strings():
            return Answer(node=node, code="VictimsLeaving", text=f"room is held on node {node}")
        if len(self._state.core.answer(FilterAsked(request=request), names).left):
            return None  # other capacity was freed
        if not waiting:
            return None
        self.consider(pod, request, names)  # some victims may not have been evicted
        return Answer(
            code="VictimsLeaving",
            text=f"VictimsLeaving: {waiting} pods leave node {node}, their room is held",
        )

    async def complete(
        self, pod: PodView, request: PodRequest, given: Mapping[str, wire.MetaVictims]
    ) -> dict[str, wire.MetaVictims]:
        """Return kube-scheduler's victims by node, plus those that the pod's devices need.

        Nodes where eviction cannot free enough capacity are left out.
        """
        covered = await self._evictions.covered()
        known = self._state.pods.get(request.uid)
        kept: dict[str, wire.MetaVictims] = {}
        for node, victims in given.items():
            uids = [victim.uid for victim in victims.pods or []]
            lenders = None if known is None else self._lenders(known, request, node)
            found = site(
                self._state.ledger,
                node,
                priority=pod.spec.priority or 0,
                pod_of=self._state.pods.get,
                members_of=self._state.pods.members_of_group,
                rules=self._rules(covered.by_uid, lenders, service_class=terms_of(pod)[1]),
            )
            held = [self._state.ledger.holding(node, uid) for uid in uids]
            going = [holding for holding in held if holding is not None]
            left = {*uids, *(holding.record.pod_uid for holding in found.leaving)}
            search = find_victims(
                self._state.table,
                request,
                node,
                [
                    unit
                    for unit in found.units
                    if len(unit.pods) == 1 and unit.pods[0].uid not in left
                ]
                if self._settings.preemption
                else [],
                leaving=[
                    *(Leaving.of(holding) for holding in going),
                    *(Leaving.of(h) for h in found.leaving if h.record.pod_uid not in uids),
                ],
                allowed={**covered.allowed, **(lenders.allowed if lenders else {})},
            )
            more = run(search)
            await anyio.lowlevel.checkpoint()
            if more is not None:
                pods = [*uids, *more.uids()]
                kept[node] = wire.MetaVictims(
                    pods=[wire.MetaPod(uid=uid) for uid in pods],
                    num_violations=victims.num_violations + more.cost.violations,
                )
        return kept

    async def work(self) -> None:
        """Handle the pods that ``consider`` queued, indefinitely."""
        while True:
            asked = await self._next()
            uid = asked.request.uid
            self._put_off(uid)
            if not await self._quarantine.run(
                PREEMPTION,
                uid,
                partial(self._try, asked),
                name=(asked.request.namespace, asked.request.name),
                is_retried=False,  # filter queues the pod again
            ):
                self._metrics.preemptions.labels(outcome="failed").inc()

    async def _try(self, asked: _Asked) -> None:
        uid = asked.request.uid
        try:
            outcome = await self._preempt(asked)
        except HamiError as error:
            outcome = "unavailable"
            _log.warning("preemption failed", extra={"uid": uid, "problem": str(error)})
        if outcome in PASSING and asked.tries < TRIES_MOST and uid not in self._asked:
            due_s = self._not_before_s[uid]
            self._asked[uid] = replace(asked, due_s=due_s, tries=asked.tries + 1)
        if outcome:
            self._metrics.preemptions.labels(outcome=outcome).inc()

    async def _next(self) -> _Asked:
        """Dequeue the pod that is due first, as soon as it is due."""
        while True:
            if self._wake.is_set():
                self._wake = anyio.Event()
            first = min(self._asked.values(), key=lambda asked: asked.due_s, default=None)
            if first is None:
                await self._wake.wait()
                continue
            wait_s = first.due_s - self._state.clock.monotonic_s()
            if wait_s <= 0:
                return self._asked.pop(first.request.uid)
            async with anyio.create_task_group() as group:
                group.start_soon(self._wake_after, wait_s)
                await self._wake.wait()
                group.cancel_scope.cancel()

    async def _wake_after(self, wait_s: float) -> None:
        await self._state.clock.sleep(wait_s)
        self._wake.set()

    def _put_off(self, uid: str) -> None:
        self._not_before_s[uid] = self._state.clock.monotonic_s() + self._settings.preempt_retry_s
        self._not_before_s.move_to_end(uid)
        while len(self._not_before_s) > ASKED_MOST:
            self._not_before_s.popitem(last=False)

    # --- one pod ---------------------------------------------------------------------------------

    async def _preempt(self, asked: _Asked) -> str:
        """Preempt for one pod.

        Returns the outcome in one word, empty when there was nothing to do.
        """
        uid = asked.request.uid
        for _ in range(self._settings.fence_tries):
            pod = self._state.pods.get(uid)
            if pod is None or not self._state.is_complete:
                return "early"
            if not pod.is_waiting():
                return ""
            held = self._state.ledger.reserved_for(uid, fenced=pod.fence)
            if held is not None:
                if not held.record.held_for:
                    return ""  # being bound
                return await self._resume(asked, pod, held)
            if len(self._state.core.answer(FilterAsked(request=asked.request), asked.names).left):
                return ""
            covered = await self._evictions.covered()
            plan = await self._choose(asked, pod, covered)
            if plan is None:
                self._publish(
                    asked, verdict="refused", error="no pod that may leave would make room"
                )
                return "none"
            if plan.victims.cost.violations:
                text = "capacity could be freed only against a PodDisruptionBudget or a guarantee"
                self._publish(asked, verdict="refused", error=text)
                return "budget"
            outcome = await self._execute(asked, pod, plan)
            if outcome:
                return outcome
        return "contended"

    def _may_end_bursts(self, pod: PodView) -> bool:
        """Return whether the pod may evict pods that use more memory than they request."""
        return bool(self._state.table.bursting) and terms_of(pod)[1] != SPOT

    def _may_reclaim(self, request: PodRequest) -> bool:
        """Return whether the pod may be within the guarantee of its queue."""
        if not self._settings.reclaim or not self._state.core.quota.tree:
            return False
        pod = self._state.pods.get(request.uid)
        if pod is None:
            return True  # the attempt waits for its watch event
        lenders = self._lenders(pod, request)
        return lenders is not None and bool(lenders.owner)

    def _lenders(self, pod: PodFacts, request: PodRequest, node: str = "") -> Lenders | None:
        """Return whose pods may be evicted for the pod; ``None`` without queues.

        Without a node its amounts are the least of any node.
        """
        quota = self._state.core.quota
        if not self._settings.reclaim or not quota.tree:
            return None
        wanted = (
            wanted_on(self._state.table, request, pod.account, node)
            if node
            else least_amounts(request, {}, pod.account)
        )
        own = [(h.record.node, pod.uid) for h in self._state.ledger.holdings_of_pod(pod.uid)]
        return quota.lenders(pod.namespace, pod.account, wanted, own=own)

    def _uses_of(self, lenders: Lenders | None) -> UsesOf | None:
        if lenders is None:
            return None

        def uses(pod: PodFacts, priority: int) -> Uses | None:
            holding = self._state.ledger.holding(pod.node, pod.uid)
            is_lower = pod.priority < priority
            if holding is None:
                return () if is_lower else None
            return lenders.uses(holding.record, by_priority=is_lower)

        return uses

    async def _choose(self, asked: _Asked, pod: PodFacts, covered: Covered) -> _Plan | None:
        """Return the cheapest victims on any of the nodes, ``None`` when no set is enough."""
        on_any = self._rules(
            covered.by_uid,
            self._lenders(pod, asked.request),
            service_class=pod.service_class,
        )
        ranked: list[tuple[Cost, str]] = []
        for number, node in enumerate(asked.names.strings()):
            if not number % NODES_AT_ONCE:
                await anyio.lowlevel.checkpoint()
            least = least_cost(
                self._state.ledger,
                node,
                priority=pod.priority,
                pod_of=self._state.pods.get,
                rules=on_any,
            )
            if least is not None:
                ranked.append((least, node))
        ranked.sort()
        best: _Plan | None = None
        for least, node in ranked[: self._settings.preempt_nodes]:
            below = None if best is None else best.victims.cost
            if below is not None and least >= below:
                break
            lenders = self._lenders(pod, asked.request, node)
            rules = self._rules(covered.by_uid, lenders, service_class=pod.service_class)
            here = self._site(node, pod, rules)
            search = find_victims(
                self._state.table,
                asked.request,
                node,
                here.units,
                leaving=here.without(),
                allowed={**covered.allowed, **(lenders.allowed if lenders else {})},
                below=below,
            )
            seen = self._state.ledger.fence(node)
            try:
                while self._state.ledger.fence(node) == seen:
                    next(search)
                    await anyio.lowlevel.checkpoint()
            except StopIteration as end:
                if end.value is not None:
                    best = _Plan(victims=end.value, site=here)
            await anyio.lowlevel.checkpoint()
        return best

    def _site(self, node: str, pod: PodFacts, rules: Rules) -> Site:
        pods = self._state.pods
        return site(
            self._state.ledger,
            node,
            priority=pod.priority,
            pod_of=pods.get,
            members_of=pods.members_of_group,
            rules=rules,
        )

    def _rules(
        self,
        budgets: Mapping[str, tuple[str, ...]],
        lenders: Lenders | None,
        *,
        service_class: str,
    ) -> Rules:
        return replace(
            self._evictions.rules(budgets),
            uses_of=self._uses_of(lenders),
            burst_of=self._burst_of if self._state.table.bursting else None,
            is_spot=service_class == SPOT,
        )

    def _burst_of(self, pod: PodFacts) -> int:
        return self._state.table.burst_mib(pod.node, pod.uid)

    async def _execute(self, asked: _Asked, pod: PodFacts, plan: _Plan) -> str:
        """Reserve the capacity, then evict.

        Returns an empty text when the node changed and must be evaluated again.
        """
        node, uids = plan.victims.node, plan.victims.uids()
        victims = [known for uid in uids if (known := self._state.pods.get(uid)) is not None]
        # Victims that a budget may protect first, so that no other victim is evicted in vain.
        leaves = {p.uid: p for unit in plan.victims.units for p in unit.pods}
        victims.sort(key=lambda victim: (not leaves[victim.uid].budgets, victim.uid))
        leaving = [holding.record.pod_uid for holding in plan.site.leaving]
        going = [known for uid in leaving if (known := self._state.pods.get(uid)) is not None]
        here = [uid for uid in uids if self._state.ledger.holding(node, uid) is not None]
        hold = Hold(
            held_for=HELD_FOR,
            lease_s=self._settings.preempt_hold_s + wanted_grace_s([*victims, *going]),
            awaits=(*here, *leaving),
            keeps=tuple(uid for uid in here if leaves[uid].keeps_share),
        )
        try:
            holding = await self._binder.hold(pod, node, hold, traceparent=pod.traceparent)
        except Refused as refused:
            _log.info("room not held", extra={"node": node, "problem": refused.text})
            return "quota" if refused.outcome == "no-quota" else ""
        if await self._is_second(holding):
            await self._effects.ledger.release(holding, "held-elsewhere")
            return ""
        await self._nominate(pod, node)
        refusals = await self._evict_all(pod, victims, node)
        if refusals:
            await self._effects.ledger.release(holding, "preemption-refused")
            self._publish(asked, verdict="refused", node=node, victims=victims, error=refusals[0])
            return "refused"
        self._publish(asked, verdict="placed", node=node, victims=victims, holding=holding)
        await self._events.record(
            pod_reference(pod),
            reason="Preempting",
            message=f"{len(victims)} pods leave node {node}"
            f"{', ' + str(len(leaving)) + ' more are leaving' if leaving else ''};"
            " their devices are held for this pod",
        )
        return "placed"

    async def _resume(self, asked: _Asked, pod: PodFacts, held: Holding) -> str:
        """Evict the victims that an interrupted preemption did not evict."""
        awaited = self._state.ledger.awaited(held)
        found: dict[str, PodFacts] = {}
        for holding in awaited:
            victim = self._state.pods.get(holding.record.pod_uid)
            if victim is None:
                continue
            members = self._state.pods.members_of_group(victim.group) if victim.group else [victim]
            found |= {member.uid: member for member in members if member.node}
        rules = self._rules(
            {},
            self._lenders(pod, asked.request, held.record.node),
            service_class=pod.service_class,
        )
        staying = [
            victim for victim in found.values() if not victim.is_deleting and not victim.is_finished
        ]
        if not staying:
            return ""
        if not all(is_evictable(victim, priority=pod.priority, rules=rules) for victim in staying):
            await self._effects.ledger.release(held, "preemption-refused")
            return "refused"
        refusals = await self._evict_all(pod, staying, held.record.node)
        if refusals:
            await self._effects.ledger.release(held, "preemption-refused")
            return "refused"
        self._publish(asked, verdict="placed", node=held.record.node, victims=staying, holding=held)
        return "resumed"

    # --- outside ---------------------------------------------------------------------------------

    async def _is_second(self, holding: Holding) -> bool:
        """Return whether another scheduler reserved capacity for the pod first, on another node."""
        record = holding.record
        with answer_within(self._settings.bus_timeout_s, peer="NATS"):
            entries = await self._records.latest(f"*.{record.pod_uid}")
        for entry in entries:
            try:
                subject = subjects.kv_subject(subjects.ALLOC_BUCKET, entry.key)
                other = codec.decode_on(subject, entry.value, AllocationRecord)
            except WireInvalid:
                continue
            is_live = other.op != "release" and other.node != record.node
            is_first = not other.held_for or entry.revision < holding.revision
            if is_live and is_first:
                return True
        return False

    async def _nominate(self, pod: PodFacts, node: str) -> None:
        """Write the nominated node to the pod's status; no other step depends on it."""
        document = {"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}}
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                await self._kube.patch(f"{pod.path()}/status", _encoder.encode(document))
        except HamiError as error:
            _log.info("pod not nominated", extra={"pod": pod.name, "problem": str(error)})

    async def _evict_all(
        self, preemptor: PodFacts, victims: Sequence[PodFacts], node: str
    ) -> list[str]:
        """Evict one after another until one eviction fails; returns the reasons."""
        for victim in victims:
            problem = await self._evictions.evict(victim)
            if problem:
                return [f"pod {victim.namespace}/{victim.name} cannot be evicted: {problem}"]
            self._metrics.victims.inc()
            _log.warning(
                "pod evicted for another one",
                extra={
                    "namespace": victim.namespace,
                    "pod": victim.name,
                    "for": f"{preemptor.namespace}/{preemptor.name}",
                    "node": node,
                },
            )
            await self._events.record(
                pod_reference(victim),
                reason="Preempted",
                kind="Warning",
                message=f"Evicted for pod {preemptor.namespace}/{preemptor.name}"
                f" ({self._claim(preemptor, victim)}), which needs devices of node {node}",
            )
        return []

    def _claim(self, preemptor: PodFacts, victim: PodFacts) -> str:
        """Return the reason for which one pod is evicted for another."""
        if victim.service_class == SPOT and preemptor.service_class != SPOT:
            return "this pod is of class spot"
        if victim.priority < preemptor.priority:
            return f"priority {preemptor.priority}, this pod {victim.priority}"
        burst_mib = self._burst_of(victim)
        if burst_mib and preemptor.service_class != SPOT:
            return f"this pod uses {burst_mib} MiB beyond its request"
        quota = self._state.core.quota
        theirs, ours = (quota.queue_of(pod.namespace, pod.account) for pod in (preemptor, victim))
        return f"its queue {theirs} uses its guarantee, this pod's queue {ours} borrows"

    def _publish(
        self,
        asked: _Asked,
        *,
        verdict: str,
        node: str = "",
        victims: Sequence[PodFacts] = (),
        holding: Holding | None = None,
        error: str = "",
    ) -> None:
        record = DecisionRecord(
            verb="preempt",
            namespace=asked.request.namespace,
            pod=asked.request.name,
            pod_uid=asked.request.uid,
            time_s=self._state.clock.now_s(),
            verdict="placed" if verdict == "placed" else "refused",
            snapshot_id=self._state.ledger.snapshot_id,
            nodes_considered=len(asked.names),
            node=node,
            victims=tuple(
                Victim(
                    namespace=victim.namespace,
                    pod=victim.name,
                    pod_uid=victim.uid,
                    node=victim.node,
                    priority=victim.priority,
                    burst_mib=self._burst_of(victim),
                )
                for victim in sorted(victims, key=lambda victim: victim.uid)
            ),
            error=error,
            writer=self._decisions.writer,
        )
        if holding is not None:
            record = replace(
                record,
                allocation_id=holding.record.allocation_id,
                ledger_seq=holding.revision,
                containers=holding.record.containers,
            )
        self._decisions.add(record)
