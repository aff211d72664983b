# SPDX-License-Identifier: Apache-2.0
"""The event queue: never blocks, keeps order, survives outages, drops only refused events."""

from collections.abc import Mapping

import anyio
import pytest
from prometheus_client import CollectorRegistry

from hami_common.errors import Denied, NotFound, Unavailable
from hami_common.events import codec
from hami_common.events.decision import AdmissionRecord
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.quarantine import Quarantine
from hami_webhook.shell.events import AdmissionEvents
from hami_webhook.shell.metrics import KINDS, Metrics
from tests.support.memorybus import MemoryBus, MemoryPublisher

pytestmark = pytest.mark.anyio


def record(number: int, pod: str = "p") -> AdmissionRecord:
    return AdmissionRecord(
        namespace="ns",
        pod=pod,
        operation="CREATE",
        request_uid=f"uid-{number}",
        time_s=0.0,
        allowed=True,
    )


def uid_of(data: bytes) -> str:
    return codec.decode(data, AdmissionRecord, what="event").request_uid


def queue(limit: int = 8) -> tuple[AdmissionEvents, Metrics]:
    metrics = Metrics(CollectorRegistry())
    quarantine = Quarantine(kinds=KINDS, clock=SystemClock(), registry=metrics.registry)
    events = AdmissionEvents(
        source="/webhook/w", limit=limit, metrics=metrics, quarantine=quarantine
    )
    return events, metrics


def dropped(metrics: Metrics, cause: str) -> float | None:
    name = "hami_webhook_events_dropped_total"
    return metrics.registry.get_sample_value(name, {"cause": cause})


async def test_full_queue_drops_the_new_record_and_counts_it() -> None:
    events, metrics = queue(limit=2)
    for number in range(5):
        events.offer(record(number), traceparent="")
    bus = MemoryBus()
    events.end()
    await events.run(MemoryPublisher(bus))
    assert [uid_of(m.data) for m in bus.published] == ["uid-0", "uid-1"]
    assert dropped(metrics, "queue-full") == 3
    events.close()


async def test_queue_without_a_bus_drops_instead_of_failing() -> None:
    events, metrics = queue()
    events.close()
    events.offer(record(1), traceparent="")
    assert dropped(metrics, "no-bus") == 1


class Troubled:
    """A publisher that raises the configured error, then stores."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.stored: list[str] = []

    async def publish(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        raise AssertionError(subject)

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str = "",
    ) -> int:
        if self.troubles:
            raise self.troubles.pop(0)
        assert headers is not None
        assert headers["ce-id"] == message_id
        self.stored.append(uid_of(data))
        return len(self.stored)


async def test_record_waits_for_the_bus_and_keeps_its_place() -> None:
    events, metrics = queue()
    events.offer(record(1), traceparent="")
    events.offer(record(2), traceparent="")
    events.end()
    publisher = Troubled(Unavailable(peer="bus", detail="away"), NotFound(what="stream"))
    with anyio.fail_after(3):
        await events.run(publisher)
    assert publisher.stored == ["uid-1", "uid-2"]
    assert dropped(metrics, "refused") is None
    events.close()


async def test_refused_record_does_not_stop_the_next() -> None:
    events, metrics = queue()
    events.offer(record(1), traceparent="")
    events.offer(record(2, pod="not a name"), traceparent="")
    events.offer(record(3), traceparent="")
    events.end()
    publisher = Troubled(Denied(peer="bus", detail="too large"))
    with anyio.fail_after(3):
        await events.run(publisher)
    assert publisher.stored == ["uid-3"]
    assert dropped(metrics, "refused") == 2
    events.close()


async def test_id_of_an_event_is_not_the_callers_choice() -> None:
    events, _ = queue()
    for _ in range(2):
        events.offer(record(1), traceparent="")
    bus = MemoryBus()
    events.end()
    await events.run(MemoryPublisher(bus))
    ids = {m.headers["ce-id"] for m in bus.published}
    assert len(ids) == 2
    assert "uid-1" not in ids
    events.close()


async def test_record_that_cannot_be_published_does_not_end_the_queue() -> None:
    events, metrics = queue()
    events.offer(record(1), traceparent="")
    events.offer(record(2), traceparent="")
    events.end()
    publisher = Troubled(ValueError("no such thing"))
    with anyio.fail_after(3):
        await events.run(publisher)
    assert publisher.stored == ["uid-2"]
    assert dropped(metrics, "error") == 1
    events.close()
