# SPDX-License-Identifier: Apache-2.0
"""The connection to a real nats-server through restarts, freezes and absence."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from hami_common.errors import Denied, Unavailable
from hami_common.runtime import natsio
from hami_common.runtime.natsio import connection
from hami_common.runtime.natsio.client import Question
from hami_sim.natsd import NatsServer, run_nats_server

pytestmark = pytest.mark.anyio


async def first(subscription: natsio.Subscription) -> bytes:
    with anyio.fail_after(20):
        async for message in subscription:
            return message.data
    raise AssertionError("a subscription never ends")


async def test_connecting_waits_for_a_server_that_starts_later(nats_server: NatsServer) -> None:
    await nats_server.stop()
    connected = anyio.Event()

    async def connect() -> None:
        async with natsio.connect([nats_server.url], name="t", start_timeout_s=30) as bus:
            assert bus.is_connected
            connected.set()

    async with anyio.create_task_group() as group:
        group.start_soon(connect)
        await anyio.wait_all_tasks_blocked()
        assert not connected.is_set()
        await nats_server.start()
        with anyio.fail_after(30):
            await connected.wait()


async def test_no_server_in_time_is_unavailable_and_names_the_address() -> None:
    with pytest.raises(Unavailable, match=r"nats://127\.0\.0\.1:1 in 0\.3 s"):
        async with natsio.connect(["nats://127.0.0.1:1"], name="t", start_timeout_s=0.3):
            pytest.fail("no server listens there")


async def test_wrong_password_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    config = "authorization { user: hami, password: right }"
    async with run_nats_server(tmp_path / "n", config_text=config) as server:
        url = server.url.replace("nats://", "nats://hami:wrong@")
        with pytest.raises(Unavailable, match=r"(?i)authorization"):
            async with natsio.connect([url], name="t", start_timeout_s=2):
                pytest.fail("the password is wrong")
        url = server.url.replace("nats://", "nats://hami:right@")
        async with natsio.connect([url], name="t", start_timeout_s=20) as bus:
            assert bus.is_connected


async def test_an_error_of_the_block_leaves_it_unwrapped(nats_server: NatsServer) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with natsio.connect([nats_server.url], name="t"):
            raise LookupError("mine")


async def test_requests_wait_for_a_reconnect_within_their_time(nats_server: NatsServer) -> None:
    async with (
        natsio.connect([nats_server.url], name="t", request_timeout_s=20) as bus,
        bus.subscribe("echo") as subscription,
        anyio.create_task_group() as group,
    ):

        async def answer() -> None:
            async for message in subscription:
                await bus.publish(message.reply, message.data)

        group.start_soon(answer)
        assert (await bus.request("echo", b"1")).data == b"1"
        await nats_server.stop()
        with anyio.fail_after(20):
            while bus.is_connected:  # until then a request may still be sent, and lost
                await anyio.sleep(0.005)
        group.start_soon(nats_server.start)
        assert (await bus.request("echo", b"2")).data == b"2"
        assert bus.generation == 2
        group.cancel_scope.cancel()


async def test_requests_are_unavailable_while_the_server_is_down(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t", request_timeout_s=0.3) as bus:
        await nats_server.stop()
        with anyio.fail_after(20):
            while bus.is_connected:
                await anyio.sleep(0.005)
        with pytest.raises(Unavailable, match="nothing sent"):
            await bus.request("echo", b"1")
        assert await bus.publish("echo", b"1") is False


async def test_a_request_without_a_responder_is_unavailable_at_once(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t", request_timeout_s=20) as bus:
        with anyio.fail_after(8), pytest.raises(Unavailable, match="no service answers on nowhere"):
            await bus.request("nowhere")


async def test_a_message_too_large_for_the_server_is_denied(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        with pytest.raises(Denied, match="too large"):
            await bus.publish("x", bytes(2 << 20))


def question(subject: str, data: bytes = b"x") -> Question:
    return Question(subject=subject, data=data)


async def test_concurrent_requests_are_answered_separately(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="t", request_timeout_s=20) as bus,
        bus.subscribe("echo") as subscription,
        anyio.create_task_group() as group,
    ):

        async def answer() -> None:
            while True:  # the last first
                for message in reversed(await subscription.receive()):
                    await bus.publish(message.reply, message.data)

        group.start_soon(answer)
        with anyio.fail_after(20):
            one, large, unserved, last = await bus.request_all(
                [
                    question("echo", b"1"),
                    question("echo", bytes(2 << 20)),
                    question("nowhere"),
                    question("echo", b"2"),
                ]
            )
        assert isinstance(one, natsio.Message)
        assert isinstance(last, natsio.Message)
        assert (one.data, last.data) == (b"1", b"2")
        assert isinstance(large, Denied)
        assert "2097152 bytes" in str(large)
        assert isinstance(unserved, Unavailable)
        assert "no service answers on nowhere" in str(unserved)
        assert await bus.request_all([]) == []
        group.cancel_scope.cancel()


async def test_requests_that_time_out_do_not_affect_the_others(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="t", request_timeout_s=1.5) as bus,
        bus.subscribe("echo") as subscription,
        bus.subscribe("silence"),
        anyio.create_task_group() as group,
    ):

        async def answer() -> None:
            async for message in subscription:
                await bus.publish(message.reply, message.data)

        group.start_soon(answer)
        answers = await bus.request_all([question("echo", b"1"), question("silence")])
        assert isinstance(answers[0], natsio.Message)
        assert isinstance(answers[1], Unavailable)
        assert "no answer in 1.5 s" in str(answers[1])
        again = await bus.request("echo", b"2")  # nothing of it is left behind
        assert again.data == b"2"
        await nats_server.stop()
        with anyio.fail_after(20):
            while bus.is_connected:
                await anyio.sleep(0.005)
        answers = await bus.request_all([question("echo"), question("echo")])
        assert [str(one).endswith("not connected for 1.5 s, nothing sent") for one in answers] == [
            True,
            True,
        ]
        group.cancel_scope.cancel()


async def test_questions_end_when_the_connection_does(nats_server: NatsServer) -> None:
    async with (
        natsio.connect([nats_server.url], name="t", request_timeout_s=30) as bus,
        bus.subscribe("silence") as heard,
        anyio.create_task_group() as group,
    ):

        async def stop() -> None:
            count = 0
            while count < 2:
                count += len(await heard.receive())
            await nats_server.stop()

        group.start_soon(stop)
        with anyio.fail_after(20):
            answers = await bus.request_all([question("silence"), question("silence")])
        assert [type(one) for one in answers] == [Unavailable, Unavailable]
        assert "connection lost" in str(answers[0])


async def test_a_frozen_server_makes_requests_unavailable_and_is_left_behind(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_S", 0.2)
    async with (
        natsio.connect([nats_server.url], name="t", request_timeout_s=0.2) as bus,
        bus.subscribe("x") as subscription,
    ):
        nats_server.freeze()
        with pytest.raises(Unavailable):
            await bus.request("$JS.API.INFO")
        with anyio.fail_after(20):
            while bus.is_connected:
                await anyio.sleep(0.01)
        nats_server.thaw()
        with anyio.fail_after(20):
            await bus.wait_connected(after=1)
            await bus.publish("x", b"again")
            assert await first(subscription) == b"again"


async def test_a_frozen_server_with_full_buffers_holds_up_no_publisher_for_long(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_S", 0.3)
    async with natsio.connect([nats_server.url], name="t", request_timeout_s=0.2) as bus:
        nats_server.freeze()
        with anyio.fail_after(20):
            while await bus.publish("x", bytes(512 << 10)):
                pass
            while bus.is_connected:
                await anyio.sleep(0.01)
        nats_server.thaw()
        with anyio.fail_after(20):
            await bus.wait_connected(after=1)
            while True:
                with suppress(Unavailable):  # 0.2 s may be short on a busy machine
                    assert (await bus.request("$JS.API.INFO")).data
                    break


async def test_a_message_of_a_lost_connection_is_never_sent_later(
    nats_server: NatsServer,
) -> None:
    """A writer that received ``Unavailable`` must not find its message stored afterwards."""
    async with (
        natsio.connect([nats_server.url], name="writer", request_timeout_s=0.2) as writer,
        natsio.connect([nats_server.url], name="reader") as reader,
        reader.subscribe("late") as subscription,
    ):
        await nats_server.stop()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await writer.request("late", b"too late")
        await nats_server.start()
        with anyio.fail_after(20):
            await writer.wait_connected(after=1)
            await reader.wait_connected(after=1)
        await writer.publish("late", b"in time")
        assert await first(subscription) == b"in time"


async def test_a_slow_reader_loses_the_newest_messages_and_their_count_is_reported(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="t") as bus,
        bus.subscribe("x", capacity=10) as subscription,
    ):
        for number in range(25):
            await bus.publish("x", b"%d" % number)
        with anyio.fail_after(20):
            while subscription.lost_count < 15:
                await anyio.sleep(0.005)
        received = await subscription.receive()
    assert [message.data for message in received] == [b"%d" % n for n in range(10)]


async def test_members_of_a_queue_share_messages(nats_server: NatsServer) -> None:
    async with (
        natsio.connect([nats_server.url], name="t") as bus,
        bus.subscribe("x", queue="q") as one,
        bus.subscribe("x", queue="q") as two,
    ):
        for number in range(50):
            await bus.publish("x", b"%d" % number)
        got: list[bytes] = []
        with anyio.fail_after(20):
            while len(got) < 50:
                for member in (one, two):
                    got += [m.data for m in await member.receive(timeout_s=0.05)]
    assert sorted(got) == sorted(b"%d" % number for number in range(50))


async def test_closing_under_cancellation_still_sends_what_was_published(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="reader") as reader,
        reader.subscribe("x") as subscription,
    ):
        with anyio.CancelScope() as scope:
            async with natsio.connect([nats_server.url], name="writer") as writer:
                await writer.publish("x", b"last words")
                scope.cancel()
                await anyio.sleep(1)
        assert await first(subscription) == b"last words"


async def test_loss_and_return_are_logged_once_each(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hami_common.runtime.natsio")
    async with natsio.connect([nats_server.url], name="t") as bus:
        await nats_server.restart()
        with anyio.fail_after(20):
            await bus.wait_connected(after=1)
    messages = [record.message for record in caplog.records]
    assert messages == ["connection to NATS lost", "connected to NATS again"]


async def test_messages_that_may_wait_are_gathered_and_none_is_lost(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="t", start_timeout_s=30) as bus,
        bus.subscribe("beat", gather_s=0.2) as subscription,
    ):
        for number in range(50):
            assert await bus.publish("beat", str(number).encode())
        heard = []
        with anyio.fail_after(20):
            async for message in subscription:
                heard.append(int(message.data))
                if len(heard) == 1:
                    assert await bus.publish("beat", b"50")
                if len(heard) == 51:
                    break
    assert heard == list(range(51))


async def test_a_resting_connection_loses_nothing_and_delays_no_answer(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="rests", rest_s=30, start_timeout_s=30) as bus,
        natsio.connect([nats_server.url], name="talks", start_timeout_s=30) as other,
        bus.subscribe("beat") as subscription,
    ):
        heard: list[bytes] = []
        with anyio.fail_after(20):
            assert (await bus.request("$JS.API.INFO")).data  # so the server knows who listens
            for number in range(100):
                assert await other.publish("beat", b"%d" % number)
            assert (await other.request("$JS.API.INFO")).data  # so they are at the server
            # A request ends the rest, and messages that arrived meanwhile come with its answer.
            while len(heard) < 100:
                assert (await bus.request("$JS.API.INFO")).data
                heard += [m.data for m in await subscription.receive(timeout_s=0.05)]
    assert heard == [b"%d" % number for number in range(100)]


async def test_a_subscription_ends_without_error_when_its_connection_is_lost(
    nats_server: NatsServer,
) -> None:
    """As after a pause of the whole process: the reader leaves before the loss is noticed."""
    async with natsio.connect([nats_server.url], name="reader") as bus:
        async with bus.subscribe("a.b"):
            client = bus._client  # noqa: SLF001 - cut in the very moment, which no proxy can
            assert client is not None
            transport = client._socket()  # noqa: SLF001 - as above
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            await anyio.lowlevel.checkpoint()
        with pytest.raises(Unavailable, match="no service answers"):
            await bus.request("a.b", b"")
