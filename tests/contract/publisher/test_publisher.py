# SPDX-License-Identifier: Apache-2.0
"""Contract of every Publisher, in memory and over a real server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.ports import BatchPublisher, Outgoing
from hami_common.runtime import natsio
from hami_sim.natsd import run_nats_server
from tests.support.memorybus import MemoryBus, MemoryPublisher

pytestmark = pytest.mark.anyio

HEARTBEAT = subjects.heartbeat("node.a")
REPORT = subjects.report("node.a", "nvidia")


class World:
    """A publisher, the messages that arrive on the bus, and a way to stop the bus."""

    def __init__(
        self, publisher: BatchPublisher, take_away: Callable[[], Awaitable[None]], request_s: float
    ) -> None:
        self.publisher = publisher
        self.take_away = take_away
        self.request_s = request_s
        self.arrived: list[tuple[str, bytes, dict[str, str]]] = []

    async def wait_for(self, count: int) -> list[tuple[str, bytes, dict[str, str]]]:
        with anyio.fail_after(10):
            while len(self.arrived) < count:
                await anyio.sleep(0.005)
        return self.arrived


@pytest.fixture(params=["memory", "nats"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> AsyncIterator[World]:
    if request.param == "memory":
        bus = MemoryBus()

        async def close() -> None:
            bus.set_available(available=False)

        memory = World(MemoryPublisher(bus), close, 0.0)
        bus.on_publish(lambda m: memory.arrived.append((m.subject, m.data, m.headers)))
        yield memory
        return
    async with (
        run_nats_server(tmp_path / "nats") as server,
        natsio.connect([server.url], name="contract", request_timeout_s=0.5) as nats,
        nats.subscribe("hami.v1.>") as subscription,
        anyio.create_task_group() as group,
    ):
        await natsio.ensure_bus(nats)
        real = World(natsio.NatsPublisher(nats), server.stop, 0.5)

        async def collect() -> None:
            async for message in subscription:
                headers = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
                real.arrived.append((message.subject, message.data, headers))

        group.start_soon(collect)
        yield real
        group.cancel_scope.cancel()


async def test_published_messages_arrive_with_their_headers(world: World) -> None:
    await world.publisher.publish(HEARTBEAT, b"alive", headers={"traceparent": "00-aa-bb-01"})
    assert await world.wait_for(1) == [(HEARTBEAT, b"alive", {"traceparent": "00-aa-bb-01"})]


async def test_stored_messages_have_growing_sequences(world: World) -> None:
    first = await world.publisher.publish_stored(REPORT, b"1")
    second = await world.publisher.publish_stored(REPORT, b"2", headers={"ce-id": "2"})
    assert second > first > 0
    arrived = await world.wait_for(2)
    assert [data for _, data, _ in arrived] == [b"1", b"2"]


async def test_a_repeated_message_id_is_stored_once(world: World) -> None:
    first = await world.publisher.publish_stored(REPORT, b"1", message_id="boot-1")
    again = await world.publisher.publish_stored(REPORT, b"1", message_id="boot-1")
    other = await world.publisher.publish_stored(REPORT, b"2", message_id="boot-2")
    assert again == first
    assert other > first


async def test_message_id_of_another_subject_drops_nothing(world: World) -> None:
    first = await world.publisher.publish_stored(REPORT, b"1", message_id="chosen")
    elsewhere = await world.publisher.publish_stored(f"{REPORT}0", b"2", message_id="chosen")
    assert elsewhere > first


def outgoing(number: int, *, message_id: str = "") -> Outgoing:
    return Outgoing(
        subject=REPORT,
        data=b"%d" % number,
        headers={"ce-id": f"{number}"},
        message_id=message_id or f"id-{number}",
    )


async def test_messages_stored_together_arrive_in_order_and_repeated_ones_once(
    world: World,
) -> None:
    assert await world.publisher.publish_all_stored([]) == []
    messages = [outgoing(1), outgoing(2), outgoing(3, message_id="id-1"), outgoing(4)]
    first, second, repeated, last = await world.publisher.publish_all_stored(messages)
    assert [type(one) for one in (first, second, repeated, last)] == [int] * 4
    assert repeated == first
    stored = [(REPORT, b"%d" % i, {"ce-id": f"{i}"}) for i in (1, 2, 4)]
    arrived = await world.wait_for(3)
    assert [one for one in arrived if one[1] != b"3"] == stored  # core readers see the repeated one
    assert second != last


async def test_storing_while_the_bus_is_down_is_unavailable(world: World) -> None:
    await world.take_away()
    with pytest.raises(Unavailable):
        await world.publisher.publish_stored(REPORT, b"1")
    answers = await world.publisher.publish_all_stored([outgoing(1), outgoing(2)])
    assert [type(answer) for answer in answers] == [Unavailable, Unavailable]


async def test_fire_and_forget_while_the_bus_is_down_is_dropped_silently(world: World) -> None:
    await world.publisher.publish(HEARTBEAT, b"before")
    await world.wait_for(1)
    await world.take_away()
    await world.publisher.publish(HEARTBEAT, b"lost")
    assert [data for _, data, _ in world.arrived] == [b"before"]
