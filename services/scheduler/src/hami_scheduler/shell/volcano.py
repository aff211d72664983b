# SPDX-License-Identifier: Apache-2.0
"""Answers the calls of Volcano's plugin ``extender`` (ADR 0035).

Predicate and prioritize judge a task's pod as filter and prioritize do, over all known nodes, and
answer for the nodes of the call. ``jobEnqueueable`` searches a placement of all pods that a job
needs. ``allocate`` reserves what the session decided, with a lease, and ``deallocate`` releases it
while no bind has begun; bind admission takes the reservation over (ADR 0029). A pod is read from
our own watch, and from the call only until the watch delivers it; nothing is ever reserved for a
pod that the API server does not have. Seconds throughout.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Final, Literal

from msgspec.structs import replace

from hami_common.errors import HamiError, Unavailable, WireInvalid
from hami_common.model.request import PodRequest
from hami_common.runtime.httpd import Handler, Request, Response
from hami_common.runtime.telemetry import log_context
from hami_core.ledger.ledger import Hold
from hami_core.ledger.podfacts import PodFacts, PodReader
from hami_core.ledger.stimuli import FilterAsked, PrioritizeAsked
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.reasons import RESOLVABLE, NodeRefusal
from hami_core.placement.verdicts import Filtered
from hami_core.planning.gangs import Member, place_together
from hami_core.quota.resourcequota import Asker
from hami_core.quota.verdicts import Allowed
from hami_scheduler.settings import Settings
from hami_scheduler.shell import volcano_wire as wire
from hami_scheduler.shell.binder import Binder, Bound, Refused
from hami_scheduler.shell.bindingreports import BindingReports
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.extender_wire import BindArgs
from hami_scheduler.shell.isolation import GANG, quarantined_call
from hami_scheduler.shell.joint import stepwise
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.state import State
from hami_scheduler.shell.verdictreports import VerdictReports, best_of

PREFIX: Final = "/volcano/v1"
HELD_SCORE: Final = 100.0
"""Added to the score (0..100) of a node on which devices are reserved for the pod."""
RECORDED_MOST: Final = 1024
"""Pods and jobs whose last verdict is remembered, so that repetitions are not reported."""
RECORDED_AGAIN_S: Final = 30.0
"""Time after which an unchanged verdict is reported again: Volcano asks in each session."""
OF_QUOTAS: Final = frozenset(
    {"ResourceQuotaNotFit", "QueueOverLimit", "QueueCannotBorrow", "QueueWaitsItsTurn"}
)
"""Refusals that may end when other pods under the same quota end."""

Verdict = Filtered | Allowed
_Verb = Literal["predicate", "prioritize", "enqueue", "allocate", "deallocate"]
_log = logging.getLogger(__name__)


def purpose(namespace: str, name: str) -> str:
    """Return ``held_for`` of the shares that are reserved for a pod of a session."""
    return f"volcano {namespace}/{name}"


class VolcanoExtender:
    """The plugin's verbs over one state."""

    def __init__(
        self,
        *,
        state: State,
        reader: PodReader,
        binder: Binder,
        bindings: BindingReports,
        quota: QuotaKeeper,
        decisions: Decisions,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Reserve with ``binder``; report verdicts to ``decisions``."""
        self._state = state
        self._core = state.core
        self._reader = reader
        self._binder = binder
        self._bindings = bindings
        self._quota = quota
        self._reports = VerdictReports(state=state, decisions=decisions)
        self._options = settings.volcano_extender
        self._metrics = metrics
        self._recorded: OrderedDict[str, tuple[object, float]] = OrderedDict()
        """Last verdict and the time until which it is not reported again, by uid or name."""

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("POST", f"{PREFIX}/predicate"): partial(self._timed, "predicate", self._predicate),
            ("POST", f"{PREFIX}/prioritize"): partial(self._timed, "prioritize", self._prioritize),
            ("POST", f"{PREFIX}/jobEnqueueable"): partial(self._timed, "enqueue", self._enqueue),
            ("POST", f"{PREFIX}/allocate"): self._allocate,
            ("POST", f"{PREFIX}/deallocate"): partial(self._timed, "deallocate", self._deallocate),
        }

    async def _timed(
        self, verb: _Verb, answer: Callable[[bytes, float], Awaitable[bytes]], request: Request
    ) -> Response:
        begin = perf_counter()
        body = await answer(request.body, begin)
        self._metrics.verb_seconds.labels(verb=f"volcano-{verb}").observe(perf_counter() - begin)
        return Response(body=body)

    # --- predicate and prioritize ----------------------------------------------------------------

    async def _predicate(self, body: bytes, begin: float) -> bytes:
        """Return why the pod does not fit on the node, or nothing."""
        args = wire.decode_predicate(body)
        uid, node = args.task.metadata().uid, args.node.name
        with log_context(namespace=args.task.namespace, pod=args.task.name):
            try:
                refusal = self._refusal(self._pod_of(uid, args.task), node, begin)
            except WireInvalid:
                raise
            except Exception as error:  # noqa: BLE001 - of this pod alone
                text = self._failed("predicate", uid, args.task, error)
                return wire.encode_predicate(text, wire.ERROR)
        if refusal is None:
            return wire.encode_predicate()
        may_change = refusal.code in RESOLVABLE or refusal.code in OF_QUOTAS
        code = wire.UNSCHEDULABLE if may_change else wire.UNRESOLVABLE
        return wire.encode_predicate(refusal.text, code)

    def _refusal(self, pod: PodFacts, node: str, begin: float) -> NodeRefusal | None:
        if pod.problem:
            return NodeRefusal(code="PodNotAdmitted", text=pod.problem)
        if pod.request is None:
            return None
        self._state.require_complete()
        if self._binder.holds.has_share(pod, node):
            return None
        names = NodeNames.of(self._nodes_with(node))
        verdict = self._judge(pod, pod.request, names)
        self._report(pod, pod.request, verdict, len(names), begin)
        if node in verdict.left.strings():
            return None
        place = names.strings().index(node)
        refusal = next(refusal for refusal, places in verdict.groups() if place in places)
        if refusal.code == "OtherReasons":  # one text for the small classes of many
            alone = self._core.answer(FilterAsked(request=pod.request), NodeNames.of((node,)))
            refusal = next((refusal for refusal, _ in alone.groups()), refusal)
        self._metrics.refusals.labels(code=refusal.code).inc()
        return refusal

    def _judge(self, pod: PodFacts, request: PodRequest, names: NodeNames) -> Verdict:
        """Return the verdict that filter would reach."""
        fitting = self._core.answer(FilterAsked(request=request), names)
        asker = Asker(account=pod.account, wish=pod.queue_wish)
        return self._quota.allowed(asker, request, fitting)

    def _nodes_with(self, node: str) -> list[str]:
        """Return all nodes with devices, and this one."""
        codes = self._state.table.codes
        return [*codes] if node in codes else [*codes, node]

    def _report(
        self,
        pod: PodFacts,
        request: PodRequest,
        verdict: Verdict,
        considered: int,
        begin: float,
    ) -> None:
        """Report a verdict once, not for each node of which Volcano asks."""
        classes, left = verdict.classes(), len(verdict.left)
        counted = [(one.code, one.text, one.count) for one in classes]
        if self._is_new(pod.uid, (left, counted)):
            record = self._reports.record("filter", pod.uid, pod.namespace, pod.name)
            self._reports.decided(
                replace(
                    record,
                    verdict="feasible" if left else "refused",
                    nodes_considered=considered,
                    nodes_feasible=left,
                    refusals=classes,
                    request=request,
                ),
                begin,
                look=None if left else partial(self._core.details, request, verdict),
            )

    async def _prioritize(self, body: bytes, begin: float) -> bytes:
        """Return scores; 0 where no opinion is possible."""
        args = wire.decode_prioritize(body)
        uid = args.task.metadata().uid
        names = NodeNames.of([node.name for node in args.nodes or ()])
        scores = dict.fromkeys(names.strings(), 0.0)
        with log_context(namespace=args.task.namespace, pod=args.task.name):
            try:
                pod = self._pod_of(uid, args.task)
                if pod.request is not None and scores:
                    self._state.require_complete()
                    scores.update(self._scores(pod, pod.request, names, begin))
            except WireInvalid:
                raise
            except Exception as error:  # noqa: BLE001 - of this pod alone
                self._failed("prioritize", uid, args.task, error)
        return wire.encode_scores(scores)

    def _scores(
        self, pod: PodFacts, request: PodRequest, names: NodeNames, begin: float
    ) -> Mapping[str, float]:
        near = tuple(self._state.pods.nodes_of_group(pod.group))
        scored = self._core.answer(PrioritizeAsked(request=request, near=near), names)
        best = best_of(scored)
        if self._is_new(f"prioritize/{pod.uid}", best):
            record = self._reports.record("prioritize", pod.uid, pod.namespace, pod.name)
            self._reports.decided(
                replace(
                    record,
                    verdict="feasible",
                    nodes_considered=len(names),
                    nodes_feasible=len(names),
                    feasible=best,
                ),
                begin,
                comparison=self._core.comparison(request, best, near=near),
            )
        return {
            node: score + HELD_SCORE * self._binder.holds.has_share(pod, node)
            for node, score in scored.best(len(names))
        }

    # --- jobs ------------------------------------------------------------------------------------

    async def _enqueue(self, body: bytes, _begin: float) -> bytes:
        """Vote on whether a job may try to get its pods placed."""
        job = wire.decode_job(body)
        with log_context(namespace=job.namespace, job=job.name):
            try:
                vote, reason = await self._vote(job)
            except WireInvalid:
                raise
            except Unavailable as error:
                self._metrics.verb_errors.labels(verb="volcano-enqueue", cause="unavailable").inc()
                vote, reason = wire.REJECT, str(error)
            except Exception as error:  # noqa: BLE001 - of this job alone
                self._metrics.verb_errors.labels(verb="volcano-enqueue", cause="quarantined").inc()
                self._state.quarantine.failed(GANG, job.key, error, name=(job.namespace, job.name))
                vote, reason = wire.ABSTAIN, ""
            if vote == wire.REJECT and self._is_new(job.key, reason):
                _log.info("job not enqueued", extra={"reason": reason})
        return wire.encode_vote(vote)

    async def _vote(self, job: wire.Job) -> tuple[int, str]:
        """Return the vote and the reason of a rejection."""
        tasks = list((job.tasks or {}).values())
        if not tasks or len(tasks) < job.min_available:
            return wire.ABSTAIN, ""  # not all pods exist yet
        pending = [task for task in tasks if task.status == wire.PENDING]
        pods = [self._pod_of(task.metadata().uid, task) for task in pending]
        for pod in pods:
            if pod.problem:
                return wire.REJECT, f"pod {pod.name}: {pod.problem}"
        wanting = [(pod, pod.request) for pod in pods if pod.request is not None]
        if not wanting:
            return wire.ABSTAIN, ""
        self._state.require_complete()
        names = NodeNames.of(self._state.table.codes)
        fitting: list[tuple[PodFacts, PodRequest]] = []
        text = "no node with devices is known"
        for pod, request in wanting:
            verdict = self._judge(pod, request, names)
            if len(verdict.left):
                fitting.append((pod, request))
            elif len(names):
                text = max(verdict.classes(), key=lambda one: one.count).text
        need = job.min_available - (len(tasks) - len(wanting))
        if need <= 0:
            return wire.ABSTAIN, ""
        if len(fitting) < need:
            return wire.REJECT, f"{len(fitting)} of {need} pods fit: {text}"
        if await self._has_placement(fitting, need):
            return wire.PERMIT, ""
        return wire.REJECT, f"no room for {need} pods at the same time"

    async def _has_placement(
        self, fitting: Sequence[tuple[PodFacts, PodRequest]], need: int
    ) -> bool:
        """Return whether all of the pods have a placement together, or the ``need`` smallest."""
        nodes = frozenset(self._state.table.codes)
        near = self._state.pods.nodes_of_group(fitting[0][0].group)
        members = [Member(request=request, nodes=nodes) for _, request in fitting]
        members.sort(key=lambda member: _size(member.request))
        for some in [members] if len(members) == need else [members, members[:need]]:
            if await stepwise(place_together(self._state.table, some, near=near)) is not None:
                return True
        return False

    # --- allocate and deallocate -----------------------------------------------------------------

    async def _allocate(self, request: Request) -> Response:
        """Reserve devices on the node that the session chose, or return why not.

        Volcano also reports tasks that only wait for others to leave (Pipelined), and victims that
        stay after all: nothing is reserved for them.
        """
        task = wire.decode_event(request.body)
        uid = task.metadata().uid
        if task.status != wire.ALLOCATED or not task.node_name:
            return Response(body=wire.encode_event())
        args = BindArgs(
            pod_name=task.name, pod_namespace=task.namespace, pod_uid=uid, node=task.node_name
        )
        outcome = await self._bindings.run("volcano-allocate", args, partial(self._prepare, args))
        error = str(outcome) if isinstance(outcome, Refused) else ""
        return Response(body=wire.encode_event(error))

    async def _prepare(self, args: BindArgs, *, traceparent: str) -> Bound:
        held_for = purpose(args.pod_namespace, args.pod_name)
        hold = Hold(held_for=held_for, lease_s=self._options.lease_s)
        with answer_within(self._options.wait_s, peer="scheduler"):
            return await self._binder.prepare(args, hold, traceparent=traceparent)

    async def _deallocate(self, body: bytes, _begin: float) -> bytes:
        """Release what ``allocate`` reserved, unless a bind has taken it over.

        What cannot be released now ends with its lease, so Volcano never has to repeat the call.
        """
        task = wire.decode_event(body)
        uid, held_for = task.metadata().uid, purpose(task.namespace, task.name)
        with log_context(namespace=task.namespace, pod=task.name):
            try:
                with answer_within(self._options.wait_s, peer="scheduler"):
                    await self._binder.withdraw(uid, task.node_name, held_for=held_for)
            except Exception as error:  # noqa: BLE001 - of this pod alone
                text = self._failed("deallocate", uid, task, error)
                _log.warning("reserved share left to its lease", extra={"problem": text})
        return wire.encode_event()

    # --- small things ----------------------------------------------------------------------------

    def _pod_of(self, uid: str, task: wire.Task) -> PodFacts:
        """Return the pod as our watch delivered it, else as the call has it."""
        known = self._state.pods.get(uid)
        return known if known is not None else self._reader.facts_of(task.pod_view())

    def _is_new(self, key: str, verdict: object) -> bool:
        """Return whether this verdict is to be reported, and remember it."""
        now_s = self._state.clock.monotonic_s()
        known, until_s = self._recorded.get(key, (None, 0.0))
        if known == verdict and now_s < until_s:
            return False
        self._recorded[key] = (verdict, now_s + RECORDED_AGAIN_S)
        self._recorded.move_to_end(key)
        if len(self._recorded) > RECORDED_MOST:
            self._recorded.popitem(last=False)
        return True

    def _failed(self, verb: _Verb, uid: str, task: wire.Task, error: Exception) -> str:
        """Count a failed call and return its text; an error of ours quarantines the pod's call."""
        if isinstance(error, HamiError):
            cause, text = "unavailable" if isinstance(error, Unavailable) else "error", str(error)
        else:
            names = (task.namespace, task.name)
            cause = "quarantined"
            text = quarantined_call(self._state.quarantine, uid, names, error)
        self._metrics.verb_errors.labels(verb=f"volcano-{verb}", cause=cause).inc()
        return text


def _size(request: PodRequest) -> tuple[int, int]:
    """Return a measure by which pods are tried first: memory in MiB or percent, then devices."""
    asked = [one for container in request.containers for one in container.requests]
    return (
        sum(one.count * (one.memory_mib or one.memory_pct << 20) for one in asked),
        sum(one.count for one in asked),
    )
