# SPDX-License-Identifier: Apache-2.0
"""Applies a changed settings file to its running service, as far as its settings are hot.

``watchedfile`` reads the file. Flags and environment keep their values of the start, and still take
precedence. A file that changes settings that are not hot (see ``ServiceSettings.HOT``) is applied
for the hot ones, and the rest are named as needing a restart. Decides which settings are in force;
their meaning is the service's, by ``use``. Uses no settings except ``log_level`` and
``config_poll_s``.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, Gauge

from hami_common.ports import Clock
from hami_common.runtime.settings import CONFIG, Loaded, ServiceSettings
from hami_common.runtime.watchedfile import FileKind, WatchedFile

if TYPE_CHECKING:
    from hami_common.runtime.httpd import Handler, Request, Response

S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T", bound=Struct)

PAGE = ("GET", "/configz")
"""Route with the state of the settings; beside the probes, without authentication."""
FILE: Final = FileKind(name="settings", title="settings file", field=CONFIG)

_log = logging.getLogger(__name__)


class Metrics:
    """Metrics of settings beside those of their file, the same names in every service."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.generation = Gauge(
            "hami_settings_generation",
            "Settings files applied since the start, that of the start included.",
            registry=registry,
        )
        self.restart_needed = Gauge(
            "hami_settings_restart_needed",
            "Settings that the file gives other values than those in force until a restart.",
            registry=registry,
        )


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
    """The settings in force, and the file they came from."""

    def __init__(
        self,
        loaded: Loaded[S],
        *,
        load: Callable[[bytes], Loaded[S]],
        service: str,
        registry: CollectorRegistry,
    ) -> None:
        """Begin with the settings ``loaded`` at the start; ``load`` loads those of new content."""
        self.settings = loaded.settings
        self.generation = 1
        self.restart_needed: tuple[str, ...] = ()
        self.use: Callable[[S], None] = _no_hot_settings
        """Passes changed settings to the service; raising ``SettingsInvalid`` rejects all of them.
        """
        self.file = WatchedFile(
            str(loaded.config_path or ""),
            FILE,
            parse=load,
            value=loaded,
            digest=loaded.digest,
            registry=registry,
        )
        self.file.use = self._take
        self._service = service
        self._metrics = Metrics(registry)
        self._show()

    def poll_s(self) -> float:
        """Return the interval at which this file, and others of the service, are polled."""
        return self.settings.config_poll_s

    async def watch(self, clock: Clock) -> None:
        """Poll the file until cancelled; returns at once when there is none."""
        await self.file.watch(clock, self.poll_s)

    async def page(self, request: "Request") -> "Response":
        """Answer ``GET /configz``."""
        from hami_common.runtime.httpd import (  # noqa: PLC0415 - the plugin proxy has no server
            json_response,
        )

        del request
        return json_response(
            Told(
                service=self._service,
                file=self.file.path,
                digest=self.file.digest,
                observed_generation=self.generation,
                problem=self.file.problem,
                restart_needed=self.restart_needed,
            )
        )

    def routes(self) -> "dict[tuple[str, str], Handler]":
        """The page, for the server of the probes."""
        return {PAGE: self.page}

    def _take(self, loaded: Loaded[S]) -> None:
        settings, waiting = merge(self.settings, loaded.settings, type(self.settings).HOT)
        self.use(settings)
        self.settings = settings
        logging.getLogger().setLevel(settings.log_level)
        self.restart_needed = waiting
        if loaded.digest != self.file.digest:
            self.generation += 1
        self._show()
        if waiting:
            _log.warning("settings need a restart", extra={"settings": waiting})

    def _show(self) -> None:
        self._metrics.generation.set(self.generation)
        self._metrics.restart_needed.set(len(self.restart_needed))


def _no_hot_settings(settings: ServiceSettings) -> None:
    """Default of ``use``, for a service without hot settings of its own."""
    del settings
