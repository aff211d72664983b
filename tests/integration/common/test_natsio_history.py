# SPDX-License-Identifier: Apache-2.0
"""Events of the last days, read on demand from a real nats-server."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.usage import UsageRecord
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import Bus, NatsPublisher, connect, ensure_bus
from hami_common.runtime.natsio.history import Bounds, History
from hami_sim.natsd import NatsServer

pytestmark = pytest.mark.anyio

USAGE = (f"{subjects.EVENT_PREFIX}.usage.*",)
WIDE = Bounds(messages=1000, mib=16, time_s=10.0)


@asynccontextmanager
async def stream(server: NatsServer) -> AsyncIterator[tuple[Bus, NatsPublisher]]:
    async with connect([server.url], name="test") as bus:
        await ensure_bus(bus)
        yield bus, NatsPublisher(bus)


async def put(publisher: NatsPublisher, seq: int, node: str = "gpu-1") -> None:
    usage = UsageRecord(node=node, boot_id="1", seq=seq, time_s=float(seq))
    await publisher.publish_stored(subjects.usage_event(node), codec.encode(usage))


def history(bus: Bus, bounds: Bounds = WIDE) -> History:
    return History(bus, bounds=bounds, clock=SystemClock())


async def read(reader: History, *filters: str, **more: object) -> tuple[list[int], str]:
    """Sequences that the records name, and the cut."""
    found = []
    async with reader.read(filters or USAGE, **more) as reading:  # type: ignore[arg-type]  # test data
        async for event in reading:
            record = event.record(UsageRecord)
            assert record is not None
            found.append(record.seq)
    return found, reading.cut


async def test_reading_ends_at_the_end_of_the_stream_or_at_a_bound(nats_server: NatsServer) -> None:
    async with stream(nats_server) as (bus, publisher):
        assert await read(history(bus)) == ([], "")
        for seq in range(250):
            await put(publisher, seq, node=f"gpu-{seq % 2}")
        assert await read(history(bus)) == (list(range(250)), "")
        one = subjects.usage_event("gpu-1")
        assert await read(history(bus), one) == (list(range(1, 250, 2)), "")
        assert await read(history(bus), is_newest_only=True) == ([248, 249], "")
        assert await read(history(bus), since_s=4e9) == ([], "")

        found, cut = await read(history(bus, Bounds(messages=7, mib=16, time_s=10.0)))
        assert found == list(range(7))
        assert "after 7 events, at events of 20" in cut
        found, cut = await read(history(bus, Bounds(messages=1000, mib=0, time_s=10.0)))
        assert (found, cut.split(";")[0]) == ([], "reading stopped after 0 MiB of events")
        found, cut = await read(history(bus, Bounds(messages=1000, mib=16, time_s=0.0)))
        assert "after 0 s" in cut


async def test_follow_survives_a_restart_of_the_server(nats_server: NatsServer) -> None:
    async with stream(nats_server) as (bus, publisher):
        for seq in range(3):
            await put(publisher, seq)
        reader = history(bus)
        assert await reader.extent() == (1, 3)
        async with aclosing(reader.follow(USAGE, after=1)) as events:
            found = []
            with anyio.fail_after(25):
                async for event in events:
                    if event is None:
                        continue
                    found.append(event.sequence)
                    if event.sequence == 3:
                        await nats_server.stop()
                        await nats_server.start()
                        await bus.wait_connected()
                        await put(publisher, 3)
                    if event.sequence == 4:
                        break
        assert found == [2, 3, 4]


async def test_follow_of_new_events_begins_now_and_ends_with_the_service(
    nats_server: NatsServer,
) -> None:
    async with stream(nats_server) as (bus, publisher):
        await put(publisher, 0)
        reader = history(bus)
        found = []
        async with aclosing(reader.follow(USAGE)) as events:
            with anyio.fail_after(20):
                async for event in events:
                    if event is not None:
                        found.append(event.sequence)
                        reader.close()
                    elif not found:  # the first heartbeat: the consumer exists
                        await put(publisher, 1)
        assert found == [2]
