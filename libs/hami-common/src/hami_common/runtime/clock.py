# SPDX-License-Identifier: Apache-2.0
"""Clocks: the machine's own, and one that tests move by hand.

Seconds throughout. Only this module reads the machine's time; everything else is given a ``Clock``.
"""

import heapq
import time
from itertools import count

import anyio
import anyio.lowlevel


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()  # noqa: TID251 - this is the Clock everybody else asks

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        await anyio.sleep(delay_s)


class ManualClock:
    """A clock that stands still until ``advance`` moves it; sleepers wake in order of time."""

    def __init__(self, *, now_s: float = 1_750_000_000.0) -> None:
        self._start_s = now_s
        self._elapsed_s = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, anyio.Event]] = []

    def now_s(self) -> float:
        """Unix seconds."""
        return self._start_s + self._elapsed_s

    def monotonic_s(self) -> float:
        """Seconds since the clock was made."""
        return self._elapsed_s

    @property
    def sleeper_count(self) -> int:
        """How many tasks wait for this clock: lets a test advance only when its subject sleeps."""
        return len(self._sleepers)

    async def sleep(self, delay_s: float) -> None:
        """Wait until the clock was moved by ``delay_s``."""
        if delay_s <= 0:
            await anyio.lowlevel.checkpoint()
            return
        entry = (self._elapsed_s + delay_s, next(self._order), anyio.Event())
        heapq.heappush(self._sleepers, entry)
        try:
            await entry[2].wait()
        finally:
            if entry in self._sleepers:
                self._sleepers.remove(entry)
                heapq.heapify(self._sleepers)

    async def advance(self, delay_s: float) -> None:
        """Move the clock on; each sleeper due on the way wakes at its own time."""
        target_s = self._elapsed_s + delay_s
        await anyio.wait_all_tasks_blocked()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            wake_s, _, event = heapq.heappop(self._sleepers)
            self._elapsed_s = max(self._elapsed_s, wake_s)
            event.set()
            await anyio.wait_all_tasks_blocked()
        self._elapsed_s = target_s
