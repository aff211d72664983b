# SPDX-License-Identifier: Apache-2.0
"""A lane runs blocking calls of one device in worker threads, one at a time, with a deadline.

A call that does not return by its deadline is abandoned: the awaiting task continues with
``DeviceHung``, the thread keeps running, and the lane rejects further calls at once until that
thread returns. A hung device thus costs one thread and one deadline, regardless of the number of
calls. If the awaiting task was cancelled, the next call waits for its thread.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from hami_nodeagent.drivers.errors import DeviceHung

T = TypeVar("T")

_POLL_S = 0.005
"""Interval at which a lane checks if a cancelled call has returned, in seconds."""


class Lane:
    """The way into a vendor's library for one device, or for the library as a whole."""

    def __init__(self, name: str, deadline_s: float) -> None:
        """``name`` appears in errors; ``deadline_s`` bounds calls without a limit of their own."""
        self.name = name
        self._deadline_s = deadline_s
        self._turn = anyio.Lock()
        self._limiter = anyio.CapacityLimiter(1)
        self._running = False
        self._gave_up = False

    @property
    def is_stuck(self) -> bool:
        """True while an abandoned call has not returned."""
        return self._running and self._gave_up

    async def call(self, doing: str, fn: Callable[[], T], *, deadline_s: float | None = None) -> T:
        """Run ``fn`` in a thread; ``DeviceHung`` when it does not return in time."""
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        async with self._turn:
            await self._wait_empty(doing)
            with anyio.move_on_after(limit_s):
                return await anyio.to_thread.run_sync(
                    lambda: self._tracked(fn), abandon_on_cancel=True, limiter=self._limiter
                )
            self._gave_up = True
        raise DeviceHung(doing=f"{self.name}: {doing}", detail=f"no answer within {limit_s:g} s")

    @asynccontextmanager
    async def hold(self, doing: str) -> AsyncIterator[None]:
        """Keep the lane empty inside the block; ``DeviceHung`` if a call is stuck in it."""
        async with self._turn:
            await self._wait_empty(doing)
            yield

    def _tracked(self, fn: Callable[[], T]) -> T:
        self._running = True
        try:
            return fn()
        finally:
            self._running = False

    async def _wait_empty(self, doing: str) -> None:
        """Wait for a cancelled call, not for a hung one."""
        if self._running and not self._gave_up:
            with anyio.move_on_after(self._deadline_s):
                while self._running:  # noqa: ASYNC110 -- the thread may outlive this loop
                    await anyio.sleep(_POLL_S)
        self._gave_up = self._running
        if self._running:
            raise DeviceHung(
                doing=f"{self.name}: {doing}", detail="an earlier call has not returned yet"
            )
