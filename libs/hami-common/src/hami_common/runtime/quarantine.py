# SPDX-License-Identifier: Apache-2.0
"""Isolate objects whose handling fails, so that a loop goes on with the next object.

Every loop over objects that come from outside (pods, bucket values, reports, events, gangs, jobs)
hands each object to its service's ``Quarantine``. An object that raises is counted, logged and kept
with the attempt that failed; ``retry`` repeats the attempt with exponential backoff until it
succeeds, a newer version of the object is handled, or the object is gone. The source of a loop is
not covered: what iterating it raises ends the loop, and its supervisor restarts it.

Knows neither what the objects are nor who is informed: see ``Quarantine.entered`` and ``released``.
Seconds throughout.
"""

import inspect
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Final, TypeVar

import anyio
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge

from hami_common.ports import Clock

T = TypeVar("T")

Attempt = Callable[[], Awaitable[None] | None]
"""Handles one version of one object; called again for each retry."""

CAPACITY: Final = 10_000
"""Objects in quarantine at the same time; failures of further objects are counted only."""
PROBLEM_MOST: Final = 500
"""Characters of an error text that are kept."""

_log = logging.getLogger(__name__)


class Quarantined(Struct, frozen=True, kw_only=True):
    """One object whose last attempt failed."""

    kind: str
    """What the object is, one word of a closed set, such as ``pod`` or ``record``."""
    key: str
    """Identifies the object among its kind: a uid, a bucket key, a subject."""
    problem: str
    """Type and text of the last error, ``PROBLEM_MOST`` characters at most."""
    failures: int
    """Attempts that failed, at least 1."""
    first_s: float
    """Unix time of the first failure."""
    last_s: float
    """Unix time of the last failure."""
    retry_s: float
    """Unix time from which the next attempt is due."""


class Quarantine:
    """The objects of one service that cannot be handled now."""

    def __init__(
        self,
        *,
        kinds: Iterable[str],
        clock: Clock,
        registry: CollectorRegistry,
        first_s: float = 1.0,
        most_s: float = 300.0,
        capacity: int = CAPACITY,
    ) -> None:
        """Retry after ``first_s``, doubling up to ``most_s``; declare metrics in ``registry``."""
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._capacity = capacity
        self._entries: dict[tuple[str, str], Quarantined] = {}
        self._attempts: dict[tuple[str, str], Attempt] = {}
        self._running: dict[tuple[str, str], anyio.Event] = {}
        self._filled = anyio.Event()
        self._due_s: dict[tuple[str, str], float] = {}
        """When the next attempt is due, on the monotonic clock."""
        self.entered: Callable[[Quarantined], None] = lambda _: None
        """Called on each failure; must neither block nor raise."""
        self.released: Callable[[Quarantined], None] = lambda _: None
        """Called once an object is handled or forgotten; must neither block nor raise."""
        self._objects = Gauge(
            "hami_quarantined_objects",
            "Objects whose handling failed and is retried, by kind.",
            ["kind"],
            registry=registry,
        )
        self._failures = Counter(
            "hami_quarantine_failures",
            "Attempts to handle an object that raised an error, by kind of object.",
            ["kind"],
            registry=registry,
        )
        for kind in kinds:
            self._objects.labels(kind=kind)
            self._failures.labels(kind=kind)

    def entries(self) -> list[Quarantined]:
        """Return what is in quarantine, the oldest first."""
        return list(self._entries.values())

    def get(self, kind: str, key: str) -> Quarantined | None:
        """Return the entry of one object, ``None`` while it is not in quarantine."""
        return self._entries.get((kind, key))

    def forget(self, kind: str, key: str) -> None:
        """Release an object that no longer exists."""
        self._release((kind, key))

    async def each(
        self,
        source: AsyncIterable[T],
        *,
        kind: str,
        key: Callable[[T], str],
        handle: Callable[[T], Awaitable[None] | None],
        passes: tuple[type[Exception], ...] = (),
    ) -> None:
        """Handle every object of ``source``; errors of one object stay with that object.

        Errors of the types ``passes`` are those of a peer, not of an object, and are raised.
        """
        async for item in source:

            def attempt(item: T = item) -> Awaitable[None] | None:
                return handle(item)

            await self.run(kind, _key_of(item, key), attempt, passes=passes)

    async def run(
        self, kind: str, key: str, attempt: Attempt, *, passes: tuple[type[Exception], ...] = ()
    ) -> bool:
        """Call ``attempt``; return whether it succeeded. A failure puts the object in quarantine.

        Waits while a retry of the same object runs, so that versions are handled in their order.
        """
        place = (kind, key)
        while place in self._running:
            await self._running[place].wait()
        return await self._try(place, attempt, passes)

    async def _try(
        self, place: tuple[str, str], attempt: Attempt, passes: tuple[type[Exception], ...]
    ) -> bool:
        done = self._running[place] = anyio.Event()
        try:
            outcome = attempt()
            if inspect.isawaitable(outcome):
                await outcome
        except passes:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where an object's error ends
            self._fail(place, attempt, error)
            return False
        finally:
            del self._running[place]
            done.set()
        self._release(place)
        return True

    def _fail(self, place: tuple[str, str], attempt: Attempt, error: Exception) -> None:
        kind, key = place
        self._failures.labels(kind=kind).inc()
        known = self._entries.get(place)
        if known is None and len(self._entries) >= self._capacity:
            _log.error(
                "object failed, quarantine is full",
                extra={"kind": kind, "key": key, "problem": _text(error)},
            )
            return
        now_s = self._clock.now_s()
        failures = known.failures + 1 if known is not None else 1
        delay_s = min(self._most_s, self._first_s * 2.0 ** min(failures - 1, 32))
        entry = Quarantined(
            kind=kind,
            key=key,
            problem=_text(error),
            failures=failures,
            first_s=known.first_s if known is not None else now_s,
            last_s=now_s,
            retry_s=now_s + delay_s,
        )
        self._entries[place] = entry
        self._attempts[place] = attempt
        self._due_s[place] = self._clock.monotonic_s() + delay_s
        self._filled.set()
        if known is None:
            self._objects.labels(kind=kind).inc()
        if known is None or known.problem != entry.problem:
            _log.error(
                "object quarantined",
                extra={"kind": kind, "key": key, "problem": entry.problem},
                exc_info=error,
            )
        self.entered(entry)

    def _release(self, place: tuple[str, str]) -> None:
        entry = self._entries.pop(place, None)
        if entry is None:
            return
        del self._attempts[place], self._due_s[place]
        self._objects.labels(kind=entry.kind).dec()
        _log.info(
            "object released from quarantine",
            extra={"kind": entry.kind, "key": entry.key, "failures": entry.failures},
        )
        self.released(entry)

    async def retry(self) -> None:
        """Repeat attempts that are due, indefinitely."""
        while True:
            if not self._entries:
                self._filled = anyio.Event()
                await self._filled.wait()
            await self._clock.sleep(self._first_s)
            await self.retry_due()

    async def retry_due(self) -> None:
        """Repeat each attempt whose time has come, once."""
        now_s = self._clock.monotonic_s()
        for place in [place for place, due_s in self._due_s.items() if due_s <= now_s]:
            attempt = self._attempts.get(place)
            if attempt is not None and place not in self._running:
                await self._try(place, attempt, ())


def _key_of(item: T, key: Callable[[T], str]) -> str:
    """Return the object's key; an object without a readable one shares a key with its like."""
    try:
        return key(item)[:PROBLEM_MOST]
    except Exception:  # noqa: BLE001 - an object may be too broken to say which one it is
        return "unreadable"


def _text(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:PROBLEM_MOST]
    except Exception:  # noqa: BLE001 - an error may quote a number too long to be written out
        return type(error).__name__
