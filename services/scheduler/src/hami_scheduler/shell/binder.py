# SPDX-License-Identifier: Apache-2.0
"""Binds one pod to one node: reserve in the ledger, commit in Kubernetes, report ``bound``.

``admit`` does the first half for a Binding that another scheduler posted: it reserves and returns
what the Binding must carry, and the API server commits (ADR 0029).

Sequence (design D3, D4): read the pod and its resourceVersion → pick devices and append ``reserve``
on the node's fence → make the pod's ResourceClaim, if it has one, equal to the record → post the
Binding with uid, resourceVersion and the signed allocation → report the state. Each step may fail
or be interrupted, and each failure ends in one of three ways:

- The pod is bound and the share is allocated.
- The pod is not bound, we can never bind it with this attempt any more, and the share is released.
- The outcome is unknown, the reservation stays, and is examined when its lease expires.

Calls for one pod run one after another, so a repeated call finds the result of the first one. Binds
of different pods run concurrently; those of one node only take turns while they pick and append.
The rules of ``hami_scheduler.shell.ledgerwriter`` decide whether a release is safe. Seconds
throughout.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import anyio
import msgspec
from msgspec import Struct

from hami_common.errors import Conflict, Denied, HamiError, NotFound, Unavailable
from hami_common.events.allocation import AllocationRecord, is_of_owner
from hami_common.model.request import PodRequest, options
from hami_common.pods import annotations as keys
from hami_common.pods.signing import Signer
from hami_core.ledger import binding
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podclaim import on_published
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.repair import Restore
from hami_core.ledger.stimuli import Append, BindPlanned, HoldPlanned, Reuse, TakePlanned
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.reasons import NodeRefusal
from hami_scheduler.settings import Settings
from hami_scheduler.shell import mirror
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.extender_wire import BindArgs
from hami_scheduler.shell.holds import Holds
from hami_scheduler.shell.keylocks import KeyLocks
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podclaims import Unsettled
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.state import State

_log = logging.getLogger(__name__)

REFUSALS = ("no-fit", "no-quota")
"""Outcomes that are a verdict about the pod, not a failure."""

_FATES = {
    "gone": "pod {namespace}/{name} with uid {uid} does not exist any more",
    "finished": "pod {namespace}/{name} has finished",
    "deleting": "pod {namespace}/{name} is being deleted",
    "unreadable": "pod {namespace}/{name} is assigned to node {node} with an allocation that is"
    " not signed with a trusted key",
    "elsewhere": "pod {namespace}/{name} is already assigned to node {node} by another scheduler",
}


class Refused(HamiError):
    """The pod is not bound. ``outcome`` is the stable word for metrics and the decision record."""

    def __init__(self, *, outcome: str, text: str) -> None:
        """Return ``text`` to kube-scheduler, where it becomes an event of the pod."""
        super().__init__(outcome, text)
        self.outcome = outcome
        self.text = text

    def __str__(self) -> str:
        return self.text


class Bound(Struct, frozen=True, kw_only=True):
    """The pod is bound."""

    outcome: str
    holding: Holding | None = None
    """The pod's allocation; ``None`` when it requests none of our devices or was bound before."""


class Admitted(Bound, frozen=True, kw_only=True):
    """The Binding of another scheduler may be stored, with these changes."""

    pod: PodFacts | None = None
    """The pod that the Binding must be for; ``None`` where the API server refuses the Binding."""
    annotations: Mapping[str, str] = {}
    """Signed allocation and limits; with them the Binding must expect this version of the pod."""


Outcome = TypeVar("Outcome", bound=Bound)


class Binder:
    """Executes bind calls, and admits the Bindings of other schedulers."""

    def __init__(
        self,
        *,
        state: State,
        effects: Effects,
        quota: QuotaKeeper,
        ensure: Callable[[str], Awaitable[None]],
        signer: Signer,
        settings: Settings,
        metrics: Metrics,
        ids: Callable[[], str],
    ) -> None:
        """Sign with ``signer``; ``ids`` makes unique allocation ids.

        ``ensure`` returns once the devices of a node may be allocated.
        """
        self._state = state
        self._effects = effects
        self._quota = quota
        self.holds = Holds(state)
        """Shares that pods take over, such as those held for their Workload."""
        self._signer = signer
        self._settings = settings
        self._metrics = metrics
        self._ids = ids
        self._pods = KeyLocks("pod")
        self._ensure = ensure

    async def bind(self, args: BindArgs, *, traceparent: str = "") -> Bound:
        """Bind; ``Refused`` has the reason otherwise.

        Safe to repeat after any outcome and any crash.
        """
        return await self._counted(args, partial(self._bind, args, traceparent))

    async def admit(
        self, args: BindArgs, *, resource_version: str, is_dry_run: bool, traceparent: str = ""
    ) -> Admitted:
        """Reserve for a Binding that another scheduler posted; ``Refused`` has the reason if not.

        Safe to repeat: the second call finds the reservation of the first one and renews it. If the
        Binding is not stored after all, the reservation ends with its lease. ``resource_version``
        is the Binding's own precondition; a dry run reserves nothing.
        """
        return await self._counted(
            args,
            partial(
                self._admit,
                args,
                resource_version=resource_version,
                is_dry_run=is_dry_run,
                traceparent=traceparent,
            ),
        )

    async def _counted(self, args: BindArgs, attempt: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Run an attempt after all others for its pod, and count its outcome."""
        try:
            async with self._pods.hold(args.pod_uid, wait_s=self._settings.bind_wait_s):
                with self._effects.settling.while_binding(args.pod_uid):
                    bound = await attempt()
        except Refused as refused:
            self._metrics.binds.labels(outcome=refused.outcome).inc()
            raise
        except HamiError as error:
            # A reservation, if any, is left to its lease.
            outcome = "unavailable" if isinstance(error, Unavailable) else "error"
            self._metrics.binds.labels(outcome=outcome).inc()
            raise Refused(outcome=outcome, text=str(error)) from error
        except Exception:
            self._metrics.binds.labels(outcome="quarantined").inc()
            raise
        self._metrics.binds.labels(outcome=bound.outcome).inc()
        return bound

    async def _unbound(self, args: BindArgs) -> PodFacts | None:
        """Return the pod; ``None`` if it is bound to the node. ``Refused``: it cannot be bound."""
        pod = self._state.pods.get(args.pod_uid)
        if pod is None or (pod.namespace, pod.name) != (args.pod_namespace, args.pod_name):
            pod = await self._effects.pods.get(args.pod_namespace, args.pod_name)
        fate = binding.fate_of(pod, uid=args.pod_uid, node=args.node)
        if fate in ("same-node", "ours"):
            return None
        if fate != "free" or pod is None:
            raise _refusal(fate, args.pod_namespace, args.pod_name, args.pod_uid, pod)
        if pod.problem:
            raise Refused(outcome="invalid", text=pod.problem)
        return pod

    async def _bind(self, args: BindArgs, traceparent: str) -> Bound:
        pod = await self._unbound(args)
        if pod is None:
            return Bound(outcome="already-bound")
        if pod.request is None:
            return await self._commit_plain(pod, args.node)
        may_be_allocated = bool(pod.claim) and not pod.claim_at_bind
        try:
            reserved = await self._reserve_with_claim(pod, args.node, traceparent)
            if isinstance(reserved, Bound):
                bound = reserved
            else:
                may_be_allocated = bool(pod.claim)
                bound = await self._commit(reserved)
        except HamiError:
            if may_be_allocated:
                await self._clear_claim(pod)
            raise
        if bound.holding is not None:
            self._effects.confirmations.add(bound.holding)
        return bound

    async def _clear_claim(self, pod: PodFacts) -> None:
        """Clear what is allocated for a refused bind: it would keep others from the devices.

        It also pins the pod to the node where kube-scheduler allocates claims.

        Left to the follower of the claims when the API server or the bus cannot answer.
        """
        try:
            await self._effects.claims.clear(
                namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, claim=pod.claim
            )
        except HamiError as error:
            _log.warning(
                "claim allocation not cleared",
                extra={"namespace": pod.namespace, "pod": pod.name, "problem": str(error)},
            )

    async def _admit(
        self, args: BindArgs, *, resource_version: str, is_dry_run: bool, traceparent: str
    ) -> Admitted:
        pod = await self._effects.pods.get(args.pod_namespace, args.pod_name)
        fate = binding.fate_of(pod, uid=args.pod_uid, node=args.node)
        if fate == "finished":
            raise _refusal(fate, args.pod_namespace, args.pod_name, args.pod_uid, pod)
        if fate in ("same-node", "ours"):
            return Admitted(outcome="already-bound")
        if fate != "free" or pod is None:
            return Admitted(outcome=f"pod-{fate}")
        if resource_version not in ("", pod.resource_version):
            return Admitted(outcome="outdated")
        if pod.problem:
            raise Refused(outcome="invalid", text=pod.problem)
        if pod.request is None:
            return Admitted(outcome="admitted-plain", pod=pod)
        if is_dry_run:
            self._rehearse(pod, pod.request, args.node)
            return Admitted(outcome="dry-run", pod=pod)
        reserved = await self._reserve_within_quota(pod, args.node, traceparent)
        if isinstance(reserved, Bound):
            return Admitted(outcome=reserved.outcome)
        holding = reserved.holding
        self._effects.settling.expect_bound(holding)
        _log.info("binding admitted", extra=_fields(holding))
        return Admitted(
            outcome="admitted", holding=holding, pod=pod, annotations=self._annotations(holding)
        )

    def _rehearse(self, pod: PodFacts, request: PodRequest, node: str) -> None:
        """Refuse what ``_reserve`` and the quotas would refuse now; write nothing."""
        self._state.require_complete()
        allocation_id = self._ids()
        plan = _fitting(self._plan(pod, request, node, allocation_id, None), node)
        if isinstance(plan, Append):
            try:
                self._expect(_under(plan, pod).record)
            finally:
                self._quota.stop_expecting(allocation_id)

    # --- reserve ---------------------------------------------------------------------------------

    async def hold(self, pod: PodFacts, node: str, hold: Hold, *, traceparent: str = "") -> Holding:
        """Reserve devices for a waiting pod before its bind; ``Refused`` has the reason otherwise.

        An existing reservation for this purpose is returned unchanged.
        """
        async with self._pods.hold(pod.uid, wait_s=self._settings.bind_wait_s):
            return await self._hold(pod, node, hold, traceparent)

    async def prepare(self, args: BindArgs, hold: Hold, *, traceparent: str = "") -> Bound:
        """Reserve devices for a bind that another scheduler has decided on and not yet begun.

        ``Refused`` has the reason if not. Safe to repeat. A reservation of the pod on the node is
        left as it is, also one that a bind took over: the next bind takes it over again. Those for
        the same purpose on other nodes are released.
        """
        async with self._pods.hold(args.pod_uid, wait_s=self._settings.bind_wait_s):
            pod = await self._unbound(args)
            if pod is None:
                return Bound(outcome="already-bound")
            if pod.request is None:
                return Bound(outcome="plain")
            for other in self._state.ledger.holdings_of_pod(pod.uid):
                record = other.record
                if record.node != args.node and record.held_for == hold.held_for:
                    await self._effects.ledger.release(other, "moved")
            if self.holds.has_share(pod, args.node):
                self.holds.room(pod.request, pod.owners(), NodeNames.of((args.node,)))  # claims it
                return Bound(outcome="held")
            holding = await self._hold(pod, args.node, hold, traceparent)
        return Bound(outcome="held", holding=holding)

    async def withdraw(self, pod_uid: str, node: str, *, held_for: str) -> None:
        """Release the reservations for this purpose whose bind has not begun; safe to repeat.

        Waits for a ``prepare`` of the pod that still runs. ``node``: the node of which the records
        are read where this replica knows none of the pod.
        """
        async with self._pods.hold(pod_uid, wait_s=self._settings.bind_wait_s):
            if node and not self._state.ledger.holdings_of_pod(pod_uid):
                await self._effects.ledger.read_node(node)  # of another replica, a moment ago
            for holding in self._state.ledger.holdings_of_pod(pod_uid):
                if holding.record.held_for == held_for:
                    await self._effects.ledger.release(holding, "withdrawn")

    async def _hold(self, pod: PodFacts, node: str, hold: Hold, traceparent: str) -> Holding:
        generation, allocation_id = self._quota.ledger.generation, self._ids()
        try:
            attempt = await self._reserve(pod, node, allocation_id, traceparent, hold)
            if attempt.is_first:
                await self._within_quota(attempt, generation)
        finally:
            self._quota.stop_expecting(allocation_id)
        return attempt.holding

    async def _reserve_with_claim(
        self, pod: PodFacts, node: str, traceparent: str
    ) -> "_Attempt | Bound":
        """Reserve, and create the pod's claim while the reservation is appended."""
        reserved: _Attempt | Bound | Exception
        is_created = not pod.claim_at_bind
        async with anyio.create_task_group() as group:

            def create() -> None:
                nonlocal is_created
                if not is_created:
                    is_created = True
                    group.start_soon(self._effects.claims.create_early, pod)

            try:
                reserved = await self._reserve_within_quota(pod, node, traceparent, create)
            except Exception as error:  # noqa: BLE001 - raised below, outside of the group
                reserved = error
        if isinstance(reserved, Exception):
            raise reserved
        return reserved

    async def _reserve_within_quota(
        self,
        pod: PodFacts,
        node: str,
        traceparent: str,
        planned: Callable[[], object] = lambda: None,
    ) -> "_Attempt | Bound":
        """Return a reservation to be committed, or ``Bound`` if another attempt bound the pod.

        ``planned`` is called before each append, once devices within all quotas are chosen.
        """
        generation, allocation_id = self._quota.ledger.generation, self._ids()
        try:
            attempt = await self._reserve(pod, node, allocation_id, traceparent, planned=planned)
            return await self._within_quota(attempt, generation) or attempt
        finally:
            self._quota.stop_expecting(allocation_id)

    async def _reserve(
        self,
        pod: PodFacts,
        node: str,
        allocation_id: str,
        traceparent: str,
        hold: Hold | None = None,
        *,
        planned: Callable[[], object] = lambda: None,
    ) -> "_Attempt":
        """Return a reservation whose record we wrote after reading ``pod``, or a ``hold``."""
        request = pod.request
        if request is None:
            raise Refused(outcome="invalid", text="the pod asks for no device")
        await self._ensure(node)
        async with self._effects.ledger.planning(node):
            for _ in range(self._settings.fence_tries):
                holding: Holding | None
                await self._release_taken(pod.uid, node)
                # No await before the plan is made: an emptied ledger must plan nothing.
                self._state.require_complete()
                plan = self._within_quotas(pod, request, node, allocation_id, hold)
                if isinstance(plan, Append):
                    planned()
                if isinstance(plan, Reuse) and hold is not None:
                    holding = plan.holding  # no Binding is posted yet, so it need not be ours
                elif isinstance(plan, Reuse):
                    # Left by an earlier attempt, perhaps of another replica: the renewal makes it
                    # ours.
                    ledger = self._effects.ledger
                    holding = await ledger.renew(plan.holding, traceparent=traceparent)
                else:
                    holding = await self._append(plan, traceparent)
                if holding is not None:
                    await self._release_taken(pod.uid, node)
                    return _Attempt(
                        pod=pod,
                        holding=holding,
                        is_first=isinstance(plan, Append),
                        traceparent=traceparent,
                    )
        raise Refused(
            outcome="contended",
            text=f"node {node} changed {self._settings.fence_tries} times while devices were"
            " picked; try again",
        )

    def _within_quotas(
        self,
        pod: PodFacts,
        request: PodRequest,
        node: str,
        allocation_id: str,
        hold: Hold | None,
    ) -> Append | Reuse:
        """Return the plan of the pod's first alternative that fits and is within all quotas.

        ``Refused`` has the reason of the first one that fits.
        """
        first: Refused | None = None
        for choice in (request, *(options(request) if request.others else ())):
            try:
                plan = _fitting(self._plan(pod, choice, node, allocation_id, hold), node)
                if isinstance(plan, Append):
                    plan = _under(plan, pod)
                    self._expect(plan.record)
            except Refused as refused:
                first = first or refused
                if first.outcome != "no-quota":
                    raise first from None
            else:
                return plan
        raise first or Refused(outcome="no-fit", text=f"node {node} has no devices for the pod")

    async def book(
        self,
        node: str,
        plan: Callable[[], Append | NodeRefusal | None],
        *,
        traceparent: str = "",
    ) -> Holding | None:
        """Write a record that no Binding follows, within quotas; ``Refused`` has the reason if not.

        ``None`` when ``plan`` finds that the record exists. Each plan has the same allocation id.
        """
        generation, allocation_id = self._quota.ledger.generation, ""
        await self._ensure(node)
        try:
            async with self._effects.ledger.planning(node):
                for _ in range(self._settings.fence_tries):
                    # No await before the plan is made: an emptied ledger must plan nothing.
                    self._state.require_complete()
                    planned = plan()
                    if planned is None:
                        return None
                    if isinstance(planned, NodeRefusal):
                        raise Refused(outcome="no-fit", text=planned.text)
                    allocation_id = planned.record.allocation_id
                    self._expect(planned.record)
                    holding = await self._append(planned, traceparent)
                    if holding is not None:
                        break
                else:
                    raise Refused(
                        outcome="contended", text=f"node {node} kept changing; it is tried again"
                    )
            await self._require_quota(holding, generation)
        finally:
            self._quota.stop_expecting(allocation_id)
        return holding

    async def _require_quota(self, holding: Holding, generation: int) -> None:
        """Release a record that no Binding follows and refuse, unless it is within all quotas."""
        record = holding.record
        if not self._quota.ledger.governs(record.namespace, record.account):
            return
        try:
            refusal = await self._quota.verdict(holding.revision, generation=generation)
        except Unavailable:
            await self._effects.ledger.release(holding, "bind-unavailable")
            raise
        if refusal is not None:
            self._metrics.quota_races.inc()
            await self._effects.ledger.release(holding, "bind-no-quota")
            raise Refused(outcome="no-quota", text=refusal.text)

    def _expect(self, record: AllocationRecord) -> None:
        """Refuse a record that exceeds a quota before it is written; else count it."""
        own = [
            (held.record.node, record.pod_uid)
            for held in self._state.ledger.holdings_of_pod(record.pod_uid)
        ]
        own += [(record.node, uid) for uid in record.awaits if self._is_hold(record.node, uid)]
        if refusal := self._quota.expect(record, own=own):
            raise Refused(outcome="no-quota", text=refusal)

    async def _within_quota(self, attempt: "_Attempt", generation: int) -> Bound | None:
        """Return ``None`` when the reservation is within all quotas at its place in the ledger.

        Otherwise it is released before any Binding for it was sent.
        """
        record = attempt.holding.record
        if not self._quota.ledger.governs(record.namespace, record.account):
            return None
        try:
            refusal = await self._quota.verdict(attempt.holding.revision, generation=generation)
        except Unavailable as error:
            return await self._give_up(attempt, outcome="unavailable", text=str(error))
        if refusal is None:
            return None
        self._metrics.quota_races.inc()
        return await self._give_up(attempt, outcome="no-quota", text=refusal.text)

    def _is_hold(self, node: str, uid: str) -> bool:
        holding = self._state.ledger.holding(node, uid)
        return holding is not None and is_of_owner(holding.record)

    async def _release_taken(self, pod_uid: str, node: str) -> None:
        """Release the hold whose shares the pod's reservation took over."""
        for _ in range(self._settings.fence_tries):
            own = self._state.ledger.holding(node, pod_uid)
            awaited = [] if own is None else self._state.ledger.awaited(own)
            taken = [one for one in awaited if is_of_owner(one.record)]
            if not taken:
                return
            for one in taken:
                if await self._effects.ledger.release(one, "taken-over"):
                    self.holds.taken(pod_uid)

    def _plan(
        self,
        pod: PodFacts,
        request: PodRequest,
        node: str,
        allocation_id: str,
        hold: Hold | None,
    ) -> Append | Reuse | NodeRefusal:
        """Plan the pod's devices on the node in its present state."""
        core, now_s = self._state.core, self._state.clock.now_s()
        request = on_published(
            request, (one for some in core.inventory.of_node(node) for one in some.devices)
        )
        if hold is not None:
            return core.answer(
                HoldPlanned(
                    request=request,
                    node=node,
                    allocation_id=allocation_id,
                    now_s=now_s,
                    held_for=hold.held_for,
                    lease_s=hold.lease_s,
                    awaits=hold.awaits,
                    keeps=hold.keeps,
                    fenced=pod.fence,
                )
            )
        taken = self.holds.claimed(pod, node)
        if taken is not None:
            return core.answer(
                TakePlanned(
                    request=request,
                    node=node,
                    held_uid=taken.record.pod_uid,
                    allocation_id=allocation_id,
                    now_s=now_s,
                    fenced=pod.fence,
                )
            )
        return core.answer(
            BindPlanned(
                request=request,
                node=node,
                allocation_id=allocation_id,
                now_s=now_s,
                fenced=pod.fence,
            )
        )

    async def _append(self, plan: Append, traceparent: str) -> Holding | None:
        """Append the record; ``None`` when it lost the race and was not stored."""
        record = plan.record
        problem: Conflict | Unavailable
        try:
            await self._effects.ledger.append(plan, traceparent=traceparent)
        except Conflict as error:
            self._metrics.fence_conflicts.inc()
            problem = error
        except Unavailable as error:
            problem = error
        else:
            return self._held(record.node, record.pod_uid, record.allocation_id)
        # The record may be stored although its acknowledgment was lost, also after a retry.
        await self._effects.ledger.read_node(record.node)
        holding = self._held(record.node, record.pod_uid, record.allocation_id)
        if holding is not None:
            # Replicas give the record of a claim the same allocation id.
            if holding.record.writer == record.writer:
                self._metrics.lost_acks.inc()
        elif isinstance(problem, Unavailable):
            _log.info("append was lost, tried again", extra={"problem": str(problem)})
        return holding

    def _held(self, node: str, pod_uid: str, allocation_id: str) -> Holding | None:
        holding = self._state.ledger.holding(node, pod_uid)
        if holding is None or holding.record.allocation_id != allocation_id:
            return None
        return holding

    # --- commit ----------------------------------------------------------------------------------

    async def _commit_plain(self, pod: PodFacts, node: str) -> Bound:
        """Bind a pod that requests none of our devices."""
        current = pod
        for _ in range(self._settings.binding_tries):
            try:
                await self._effects.pods.post_binding(
                    current, binding.binding_document(pod=current, node=node)
                )
            except (Conflict, Unavailable) as error:
                fresh = await self._effects.pods.get(pod.namespace, pod.name)
                fate = binding.fate_of(fresh, uid=pod.uid, node=node)
                if fate in ("same-node", "ours"):
                    return Bound(outcome="bound-plain")
                if fate != "free" or fresh is None:
                    raise _refusal(fate, pod.namespace, pod.name, pod.uid, fresh) from error
                if isinstance(error, Unavailable):
                    raise
                current = fresh
            except (NotFound, Denied) as error:
                raise Refused(outcome="denied", text=str(error)) from error
            else:
                return Bound(outcome="bound-plain")
        raise Refused(outcome="pod-changing", text=_CHANGING)

    def _annotations(self, holding: Holding) -> dict[str, str]:
        """Return what the pod is to carry, and trust it unverified when the watch delivers it."""
        annotations = binding.allocation_annotations(
            holding.record,
            ledger_seq=holding.revision,
            signer=self._signer,
            core_policy=self._settings.vendors.nvidia.core_policy,
        )
        self._effects.pods.vouch(
            annotations[keys.ALLOCATION],
            binding.signed_placement(holding.record, ledger_seq=holding.revision),
            key_id=self._signer.key_id,
        )
        return annotations | mirror.for_volcano(holding.record, self._settings.vendors.nvidia)

    async def _commit(self, attempt: "_Attempt") -> Bound:
        """Post the Binding; retry while only the pod's version caused the refusal."""
        record = attempt.holding.record
        if record.claim:
            try:
                await self._effects.claims.settle(record, attempt.pod)
            except Unsettled as error:
                return await self._give_up(attempt, outcome=error.outcome, text=str(error))
            except (Denied, NotFound, Unavailable) as error:
                cause = "unavailable" if isinstance(error, Unavailable) else "denied"
                return await self._give_up(attempt, outcome=cause, text=str(error))
        for _ in range(self._settings.binding_tries):
            holding = attempt.holding
            annotations = self._annotations(holding)
            document = binding.binding_document(
                pod=attempt.pod, node=holding.record.node, annotations=annotations
            )
            try:
                await self._effects.pods.post_binding(attempt.pod, document)
            except Conflict:
                self._metrics.binding_conflicts.inc()
            except (NotFound, Denied) as error:
                return await self._give_up(attempt, outcome="denied", text=str(error))
            except Unavailable as error:
                return await self._settle(attempt, outcome="unavailable", text=str(error))
            else:
                _log.info("pod bound", extra=_fields(holding))
                return Bound(outcome="bound", holding=holding)
            outcome = await self._after_conflict(attempt)
            if isinstance(outcome, Bound):
                return outcome
            attempt = outcome
        return await self._give_up(attempt, outcome="pod-changing", text=_CHANGING)

    async def _after_conflict(self, attempt: "_Attempt") -> "Bound | _Attempt":
        """Return the next step after the API server refused the Binding of this pod version."""
        holding = attempt.holding
        record = holding.record
        fresh = await self._effects.pods.get(record.namespace, record.pod)
        fate = binding.fate_of(
            fresh, uid=record.pod_uid, node=record.node, allocation_id=record.allocation_id
        )
        if fate == "ours":
            return Bound(outcome="bound", holding=holding)
        if fate == "same-node" and fresh is not None and fresh.signed is not None:
            self._state.later(Restore(signed=fresh.signed, must=fresh.is_started, replaces=holding))
            return Bound(outcome="already-bound")
        if fate != "free" or fresh is None:
            refused = _refusal(fate, record.namespace, record.pod, record.pod_uid, fresh)
            if fate != "unreadable":
                await self._effects.ledger.release(holding, refused.outcome)
            raise refused
        if fresh.fence == record.allocation_id:
            return await self._give_up(
                attempt,
                outcome="taken-back",
                text="the reservation timed out and was released; try again",
            )
        if fresh.request != attempt.pod.request:
            return await self._give_up(
                attempt, outcome="pod-changed", text="the pod's request changed; try again"
            )
        renewed = await self._effects.ledger.renew(holding, traceparent=attempt.traceparent)
        if renewed is None or renewed.record.allocation_id != record.allocation_id:
            raise Refused(
                outcome="taken-back",
                text="the reservation timed out and was released; try again",
            )
        return msgspec.structs.replace(attempt, pod=fresh, holding=renewed)

    # --- the ways to fail ------------------------------------------------------------------------

    async def _give_up(self, attempt: "_Attempt", *, outcome: str, text: str) -> Bound:
        """Release the share after every Binding of ours was refused for good, then refuse.

        A reservation of an earlier attempt may still have a Binding of that attempt in flight, so
        it is settled like an unknown outcome.
        """
        if not attempt.is_first:
            return await self._settle(attempt, outcome=outcome, text=text)
        await self._effects.ledger.release(
            attempt.holding, f"bind-{outcome}", traceparent=attempt.traceparent
        )
        raise Refused(outcome=outcome, text=text)

    async def _settle(self, attempt: "_Attempt", *, outcome: str, text: str) -> Bound:
        """Determine whether a Binding took effect, then release or keep the reservation."""
        try:
            finding = await self._effects.settling.settle(attempt.holding)
        except (Unavailable, Denied, Conflict) as error:
            _log.warning(
                "outcome of a bind is unknown, left to its lease",
                extra=_fields(attempt.holding, problem=str(error)),
            )
            raise Refused(
                outcome="unknown",
                text=f"{text}; the reservation is examined when its lease ends",
            ) from error
        if finding == "ours":
            return Bound(outcome="bound", holding=attempt.holding)
        if finding == "same-node":
            return Bound(outcome="already-bound")
        raise Refused(outcome=outcome, text=text)


class _Attempt(Struct, frozen=True, kw_only=True):
    """A reservation that is being committed."""

    pod: PodFacts
    """The version of the pod that the next Binding expects; read before ``holding`` was written."""
    holding: Holding
    is_first: bool
    """No Binding was posted for this reservation before this call."""
    traceparent: str


_CHANGING = "the pod kept changing while it was bound; try again"


def _fitting(plan: Append | Reuse | NodeRefusal, node: str) -> Append | Reuse:
    """Return the plan; ``Refused`` if it is a refusal."""
    if isinstance(plan, NodeRefusal):
        raise Refused(outcome="no-fit", text=f"node {node}: {plan.text}")
    return plan


def _under(plan: Append, pod: PodFacts) -> Append:
    """Return the plan with what the pod's quotas and bills need in the record."""
    return plan.under(pod.account, sku=pod.sku, service_class=pod.service_class, labels=pod.labels)


def _refusal(
    fate: binding.Fate, namespace: str, name: str, uid: str, pod: PodFacts | None
) -> Refused:
    text = _FATES[fate].format(
        namespace=namespace, name=name, uid=uid, node=pod.node if pod is not None else ""
    )
    return Refused(outcome=f"pod-{fate}", text=text)


def _fields(holding: Holding, **more: object) -> dict[str, object]:
    record = holding.record
    return {
        "namespace": record.namespace,
        "pod": record.pod,
        "node": record.node,
        "allocation_id": record.allocation_id,
        "ledger_seq": holding.revision,
        **more,
    }
