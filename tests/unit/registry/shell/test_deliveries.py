# SPDX-License-Identifier: Apache-2.0
"""A message whose handling fails is delivered again, then dead-lettered; others go on meanwhile."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.runtime.natsio import Delivery
from hami_registry.shell.deliveries import DELIVERIES_MOST, Deliveries
from hami_registry.shell.metrics import Metrics
from tests.support.registry import quarantine

pytestmark = pytest.mark.anyio


class Letters:
    """Stores dead letters, unless the test makes it fail."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.is_available = True

    async def publish(self, *args: Any, **more: Any) -> None:
        raise NotImplementedError

    async def publish_stored(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        message_id: str = "",
    ) -> int:
        del message_id
        if not self.is_available:
            raise Unavailable(peer="bus", detail="the test says so")
        self.stored.append((subject, data, headers or {}))
        return len(self.stored)


class Fake:
    """A delivery that records how it was acknowledged."""

    def __init__(self, subject: str, delivered_count: int = 1) -> None:
        self.subject = subject
        self.data = b"payload"
        self.headers: Mapping[str, str] = {}
        self.sequence = 7
        self.delivered_count = delivered_count
        self.ended: list[tuple[str, float]] = []

    async def ack(self) -> None:
        self.ended.append(("ack", 0.0))

    async def nak(self, *, delay_s: float = 0.0) -> None:
        self.ended.append(("nak", delay_s))


class Bench:
    def __init__(self) -> None:
        self.letters = Letters()
        self.metrics = Metrics(CollectorRegistry())
        self.quarantine = quarantine()
        self.handled: list[str] = []
        self.deliveries = Deliveries(
            kind="report",
            stream=subjects.REPORTS_STREAM,
            key=lambda delivery: delivery.subject,
            handle=self.handle,
            quarantine=self.quarantine,
            publisher=self.letters,
            metrics=self.metrics,
        )

    async def handle(self, delivery: Delivery) -> None:
        if delivery.subject == "bad":
            raise RuntimeError("odd")
        self.handled.append(delivery.subject)
        await delivery.ack()

    async def pass_through(self, *fakes: Fake) -> None:
        async def source() -> AsyncIterator[Delivery]:
            for one in fakes:
                yield cast("Delivery", one)

        await self.deliveries.each(source())


async def test_a_message_that_fails_is_delivered_again_with_growing_pauses() -> None:
    bench = Bench()
    failing = [Fake("bad", count) for count in range(1, DELIVERIES_MOST)]
    await bench.pass_through(*failing, Fake("good"))
    assert [one.ended for one in failing] == [[("nak", 2.0**count)] for count in (1, 2, 3, 4)]
    assert bench.handled == ["good"]
    assert [entry.key for entry in bench.quarantine.entries()] == ["bad"]


async def test_a_message_that_keeps_failing_is_dead_lettered_with_the_reason() -> None:
    bench = Bench()
    last = Fake("bad", DELIVERIES_MOST)
    await bench.pass_through(last, Fake("good"))
    ((subject, data, headers),) = bench.letters.stored
    assert subject == subjects.dead_letter("registry", "bad")
    assert data == b"payload"
    assert headers["hami-reason"] == "max-deliveries"
    assert "RuntimeError: odd" in headers["hami-problem"]
    assert last.ended == [("ack", 0.0)]
    assert bench.quarantine.entries() == []
    assert bench.handled == ["good"]


async def test_a_message_is_kept_on_the_bus_until_its_dead_letter_is_stored() -> None:
    bench = Bench()
    bench.letters.is_available = False
    last = Fake("bad", DELIVERIES_MOST)
    await bench.pass_through(last, Fake("good"))
    assert [how for how, _ in last.ended] == ["nak"]
    assert bench.handled == ["good"]
