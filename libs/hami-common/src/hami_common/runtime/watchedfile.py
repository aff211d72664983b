# SPDX-License-Identifier: Apache-2.0
"""Reloads a configuration file while its service runs: settings, SKUs, queues, policies, devices.

The file is read every ``config_poll_s`` and identified by its SHA-256, so that the symlink swap of
a mounted ConfigMap and an edit in place are both detected. Two equal reads in a row show that the
file is complete. An invalid file stops the start; later it leaves the last valid content in force,
with one log line and one count for each problem. Decides which content is in force; the meaning of
the content is the owner's, by ``parse`` and ``use``. Times in seconds.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import anyio.to_thread
from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from hami_common.errors import SettingsInvalid
from hami_common.ports import Clock
from hami_common.runtime.settings import digest_of, read

T = TypeVar("T")

_OUTCOMES = ("ok", "failed")

_log = logging.getLogger(__name__)


class FileKind(NamedTuple):
    """A kind of watched file; a service has at most one file of each."""

    name: str
    """In names of metrics and in logs."""
    title: str
    field: str
    """Setting or flag with the path, for errors."""


class FileMetrics:
    """Metrics of a watched file, the same for every kind."""

    def __init__(self, kind: FileKind, registry: CollectorRegistry) -> None:
        self.info = Info(
            f"hami_{kind.name}",
            f"SHA-256 of the {kind.title} in force; empty without a file.",
            registry=registry,
        )
        self.valid = Gauge(
            f"hami_{kind.name}_file_valid",
            f"1 while the present {kind.title} is in force; 0 while an earlier one is.",
            registry=registry,
        )
        self.reloads = Counter(
            f"hami_{kind.name}_reloads",
            f"Reloads of a changed {kind.title}, by outcome (ok, failed).",
            ["outcome"],
            registry=registry,
        )
        for outcome in _OUTCOMES:
            self.reloads.labels(outcome=outcome)


class WatchedFile(Generic[T]):
    """The content in force, and the problem of the present file."""

    def __init__(
        self,
        path: str,
        kind: FileKind,
        *,
        parse: Callable[[bytes], T],
        value: T,
        digest: str,
        registry: CollectorRegistry,
    ) -> None:
        """Watch ``path``, whose content ``value`` with this digest is in force already."""
        self.path = path
        """Empty: there is no file."""
        self.value = value
        self.digest = digest
        """SHA-256 of the file in force, as ``sha256sum`` prints it; empty without one."""
        self.problem = ""
        """Reason for which the present file is not in force; empty when it is."""
        self.use: Callable[[T], None] = _accept
        """Applies changed content before it is in force. ``SettingsInvalid`` refuses it; it is
        offered again at every poll, because the reason may end.
        """
        self.kind = kind
        self._parse = parse
        self._metrics = FileMetrics(kind, registry)
        self._seen = self._judged = digest
        self._offered: T | None = None
        """Valid content that is not in force."""
        self._show()

    @classmethod
    def at_start(
        cls,
        path: str,
        kind: FileKind,
        *,
        parse: Callable[[bytes], T],
        default: T,
        registry: CollectorRegistry,
    ) -> "WatchedFile[T]":
        """Read ``path``; empty: ``default``. ``SettingsInvalid``: it is unreadable or invalid."""
        content = read(Path(path), field=kind.field) if path else None
        return cls(
            path,
            kind,
            parse=parse,
            value=default if content is None else parse(content),
            digest="" if content is None else digest_of(content),
            registry=registry,
        )

    async def watch(self, clock: Clock, poll_s: Callable[[], float]) -> None:
        """Poll the file until cancelled; returns at once when there is none, or an interval is 0.

        ``poll_s`` returns the interval in force.
        """
        while self.path and (interval_s := poll_s()) > 0:
            await clock.sleep(interval_s)
            await self.look()

    async def look(self) -> None:
        """Read the file once; apply it when two reads are equal and it is new."""
        if not self.path:
            return
        found = await anyio.to_thread.run_sync(self._read)
        digest = digest_of(found) if isinstance(found, bytes) else ""
        before, self._seen = self._seen, digest
        if digest != before:
            return
        try:
            if isinstance(found, SettingsInvalid):
                self._judged, self._offered = "", None
                raise found  # noqa: TRY301 - handled as any other problem
            if digest != self._judged:
                self._judged, self._offered = digest, None
                self._offered = await anyio.to_thread.run_sync(self._parse, found)
            if self._offered is not None:
                self._apply(self._offered, digest)
        except SettingsInvalid as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - the loop's top: an owner's bug must not end it
            self._offered = None
            self._fail("the service could not use it, see its log", error)

    def _read(self) -> bytes | SettingsInvalid:
        try:
            return read(Path(self.path), field=self.kind.field)
        except SettingsInvalid as error:
            return error

    def _apply(self, value: T, digest: str) -> None:
        self.use(value)
        self.value, self.digest, self.problem, self._offered = value, digest, "", None
        self._metrics.reloads.labels(outcome="ok").inc()
        self._show()
        extra = {"kind": self.kind.name, "file": self.path, "digest": digest}
        _log.info("configuration file reloaded", extra=extra)

    def _fail(self, problem: str, error: Exception | None = None) -> None:
        if problem == self.problem and error is None:
            return
        self.problem = problem
        self._metrics.reloads.labels(outcome="failed").inc()
        self._show()
        extra = {"kind": self.kind.name, "file": self.path, "problem": problem}
        message = "configuration file invalid, last valid one kept"
        _log.error(message, extra=extra, exc_info=error)

    def _show(self) -> None:
        self._metrics.info.info({"digest": self.digest})
        self._metrics.valid.set(not self.problem)


def _accept(value: object) -> None:
    """Default of ``use``."""
    del value
