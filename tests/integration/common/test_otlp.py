# SPDX-License-Identifier: Apache-2.0
"""Spans reach an OTLP/HTTP collector, and nothing of the exporter is left after closing."""

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hami_common.runtime import telemetry

pytestmark = pytest.mark.anyio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        got.append((request.path, body))
        return web.Response()

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


async def test_spans_are_exported_at_the_latest_when_tracing_is_closed() -> None:
    async with collector() as (endpoint, got):
        tracing = telemetry.Tracing(service="scheduler", endpoint=endpoint, instance="s-0")
        with tracing.start_span("bind", traceparent=PARENT, attributes={"hami.node": "n1"}):
            pass
        await anyio.to_thread.run_sync(tracing.close)
    ((path, body),) = got
    assert path == "/v1/traces"
    request = ExportTraceServiceRequest.FromString(body)
    (resource,) = request.resource_spans
    assert "hami-scheduler" in str(resource.resource)
    (span,) = resource.scope_spans[0].spans
    assert span.name == "bind"
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]


async def test_a_collector_that_is_away_never_holds_up_the_service() -> None:
    tracing = telemetry.Tracing(service="scheduler", endpoint="http://127.0.0.1:1")
    before = anyio.current_time()
    for _ in range(1000):
        with tracing.start_span("bind"):
            pass
    assert anyio.current_time() - before < 2
    await anyio.to_thread.run_sync(tracing.close)
    assert anyio.current_time() - before < telemetry.CLOSE_S + 3
