# SPDX-License-Identifier: Apache-2.0
"""Runs ``hami-recall``, which makes the driver's checkpoint calls for this agent.

The protocol is that of docs/adr/0026-recall.md: one packet of text per request and answer. The
helper is started when the first call is made, and again with a growing delay when it ends. Calls
whose answers did not arrive are reported as ``LOST``.
"""

import errno
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import anyio

from hami_common.ports import Clock
from hami_common.units import whole
from hami_nodeagent.core.recall import LOST, Answer, Call

ANSWER_S = 600.0
"""Age of a request after which the helper counts as hung; its own deadlines are shorter."""
_CHECK_S = 5.0
_DESCRIPTOR = 3
_PACKET_BYTES = 4096
_REAP_S = 1.0
_MS = 1000
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 30.0
_SETTLED_S = 60.0
"""Life of a helper after which the delay starts again from the first."""

_log = logging.getLogger(__name__)

Answered = Callable[[Call, Answer], None]


class RecallHelper:
    """One child at a time."""

    def __init__(self, path: str, *, clock: Clock, answered: Answered) -> None:
        """``answered`` is called once for each call that was sent."""
        self._path = path
        self._clock = clock
        self._answered = answered
        self._socket: socket.socket | None = None
        self._calls: dict[int, tuple[Call, float]] = {}
        """Call and time by the number of the request."""
        self._next = 1
        self._ended: set[int] = set()
        """Killed helpers that have not been reaped."""
        self.restarts = 0

    @property
    def is_ready(self) -> bool:
        """Return whether a call can be sent."""
        return self._socket is not None

    def send(self, call: Call) -> None:
        """Send a call; its answer, or ``LOST``, is passed to ``answered`` later."""
        number, self._next = self._next, self._next + 1
        self._calls[number] = call, self._clock.monotonic_s()
        words = [str(number), call.verb, str(call.pid)]
        if call.verb == "lock":
            words.append(str(round(call.timeout_s * _MS)))
        try:
            if self._socket is None:
                raise BrokenPipeError(errno.EPIPE, "not started")
            self._socket.send(" ".join(words).encode())
        except OSError as error:
            _log.warning("recall request not sent", extra={"problem": error.strerror})
            del self._calls[number]
            self._answered(call, LOST)

    async def run(self) -> None:
        """Keep the helper running until cancelled."""
        delay_s = _FIRST_DELAY_S
        while True:
            began_s = self._clock.monotonic_s()
            try:
                await self._run_once()
            except OSError as error:
                extra = {"file": self._path, "problem": error.strerror or str(error)}
                _log.error("recall helper not started", extra=extra)
            if self._clock.monotonic_s() - began_s > _SETTLED_S:
                delay_s = _FIRST_DELAY_S
            await self._clock.sleep(delay_s)
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)
            self.restarts += 1

    async def _run_once(self) -> None:
        """Start the helper and read its answers until it ends; ``OSError`` if it cannot start."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with own, other:
            own.setblocking(False)  # noqa: FBT003 - the standard library's signature
            pid = _start(self._path, other)
            other.close()
            self._socket = own
            try:
                await self._read(own)
            finally:
                self._socket = None
                with anyio.CancelScope(shield=True):
                    await self._end(pid)
                calls, self._calls = self._calls, {}
                for call, _ in calls.values():
                    self._answered(call, LOST)

    async def _read(self, own: socket.socket) -> None:
        """Pass on answers until the helper closes its end or hangs."""
        while True:
            with anyio.move_on_after(_CHECK_S):
                await anyio.wait_readable(own)
            try:
                packet = own.recv(_PACKET_BYTES)
            except BlockingIOError:
                packet = None
            except OSError:
                return
            now_s = self._clock.monotonic_s()
            if packet is not None and not packet:
                _log.warning("recall helper ended")
                return
            if packet is not None:
                self._take(packet.decode(errors="replace"))
            if any(now_s - sent_s > ANSWER_S for _, sent_s in self._calls.values()):
                _log.error("recall helper does not answer")
                return

    async def _end(self, pid: int) -> None:
        """End the helper; operations under way are finished by the driver."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._ended.add(pid)
        until_s = self._clock.monotonic_s() + _REAP_S
        while self._ended and self._clock.monotonic_s() < until_s:
            self._ended = {one for one in self._ended if not _is_reaped(one)}
            await self._clock.sleep(_REAP_S / 100)

    def _take(self, text: str) -> None:
        words = text.split()
        number = whole(words[0]) if words else None
        known = self._calls.pop(number, None) if number is not None else None
        answer = parse_answer(words[1:])
        if known is None or answer is None:
            _log.warning("recall answer not understood", extra={"text": text[:80]})
        if known is not None:
            self._answered(known[0], answer or LOST)


def parse_answer(words: list[str]) -> Answer | None:
    """Return the answer after its number; ``None`` if it is not one of the protocol."""
    match words:
        case ["ok"]:
            return Answer(is_ok=True)
        case ["ok", state]:
            return Answer(is_ok=True, state=state)
        case ["error", "deadline"]:
            return LOST
        case ["error", code, *name] if (number := whole(code)) is not None and number > 0:
            return Answer(code=number, name=" ".join(name)[:80] or code)
        case _:
            return None


def _start(path: str, other: socket.socket) -> int:
    """Start the helper with its end of the pair; ``OSError`` if that is not possible."""
    moves = [(os.POSIX_SPAWN_DUP2, other.fileno(), _DESCRIPTOR)]
    return os.posix_spawn(path, [path], os.environ, file_actions=moves)


def _is_reaped(pid: int) -> bool:
    """Return whether the child has ended; it cannot while the driver holds it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
