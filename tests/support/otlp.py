# SPDX-License-Identifier: Apache-2.0
"""A collector for tests: receives OTLP/HTTP, stores every span with the service that sent it.

Bodies are decoded with the protobuf classes of the OTLP specification, independently of the
exporter.
"""

import gzip
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from msgspec import Struct
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")


class Span(Struct, frozen=True, kw_only=True):
    """One span as it arrived."""

    service: str
    instance: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    """Empty: the root of its trace."""
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    problem: str
    """Empty: no error."""


class Collector:
    """Spans that arrived so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.requests = 0
        self.status = 200
        """Status of the answer; spans of requests that are not answered with 200 are dropped."""
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.requests += 1
        if (request.method, request.path) != ("POST", "/v1/traces"):
            return web.Response(status=404)
        if self.status == 200:
            self.spans.extend(_spans_of(ExportTraceServiceRequest.FromString(body)))
        return web.Response(status=self.status)


@asynccontextmanager
async def run_collector(port: int = 0) -> AsyncIterator[Collector]:
    """A collector on ``port`` of the loopback, 0: any."""
    collector = Collector()
    runner = web.ServerRunner(web.Server(collector.handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        await runner.cleanup()


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        about = {one.key: _value(one.value) for one in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield Span(
                service=about["service.name"],
                instance=about.get("service.instance.id", ""),
                name=span.name,
                kind=_KINDS[span.kind],
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                begin_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
                attributes={one.key: _value(one.value) for one in span.attributes},
                problem=(span.status.message or "error") if span.status.code == 2 else "",
            )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
