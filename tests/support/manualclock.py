# SPDX-License-Identifier: Apache-2.0
"""A clock that tests advance. Seconds throughout."""

import heapq
from itertools import count

import anyio
import anyio.lowlevel


class ManualClock:
    """A clock that stands still until ``advance`` moves it; sleepers wake in order of time."""

    def __init__(self, *, now_s: float = 1_750_000_000.0) -> None:
        self._start_s = now_s
        self._elapsed_s = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, anyio.Event]] = []

    def now_s(self) -> float:
        """Return Unix seconds."""
        return self._start_s + self._elapsed_s

    def monotonic_s(self) -> float:
        """Return seconds since the clock was created."""
        return self._elapsed_s

    @property
    def sleeper_count(self) -> int:
        """Number of sleeping tasks: lets a test advance only when its subject sleeps."""
        return len(self._sleepers)

    async def sleep(self, delay_s: float) -> None:
        """Sleep until the clock has advanced by ``delay_s``."""
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
        """Advance the clock; each sleeper wakes at its own time."""
        target_s = self._elapsed_s + delay_s
        await anyio.wait_all_tasks_blocked()
        while self._sleepers and self._sleepers[0][0] <= target_s:
            wake_s, _, event = heapq.heappop(self._sleepers)
            self._elapsed_s = max(self._elapsed_s, wake_s)
            event.set()
            await anyio.wait_all_tasks_blocked()
        self._elapsed_s = target_s
