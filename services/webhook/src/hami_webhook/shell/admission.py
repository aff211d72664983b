# SPDX-License-Identifier: Apache-2.0
"""Answers AdmissionReviews: routes each to its decision, counts, traces and records it.

CREATE of a pod is mutated; UPDATE of a pod or any of its subresources is validated; ephemeral
containers are validated and get the limits of their target. Everything else is allowed unread. A
review that cannot be read is answered with 400: the API server then refuses the request, because
the configuration sets ``failurePolicy: Fail`` (design D7). An unexpected error denies only the
request that caused it. Callers without a client certificate of the API server may use a bounded
share of the processor's time and publish a bounded rate of events, per source.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal

from opentelemetry.trace import SpanKind

from hami_common.admission.review import (
    ReviewRequest,
    decode_review,
    polite_warnings,
    short_message,
)
from hami_common.dra.podclaims import claim_name
from hami_common.errors import RequestInvalid, WireInvalid
from hami_common.events.decision import AdmissionRecord
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.ports import Clock
from hami_common.runtime.httpd import Request, Response, error_response
from hami_common.runtime.telemetry import Tracing, current_traceparent
from hami_common.skus.catalog import SkuCatalog
from hami_common.vendors.catalog import Catalog
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, Verdict, mutate
from hami_webhook.core.validate import (
    settled,
    validate_create,
    validate_ephemeral,
    validate_update,
)
from hami_webhook.shell import review as wire
from hami_webhook.shell.callers import Callers
from hami_webhook.shell.events import AdmissionEvents
from hami_webhook.shell.metrics import Metrics

Route = Literal["create", "update", "ephemeral", "other"]
_NAME_MOST = 253
"""Longest name, namespace or uid that an event is published for."""

_log = logging.getLogger(__name__)


def route_of(request: ReviewRequest) -> Route:
    """Return the route of ``request``."""
    if not request.is_pod():
        return "other"
    if request.operation == "CREATE" and not request.sub_resource:
        return "create"
    if request.operation == "UPDATE":
        return "ephemeral" if request.sub_resource == "ephemeralcontainers" else "update"
    return "other"


class Admission:
    """The two handlers, mutating and validating."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        policy: AdmissionPolicy,
        tracing: Tracing,
        clock: Clock,
        metrics: Metrics,
        events: AdmissionEvents,
        callers: Callers,
        skus: Callable[[], SkuCatalog | None] = lambda: None,
    ) -> None:
        """``skus`` returns the catalog of SKUs in force."""
        self._skus = skus
        self._callers = callers
        self._catalog = catalog
        self._policy = policy
        self._tracing = tracing
        self._clock = clock
        self._metrics = metrics
        self._events = events

    def use(self, policy: AdmissionPolicy) -> None:
        """Decide by ``policy`` from the next review on."""
        self._policy = policy

    async def mutate(self, request: Request, *, namespace_mode: str = "") -> Response:
        """Answer a mutating webhook's call.

        ``namespace_mode``: allocation mode by the label of the namespaces that the API server sends
        to this path.
        """
        return self._answer(request, mutating=True, namespace_mode=namespace_mode)

    async def validate(self, request: Request) -> Response:
        """Answer a validating webhook's call: the same rules, never a patch."""
        return self._answer(request, mutating=False)

    def _answer(self, request: Request, *, mutating: bool, namespace_mode: str = "") -> Response:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        source, refusal = self._callers.identify(request)
        if refusal is not None:
            return refusal
        try:
            return self._review(
                request.body, source, mutating=mutating, namespace_mode=namespace_mode
            )
        finally:
            self._callers.charge(source, time.process_time() - started_cpu_s)
            self._metrics.admission_seconds.observe(time.perf_counter() - started_s)

    def _review(self, body: bytes, source: str, *, mutating: bool, namespace_mode: str) -> Response:
        try:
            review = decode_review(body)
        except WireInvalid as error:
            self._metrics.reviews_malformed.inc()
            _log.warning("review refused", extra={"problem": str(error)})
            return error_response(status=400, code="wire-invalid", message=str(error))
        route = route_of(review)
        try:
            verdict = self._decide(
                review, route, source, mutating=mutating, namespace_mode=namespace_mode
            )
        except Exception as error:  # noqa: BLE001 - fail closed: this one request is denied
            _log.exception("admission failed", extra=_facts(review))
            verdict = Verdict(
                allowed=False,
                failed=True,
                message=(
                    f"admission of this pod failed unexpectedly ({type(error).__name__}): see the "
                    f"log of the HAMi webhook, request {review.uid}"
                ),
            )
        self._metrics.admissions.labels(operation=route, outcome=_outcome(verdict)).inc()
        return Response(body=wire.encode_verdict(review.uid, verdict))

    def _decide(
        self,
        review: ReviewRequest,
        route: Route,
        source: str,
        *,
        mutating: bool,
        namespace_mode: str,
    ) -> Verdict:
        if route == "other":
            return Verdict()
        try:
            view = wire.pod_view(review.object, field="request.object")
            with self._tracing.start_span(
                "admission" if route == "create" else f"admission.{route}",
                traceparent=view.annotations().get(keys.TRACEPARENT, ""),
                kind=SpanKind.SERVER,
                attributes={
                    "k8s.namespace.name": review.namespace or view.metadata.namespace,
                    "k8s.pod.name": review.name or view.metadata.name,
                    "hami.admission.operation": route,
                },
            ) as span:
                traceparent = current_traceparent()
                at = Circumstances(
                    traceparent=traceparent,
                    claim=claim_name(review.uid),
                    namespace_mode=namespace_mode,
                )
                verdict = self._judge(review, route, view, at if mutating else settled(view, at))
                if not mutating:
                    verdict = validate_create(verdict, view) if route == "create" else verdict
                span.set_attribute("hami.admission.allowed", verdict.allowed)
                if verdict.message:
                    span.set_attribute("hami.admission.message", verdict.message)
        except (WireInvalid, RequestInvalid) as error:
            return Verdict(allowed=False, invalid=True, message=str(error))
        if verdict.concerns_us and (mutating or not verdict.allowed):
            self._record(review, view, verdict, source=source, traceparent=traceparent)
        return verdict if mutating else verdict.without_patch()

    def _judge(
        self, review: ReviewRequest, route: Route, view: PodView, at: Circumstances
    ) -> Verdict:
        if route == "create":
            return mutate(
                wire.pod_document(review.object, field="request.object"),
                view,
                catalog=self._catalog,
                skus=self._skus(),
                policy=self._policy,
                at=at,
            )
        old = wire.pod_view(review.old_object, field="request.oldObject")
        verdict = validate_update(
            old,
            view,
            user=review.user_info.username,
            policy=self._policy,
            catalog=self._catalog,
        )
        if not verdict.allowed or route == "update":
            return verdict
        document = wire.pod_document(review.object, field="request.object")
        return validate_ephemeral(document, old, view, catalog=self._catalog)

    def _record(
        self,
        review: ReviewRequest,
        view: PodView,
        verdict: Verdict,
        *,
        source: str,
        traceparent: str,
    ) -> None:
        name = review.name or view.metadata.name or view.metadata.generate_name
        _log.info(
            "admission decided",
            extra={
                **_facts(review),
                "allowed": verdict.allowed,
                "reason": short_message(verdict.message),
            },
        )
        if review.dry_run or not self._may_publish(review, name, source):
            return
        record = AdmissionRecord(
            namespace=review.namespace or view.metadata.namespace or "default",
            pod=name,
            operation=review.operation,
            request_uid=review.uid,
            time_s=self._clock.now_s(),
            allowed=verdict.allowed,
            message=short_message(verdict.message),
            warnings=tuple(polite_warnings(verdict.warnings)),
            patch_operations=len(verdict.operations),
        )
        self._events.offer(record, traceparent=traceparent)

    def _may_publish(self, review: ReviewRequest, name: str, source: str) -> bool:
        """Return whether an event of this review may be published; counts suppressed ones."""
        if max(len(name), len(review.namespace), len(review.uid)) > _NAME_MOST:
            self._metrics.events_dropped.labels(cause="invalid").inc()
            return False
        return self._callers.may_publish(source)


def _outcome(verdict: Verdict) -> str:
    if verdict.failed:
        return "error"
    if verdict.allowed:
        return "changed" if verdict.operations else "allowed"
    return "invalid" if verdict.invalid else "denied"


def _facts(review: ReviewRequest) -> dict[str, object]:
    return {
        "namespace": review.namespace,
        "pod": review.name,
        "request_uid": review.uid,
        "operation": review.operation,
        "subresource": review.sub_resource,
        "user": review.user_info.username,
        "dry_run": bool(review.dry_run),
    }
