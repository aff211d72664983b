# SPDX-License-Identifier: Apache-2.0
"""Reports each attempt to bind a pod: span, metrics, log, and the recorded decision.

Common to binds of our kube-scheduler, to Bindings of other schedulers, and to reservations that
Volcano asks for before it binds; of the latter only refusals are recorded. An error of one pod is
isolated here, so that every attempt ends in an outcome. Milliseconds only in names that end in
``_ms``.
"""

import logging
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Literal, Protocol, TypeVar

from msgspec.structs import replace
from opentelemetry.trace import Span, SpanKind

from hami_common.errors import Unavailable
from hami_common.events.decision import DecisionRecord
from hami_common.model.placement import ContainerShares
from hami_common.runtime.telemetry import Tracing, current_traceparent, log_context
from hami_core.ledger.holding import Holding
from hami_scheduler.settings import Settings
from hami_scheduler.shell.binder import REFUSALS, Bound, Refused
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.extender_wire import BindArgs
from hami_scheduler.shell.isolation import quarantined_call
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.state import State

_log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome", bound=Bound)
Result_co = TypeVar("Result_co", bound=Bound, covariant=True)


class Attempt(Protocol[Result_co]):
    """Binds or admits, in a trace; ``Refused`` has the reason if not."""

    def __call__(self, *, traceparent: str) -> Awaitable[Result_co]:
        """Begin."""
        ...


class BindingReports:
    """Runs and reports attempts."""

    def __init__(
        self,
        *,
        state: State,
        decisions: Decisions,
        settings: Settings,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        """Wait for ``state`` to be complete before an attempt; report to ``decisions``."""
        self._state = state
        self._decisions = decisions
        self._settings = settings
        self._metrics = metrics
        self._tracing = tracing

    async def run(
        self,
        verb: Literal["bind", "admit", "volcano-allocate"],
        args: BindArgs,
        attempt: Attempt[Outcome],
        *,
        traceparent: str = "",
        is_recorded: bool = True,
    ) -> Outcome | Refused:
        """Return the outcome of an attempt.

        ``traceparent``: that of a pod which the watch has not delivered yet. ``is_recorded``:
        publish the decision.
        """
        begin = perf_counter()
        known = self._state.pods.get(args.pod_uid)
        outcome: Outcome | Refused
        with (
            self._tracing.start_span(
                verb,
                traceparent=known.traceparent if known is not None else traceparent,
                kind=SpanKind.SERVER,
                attributes={
                    "k8s.namespace.name": args.pod_namespace,
                    "k8s.pod.name": args.pod_name,
                    "k8s.pod.uid": args.pod_uid,
                    "k8s.node.name": args.node,
                },
            ) as span,
            log_context(namespace=args.pod_namespace, pod=args.pod_name, node=args.node),
        ):
            record = DecisionRecord(
                verb="bind",
                namespace=args.pod_namespace,
                pod=args.pod_name,
                pod_uid=args.pod_uid,
                time_s=self._state.clock.now_s(),
                verdict="placed",
                snapshot_id=self._state.ledger.snapshot_id,
                node=args.node,
                writer=self._decisions.writer,
            )
            try:
                await self._state.wait_complete(wait_s=self._settings.sync_wait_s)
                outcome = await attempt(traceparent=current_traceparent())
            except Exception as failure:  # noqa: BLE001 - of this pod alone
                outcome = self._refused(args, failure)
                text = str(outcome)
                self._metrics.verb_errors.labels(verb=verb, cause=outcome.outcome).inc()
                span.set_attribute("hami.error", text)
                _log.warning("pod not bound", extra={"outcome": outcome.outcome, "reason": text})
                is_verdict = outcome.outcome in REFUSALS
                record = replace(record, verdict="refused" if is_verdict else "error", error=text)
            else:
                held = outcome.holding
                # Most pods of another scheduler request no devices: of no interest here. Of a
                # reservation before the Binding, the Binding will be recorded.
                is_recorded = is_recorded and (
                    verb == "bind" or (verb == "admit" and held is not None)
                )
                if held is not None:
                    record = _allocated(record, held, span)
            span.set_attribute("hami.outcome", outcome.outcome)
            if is_recorded:
                if record.verdict == "placed":
                    self._state.refusals.placed(args.pod_uid)
                record = replace(record, duration_ms=round((perf_counter() - begin) * 1000, 3))
                self._decisions.add(record, traceparent=current_traceparent())
        self._metrics.verb_seconds.labels(verb=verb).observe(perf_counter() - begin)
        return outcome

    def _refused(self, args: BindArgs, failure: Exception) -> Refused:
        """Return the failure of an attempt as a refusal."""
        if isinstance(failure, Refused):
            return failure
        if isinstance(failure, Unavailable):
            return Refused(outcome="unavailable", text=str(failure))
        names = (args.pod_namespace, args.pod_name)
        text = quarantined_call(self._state.quarantine, args.pod_uid, names, failure)
        return Refused(outcome="quarantined", text=text)


def shares_text(containers: Sequence[ContainerShares]) -> list[str]:
    """Format each share as ``<container>: <device> <memory> MiB <compute> %``."""
    return [
        f"{container.name}: {share.uuid} {share.memory_mib} MiB {share.core_pct} %"
        for container in containers
        for share in container.shares
    ]


def _allocated(record: DecisionRecord, held: Holding, span: Span) -> DecisionRecord:
    """Return the decision with its allocation, which the span shows too."""
    if span.is_recording():
        span.set_attributes(
            {
                "hami.allocation.id": held.record.allocation_id,
                "hami.allocation.ledger_seq": held.revision,
                "hami.shares": shares_text(held.record.containers),
            }
        )
    return replace(
        record,
        allocation_id=held.record.allocation_id,
        ledger_seq=held.revision,
        containers=held.record.containers,
    )
