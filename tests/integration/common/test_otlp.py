# SPDX-License-Identifier: Apache-2.0
"""Spans reach an OTLP/HTTP collector, also after an outage of it, and never block the service."""

import time

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from hami_common.runtime import otlp, telemetry
from hami_sim.ports import free_port
from tests.support.otlp import Collector, run_collector

pytestmark = pytest.mark.anyio

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def until_spans(collector: Collector, count: int, *, limit_s: float = 20) -> None:
    with anyio.fail_after(limit_s):
        while len(collector.spans) < count:
            await anyio.sleep(0.02)


async def close(tracing: telemetry.Tracing) -> None:
    await anyio.to_thread.run_sync(tracing.close)


async def test_spans_are_exported_at_the_latest_when_tracing_is_closed() -> None:
    async with run_collector() as collector:
        tracing = telemetry.Tracing(
            service="scheduler", endpoint=collector.endpoint, instance="s-0"
        )
        with tracing.start_span("bind", traceparent=PARENT, attributes={"hami.node": "n1"}):
            pass
        await close(tracing)
    (span,) = collector.spans
    assert (span.service, span.instance, span.name) == ("hami-scheduler", "s-0", "bind")
    assert (span.trace, span.parent) == tuple(PARENT.split("-")[1:3])
    assert span.attributes == {"hami.node": "n1"}


async def test_spans_made_during_an_outage_of_the_collector_arrive_after_it() -> None:
    port = free_port()
    registry = CollectorRegistry()
    tracing = telemetry.Tracing(service="t", endpoint=f"http://127.0.0.1:{port}", registry=registry)
    try:
        for _ in range(2000):
            with tracing.start_span("bind"):
                pass
        await anyio.sleep(1.5)  # long enough for the first attempts to fail
        async with run_collector(port) as collector:
            await until_spans(collector, 2000)
            assert len({span.id for span in collector.spans}) == 2000
    finally:
        await close(tracing)
    assert registry.get_sample_value("hami_spans_sent_total") == 2000
    assert registry.get_sample_value("hami_spans_lost_total", {"cause": "queue-full"}) == 0


async def test_spans_that_the_collector_refuses_for_a_while_are_not_lost() -> None:
    async with run_collector() as collector:
        collector.status = 503
        tracing = telemetry.Tracing(service="t", endpoint=collector.endpoint)
        try:
            with tracing.start_span("bind"):
                pass
            with anyio.fail_after(20):
                while not collector.requests:
                    await anyio.sleep(0.02)
            collector.status = 200
            await until_spans(collector, 1)
        finally:
            await close(tracing)


async def test_an_unavailable_collector_never_blocks_the_service() -> None:
    tracing = telemetry.Tracing(service="scheduler", endpoint="http://127.0.0.1:1")
    before = anyio.current_time()
    for _ in range(1000):
        with tracing.start_span("bind"):
            pass
    assert anyio.current_time() - before < 5
    await close(tracing)
    assert anyio.current_time() - before < otlp.CLOSE_S + otlp.ATTEMPT_S + 15


class Stubborn(SpanExporter):
    """Takes nothing until ``takes`` is set."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.takes = False

    def export(self, spans: object) -> SpanExportResult:
        assert isinstance(spans, list)
        if not self.takes:
            return SpanExportResult.FAILURE
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.takes = False


def test_a_full_queue_drops_and_counts_instead_of_growing() -> None:
    exporter, registry, provider = Stubborn(), CollectorRegistry(), TracerProvider()
    queue = otlp.SpanQueue(exporter, registry=registry, delay_s=0.01, queue=5)
    provider.add_span_processor(queue)
    for number in range(9):
        provider.get_tracer("t").start_span(f"s{number}").end()
    assert registry.get_sample_value("hami_spans_lost_total", {"cause": "queue-full"}) == 4
    exporter.takes = True
    assert queue.force_flush(30_000)
    assert exporter.taken == ["s0", "s1", "s2", "s3", "s4"]
    provider.shutdown()


def test_a_rejected_batch_delays_the_others_only_for_a_while() -> None:
    exporter, registry, provider = Stubborn(), CollectorRegistry(), TracerProvider()
    queue = otlp.SpanQueue(exporter, registry=registry, delay_s=0.01, hold_s=0.2)
    provider.add_span_processor(queue)
    provider.get_tracer("t").start_span("poison").end()
    end_s = time.monotonic() + 30
    while not registry.get_sample_value("hami_spans_lost_total", {"cause": "not-taken"}):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    exporter.takes = True
    provider.get_tracer("t").start_span("fine").end()
    assert queue.force_flush(30_000)
    assert exporter.taken == ["fine"]
    provider.shutdown()
