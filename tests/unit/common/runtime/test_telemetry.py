# SPDX-License-Identifier: Apache-2.0
"""Logs as data, trace context, metrics registry."""

import io
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Counter, generate_latest

from hami_common.runtime import telemetry

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    telemetry.configure_logging(service="scheduler", level="INFO", stream=stream)
    yield stream
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])


def logged(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_message_level_service_and_fields(lines: io.StringIO) -> None:
    logging.getLogger("hami.x").info("pod placed", extra={"pod": "web-0", "score": 3})
    (line,) = logged(lines)
    assert line["message"] == "pod placed"
    assert (line["level"], line["service"], line["logger"]) == ("INFO", "scheduler", "hami.x")
    assert (line["pod"], line["score"]) == ("web-0", 3)
    assert line["time"].endswith("+00:00")


def test_context_fields_reach_every_line_inside_the_block_only(lines: io.StringIO) -> None:
    log = logging.getLogger("hami.x")
    with telemetry.log_context(pod="web-0"), telemetry.log_context(node="n1"):
        log.info("inside")
    log.info("outside")
    inside, outside = logged(lines)
    assert (inside["pod"], inside["node"]) == ("web-0", "n1")
    assert "pod" not in outside


def test_a_field_given_with_the_line_wins_over_the_context(lines: io.StringIO) -> None:
    with telemetry.log_context(node="outer"):
        logging.getLogger("hami.x").info("x", extra={"node": "inner"})
    assert logged(lines)[0]["node"] == "inner"


def test_lines_inside_a_span_carry_its_ids(lines: io.StringIO) -> None:
    tracing = telemetry.Tracing(service="t")
    with tracing.start_span("bind", traceparent=PARENT):
        logging.getLogger("hami.x").info("x")
    assert logged(lines)[0]["trace_id"] == PARENT.split("-")[1]


def test_exceptions_and_odd_values_stay_one_line(lines: io.StringIO) -> None:
    try:
        json.loads("two\nlines")
    except ValueError:
        logging.getLogger("hami.x").exception("failed", extra={"odd": object(), "data": {1, 2}})
    (line,) = logged(lines)
    assert "JSONDecodeError" in line["exception"]
    assert line["exception"].count("\n") > 2
    assert line["odd"].startswith("<object object")


def test_levels_below_the_setting_are_silent(lines: io.StringIO) -> None:
    logging.getLogger("hami.x").debug("detail")
    logging.getLogger("nats.aio.client").error("the client dials")
    assert logged(lines) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nNats-Msg-Id: 1",
        "00-1-2-3",
    ],
)
def test_an_invalid_traceparent_is_no_context(text: str) -> None:
    assert telemetry.extract(text) is None


def test_a_span_continues_the_callers_trace_and_hands_it_on() -> None:
    tracing = telemetry.Tracing(
        service="t", processors=(SimpleSpanProcessor(InMemorySpanExporter()),)
    )
    assert telemetry.current_traceparent() == ""
    with tracing.start_span("outer", traceparent=PARENT):
        outer = telemetry.current_traceparent()
        with tracing.start_span("inner"):
            inner = telemetry.current_traceparent()
    assert telemetry.current_traceparent() == ""
    assert outer.split("-")[1] == inner.split("-")[1] == PARENT.split("-")[1]
    assert len({PARENT, outer, inner}) == 3


def test_incoming_trace_is_forwarded_without_a_collector() -> None:
    tracing = telemetry.Tracing(service="t")
    assert not tracing.is_recording
    with tracing.start_span("outer", traceparent=PARENT) as span:
        assert not span.is_recording()
        assert not telemetry.current_span().is_recording()
        assert telemetry.current_traceparent() == PARENT
        with tracing.start_span("inner", traceparent="nonsense"):
            assert telemetry.current_traceparent() == PARENT
        assert telemetry.current_traceparent() == PARENT
    assert telemetry.current_traceparent() == ""


def test_without_a_collector_the_library_that_makes_spans_is_not_even_loaded() -> None:
    program = (
        "import sys\n"
        "from hami_common.runtime.telemetry import Tracing\n"
        "with Tracing(service='t').start_span('x'): pass\n"
        "sys.exit('opentelemetry.sdk' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_a_collector_a_span_costs_a_small_part_of_a_real_one() -> None:
    def cost_s(tracing: telemetry.Tracing) -> float:
        tries = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200):
                with tracing.start_span("filter", traceparent=PARENT, attributes={"a": "b"}):
                    telemetry.current_traceparent()
            tries.append(time.perf_counter() - begin)
        return min(tries)

    exporter = SimpleSpanProcessor(InMemorySpanExporter())
    real = cost_s(telemetry.Tracing(service="t", processors=(exporter,)))
    assert cost_s(telemetry.Tracing(service="t")) * 5 < real


@pytest.mark.parametrize("is_recording", [False, True], ids=["carried", "recorded"])
def test_finished_span_is_recorded_with_its_times(*, is_recording: bool) -> None:
    exporter = InMemorySpanExporter()
    tracing = telemetry.Tracing(
        service="t", processors=(SimpleSpanProcessor(exporter),) if is_recording else ()
    )
    handed_on = tracing.record(
        "allocate", traceparent=PARENT, begin_s=10.5, end_s=10.0, problem="no room"
    )
    assert tracing.record("x", traceparent="nonsense", begin_s=1, end_s=2) == ""
    if not is_recording:
        assert handed_on == PARENT
        return
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (10_500_000_000, 10_500_000_000)
    assert span.status.description == "no room"
    assert handed_on.split("-")[1] == PARENT.split("-")[1]
    assert span.context is not None
    assert handed_on.split("-")[2] == f"{span.context.span_id:016x}"


def is_sampled(traceparent: str) -> bool:
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


def test_part_of_the_traces_is_recorded_and_others_follow() -> None:
    exporter = InMemorySpanExporter()
    processors = (SimpleSpanProcessor(exporter),)
    tracing = telemetry.Tracing(service="t", ratio=0.0, processors=processors)
    with tracing.start_span("mine"):
        assert is_sampled(telemetry.current_traceparent()) is False
    with tracing.start_span("theirs", traceparent=PARENT):
        assert is_sampled(telemetry.current_traceparent()) is True
    assert [span.name for span in exporter.get_finished_spans()] == ["theirs"]


@pytest.mark.parametrize("is_recording", [False, True], ids=["carried", "recorded"])
def test_without_a_parent_a_new_trace_begins(*, is_recording: bool) -> None:
    processors = (SimpleSpanProcessor(InMemorySpanExporter()),)
    tracing = telemetry.Tracing(service="t", processors=processors if is_recording else ())
    seen = set()
    for _ in range(2):
        with tracing.start_span("root", traceparent="nonsense"):
            assert telemetry.extract(telemetry.current_traceparent()) is not None
            seen.add(telemetry.current_traceparent().split("-")[1])
    assert len(seen) == 2


def test_spans_carry_service_attributes_and_errors() -> None:
    exporter = InMemorySpanExporter()
    tracing = telemetry.Tracing(
        service="scheduler", instance="s-0", processors=(SimpleSpanProcessor(exporter),)
    )

    def bind() -> None:
        with tracing.start_span("bind", attributes={"hami.node": "n1"}) as span:
            span.set_attribute("hami.tries", 2)
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        bind()
    tracing.close()
    (finished,) = exporter.get_finished_spans()
    assert finished.name == "bind"
    assert dict(finished.attributes or {}) == {"hami.node": "n1", "hami.tries": 2}
    assert finished.status.description == "no room"
    assert finished.resource.attributes["service.name"] == "hami-scheduler"
    assert finished.resource.attributes["service.instance.id"] == "s-0"


def test_without_a_collector_no_thread_is_started() -> None:
    before = threading.active_count()
    tracing = telemetry.Tracing(service="t")
    with tracing.start_span("x"):
        assert threading.active_count() == before
    tracing.close()


def test_each_registry_is_fresh_and_names_the_build() -> None:
    first, second = (telemetry.make_registry(service="s", version="1.2") for _ in range(2))
    Counter("hami_s_things", "Things", registry=first).inc()
    text = generate_latest(first).decode()
    assert "hami_s_things_total 1.0" in text
    assert 'hami_build_info{service="s",version="1.2"} 1.0' in text
    assert "process_cpu_seconds_total" in text
    assert "hami_s_things" not in generate_latest(second).decode()
