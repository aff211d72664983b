# SPDX-License-Identifier: Apache-2.0
"""Isolate objects whose handling fails, so that a loop goes on with the next object.

Every loop over objects that come from outside (pods, bucket values, reports, events, gangs, jobs)
hands each object to its service's ``Quarantine``. An object that raises is counted, logged and kept
with the attempt that failed; ``retry`` repeats the attempt with exponential backoff until it
succeeds, a newer version of the object is handled, or the object is gone. The source of a loop is
not covered: an error raised while iterating it ends the loop, and its supervisor restarts it.

Independent of the type of the objects and of the reporting: see ``Quarantine.entered`` and
``released``. Seconds throughout.
"""

import inspect
import logging
import math
from collections import Counter as Counted
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Final, TypeVar

import anyio
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge

from hami_common.ports import Clock

T = TypeVar("T")
U = TypeVar("U")

Attempt = Callable[[], Awaitable[None] | None]
"""Handles one version of one object; called again for each retry."""

CAPACITY: Final = 10_000
"""Objects of one kind in quarantine at the same time; further failures are counted only."""
KEPT_BYTES: Final = 64 << 20
"""Size of the objects that are kept for a retry; others are handled when they change."""
PROBLEM_MOST: Final = 500
"""Characters of an error text that are kept."""
LOGGED_S: Final = 60.0
"""Shortest time between two log lines about one object that stays in quarantine."""

_log = logging.getLogger(__name__)


class Quarantined(Struct, frozen=True, kw_only=True):
    """One object whose last attempt failed."""

    kind: str
    """Kind of the object, one word of a closed set, such as ``pod`` or ``record``."""
    key: str
    """Identifies the object among its kind: a uid, a bucket key, a subject."""
    namespace: str = ""
    """Namespace of the Kubernetes object concerned; empty where it has none or is not known."""
    name: str = ""
    """Name of the Kubernetes object concerned; empty where there is none or it is not known."""
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


class _Place(Struct):
    """An entry and the data for its retry."""

    entry: Quarantined
    attempt: Attempt | None
    size_bytes: int
    due_s: float
    """Monotonic time of the next attempt; where there is none to repeat, of the release."""
    logged_s: float


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
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Retry after ``first_s``, doubling up to ``most_s``; declare metrics in ``registry``.

        ``capacity``: entries of each kind. ``kept_bytes``: size of all objects kept for a retry.
        """
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._capacity = capacity
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._places: dict[tuple[str, str], _Place] = {}
        self._count: Counted[str] = Counted()
        self._running: dict[tuple[str, str], anyio.Event | None] = {}
        """Attempts in progress, with the event that wakes those who wait for their end."""
        self._filled = anyio.Event()
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

    def __len__(self) -> int:
        """Return the number of objects in quarantine."""
        return len(self._places)

    def entries(self) -> list[Quarantined]:
        """Return the entries, the oldest first."""
        entries = [place.entry for place in self._places.values()]
        return sorted(entries, key=lambda entry: entry.first_s)

    def get(self, kind: str, key: str) -> Quarantined | None:
        """Return the entry of one object, ``None`` while it is not in quarantine."""
        place = self._places.get((kind, key[:PROBLEM_MOST]))
        return None if place is None else place.entry

    def is_due(self, kind: str, key: str) -> bool:
        """Return whether the object may be handled now: it never failed, or its delay is over."""
        place = self._places.get((kind, key[:PROBLEM_MOST]))
        return place is None or place.entry.retry_s <= self._clock.now_s()

    def forget(self, kind: str, key: str) -> None:
        """Release an object that no longer exists."""
        self._release((kind, key[:PROBLEM_MOST]))

    async def each(
        self,
        source: AsyncIterable[T],
        *,
        kind: str,
        key: Callable[[T], str],
        handle: Callable[[T], Awaitable[None] | None],
        passes: tuple[type[Exception], ...] = (),
        name: Callable[[T], tuple[str, str]] | None = None,
        is_retried: bool = True,
    ) -> None:
        """Handle every object of ``source``; errors of one object stay with that object.

        Errors of the types ``passes`` are those of a peer, not of an object, and are raised. For
        ``is_retried`` and ``name``, which returns (namespace, name) of an object, see ``run``.
        """
        async for item in source:

            def attempt(item: T = item) -> Awaitable[None] | None:
                return handle(item)

            named = _name_of(item, name) if name is not None else ("", "")
            await self.run(
                kind,
                _key_of(item, key),
                attempt,
                passes=passes,
                name=named,
                is_retried=is_retried,
            )

    async def run(
        self,
        kind: str,
        key: str,
        attempt: Attempt,
        *,
        passes: tuple[type[Exception], ...] = (),
        name: tuple[str, str] = ("", ""),
        size_bytes: int = 0,
        is_retried: bool = True,
    ) -> bool:
        """Call ``attempt``; return whether it succeeded.

        A failure puts the object in quarantine.

        ``name``: (namespace, name) of the Kubernetes object concerned. ``size_bytes``: memory that
        keeping ``attempt`` costs. ``is_retried``: whether ``attempt`` is repeated; where not, the
        caller retries by itself, see ``is_due``, and an entry without a failure for two of the
        longest delays is released. Waits while a retry of the same object runs, so that versions
        are handled in their order.
        """
        place = (kind, key[:PROBLEM_MOST])
        while place in self._running:
            ended = self._running[place]
            if ended is None:
                ended = self._running[place] = anyio.Event()
            await ended.wait()
        try:
            outcome = attempt()
            if inspect.isawaitable(outcome):
                await self._awaited(place, outcome)
        except passes:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where an object's error ends
            self._fail(place, attempt if is_retried else None, error, name, size_bytes)
            return False
        if place in self._places:
            self._release(place)
        return True

    def call(
        self,
        kind: str,
        key: str,
        attempt: Callable[[], None],
        *,
        name: tuple[str, str] = ("", ""),
    ) -> bool:
        """Call ``attempt``, which awaits nothing and is not repeated; see ``run``."""
        place = (kind, key[:PROBLEM_MOST])
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - as in run
            self._fail(place, None, error, name, 0)
            return False
        if place in self._places:
            self._release(place)
        return True

    def failed(
        self, kind: str, key: str, error: Exception, *, name: tuple[str, str] = ("", "")
    ) -> None:
        """Put an object in quarantine whose attempt the caller made, and retries, itself."""
        self._fail((kind, key[:PROBLEM_MOST]), None, error, name, 0)

    async def once(
        self, kind: str, attempt: Attempt, *, passes: tuple[type[Exception], ...] = ()
    ) -> bool:
        """Call ``attempt`` for a request that is not repeated; return whether it succeeded.

        A failure is counted and logged and makes no entry: its sender retries or gives up. For
        ``passes`` see ``each``.
        """
        try:
            outcome = attempt()
            if inspect.isawaitable(outcome):
                await outcome
        except passes:
            raise
        except Exception as error:  # noqa: BLE001 - as in run
            self._failures.labels(kind=kind).inc()
            extra = {"kind": kind, "problem": _text(error)}
            _log.error("request failed", extra=extra, exc_info=error)
            return False
        return True

    async def _awaited(self, place: tuple[str, str], outcome: Awaitable[None]) -> None:
        self._running[place] = None
        try:
            await outcome
        finally:
            ended = self._running.pop(place)
            if ended is not None:
                ended.set()

    def _fail(
        self,
        place: tuple[str, str],
        attempt: Attempt | None,
        error: Exception,
        name: tuple[str, str],
        size_bytes: int,
    ) -> None:
        kind, key = place
        self._failures.labels(kind=kind).inc()
        known, problem = self._places.get(place), _text(error)
        if known is None and self._count[kind] >= self._capacity:
            _log.error(
                "object failed, quarantine is full",
                extra={"kind": kind, "key": key, "problem": problem},
            )
            return
        now_s, monotonic_s = self._clock.now_s(), self._clock.monotonic_s()
        failures = known.entry.failures + 1 if known is not None else 1
        delay_s = min(self._most_s, self._first_s * 2.0 ** min(failures - 1, 32))
        entry = Quarantined(
            kind=kind,
            key=key,
            namespace=name[0],
            name=name[1],
            problem=problem,
            failures=failures,
            first_s=known.entry.first_s if known is not None else now_s,
            last_s=now_s,
            retry_s=now_s + delay_s,
        )
        is_logged = known is not None and (
            known.entry.problem == problem or monotonic_s - known.logged_s < LOGGED_S
        )
        if attempt is None and known is not None and known.attempt is not None:
            attempt, size_bytes = known.attempt, known.size_bytes
        self._drop(place)
        if attempt is not None and self._bytes + size_bytes <= self._kept_bytes:
            due_s, kept = monotonic_s + delay_s, attempt
        else:
            # Only the next version can help, or the caller's own retry.
            due_s = math.inf if attempt is not None else monotonic_s + delay_s + 2 * self._most_s
            kept, size_bytes = None, 0
        self._bytes += size_bytes
        self._count[kind] += 1
        self._places[place] = _Place(
            entry=entry,
            attempt=kept,
            size_bytes=size_bytes,
            due_s=due_s,
            logged_s=known.logged_s if known is not None and is_logged else monotonic_s,
        )
        self._filled.set()
        if known is None:
            self._objects.labels(kind=kind).inc()
        if not is_logged:
            _log.error(
                "object quarantined",
                extra={
                    "kind": kind,
                    "key": key,
                    "namespace": entry.namespace,
                    "object": entry.name,
                    "problem": problem,
                },
                exc_info=error,
            )
        self.entered(entry)

    def _drop(self, place: tuple[str, str]) -> _Place | None:
        known = self._places.pop(place, None)
        if known is not None:
            self._bytes -= known.size_bytes
            self._count[known.entry.kind] -= 1
        return known

    def _release(self, place: tuple[str, str]) -> None:
        known = self._drop(place)
        if known is None:
            return
        entry = known.entry
        self._objects.labels(kind=entry.kind).dec()
        _log.info(
            "object released from quarantine",
            extra={"kind": entry.kind, "key": entry.key, "failures": entry.failures},
        )
        self.released(entry)

    async def retry(self) -> None:
        """Repeat attempts that are due, indefinitely."""
        while True:
            if not self._places:
                self._filled = anyio.Event()
                await self._filled.wait()
            await self._clock.sleep(self._first_s)
            await self.retry_due()

    async def retry_due(self) -> None:
        """Repeat each attempt that is due, once; release entries without a recent attempt."""
        now_s = self._clock.monotonic_s()
        for place in [place for place, known in self._places.items() if known.due_s <= now_s]:
            known = self._places.get(place)
            if known is None or known.due_s > now_s or place in self._running:
                continue
            if known.attempt is None:
                self._release(place)
                continue
            await self.run(
                *place,
                known.attempt,
                name=(known.entry.namespace, known.entry.name),
                size_bytes=known.size_bytes,
            )


def sift(
    items: Iterable[T], handle: Callable[[T], U]
) -> tuple[list[tuple[T, U]], list[tuple[T, Exception]]]:
    """Call ``handle`` for each item; return the items with their results, and those that failed.

    For loops in worker threads, which may not touch a ``Quarantine``: the caller hands the failures
    to ``Quarantine.failed``.
    """
    handled: list[tuple[T, U]] = []
    failed: list[tuple[T, Exception]] = []
    for item in items:
        try:
            handled.append((item, handle(item)))
        except Exception as error:  # noqa: BLE001 - as in run
            failed.append((item, error))
    return handled, failed


def _key_of(item: T, key: Callable[[T], str]) -> str:
    """Return the object's key; an object without a readable one shares a key with its like."""
    try:
        return key(item)[:PROBLEM_MOST]
    except Exception:  # noqa: BLE001 - an object may be too broken to say which one it is
        return "unreadable"


def _name_of(item: T, name: Callable[[T], tuple[str, str]]) -> tuple[str, str]:
    """Return the object's namespace and name, empty where they cannot be read."""
    try:
        return name(item)
    except Exception:  # noqa: BLE001 - as with keys
        return "", ""


def _text(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:PROBLEM_MOST]
    except Exception:  # noqa: BLE001 - an error may quote a number too long to be written out
        return type(error).__name__
