# SPDX-License-Identifier: Apache-2.0
"""Pull loops with acknowledgement on a real nats-server."""

from typing import Any

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.runtime import natsio
from hami_common.runtime.natsio.consume import parse_ack, parse_time_s
from hami_common.runtime.natsio.jetstream import api
from hami_sim.natsd import NatsServer

pytestmark = pytest.mark.anyio

STREAM = subjects.REPORTS_STREAM


async def report(bus: natsio.Bus, node: str, data: bytes) -> int:
    return await natsio.NatsPublisher(bus).publish_stored(subjects.report(node, "nvidia"), data)


async def consumer_info(bus: natsio.Bus) -> dict[str, Any]:
    return await api(bus, f"CONSUMER.INFO.{STREAM}.registry", {})


async def test_acknowledged_messages_are_not_delivered_again(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        for number in range(3):
            await report(bus, f"n{number}", b"%d" % number)
        async with natsio.pull_events(bus, STREAM, durable="registry") as deliveries:
            with anyio.fail_after(20):
                for number in range(2):
                    delivery = await anext(deliveries)
                    assert delivery.data == b"%d" % number
                    assert delivery.subject == subjects.report(f"n{number}", "nvidia")
                    assert (delivery.delivered_count, delivery.sequence) == (1, number + 1)
                    assert delivery.time_s > 1_600_000_000
                    await delivery.ack()
        async with natsio.pull_events(bus, STREAM, durable="registry") as deliveries:
            with anyio.fail_after(20):
                assert (await anext(deliveries)).data == b"2"


async def test_unread_messages_are_returned_to_the_stream(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await report(bus, "n0", b"0")
        async with natsio.pull_events(bus, STREAM, durable="registry") as deliveries:
            with anyio.fail_after(20):
                await (await anext(deliveries)).ack()
                for number in range(1, 4):
                    await report(bus, f"n{number}", b"%d" % number)
                while (await consumer_info(bus))["num_ack_pending"] < 3:
                    await anyio.sleep(0.01)
        async with natsio.pull_events(bus, STREAM, durable="registry") as deliveries:
            with anyio.fail_after(12):  # much less than the time after which they come anyway
                assert sorted([(await anext(deliveries)).data for _ in range(3)]) == [
                    b"1",
                    b"2",
                    b"3",
                ]


async def test_a_refused_message_is_redelivered_and_a_terminated_one_is_not(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await report(bus, "poison", b"poison")
        await report(bus, "later", b"later")
        seen: list[tuple[bytes, int]] = []
        async with natsio.pull_events(bus, STREAM, durable="d") as deliveries:
            with anyio.fail_after(20):
                while len(seen) < 4:
                    delivery = await anext(deliveries)
                    seen.append((delivery.data, delivery.delivered_count))
                    if delivery.data == b"poison":
                        await delivery.term(reason="does not decode")
                    elif delivery.delivered_count < 3:
                        await delivery.nak(delay_s=0.05)
                    else:
                        await delivery.ack()
    assert seen == [(b"poison", 1), (b"later", 1), (b"later", 2), (b"later", 3)]


async def test_unacknowledged_messages_are_redelivered_after_the_wait(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await report(bus, "n", b"1")
        async with natsio.pull_events(bus, STREAM, durable="d", ack_wait_s=1.0) as deliveries:
            with anyio.fail_after(20):
                first = await anext(deliveries)
                again = await anext(deliveries)
                assert (first.sequence, again.delivered_count) == (again.sequence, 2)
                await again.ack()
            with anyio.move_on_after(1.5):
                late = await anext(deliveries)
                pytest.fail(f"delivered a {late.delivered_count}th time")


async def test_replicas_with_one_durable_name_share_the_work(nats_server: NatsServer) -> None:
    total = 200
    done: list[tuple[int, bytes]] = []
    async with (
        natsio.connect([nats_server.url], name="a") as one,
        natsio.connect([nats_server.url], name="b") as two,
    ):
        await natsio.ensure_bus(one)

        async def work(number: int, bus: natsio.Bus) -> None:
            async with natsio.pull_events(bus, STREAM, durable="d", batch=5) as deliveries:
                async for delivery in deliveries:
                    done.append((number, delivery.data))
                    await delivery.ack()

        async with anyio.create_task_group() as group:
            group.start_soon(work, 1, one)
            group.start_soon(work, 2, two)
            for number in range(total):
                await report(one, f"n{number}", b"%d" % number)
            with anyio.fail_after(30):
                while len(done) < total:
                    await anyio.sleep(0.005)
            group.cancel_scope.cancel()
    assert sorted(int(data) for _, data in done) == list(range(total))
    assert {number for number, _ in done} == {1, 2}


async def test_a_durable_consumer_resumes_after_a_server_restart(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await report(bus, "n0", b"0")
        async with natsio.pull_events(bus, STREAM, durable="d") as deliveries:
            with anyio.fail_after(20):
                delivery = await anext(deliveries)
                await delivery.ack()
                await bus.request("$JS.API.INFO")  # the ack travelled before this
                await nats_server.restart()
                await bus.wait_connected(after=1)
                await report(bus, "n1", b"1")
                assert (await anext(deliveries)).data == b"1"


async def test_filters_and_new_only_limit_deliveries(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        await report(bus, "old", b"old")
        async with natsio.pull_events(
            bus,
            STREAM,
            deliver="new",
            filter_subjects=(subjects.report("a", "nvidia"), subjects.report("b", "nvidia")),
        ) as deliveries:
            got: list[bytes] = []

            async def read() -> None:
                async for delivery in deliveries:
                    got.append(delivery.data)
                    await delivery.ack()

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                with anyio.fail_after(20):
                    while b"b" not in got:  # until the consumer exists, nothing is new for it
                        await report(bus, "b", b"b")
                        await anyio.sleep(0.01)
                await report(bus, "c", b"c")
                await report(bus, "a", b"a")
                with anyio.fail_after(20):
                    while b"a" not in got:
                        await anyio.sleep(0.005)
                group.cancel_scope.cancel()
    assert set(got) == {b"a", b"b"}


async def test_waiting_for_a_stream_that_does_not_exist_yet(nats_server: NatsServer) -> None:
    async with (
        natsio.connect([nats_server.url], name="t") as bus,
        natsio.pull_events(bus, STREAM, durable="d") as deliveries,
        anyio.create_task_group() as group,
    ):

        async def declare() -> None:
            await natsio.ensure_bus(bus)
            await report(bus, "n", b"1")

        group.start_soon(declare)
        with anyio.fail_after(20):
            assert (await anext(deliveries)).data == b"1"


def test_both_forms_of_the_acknowledgement_subject_are_read() -> None:
    short = parse_ack("$JS.ACK.S.C.3.7.5.1700000000000000000.2")
    long = parse_ack("$JS.ACK.hub.ACCHASH.S.C.3.7.5.1700000000000000000.2.rnd")
    assert short is not None
    assert short == long
    assert (short.stream, short.consumer, short.delivered_count, short.pending) == (7, 5, 3, 2)
    assert parse_ack("_INBOX.x") is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("2026-11-21T20:52:40.787049691Z", 1795294360.787049691),
        ("2026-11-21T20:52:40.5Z", 1795294360.5),
    ],
)
def test_times_of_the_server_have_up_to_nine_decimals(text: str, seconds: float) -> None:
    assert parse_time_s(text) == pytest.approx(seconds, abs=1e-6)
