# SPDX-License-Identifier: Apache-2.0
"""Answers kube-scheduler's extender calls (filter, prioritize, bind).

Filter and prioritize read one state of table and ledger without awaiting and write nothing; filter
returns the best of the nodes that fit or, where none does, one text per class of refusals. Bind is
``Binder``'s. A call that cannot be decided (not in sync, bus unavailable) is answered with an error
text, so that kube-scheduler retries the pod; a body that is not an extender call is HTTP 400, one
that is too large 413. Obeys k8s.io/kube-scheduler/extender/v1 (v1.34). Milliseconds only in names
that end in ``_ms``.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from opentelemetry.trace import SpanKind

from hami_common.errors import HamiError, RequestInvalid, Unavailable, WireInvalid
from hami_common.events.decision import NODES_LISTED, RefusalClass
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.runtime.httpd import Handler, Request, Response
from hami_common.runtime.telemetry import Tracing, log_context
from hami_core.ledger.podfacts import PodReader, group_of, has_preferences, owners_of
from hami_core.ledger.stimuli import FilterAsked, PrioritizeAsked, ShortlistAsked
from hami_core.placement.nodenames import NodeNames
from hami_core.planning.gangs import gang_of
from hami_scheduler.settings import Settings
from hami_scheduler.shell import extender_wire as wire
from hami_scheduler.shell.answer import Answer
from hami_scheduler.shell.binder import Binder, Refused
from hami_scheduler.shell.bindingreports import BindingReports
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.gangs import Gangs
from hami_scheduler.shell.isolation import CALL, quarantined_call
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.preemption import Preemption
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.state import State
from hami_scheduler.shell.verdictreports import VerdictReports, best_of

TRACES_MOST = 1024
"""Pods whose traceparent is kept from filter to bind."""
ASKED_MOST = 65_536
"""Pods with a claim whose last filter call is remembered."""

_log = logging.getLogger(__name__)


class Deciders(Struct, frozen=True, kw_only=True):
    """Parts that take part in the decision about a pod."""

    binder: Binder
    bindings: BindingReports
    quota: QuotaKeeper
    gangs: Gangs
    preemption: Preemption


class Extender:
    """The extender's verbs over one state."""

    def __init__(
        self,
        *,
        state: State,
        reader: PodReader,
        deciders: Deciders,
        decisions: Decisions,
        settings: Settings,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        """Decide on ``state``; report each verdict to ``decisions``."""
        self._state = state
        self._quarantine = state.quarantine
        self._core = state.core
        self._reader = reader
        self._decoder = wire.ArgsDecoder()
        self._binder = deciders.binder
        self._bindings = deciders.bindings
        self._reports = VerdictReports(state=state, decisions=decisions)
        self._quota = deciders.quota
        self._gangs = deciders.gangs
        self._holds = deciders.binder.holds
        self._preemption = deciders.preemption
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing
        self._parsed: tuple[PodView, PodRequest | None] | None = None
        self._asked_s: OrderedDict[str, float] = OrderedDict()
        """Time of the last filter call about a pod with a claim of ours, by uid."""
        self._traces: dict[str, str] = {}
        """Traceparent by uid of pods that filter saw before the watch delivered them: a bind names
        its pod only by uid."""

    def use(self, settings: Settings) -> None:
        """Apply changed settings."""
        self._settings = settings

    def routes(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        return {
            ("POST", "/filter"): self.filter,
            ("POST", "/prioritize"): self.prioritize,
            ("POST", "/bind"): self.bind,
            ("POST", "/preempt"): self.preempt,
        }

    # --- filter ----------------------------------------------------------------------------------

    async def filter(self, request: Request) -> Response:
        """Return the best nodes that fit, or the reasons why none does.

        All nodes that fit are returned for a pod with preferences of its own. kube-scheduler uses
        reasons only for a pod that has no node left, and drops them otherwise
        (pkg/scheduler/schedule_one.go, v1.34): then they are only recorded.
        """
        begin = perf_counter()
        pod, candidates = self._decoder.decode(request.body)
        with self._span("filter", pod), log_context(**_named(pod)):
            try:
                body = await self._filter(pod, candidates, begin)
            except Unavailable as error:
                self._failed("filter", "unavailable", pod, error, begin)
                body = wire.encode_filter_error(str(error))
            except WireInvalid:
                raise
            except Exception as error:  # noqa: BLE001 - of this pod alone
                body = wire.encode_filter_error(self._isolated("filter", pod, error, begin))
            else:
                self._handled(pod.metadata.uid)
        self._metrics.verb_seconds.labels(verb="filter").observe(perf_counter() - begin)
        return Response(body=body)

    async def _filter(
        self, pod: PodView, candidates: wire.Candidates, begin: float
    ) -> bytes | bytearray:
        names = candidates.names
        try:
            request, gang = self._request_of(pod), gang_of(pod)
        except RequestInvalid as error:
            # No event in the cluster and no preemption can help: only the user can.
            self._failed("filter", "invalid", pod, error, begin)
            return wire.encode_filter(
                candidates, NodeNames.of(()), unresolvable=[(str(error), names.places())]
            )
        if request is None:
            return wire.encode_filter(candidates, names)
        if request.claim:
            self._note_asked(request.uid)
        await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
        answer = self._holds.room(request, owners_of(pod), names)
        if answer is not None:
            return self._answered(pod, request, candidates, answer, begin)
        if gang is not None:
            answer = await self._gangs.admit(gang, pod, request, names)
            self._state.require_complete()
        else:
            answer = self._preemption.room(pod, request, names)
        if answer is not None:
            return self._answered(pod, request, candidates, answer, begin)
        fitting = self._core.answer(FilterAsked(request=request), names)
        if gang is None and not len(fitting.left):
            self._preemption.consider(pod, request, names)
        filtered = self._quota.allowed(self._quota.asker(pod), request, fitting)
        classes = filtered.classes()
        for refused in classes:
            self._metrics.refusals.labels(code=refused.code).inc(refused.count)
        named = self._best_of(pod, request, filtered.left)
        self._reports.decided(
            replace(
                self._reports.record("filter", *_names(pod)),
                verdict="feasible" if len(filtered.left) else "refused",
                nodes_considered=len(names),
                nodes_feasible=len(filtered.left),
                nodes_named=len(named) if named is not filtered.left else 0,
                refusals=classes,
                request=request,
            ),
            begin,
            look=None if len(filtered.left) else partial(self._core.details, request, filtered),
        )
        if len(named):
            return wire.encode_filter(candidates, named)
        failed = [(refusal.text, places) for refusal, places in filtered.groups()]
        return wire.encode_filter(candidates, named, failed)

    def asked_s(self, uid: str) -> float:
        """Return the monotonic time of the last filter call about a pod with a claim; 0: none."""
        return self._asked_s.get(uid, 0.0)

    def _note_asked(self, uid: str) -> None:
        self._asked_s[uid] = self._state.clock.monotonic_s()
        self._asked_s.move_to_end(uid)
        if len(self._asked_s) > ASKED_MOST:
            self._asked_s.popitem(last=False)

    def _best_of(self, pod: PodView, request: PodRequest, left: NodeNames) -> NodeNames:
        """Return the fitting nodes that kube-scheduler is to score, see docs/adr/0016."""
        most = self._settings.nodes_to_score
        if not 0 < most < len(left) or has_preferences(pod):
            return left
        near = tuple(self._state.pods.nodes_of_group(group_of(pod)))
        return self._core.answer(ShortlistAsked(request=request, count=most, near=near))

    def _answered(
        self,
        pod: PodView,
        request: PodRequest,
        candidates: wire.Candidates,
        answer: Answer,
        begin: float,
    ) -> bytes | bytearray:
        """Encode the reply where a share is reserved for the pod, or other pods must act first."""
        names = candidates.names
        left, others = names.divided(answer.node)
        refusals: tuple[RefusalClass, ...] = ()
        if len(others):
            self._metrics.refusals.labels(code=answer.code).inc(len(others))
            refusals = (
                RefusalClass(
                    code=answer.code,
                    text=answer.text,
                    count=len(others),
                    nodes=tuple(sorted(names.several(others[:NODES_LISTED]))),
                ),
            )
        self._reports.decided(
            replace(
                self._reports.record("filter", *_names(pod)),
                verdict="feasible" if len(left) else "refused",
                nodes_considered=len(names),
                nodes_feasible=len(left),
                refusals=refusals,
                request=request,
            ),
            begin,
        )
        failed = [] if len(left) else [(answer.text, others)]
        return wire.encode_filter(candidates, left, failed)

    def _request_of(self, pod: PodView) -> PodRequest | None:
        """Return the devices the pod requests; prioritize follows a filter about the same pod.

        Mostly our watch has delivered this very version of the pod, and it was read then.
        """
        if self._parsed is None or self._parsed[0] is not pod:
            known = self._state.pods.get(pod.metadata.uid)
            version = pod.metadata.resource_version
            if (
                known is not None
                and known.request is not None
                and known.resource_version == version
            ):
                self._parsed = (pod, known.request)
            else:
                self._parsed = (pod, self._reader.request_of(pod))
        return self._parsed[1]

    # --- prioritize ------------------------------------------------------------------------------

    async def prioritize(self, request: Request) -> Response:
        """Return scores 0..10; unnamed nodes have 0, and all nodes when no opinion is possible."""
        begin = perf_counter()
        pod, candidates = self._decoder.decode(request.body)
        with self._span("prioritize", pod), log_context(**_named(pod)):
            try:
                body = self._prioritize(pod, candidates.names, begin)
            except WireInvalid:
                raise
            except Exception as error:  # noqa: BLE001 - of this pod alone
                self._isolated("prioritize", pod, error, begin)
                body = wire.encode_priorities(candidates.names, candidates.names.nothing())
        self._metrics.verb_seconds.labels(verb="prioritize").observe(perf_counter() - begin)
        return Response(body=body)

    def _prioritize(self, pod: PodView, names: NodeNames, begin: float) -> bytes:
        try:
            request = self._request_of(pod)
            self._state.require_complete()
        except RequestInvalid as error:
            self._failed("prioritize", "invalid", pod, error, begin)
            return wire.encode_priorities(names, names.nothing())
        except Unavailable as error:
            self._failed("prioritize", "unavailable", pod, error, begin)
            return wire.encode_priorities(names, names.nothing())
        if request is None:
            return wire.encode_priorities(names, names.nothing())
        near = tuple(self._state.pods.nodes_of_group(group_of(pod)))
        scored = self._core.answer(PrioritizeAsked(request=request, near=near), names)
        best = best_of(scored)
        self._reports.decided(
            replace(
                self._reports.record("prioritize", *_names(pod)),
                verdict="feasible",
                nodes_considered=len(names),
                nodes_feasible=len(names),
                feasible=best,
            ),
            begin,
            comparison=self._core.comparison(request, best, near=near),
        )
        return wire.encode_priorities(names, scored.priorities(highest=wire.MAX_PRIORITY))

    # --- preempt ---------------------------------------------------------------------------------

    async def preempt(self, request: Request) -> Response:
        """Return the victims that kube-scheduler must evict on each node where eviction helps."""
        begin = perf_counter()
        args = wire.decode_preemption(request.body)
        with self._span("preempt", args.pod), log_context(**_named(args.pod)):
            victims = args.victims()
            try:
                wanted = self._request_of(args.pod)
                if wanted is not None:
                    self._state.require_complete()
                    victims = await self._preemption.complete(args.pod, wanted, victims)
            except RequestInvalid:
                victims = {}
            except Unavailable as error:
                self._metrics.verb_errors.labels(verb="preempt", cause="unavailable").inc()
                _log.warning("victims not looked at", extra={"problem": str(error)})
                victims = {}
            except Exception as error:  # noqa: BLE001 - of this pod alone
                self._note("preempt", args.pod, error)
                victims = {}
        self._metrics.verb_seconds.labels(verb="preempt").observe(perf_counter() - begin)
        return Response(body=wire.encode_preemption(victims))

    # --- bind ------------------------------------------------------------------------------------

    async def bind(self, request: Request) -> Response:
        """Bind the pod, or return why not."""
        args = wire.decode_bind(request.body)
        unseen = self._traces.pop(args.pod_uid, "")
        attempt = partial(self._binder.bind, args)
        outcome = await self._bindings.run("bind", args, attempt, traceparent=unseen)
        return Response(body=wire.encode_bind(str(outcome) if isinstance(outcome, Refused) else ""))

    # --- errors of one pod ---------------------------------------------------------------------

    def _isolated(
        self, verb: Literal["filter", "prioritize"], pod: PodView, error: Exception, begin: float
    ) -> str:
        """Quarantine a call about one pod that failed; returns the text for kube-scheduler."""
        text = self._note(verb, pod, error)
        self._reports.decided(replace(self._reports.record(verb, *_names(pod)), error=text), begin)
        return text

    def _note(self, verb: str, pod: PodView, error: Exception) -> str:
        self._metrics.verb_errors.labels(verb=verb, cause="quarantined").inc()
        uid, *names = _names(pod)
        return quarantined_call(self._quarantine, uid, (names[0], names[1]), error)

    def _handled(self, uid: str) -> None:
        if len(self._quarantine):
            self._quarantine.forget(CALL, uid)

    # --- small things ----------------------------------------------------------------------------

    @contextmanager
    def _span(self, verb: str, pod: PodView) -> Iterator[None]:
        uid, traceparent = pod.metadata.uid, pod.annotations().get(keys.TRACEPARENT, "")
        if traceparent and self._state.pods.get(uid) is None:
            if len(self._traces) >= TRACES_MOST:
                del self._traces[next(iter(self._traces))]
            self._traces[uid] = traceparent
        with self._tracing.start_span(
            verb,
            traceparent=traceparent,
            kind=SpanKind.SERVER,
            attributes={
                "k8s.namespace.name": pod.metadata.namespace,
                "k8s.pod.name": pod.metadata.name,
                "k8s.pod.uid": uid,
            },
        ):
            yield

    def _failed(
        self,
        verb: Literal["filter", "prioritize"],
        cause: str,
        pod: PodView,
        error: HamiError,
        begin: float,
    ) -> None:
        self._metrics.verb_errors.labels(verb=verb, cause=cause).inc()
        self._reports.decided(
            replace(self._reports.record(verb, *_names(pod)), error=str(error)), begin
        )


def _named(pod: PodView) -> dict[str, object]:
    return {"namespace": pod.metadata.namespace, "pod": pod.metadata.name}


def _names(pod: PodView) -> tuple[str, str, str]:
    """Return uid, namespace and name."""
    metadata = pod.metadata
    return metadata.uid, metadata.namespace or "default", metadata.name
