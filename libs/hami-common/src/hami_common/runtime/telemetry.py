# SPDX-License-Identifier: Apache-2.0
"""Logs as JSON lines, traces as OpenTelemetry spans, metrics as a Prometheus registry.

Log messages are constant; what varies goes into fields (``extra=``) or into ``log_context``, which
reaches every line written inside its block. Without a collector no span leaves the process and no
thread is started, yet trace ids exist, so that a traceparent is always passed on (design D35).
Formats: W3C Trace Context level 1, OTLP/HTTP, Prometheus text.
"""

import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Info
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

__all__ = [
    "JsonFormatter",
    "Tracing",
    "configure_logging",
    "current_traceparent",
    "extract",
    "log_context",
    "make_registry",
]

CLOSE_S = 3.0
"""Longest time for the export of the last spans."""

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_propagator = TraceContextTextMapPropagator()
_NO_FIELDS: Mapping[str, object] = MappingProxyType({})
_fields: ContextVar[Mapping[str, object]] = ContextVar("hami_log_fields", default=_NO_FIELDS)
_encoder = msgspec.json.Encoder(enc_hook=str)

AttributeValue = str | int | float | bool


@contextmanager
def log_context(**fields: object) -> Iterator[None]:
    """Put ``fields`` (pod, node, …) on every log line written inside the block."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, then all fields."""

    def __init__(self, *, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """JSON text of ``record``."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields.get(),
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = f"{span.trace_id:032x}"
            line["span_id"] = f"{span.span_id:016x}"
        line |= {name: v for name, v in record.__dict__.items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


def configure_logging(*, service: str, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send all log lines to ``stream`` (standard error) as JSON; replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service=service))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # The client reports every failed dial here; our own connection loop logs the change of state.
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def make_registry(*, service: str, version: str = "") -> CollectorRegistry:
    """Fresh metrics registry of one service, with figures of process, collector and platform."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    info = Info("hami_build", "Which service and version this process runs", registry=registry)
    info.info({"service": service, "version": version})
    return registry


def extract(traceparent: str) -> Context | None:
    """Trace context of a W3C traceparent; ``None`` when it is empty or not valid."""
    if not traceparent:
        return None
    context = _propagator.extract({"traceparent": traceparent})
    if not trace.get_current_span(context).get_span_context().is_valid:
        return None
    return context


def current_traceparent() -> str:
    """W3C traceparent of the span we are in; empty outside any span."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent", "")


class Tracing:
    """Makes the spans of one service. Close it at the end, so that the last spans are exported."""

    def __init__(
        self,
        *,
        service: str,
        endpoint: str = "",
        instance: str = "",
        processors: tuple[SpanProcessor, ...] = (),
    ) -> None:
        """Export to the OTLP/HTTP collector at ``endpoint`` (empty: nowhere) and ``processors``."""
        attributes = {"service.namespace": "hami", "service.name": f"hami-{service}"}
        if instance:
            attributes["service.instance.id"] = instance
        self._provider = TracerProvider(
            resource=Resource.create(attributes), shutdown_on_exit=False
        )
        self._exporter: OTLPSpanExporter | None = None
        if endpoint:
            self._exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(f"hami_{service}")

    @contextmanager
    def start_span(
        self,
        name: str,
        *,
        traceparent: str = "",
        attributes: Mapping[str, AttributeValue] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Iterator[Span]:
        """A span around the block: child of ``traceparent`` if valid, else of the current span."""
        with self._tracer.start_as_current_span(
            name,
            context=extract(traceparent),
            kind=kind,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, str(error)))
                raise

    def close(self) -> None:
        """Export what is left and end the exporter's thread; blocks for ``CLOSE_S`` or so."""
        if self._exporter is None:
            self._provider.shutdown()
            return
        # Left alone, the library tries each batch for ten seconds when the collector is away.
        giving_up = threading.Timer(CLOSE_S, self._exporter.shutdown)
        giving_up.start()
        self._provider.shutdown()
        giving_up.cancel()
        giving_up.join()
