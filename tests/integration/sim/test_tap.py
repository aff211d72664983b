# SPDX-License-Identifier: Apache-2.0
"""The tapping proxy: forwards bytes, triggers actions at exact points, cuts and restores links."""

from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from hami_sim.tap import HOST, Tap, Trap, run_tap

pytestmark = pytest.mark.anyio


class Echo:
    """A server that answers each chunk with ``got:`` and the chunk, and remembers it."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def handle(self, stream: SocketStream) -> None:
        async with stream:
            try:
                while True:
                    chunk = await stream.receive()
                    self.received.append(chunk)
                    await stream.send(b"got:" + chunk)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass


@pytest.fixture
async def echo_and_tap() -> AsyncIterator[tuple[Echo, Tap]]:
    echo = Echo()
    listener = await anyio.create_tcp_listener(local_host=HOST, local_port=0)
    port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django's extra()
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, echo.handle)
        async with run_tap(port) as tap:
            yield echo, tap
        group.cancel_scope.cancel()


class Noted:
    """An action that notes when it ran."""

    def __init__(self, echo: Echo) -> None:
        self.echo = echo
        self.received_then: list[bytes] | None = None

    async def __call__(self) -> None:
        self.received_then = list(self.echo.received)


async def test_bytes_pass_both_ways(echo_and_tap: tuple[Echo, Tap]) -> None:
    _, tap = echo_and_tap
    async with await anyio.connect_tcp(HOST, tap.port) as client:
        await client.send(b"hello")
        assert await client.receive() == b"got:hello"


async def test_undelivered_request_never_reaches_the_server(
    echo_and_tap: tuple[Echo, Tap],
) -> None:
    echo, tap = echo_and_tap
    noted = Noted(echo)
    trap = tap.arm(Trap(b"bind", "up", noted, deliver=False))
    async with await anyio.connect_tcp(HOST, tap.port) as client:
        await client.send(b"please bind")
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await client.receive()
    assert trap.sprung.is_set()
    assert echo.received == []
    assert noted.received_then == []


async def test_delivered_request_reaches_the_server_before_the_answer_is_lost(
    echo_and_tap: tuple[Echo, Tap],
) -> None:
    echo, tap = echo_and_tap
    noted = Noted(echo)
    tap.arm(Trap(b"got:", "down", noted, deliver=False))
    async with await anyio.connect_tcp(HOST, tap.port) as client:
        await client.send(b"bind")
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await client.receive()
    assert noted.received_then == [b"bind"]


async def test_pattern_split_over_two_reads_is_found(echo_and_tap: tuple[Echo, Tap]) -> None:
    echo, tap = echo_and_tap
    trap = tap.arm(Trap(b"binding", "up", Noted(echo), deliver=True))
    async with await anyio.connect_tcp(HOST, tap.port) as client:
        await client.send(b"a bind")
        assert await client.receive() == b"got:a bind"
        assert not trap.sprung.is_set()
        await client.send(b"ing b")
        assert await client.receive() == b"got:ing b"
        await trap.sprung.wait()


async def test_trap_fires_once_and_after_skipping(echo_and_tap: tuple[Echo, Tap]) -> None:
    echo, tap = echo_and_tap
    trap = tap.arm(Trap(b"x", "up", Noted(echo), deliver=True, skip=1))
    async with await anyio.connect_tcp(HOST, tap.port) as client:
        await client.send(b"x")
        await client.receive()
        assert not trap.sprung.is_set()
        await client.send(b"x")
        await client.receive()
        await trap.sprung.wait()
        await client.send(b"x")
        assert await client.receive() == b"got:x"


async def test_cut_breaks_connections_until_healed(echo_and_tap: tuple[Echo, Tap]) -> None:
    _, tap = echo_and_tap
    client = await anyio.connect_tcp(HOST, tap.port)
    await client.send(b"a")
    await client.receive()
    await tap.cut()
    with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
        await client.receive()
    await client.aclose()
    async with await anyio.connect_tcp(HOST, tap.port) as refused:
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await refused.receive()
    await tap.heal()
    async with await anyio.connect_tcp(HOST, tap.port) as again:
        await again.send(b"b")
        assert await again.receive() == b"got:b"


async def test_action_that_cuts_its_own_connection_runs_to_its_end(
    echo_and_tap: tuple[Echo, Tap],
) -> None:
    _, tap = echo_and_tap
    for number in range(40):
        trap = tap.arm(Trap(b"x", "up", tap.cut, deliver=number % 2 == 0))
        async with await anyio.connect_tcp(HOST, tap.port) as client:
            await client.send(b"x")
            with anyio.fail_after(30):
                await trap.sprung.wait()
        await tap.heal()
