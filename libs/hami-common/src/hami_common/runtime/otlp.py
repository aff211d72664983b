# SPDX-License-Identifier: Apache-2.0
"""Sends spans to an OTLP/HTTP collector, from a thread of its own, without blocking callers.

Spans wait in a bounded queue. While the collector does not answer they are kept, up to ``QUEUE`` of
them, and are sent when it answers again. A batch that fails for ``HOLD_S`` is dropped, so a batch
that the collector rejects permanently does not block later ones. Dropped spans are counted. Only
``tracing`` uses this module, and only where a collector is configured. Headers, certificates and
compression come from the standard environment (``OTEL_EXPORTER_OTLP_HEADERS``, ``…_CERTIFICATE``,
…). Times in seconds. Obeys OTLP 1 over HTTP with protobuf payload.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping
from time import monotonic

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry, Counter

QUEUE = 8192
"""Spans kept while the collector is unavailable: about 12 MiB."""
BATCH = 512
DELAY_S = 1.0
"""Time that a span waits for others in the same batch."""
HOLD_S = 300.0
"""Longest time for which the same batch is retried."""
ATTEMPT_S = 3.0
"""Longest time for one attempt."""
CLOSE_S = 3.0
"""Longest time for the export of the last spans."""
_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.5, 10.0

_log = logging.getLogger(__name__)


def make_provider(
    attributes: Mapping[str, str],
    *,
    endpoint: str,
    ratio: float,
    registry: CollectorRegistry | None,
    processors: tuple[SpanProcessor, ...],
) -> TracerProvider:
    """Provider of a service with these resource attributes."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create(dict(attributes)),
        shutdown_on_exit=False,
    )
    if endpoint:
        # The library reports every failed attempt; the queue logs the change of state.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=ATTEMPT_S)
        provider.add_span_processor(SpanQueue(exporter, registry=registry))
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


class SpanQueue(SpanProcessor):
    """Stores ended spans until the exporter has sent them."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        registry: CollectorRegistry | None = None,
        hold_s: float = HOLD_S,
        delay_s: float = DELAY_S,
        queue: int = QUEUE,
    ) -> None:
        self._exporter = exporter
        self._hold_s = hold_s
        self._delay_s = delay_s
        self._queue = queue
        self._waiting: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._sent = Counter(
            "hami_spans_sent", "Spans that the collector has taken.", registry=registry
        )
        self._lost = Counter(
            "hami_spans_lost",
            "Spans that were dropped: the queue was full, or the collector did not take them.",
            ["cause"],
            registry=registry,
        )
        for cause in ("queue-full", "not-taken"):
            self._lost.labels(cause=cause)
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="hami-otlp", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Do nothing: a span counts when it has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        """Enqueue a span; never waits."""
        if self._closing.is_set() or not span.context.trace_flags.sampled:
            return
        if len(self._waiting) >= self._queue:
            self._lost.labels(cause="queue-full").inc()
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH:
            self._wake.set()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True when all waiting spans were sent in time."""
        end_s = monotonic() + timeout_millis / 1000
        self._wake.set()
        while self._waiting and monotonic() < end_s:
            self._closing.wait(0.01)
        return not self._waiting

    def shutdown(self) -> None:
        """Send waiting spans, stop after ``CLOSE_S``, end the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # ends an attempt in progress
        self._thread.join(ATTEMPT_S)

    def _run(self) -> None:
        while True:
            if len(self._waiting) < BATCH:
                self._wake.wait(self._delay_s)
            self._wake.clear()
            is_last = self._closing.is_set()
            while self._waiting:
                # Removed only after it was sent: waiting spans count against the bound.
                batch = [self._waiting[i] for i in range(min(BATCH, len(self._waiting)))]
                if self._deliver(batch):
                    self._sent.inc(len(batch))
                else:
                    self._lost.labels(cause="not-taken").inc(len(batch))
                for _ in batch:
                    self._waiting.popleft()
            if is_last:
                return

    def _deliver(self, batch: list[ReadableSpan]) -> bool:
        """Retry until the batch is sent, expired, or the service ends."""
        pause_s = _PAUSE_FIRST_S
        end_s = monotonic() + (CLOSE_S if self._closing.is_set() else self._hold_s)
        while True:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
            if taken is self._is_away:
                self._is_away = not taken
                _log.log(
                    logging.INFO if taken else logging.WARNING,
                    "collector takes spans again" if taken else "collector takes no spans",
                    extra={"waiting": len(self._waiting)},
                )
            if taken:
                return True
            if self._closing.is_set() or monotonic() + pause_s > end_s:
                return False
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)
