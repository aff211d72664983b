# SPDX-License-Identifier: Apache-2.0
"""Messages about idle allocations while the ledger is read again."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.idle import IdleRecord
from hami_common.events.usage import UsageRecord
from hami_common.ports import Entry
from hami_common.runtime.natsio.history import Event
from hami_registry.core.projection import Projection
from hami_registry.shell import idle
from hami_registry.shell.idle import IdleWatch
from hami_registry.shell.metrics import Metrics
from hami_registry.shell.views import Views
from tests.support.manualclock import ManualClock
from tests.support.registry import quarantine
from tests.unit.registry.core.test_idle import (
    DEVICES,
    HALF_HOUR_S,
    MINUTE_S,
    allocation,
    sample,
)

pytestmark = pytest.mark.anyio


class Script:
    """The event stream: samples, and what happens between them."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.steps: list[Any] = []
        self.count = 0

    @asynccontextmanager
    async def read(self, *_: Any, **__: Any) -> AsyncIterator["Script"]:
        yield self

    def __aiter__(self) -> "Script":
        return self

    async def __anext__(self) -> Event:
        raise StopAsyncIteration

    async def follow(self, *_: Any, **__: Any) -> AsyncIterator[Event]:
        for number, step in enumerate(self.steps):
            if not isinstance(step, UsageRecord):
                await step()
                continue
            await self.clock.advance(max(0.0, step.time_s + 1 - self.clock.now_s()))
            yield Event(
                sequence=number + 1,
                stored_s=step.time_s,
                subject=subjects.usage_event("n"),
                headers={},
                data=codec.encode(step),
            )


async def test_end_of_a_period_is_published_although_the_ledger_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, metrics, isolated = ManualClock(now_s=0.0), Metrics(CollectorRegistry()), quarantine()
    stored: list[IdleRecord] = []

    async def store(_: Any, subject: str, data: bytes, **__: Any) -> int:
        stored.append(codec.decode(data, IdleRecord, what=subject))
        return len(stored)

    async def identify(_: str) -> str:
        return "stream"

    class Fleet:
        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *_, **__: None

    anything: Any = Fleet()
    views = Views(
        projection=Projection(liveness_s=15.0),
        clock=clock,
        metrics=metrics,
        quarantine=isolated,
        queue_size=1,
        places=anything,
        fleet=anything,
        identify=identify,
    )
    key = subjects.allocation_key("n", "u")
    record = Entry(key=key, value=codec.encode(allocation()), revision=5)

    async def read() -> None:
        views.ledger.entry(record)
        await views.ledger.synced()

    async def lost() -> None:
        views.ledger.reset()

    devices = Entry(
        key=subjects.devices_key("n", "nvidia"), value=codec.encode(DEVICES), revision=1
    )
    views.devices.entry(devices)
    monkeypatch.setattr(idle, "store", store)
    script = Script(clock)
    anything = script
    watch = IdleWatch(
        bus=anything,
        history=anything,
        views=views,
        after_s=HALF_HOUR_S,
        replica="r",
        clock=clock,
        metrics=metrics,
        quarantine=isolated,
    )
    trace = [sample(MINUTE_S * i, 7.0) for i in range(40)]
    worked = [sample(MINUTE_S * i, 7.0 + i) for i in range(40, 43)]
    script.steps = [read, *trace, lost, worked[0], read, *worked[1:]]
    await watch.run()
    assert [one.change for one in stored] == ["idle", "active"]
    assert stored[1].since_s == stored[0].since_s
