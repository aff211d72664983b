# SPDX-License-Identifier: Apache-2.0
"""Reloads a changed settings file while its service runs, as far as its settings are hot.

The file is read again every ``config_poll_s`` and identified by its SHA-256, so that the symlink
swap of a mounted ConfigMap and an edit in place are both detected. Two equal reads in a row show
that the file is complete. Flags and environment keep their values of the start, and still take
precedence. An invalid file leaves the settings in force unchanged. A file that changes settings
that are not hot (see ``ServiceSettings.HOT``) is applied for the hot ones, and the rest are named
as needing a restart. Times in seconds. Uses no settings except ``log_level`` and ``config_poll_s``.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio.to_thread
import msgspec
from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from hami_common.errors import SettingsInvalid
from hami_common.ports import Clock
from hami_common.runtime.settings import Loaded, ServiceSettings, digest_of

if TYPE_CHECKING:
    from hami_common.runtime.httpd import Handler, Request, Response

S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T", bound=Struct)

PAGE = ("GET", "/configz")
"""Route with the state of the settings; beside the probes, without authentication."""
_OUTCOMES = ("ok", "failed")

_log = logging.getLogger(__name__)


class Metrics:
    """Metrics of settings, the same names in every service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.info = Info(
            "hami_settings",
            "SHA-256 of the settings file in force; empty without a file.",
            registry=registry,
        )
        self.generation = Gauge(
            "hami_settings_generation",
            "Settings files taken over since the start, that of the start included.",
            registry=registry,
        )
        self.reload_failed = Gauge(
            "hami_settings_reload_failed",
            "1 while the settings file cannot be used as it is and earlier settings are in force.",
            registry=registry,
        )
        self.restart_needed = Gauge(
            "hami_settings_restart_needed",
            "Settings that the file gives other values than those in force until a restart.",
            registry=registry,
        )
        self.reloads = Counter(
            "hami_settings_reloads",
            "Changed settings files, by outcome (ok, failed).",
            ["outcome"],
            registry=registry,
        )
        for outcome in _OUTCOMES:
            self.reloads.labels(outcome=outcome)


class Told(Struct, frozen=True, kw_only=True):
    """The answer of ``/configz``. It contains no setting's value."""

    service: str
    file: str
    """Path of the settings file; empty without one."""
    digest: str
    """SHA-256 of the file in force, as ``sha256sum`` prints it."""
    observed_generation: int = msgspec.field(name="observedGeneration")
    problem: str
    """Reason for which the current file is not in use; empty when it is."""
    restart_needed: tuple[str, ...] = msgspec.field(name="restartNeeded")
    """Settings in the file that need a restart to take effect."""


def merge(old: T, new: T, hot: frozenset[str], *, path: str = "") -> tuple[T, tuple[str, ...]]:
    """Return ``old`` with the hot settings of ``new``, and the full paths of the other changes."""
    changes: dict[str, object] = {}
    waiting: list[str] = []
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        full = f"{path}{name}"
        if full in hot:
            changes[name] = after
        elif isinstance(before, Struct) and type(before) is type(after):
            changes[name], inside = merge(before, after, hot, path=f"{full}.")
            waiting += inside
        else:
            waiting.append(full)
    return structs.replace(old, **changes), tuple(waiting)


class SettingsFile(Generic[S]):
    """The settings in force, the file they came from, and the problem of the current file."""

    def __init__(
        self,
        loaded: Loaded[S],
        *,
        load: Callable[[], Loaded[S]],
        service: str,
        registry: CollectorRegistry,
    ) -> None:
        """Begin with the settings ``loaded`` at the start; ``load`` loads them again."""
        self.settings = loaded.settings
        self.digest = loaded.digest
        self.generation = 1
        self.problem = ""
        self.restart_needed: tuple[str, ...] = ()
        self.use: Callable[[S], None] = _no_hot_settings
        """Passes changed settings to the service; raising ``SettingsInvalid`` rejects all of them.
        """
        self._path = loaded.config_path
        self._load = load
        self._service = service
        self._metrics = Metrics(registry)
        self._seen = loaded.digest
        self._judged = loaded.digest
        self._show()

    async def watch(self, clock: Clock) -> None:
        """Poll the file until cancelled; returns at once when there is none."""
        while self._path is not None and self.settings.config_poll_s > 0:
            await clock.sleep(self.settings.config_poll_s)
            await self.look()

    async def look(self) -> None:
        """Read the file once; apply it when two reads are equal and it is new."""
        if self._path is None:
            return
        digest = await anyio.to_thread.run_sync(_digest_now, self._path)
        before, self._seen = self._seen, digest
        if digest != before or digest == self._judged:
            return
        self._judged = digest
        try:
            loaded = await anyio.to_thread.run_sync(self._load)
            self._take(loaded)
        except SettingsInvalid as error:
            self._refuse(str(error))
        except Exception:  # noqa: BLE001 - the loop's top: a service's bug must not end it
            _log.exception("settings not taken over")
            self._refuse("the service could not use it, see its log")

    async def page(self, request: "Request") -> "Response":
        """Answer ``GET /configz``."""
        from hami_common.runtime.httpd import (  # noqa: PLC0415 - the plugin proxy has no server
            json_response,
        )

        del request
        return json_response(
            Told(
                service=self._service,
                file=str(self._path or ""),
                digest=self.digest,
                observed_generation=self.generation,
                problem=self.problem,
                restart_needed=self.restart_needed,
            )
        )

    def routes(self) -> "dict[tuple[str, str], Handler]":
        """The page, for the server of the probes."""
        return {PAGE: self.page}

    def _take(self, loaded: Loaded[S]) -> None:
        settings, waiting = merge(self.settings, loaded.settings, type(self.settings).HOT)
        self.use(settings)
        changed = settings != self.settings
        self.settings = settings
        logging.getLogger().setLevel(settings.log_level)
        self.problem, self.restart_needed = "", waiting
        if loaded.digest != self.digest:
            self.digest = loaded.digest
            self.generation += 1
        self._metrics.reloads.labels(outcome="ok").inc()
        self._show()
        extra = {"digest": self.digest, "changed": changed, "restart_needed": waiting}
        _log.info("settings taken over", extra=extra)

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        self._metrics.reloads.labels(outcome="failed").inc()
        self._show()
        _log.error("settings kept", extra={"problem": problem})

    def _show(self) -> None:
        self._metrics.info.info({"digest": self.digest})
        self._metrics.generation.set(self.generation)
        self._metrics.reload_failed.set(bool(self.problem))
        self._metrics.restart_needed.set(len(self.restart_needed))


def _no_hot_settings(settings: ServiceSettings) -> None:
    """Default of ``use``, for a service without hot settings of its own."""
    del settings


def _digest_now(path: Path) -> str:
    """Digest of the file's current content; empty when it cannot be read."""
    try:
        return digest_of(path.read_bytes())
    except OSError:
        return ""
