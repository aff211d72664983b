# SPDX-License-Identifier: Apache-2.0
"""A bounded queue with its workers, for background work.

``add`` never blocks: items beyond the capacity are dropped and counted, and the owner of the queue
defines the recovery. An item that fails with anything except an error of a peer is quarantined.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

import anyio
from msgspec import Struct
from prometheus_client import Counter

from hami_common.errors import HamiError
from hami_common.runtime.quarantine import Attempt, Quarantine

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Isolation(Struct, Generic[T], frozen=True, kw_only=True):
    """Isolation of items that fail."""

    quarantine: Quarantine
    kind: str
    key: Callable[[T], str]
    name: Callable[[T], tuple[str, str]]
    """Namespace and name of the pod that an item is about."""
    is_retried: bool = True
    """Retry an item that failed; false for items that are worthless when late."""

    async def run(self, item: T, attempt: Attempt) -> bool:
        """Call ``attempt``; errors of a peer are raised, any other isolates the item."""
        try:
            key, name = self.key(item), self.name(item)
        except Exception:  # noqa: BLE001 - an item may be too broken to be named
            key, name = "unreadable", ("", "")
        return await self.quarantine.run(
            self.kind, key, attempt, passes=(HamiError,), name=name, is_retried=self.is_retried
        )


class Backlog(Generic[T]):
    """Queued items in order of arrival."""

    def __init__(
        self,
        name: str,
        *,
        capacity: int,
        dropped: Counter,
        failed: Counter,
        isolation: Isolation[T],
    ) -> None:
        """Queue up to ``capacity`` items; count drops and failures under the label ``name``."""
        self._isolation = isolation
        self._name = name
        self._capacity = capacity
        self._dropped = dropped.labels(queue=name)
        self._failed = failed.labels(queue=name)
        self._items: deque[T] = deque()
        self._sleeping: deque[anyio.Event] = deque()
        """One event for each worker that waits for an item."""
        self._busy = 0
        self._idle = anyio.Event()

    def add(self, item: T) -> bool:
        """Queue ``item`` unless the queue is full; returns whether it was queued."""
        if len(self._items) >= self._capacity:
            self._dropped.inc()
            return False
        self._items.append(item)
        if self._sleeping:
            self._sleeping.popleft().set()
        return True

    async def work(self, handle: Callable[[T], Awaitable[None]]) -> None:
        """Handle items one after another, indefinitely; start as many as shall run concurrently."""
        while True:
            await self._some()
            item = self._items.popleft()
            await self._do(partial(self._alone, handle, item), what=type(item).__name__)

    async def work_together(
        self,
        handle: Callable[[Sequence[T]], Awaitable[Iterable[HamiError]]],
        gather_s: float,
        most: int,
    ) -> None:
        """Handle in one batch what arrives within ``gather_s``, up to ``most`` items, indefinitely.

        ``handle`` returns the failures.
        """
        while True:
            await self._some()
            await anyio.sleep(gather_s)
            items = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            await self._do(partial(self._together, handle, items), what=type(items[0]).__name__)

    async def _some(self) -> None:
        """Return once an item is queued that no worker has begun."""
        while not self._items:
            wake = anyio.Event()
            self._sleeping.append(wake)
            try:
                await wake.wait()
            finally:
                if not wake.is_set():
                    self._sleeping.remove(wake)

    async def _do(self, work: Callable[[], Awaitable[Iterable[HamiError]]], *, what: str) -> None:
        """Execute the work on dequeued items, and count failures."""
        self._busy += 1
        try:
            for problem in await work():
                self._fail(problem, what)
        except HamiError as error:
            self._fail(error, what)
        finally:
            self._busy -= 1
            if not self._busy and not self._items:
                self._idle.set()

    async def _alone(self, handle: Callable[[T], Awaitable[None]], item: T) -> Iterable[HamiError]:
        if not await self._isolation.run(item, partial(handle, item)):
            self._failed.inc()
        return ()

    async def _together(
        self, handle: Callable[[Sequence[T]], Awaitable[Iterable[HamiError]]], items: Sequence[T]
    ) -> Iterable[HamiError]:
        """Handle items in one batch, or one by one when the batch fails because of one of them."""
        try:
            return await handle(items)
        except HamiError:
            raise
        except Exception as error:  # noqa: BLE001 - one by one below, to find the one
            of_all: Exception | None = error if len(items) == 1 else None
        problems: list[HamiError] = []

        async def one(item: T) -> None:
            nonlocal of_all
            if of_all is not None:  # the only item was tried just now
                problem, of_all = of_all, None
                raise problem
            problems.extend(await handle([item]))

        for item in items:
            try:
                if not await self._isolation.run(item, partial(one, item)):
                    self._failed.inc()
            except HamiError as error:
                problems.append(error)
        return problems

    def _fail(self, error: HamiError, what: str) -> None:
        self._failed.inc()
        _log.warning(
            "queued work failed",
            extra={"queue": self._name, "kind": what, "problem": str(error)},
        )

    async def drain(self, *, limit_s: float) -> bool:
        """Wait up to ``limit_s`` until all items taken so far are done.

        Returns whether they are.
        """
        with anyio.move_on_after(limit_s):
            while self._busy or self._items:
                self._idle = anyio.Event()
                await self._idle.wait()
            return True
        return False

    def __len__(self) -> int:
        """Return the number of items that no worker has begun."""
        return len(self._items)
