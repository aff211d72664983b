# SPDX-License-Identifier: Apache-2.0
"""Binds one pod to one node: reserve in the ledger, commit in Kubernetes, report ``bound``.

Sequence (design D3, D4): read the pod and its resourceVersion → pick devices and append ``reserve``
on the node's fence → post the Binding with uid, resourceVersion and the signed allocation → report
the state. Each step may fail or be cut off, and each failure ends in one of three ways: the pod is
bound and the share is held; the pod is not bound, can not become bound by us any more, and the
share is given back; or nobody can know yet, the reservation stays, and its lease has it examined.

Calls for one pod run one after another, so a repeated call finds what the first one did. Binds of
different pods run together; those of one node only take turns while they pick and append. Whether
releasing is safe follows the rules of ``hami_scheduler.shell.effects``. Seconds throughout.
"""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from hami_common.errors import Conflict, Denied, HamiError, NotFound, Unavailable
from hami_common.events.allocation import AllocationRecord
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.signing import Signer
from hami_core.ledger import binding
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.repair import Holding, Restore
from hami_core.ledger.stimuli import Append, Reuse
from hami_core.placement.reasons import NodeRefusal
from hami_core.quota.resourcequota import amounts_of
from hami_scheduler.settings import Settings
from hami_scheduler.shell.effects import Effects, Queues
from hami_scheduler.shell.extender_wire import BindArgs
from hami_scheduler.shell.keylocks import KeyLocks
from hami_scheduler.shell.metrics import Metrics
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
    "elsewhere": "pod {namespace}/{name} is assigned to node {node} by somebody else",
}


class Refused(HamiError):
    """The pod is not bound. ``outcome`` is the stable word for metrics and the decision record."""

    def __init__(self, *, outcome: str, text: str) -> None:
        """Give kube-scheduler ``text``; it becomes an event of the pod."""
        super().__init__(outcome, text)
        self.outcome = outcome
        self.text = text

    def __str__(self) -> str:
        return self.text


class Bound(Struct, frozen=True, kw_only=True):
    """The pod is bound."""

    outcome: str
    holding: Holding | None = None
    """What it holds; ``None`` when it asks for nothing of ours or was bound before."""


class Binder:
    """Carries out bind calls."""

    def __init__(
        self,
        *,
        state: State,
        effects: Effects,
        quota: QuotaKeeper,
        queues: Queues,
        signer: Signer,
        settings: Settings,
        metrics: Metrics,
        ids: Callable[[], str],
    ) -> None:
        """Sign with ``signer``; ``ids`` makes allocation ids that nobody else makes."""
        self._state = state
        self._effects = effects
        self._quota = quota
        self._chores = queues.chores
        self._confirmations = queues.confirmations
        self._signer = signer
        self._settings = settings
        self._metrics = metrics
        self._ids = ids
        self._pods = KeyLocks("pod")
        self.ensure: Callable[[str], Awaitable[None]] | None = None
        """Returns once a node's devices may be given; set by the composition root."""

    async def bind(self, args: BindArgs, *, traceparent: str = "") -> Bound:
        """Bind; ``Refused`` says why not. Safe to call again after any outcome and any crash."""
        try:
            async with self._pods.hold(args.pod_uid, wait_s=self._settings.bind_wait_s):
                with self._effects.while_binding(args.pod_uid):
                    bound = await self._bind(args, traceparent)
        except Refused as refused:
            self._metrics.binds.labels(outcome=refused.outcome).inc()
            raise
        except HamiError as error:
            # What was reserved, if anything, is left to its lease.
            outcome = "unavailable" if isinstance(error, Unavailable) else "error"
            self._metrics.binds.labels(outcome=outcome).inc()
            raise Refused(outcome=outcome, text=str(error)) from error
        except Exception:
            self._metrics.binds.labels(outcome="quarantined").inc()
            raise
        self._metrics.binds.labels(outcome=bound.outcome).inc()
        return bound

    async def _bind(self, args: BindArgs, traceparent: str) -> Bound:
        pod = self._state.pods.get(args.pod_uid)
        if pod is None or (pod.namespace, pod.name) != (args.pod_namespace, args.pod_name):
            pod = await self._effects.get_pod(args.pod_namespace, args.pod_name)
        fate = binding.fate_of(pod, uid=args.pod_uid, node=args.node)
        if fate in ("same-node", "ours"):
            return Bound(outcome="already-bound")
        if fate != "free" or pod is None:
            raise _refusal(fate, args.pod_namespace, args.pod_name, args.pod_uid, pod)
        if pod.problem:
            raise Refused(outcome="invalid", text=pod.problem)
        if pod.request is None:
            return await self._commit_plain(pod, args.node)
        generation, allocation_id = self._quota.ledger.generation, self._ids()
        try:
            attempt = await self._reserve(pod, args.node, allocation_id, traceparent)
            settled = await self._within_quota(attempt, generation)
        finally:
            self._quota.ledger.stop_expecting(allocation_id)
        bound = await self._commit(attempt) if settled is None else settled
        if bound.holding is not None:
            self._confirmations.add(bound.holding)
        return bound

    # --- reserve ---------------------------------------------------------------------------------

    async def hold(self, pod: PodFacts, node: str, hold: Hold, *, traceparent: str = "") -> Holding:
        """Hold devices for a pod that waits, before anybody binds it; ``Refused`` says why not.

        What the pod holds for this purpose already is returned as it is.
        """
        generation, allocation_id = self._quota.ledger.generation, self._ids()
        async with self._pods.hold(pod.uid, wait_s=self._settings.bind_wait_s):
            try:
                attempt = await self._reserve(pod, node, allocation_id, traceparent, hold)
                if attempt.is_first:
                    await self._within_quota(attempt, generation)
            finally:
                self._quota.ledger.stop_expecting(allocation_id)
        return attempt.holding

    async def _reserve(
        self,
        pod: PodFacts,
        node: str,
        allocation_id: str,
        traceparent: str,
        hold: Hold | None = None,
    ) -> "_Attempt":
        """A reservation whose newest record we wrote after ``pod`` was read, or a ``hold``."""
        request = pod.request
        if request is None:
            raise Refused(outcome="invalid", text="the pod asks for no device")
        if self.ensure is not None:
            await self.ensure(node)
        async with self._effects.planning(node):
            for _ in range(self._settings.fence_tries):
                holding: Holding | None
                # Nothing is awaited before the plan is made: an emptied ledger must plan nothing.
                self._state.require_complete()
                plan = self._plan(pod, request, node, allocation_id, hold)
                if isinstance(plan, NodeRefusal):
                    raise Refused(outcome="no-fit", text=f"node {node}: {plan.text}")
                if isinstance(plan, Append):
                    plan = plan.under(pod.account)
                    self._expect(plan.record)
                if isinstance(plan, Reuse) and hold is not None:
                    holding = plan.holding  # nobody binds under it yet, so it need not be ours
                elif isinstance(plan, Reuse):
                    # An earlier attempt left it, perhaps another replica's. Renewed, it is ours.
                    holding = await self._effects.renew(plan.holding, traceparent=traceparent)
                else:
                    holding = await self._append(plan, traceparent)
                if holding is not None:
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

    def _expect(self, record: AllocationRecord) -> None:
        """Refuse what is beyond a quota now, before anything is written; else count it."""
        ledger = self._quota.ledger
        if not ledger.governs(record.namespace, record.account):
            return
        ledger.stop_expecting(record.allocation_id)
        own = [
            (held.record.node, record.pod_uid)
            for held in self._state.ledger.holdings_of_pod(record.pod_uid)
        ]
        refusal = ledger.first_look(
            record.namespace, record.account, amounts_of(record.containers, record.account), own=own
        )
        if refusal is not None:
            raise Refused(outcome="no-quota", text=refusal.text)
        ledger.expect(record)

    async def _within_quota(self, attempt: "_Attempt", generation: int) -> Bound | None:
        """``None`` when the reservation is within all quotas where it stands in the ledger.

        Else it is given back, before any Binding for it was sent.
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

    def _plan(
        self,
        pod: PodFacts,
        request: PodRequest,
        node: str,
        allocation_id: str,
        hold: Hold | None,
    ) -> Append | Reuse | NodeRefusal:
        """How the pod gets its devices on the node as it is now."""
        ledger, now_s = self._state.ledger, self._state.clock.now_s()
        if hold is not None:
            return ledger.plan_hold(
                request,
                node,
                allocation_id=allocation_id,
                now_s=now_s,
                hold=hold,
                fenced=pod.fence,
            )
        return ledger.plan_bind(
            request, node, allocation_id=allocation_id, now_s=now_s, fenced=pod.fence
        )

    async def _append(self, plan: Append, traceparent: str) -> Holding | None:
        """What the append left in the ledger; ``None`` when it lost the race and was not stored."""
        record = plan.record
        problem: Conflict | Unavailable
        try:
            await self._effects.append(plan, traceparent=traceparent)
        except Conflict as error:
            self._metrics.fence_conflicts.inc()
            problem = error
        except Unavailable as error:
            problem = error
        else:
            return self._held(record.node, record.pod_uid, record.allocation_id)
        # The record may be stored although its acknowledgement was lost, also after a retry.
        await self._effects.read_node(record.node)
        holding = self._held(record.node, record.pod_uid, record.allocation_id)
        if holding is not None:
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
        """Bind a pod that asks for nothing of ours."""
        current = pod
        for _ in range(self._settings.binding_tries):
            try:
                await self._effects.post_binding(
                    current, binding.binding_document(pod=current, node=node)
                )
            except (Conflict, Unavailable) as error:
                fresh = await self._effects.get_pod(pod.namespace, pod.name)
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

    async def _commit(self, attempt: "_Attempt") -> Bound:
        """Post the Binding, again while only the pod's version was in the way."""
        for _ in range(self._settings.binding_tries):
            holding = attempt.holding
            annotations = binding.allocation_annotations(
                holding.record,
                ledger_seq=holding.revision,
                signer=self._signer,
                core_policy=self._settings.vendors.nvidia.core_policy,
            )
            document = binding.binding_document(
                pod=attempt.pod, node=holding.record.node, annotations=annotations
            )
            self._effects.vouch(
                annotations[keys.ALLOCATION],
                binding.signed_placement(holding.record, ledger_seq=holding.revision),
                key_id=self._signer.key_id,
            )
            try:
                await self._effects.post_binding(attempt.pod, document)
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
        """What to do after the API server refused the Binding of this version of the pod."""
        holding = attempt.holding
        record = holding.record
        fresh = await self._effects.get_pod(record.namespace, record.pod)
        fate = binding.fate_of(
            fresh, uid=record.pod_uid, node=record.node, allocation_id=record.allocation_id
        )
        if fate == "ours":
            return Bound(outcome="bound", holding=holding)
        if fate == "same-node" and fresh is not None and fresh.signed is not None:
            self._chores.add(Restore(signed=fresh.signed, must=fresh.is_started, replaces=holding))
            return Bound(outcome="already-bound")
        if fate != "free" or fresh is None:
            refused = _refusal(fate, record.namespace, record.pod, record.pod_uid, fresh)
            if fate != "unreadable":
                await self._effects.release(holding, refused.outcome)
            raise refused
        if fresh.fence == record.allocation_id:
            return await self._give_up(
                attempt,
                outcome="taken-back",
                text="the reservation took too long and was taken back; try again",
            )
        if fresh.request != attempt.pod.request:
            return await self._give_up(
                attempt, outcome="pod-changed", text="the pod's request changed; try again"
            )
        renewed = await self._effects.renew(holding, traceparent=attempt.traceparent)
        if renewed is None or renewed.record.allocation_id != record.allocation_id:
            raise Refused(
                outcome="taken-back",
                text="the reservation took too long and was taken back; try again",
            )
        return msgspec.structs.replace(attempt, pod=fresh, holding=renewed)

    # --- the ways to fail ------------------------------------------------------------------------

    async def _give_up(self, attempt: "_Attempt", *, outcome: str, text: str) -> Bound:
        """Every Binding of ours was refused for good: give the share back, then refuse.

        A reservation that an earlier attempt left may still have a Binding of that attempt under
        way, so such a one is settled like an unknown outcome.
        """
        if not attempt.is_first:
            return await self._settle(attempt, outcome=outcome, text=text)
        await self._effects.release(
            attempt.holding, f"bind-{outcome}", traceparent=attempt.traceparent
        )
        raise Refused(outcome=outcome, text=text)

    async def _settle(self, attempt: "_Attempt", *, outcome: str, text: str) -> Bound:
        """Nobody knows whether a Binding took effect: find out, and make sure of the answer."""
        try:
            finding = await self._effects.settle(attempt.holding)
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
    """One reservation on its way to being committed."""

    pod: PodFacts
    """The version of the pod that the next Binding expects; read before ``holding`` was written."""
    holding: Holding
    is_first: bool
    """Nobody has posted a Binding for this reservation before this call."""
    traceparent: str


_CHANGING = "the pod kept changing while it was bound; try again"


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
