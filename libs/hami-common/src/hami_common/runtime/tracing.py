# SPDX-License-Identifier: Apache-2.0
"""Spans of one service, and the traceparent that they propagate (design D35).

Without a collector no span is created: a traceparent from the caller is kept through the block and
propagated unchanged, which costs about as much as setting a variable. With one, spans are created
by the OpenTelemetry SDK, which is loaded only then. When the caller passed no traceparent, a new
trace begins either way, so that events and log lines of one pod can be joined. Times in Unix
seconds. Obeys W3C Trace Context level 1; ``tracestate`` is not propagated.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from random import getrandbits
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

__all__ = ["Tracing", "carry", "current_span", "current_traceparent", "extract"]

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]

_NS = 1_000_000_000
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_current: ContextVar[str] = ContextVar("hami_traceparent", default="")


def current_traceparent() -> str:
    """W3C traceparent of the current span, or of the caller; empty outside any span."""
    return _current.get()


def current_span() -> Span:
    """The current span; one that records nothing outside any span or without a collector."""
    return trace.get_current_span() if _current.get() else INVALID_SPAN


def extract(traceparent: str) -> Context | None:
    """Trace context of a W3C traceparent; ``None`` when it is empty or not valid."""
    if _TRACEPARENT.fullmatch(traceparent) is None:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    remote = SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
    )
    return trace.set_span_in_context(NonRecordingSpan(remote), Context())


def _traceparent_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _new_traceparent() -> str:
    """Begin a trace; ids need not be secret. The top bits keep them from being zero."""
    return f"00-{getrandbits(127) | 1 << 127:032x}-{getrandbits(63) | 1 << 63:016x}-01"


class _Carry:
    """A block without a span: the caller's traceparent stays current."""

    __slots__ = ("_token", "_traceparent")

    def __init__(self, traceparent: str) -> None:
        self._traceparent = traceparent
        self._token: Token[str] | None = None

    def __enter__(self) -> Span:
        self._token = _current.set(self._traceparent)
        return INVALID_SPAN

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


def carry(traceparent: str) -> AbstractContextManager[Span]:
    """A block in which ``traceparent`` is current for log lines and messages, without a span."""
    return _Carry(traceparent if _TRACEPARENT.fullmatch(traceparent) is not None else "")


class Tracing:
    """Creates the spans of one service.

    Close it at the end, so that the last spans are exported.
    """

    def __init__(
        self,
        *,
        service: str,
        endpoint: str = "",
        instance: str = "",
        ratio: float = 1.0,
        registry: CollectorRegistry | None = None,
        processors: "tuple[SpanProcessor, ...]" = (),
    ) -> None:
        """Export to the OTLP/HTTP collector at ``endpoint`` (empty: nowhere) and ``processors``.

        ``ratio`` of the traces that begin here are recorded; others follow the caller's decision.
        """
        self._tracer: trace.Tracer | None = None
        if not endpoint and not processors:
            return
        from hami_common.runtime import otlp  # noqa: PLC0415 - memory that only who exports needs

        attributes = {"service.namespace": "hami", "service.name": f"hami-{service}"}
        if instance:
            attributes["service.instance.id"] = instance
        self._provider = otlp.make_provider(
            attributes, endpoint=endpoint, ratio=ratio, registry=registry, processors=processors
        )
        self._tracer = self._provider.get_tracer(f"hami_{service}")

    @property
    def is_recording(self) -> bool:
        """True when spans are created."""
        return self._tracer is not None

    def start_span(
        self,
        name: str,
        *,
        traceparent: str = "",
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        begins: bool = True,
    ) -> AbstractContextManager[Span]:
        """A span around the block: child of ``traceparent`` if valid, else of the current span.

        Where there is neither, a trace begins, or with ``begins`` false there is no span.
        """
        if not traceparent or _TRACEPARENT.fullmatch(traceparent) is None:
            traceparent = _current.get()
            if not traceparent and not begins:
                return _Carry("")
        if self._tracer is None:
            return _Carry(traceparent or _new_traceparent())
        return self._span(self._tracer, name, traceparent, attributes, kind)

    @contextmanager
    def _span(
        self,
        tracer: trace.Tracer,
        name: str,
        traceparent: str,
        attributes: Attributes | None,
        kind: SpanKind,
    ) -> Iterator[Span]:
        with tracer.start_as_current_span(
            name,
            context=extract(traceparent),
            kind=kind,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            token = _current.set(_traceparent_of(span))
            try:
                yield span
            except Exception as error:
                span.set_status(Status(StatusCode.ERROR, str(error)))
                raise
            finally:
                _current.reset(token)

    def record(
        self,
        name: str,
        *,
        traceparent: str,
        begin_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        problem: str = "",
    ) -> str:
        """Record a finished span as a child of ``traceparent``; return its own traceparent.

        Without a collector, or without a valid ``traceparent``, returns ``traceparent`` unchanged.
        """
        context = extract(traceparent) if self._tracer is not None else None
        if self._tracer is None or context is None:
            return traceparent if _TRACEPARENT.fullmatch(traceparent) is not None else ""
        span = self._tracer.start_span(
            name, context, kind=kind, attributes=attributes, start_time=int(begin_s * _NS)
        )
        if problem:
            span.set_status(Status(StatusCode.ERROR, problem))
        span.end(max(int(begin_s * _NS), int(end_s * _NS)))
        return _traceparent_of(span)

    def close(self) -> None:
        """Export the last spans, end the exporter's thread; blocks for about ``otlp.CLOSE_S``."""
        if self._tracer is not None:
            self._provider.shutdown()
