# SPDX-License-Identifier: Apache-2.0
"""Logs as JSON lines, metrics as a Prometheus registry; traces are in ``tracing``.

Log messages are constant; variable data goes into fields (``extra=``) or into ``log_context``,
which adds fields to every line written inside its block; a line inside a span has its ids. Formats:
JSON lines, Prometheus text.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

import msgspec
from prometheus_client import CollectorRegistry, Info
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from hami_common.runtime.tracing import Tracing, carry, current_span, current_traceparent, extract

__all__ = [
    "JsonFormatter",
    "Tracing",
    "carry",
    "configure_logging",
    "current_span",
    "current_traceparent",
    "extract",
    "log_context",
    "make_registry",
]

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_NO_FIELDS: Mapping[str, object] = MappingProxyType({})
_fields: ContextVar[Mapping[str, object]] = ContextVar("hami_log_fields", default=_NO_FIELDS)
_encoder = msgspec.json.Encoder(enc_hook=str)


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
        traceparent = current_traceparent()
        if traceparent:
            _, line["trace_id"], line["span_id"], _ = traceparent.split("-")
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
    """Fresh metrics registry of one service, with metrics of process, collector and platform."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    info = Info("hami_build", "Service and version of this process", registry=registry)
    info.info({"service": service, "version": version})
    return registry
