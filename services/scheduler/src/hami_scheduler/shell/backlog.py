# SPDX-License-Identifier: Apache-2.0
"""A bounded queue with its workers, for work that nobody may wait for.

``add`` never blocks: what does not fit is dropped and counted, and the owner of the queue says who
makes up for it. One item's failure never ends a worker.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

import anyio
from prometheus_client import Counter

from hami_common.errors import HamiError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Backlog(Generic[T]):
    """Items in the order in which they came."""

    def __init__(self, name: str, *, capacity: int, dropped: Counter, failed: Counter) -> None:
        """Hold up to ``capacity`` items; count drops and failures under the label ``name``."""
        self._name = name
        self._capacity = capacity
        self._dropped = dropped.labels(queue=name)
        self._failed = failed.labels(queue=name)
        self._items: deque[T] = deque()
        self._sleeping: deque[anyio.Event] = deque()
        """One for each worker that waits for an item."""
        self._busy = 0
        self._idle = anyio.Event()

    def add(self, item: T) -> bool:
        """Take ``item`` unless the queue is full; whether it was taken."""
        if len(self._items) >= self._capacity:
            self._dropped.inc()
            return False
        self._items.append(item)
        if self._sleeping:
            self._sleeping.popleft().set()
        return True

    async def work(self, handle: Callable[[T], Awaitable[None]]) -> None:
        """Handle items one after another, for ever; start as many as shall run at the same time."""
        while True:
            await self._some()
            item = self._items.popleft()
            await self._do(partial(_alone, handle, item), what=type(item).__name__)

    async def work_together(
        self,
        handle: Callable[[Sequence[T]], Awaitable[Iterable[HamiError]]],
        gather_s: float,
        most: int,
    ) -> None:
        """Handle at once all that comes in ``gather_s`` after the first, up to ``most``, for ever.

        ``handle`` returns what failed.
        """
        while True:
            await self._some()
            await anyio.sleep(gather_s)
            items = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            await self._do(partial(handle, items), what=type(items[0]).__name__)

    async def _some(self) -> None:
        """Return once there is an item that nobody has begun."""
        while not self._items:
            wake = anyio.Event()
            self._sleeping.append(wake)
            try:
                await wake.wait()
            finally:
                if not wake.is_set():
                    self._sleeping.remove(wake)

    async def _do(self, work: Callable[[], Awaitable[Iterable[HamiError]]], *, what: str) -> None:
        """Carry out what was taken, and count what failed of it."""
        self._busy += 1
        try:
            for problem in await work():
                self._fail(problem, what)
        except HamiError as error:
            self._fail(error, what)
        except Exception:  # noqa: BLE001 - top of a worker: counted, logged, and the next item
            self._failed.inc()
            _log.exception("queued work failed", extra={"queue": self._name, "kind": what})
        finally:
            self._busy -= 1
            if not self._busy and not self._items:
                self._idle.set()

    def _fail(self, error: HamiError, what: str) -> None:
        self._failed.inc()
        _log.warning(
            "queued work failed",
            extra={"queue": self._name, "kind": what, "problem": str(error)},
        )

    async def drain(self, *, limit_s: float) -> bool:
        """Wait until everything taken so far is done, at most ``limit_s``; whether it is."""
        with anyio.move_on_after(limit_s):
            while self._busy or self._items:
                self._idle = anyio.Event()
                await self._idle.wait()
            return True
        return False

    def __len__(self) -> int:
        """Items that no worker has begun."""
        return len(self._items)


async def _alone(handle: Callable[[T], Awaitable[None]], item: T) -> Iterable[HamiError]:
    await handle(item)
    return ()
