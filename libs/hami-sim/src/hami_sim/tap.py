# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that can be cut, and that can act when given bytes pass through it.

Failure tests stand it between a client and its server to hit one exact point of an exchange: before
a request reaches the server, after it did but before the answer comes back, and so on. The proxy
knows nothing of the protocol; a pattern is matched on the byte stream of one connection and
direction, also across read boundaries. ``up`` is from client to server, ``down`` the way back.
"""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream, TaskStatus

Direction = Literal["up", "down"]
HOST = "127.0.0.1"
_CHUNK_BYTES = 65536


class Trap:
    """Fires once, when its pattern passes."""

    def __init__(
        self,
        pattern: bytes,
        direction: Direction,
        action: Callable[[], Awaitable[None]],
        *,
        deliver: bool,
        skip: int = 0,
    ) -> None:
        """Run ``action`` when ``pattern`` passes in ``direction``.

        With ``deliver`` the bytes are handed on first; without, they are swallowed and the
        connection is closed after the action. The first ``skip`` matches are let through.
        """
        self.pattern = pattern
        self.direction = direction
        self.action = action
        self.deliver = deliver
        self.skip = skip
        self.sprung = anyio.Event()

    async def spring(self) -> None:
        """Run the action to its end, also when it breaks the very connection that sprang it."""
        with anyio.CancelScope(shield=True):
            await self.action()
        self.sprung.set()


class Tap:
    """One proxy in front of one server; see ``run_tap``."""

    def __init__(self, target_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        """Forward to ``target_port`` on loopback, which speaks TLS when ``tls`` is given.

        Clients speak plain text either way, so that patterns match.
        """
        self._target_port = target_port
        self._tls = tls
        self._traps: list[Trap] = []
        self._streams: set[ByteStream] = set()
        self._is_cut = False
        self.port = 0

    def arm(self, trap: Trap) -> Trap:
        """Wait for the trap's pattern from now on."""
        self._traps.append(trap)
        return trap

    async def retarget(self, port: int) -> None:
        """Break every connection and forward new ones to another server."""
        self._target_port = port
        await self._drop_connections()

    def disarm(self) -> None:
        """Forget all traps."""
        self._traps.clear()

    async def cut(self) -> None:
        """Break every connection and refuse new ones until ``heal``."""
        self._is_cut = True
        await self._drop_connections()

    async def heal(self) -> None:
        """Accept connections again."""
        self._is_cut = False

    async def _drop_connections(self) -> None:
        for stream in list(self._streams):
            await anyio.aclose_forcefully(stream)

    async def handle(self, client: SocketStream) -> None:
        """One connection from a client."""
        async with client:
            target = self._target_port
            if not self._leads_to(target):
                return
            try:
                server = await self._connect()
            except (OSError, anyio.BrokenResourceError):
                return
            async with server:
                if not self._leads_to(target):
                    return  # cut or retargeted while the connection was being made
                self._streams |= {client, server}
                try:
                    async with anyio.create_task_group() as group:
                        group.start_soon(self._pump, client, server, "up", group.cancel_scope)
                        group.start_soon(self._pump, server, client, "down", group.cancel_scope)
                finally:
                    self._streams -= {client, server}

    def _leads_to(self, port: int) -> bool:
        return not self._is_cut and port == self._target_port

    async def _connect(self) -> ByteStream:
        if self._tls is None:
            return await anyio.connect_tcp(HOST, self._target_port)
        return await anyio.connect_tcp(
            HOST,
            self._target_port,
            ssl_context=self._tls,
            tls_standard_compatible=False,
        )

    async def _pump(
        self,
        source: ByteStream,
        sink: ByteStream,
        direction: Direction,
        scope: anyio.CancelScope,
    ) -> None:
        tail = b""
        try:
            while True:
                chunk = await source.receive(_CHUNK_BYTES)
                seen = tail + chunk
                trap = self._match(seen, direction, len(tail))
                if trap is not None and not trap.deliver:
                    await trap.spring()
                    break
                await sink.send(chunk)
                if trap is not None:
                    await trap.spring()
                longest = max((len(t.pattern) for t in self._traps), default=1)
                tail = seen[-(longest - 1) :] if longest > 1 else b""
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            scope.cancel()

    def _match(self, seen: bytes, direction: Direction, old: int) -> Trap | None:
        """The first armed trap whose pattern ends in the new part of ``seen``, disarmed."""
        for trap in self._traps:
            if trap.direction != direction:
                continue
            start = max(0, old - len(trap.pattern) + 1)
            found = seen.find(trap.pattern, start)
            while found >= 0 and trap.skip > 0:
                trap.skip -= 1
                found = seen.find(trap.pattern, found + len(trap.pattern))
            if found >= 0:
                self._traps.remove(trap)
                return trap
        return None

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen on a free port until cancelled; ready once ``port`` is known."""
        listener = await anyio.create_tcp_listener(local_host=HOST, local_port=0)
        self.port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django's extra()
        async with listener:
            task_status.started()
            await listener.serve(self.handle)


@asynccontextmanager
async def run_tap(target_port: int) -> AsyncIterator[Tap]:
    """A tap in front of ``target_port``; ``tap.port`` is where clients connect."""
    tap = Tap(target_port)
    async with anyio.create_task_group() as group:
        await group.start(tap.serve)
        yield tap
        await tap.cut()
        group.cancel_scope.cancel()
