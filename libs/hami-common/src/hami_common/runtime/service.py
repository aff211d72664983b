# SPDX-License-Identifier: Apache-2.0
"""Runs a service: settings, logs, signals, readiness, orderly shutdown, exit code.

The service's ``main`` opens its adapters and task group, starts its children with ``await
group.start(child)`` in dependency order, sets ``context.ready`` after the last one, then waits for
``context.stopping``. On the first SIGTERM or SIGINT readiness is cleared and ``stopping`` is set;
``main`` then ends its children (servers finish requests in flight) and returns; its adapters close
in reverse order. After ``grace_s`` it is cancelled; at once if it was never ready, as it may wait
for a peer indefinitely. A second signal ends the process at once.
Meanwhile the settings file is watched (``reload``); a service with hot settings of its own sets
``context.settings_file.use``.

Exit codes: 0 asked to stop, 1 bug, 2 bad settings, 3 a dependency was missing at start.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Generic, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from prometheus_client import CollectorRegistry

from hami_common.errors import SettingsInvalid, Unavailable
from hami_common.ports import Clock
from hami_common.runtime import settings as settings_module
from hami_common.runtime import telemetry
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.reload import SettingsFile
from hami_common.runtime.tasks import finish_within

S = TypeVar("S", bound=settings_module.ServiceSettings)

EXIT_STOPPED = 0
EXIT_BUG = 1
EXIT_SETTINGS = 2
EXIT_DEPENDENCY = 3

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(__name__)


class Readiness:
    """Readiness of the service. Not ready at first, and again as soon as it is asked to stop."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._over = False

    @property
    def is_set(self) -> bool:
        """True when the service is ready now."""
        return self._event.is_set() and not self._over

    @property
    def was_set(self) -> bool:
        """True when the service has ever been ready."""
        return self._event.is_set()

    def set(self) -> None:
        """Mark the service ready: all children run."""
        self._event.set()

    def close(self) -> None:
        """Mark the service not ready for good: it was asked to stop."""
        self._over = True

    async def wait(self) -> None:
        """Return once ``set`` was called."""
        await self._event.wait()


class ServiceContext(Generic[S]):
    """Context that ``run`` passes to a service."""

    def __init__(
        self,
        *,
        service: str,
        settings: S,
        clock: Clock | None = None,
        settings_file: Callable[[CollectorRegistry], SettingsFile[S]] | None = None,
    ) -> None:
        """Without ``settings_file``, which declares its metrics, settings stay as they are."""
        self.service = service
        self.settings = settings
        """Those of the start; ``settings_file.settings`` are those in force."""
        self.clock: Clock = clock or SystemClock()
        self.ready = Readiness()
        self.stopping = anyio.Event()
        """Set at the first signal: accept no new work, finish work in progress, return."""
        self.registry: CollectorRegistry = telemetry.make_registry(service=service)
        self.settings_file = (settings_file or self._no_file)(self.registry)
        """Set its ``use`` to receive changed hot settings."""
        self.tracing = telemetry.Tracing(
            service=service,
            endpoint=settings.otlp_endpoint,
            ratio=settings.otlp_ratio,
            registry=self.registry,
            instance=os.environ.get("HOSTNAME", ""),
        )

    def _no_file(self, registry: CollectorRegistry) -> SettingsFile[S]:
        loaded = settings_module.Loaded(settings=self.settings, check_only=False, config_path=None)
        return SettingsFile(loaded, load=lambda _: loaded, service=self.service, registry=registry)

    def stop(self) -> None:
        """Begin an orderly shutdown, as the first signal does."""
        self.ready.close()
        self.stopping.set()


Main = Callable[[ServiceContext[S]], Awaitable[None]]


def run(
    main: Main[S],
    *,
    service: str,
    settings_type: type[S],
    argv: Sequence[str] | None = None,
) -> int:
    """Run ``main`` until it returns or a signal comes; returns the exit code of the process."""
    load = partial(settings_module.load, settings_type, service=service, argv=argv)
    try:
        loaded = load()
    except SettingsInvalid as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_SETTINGS
    shown = settings_module.masked(loaded.settings)
    if loaded.check_only:
        sys.stdout.write(f"{json.dumps(shown, indent=2)}\n")
        return EXIT_STOPPED
    telemetry.configure_logging(service=service, level=loaded.settings.log_level)
    _log.info("effective settings", extra={"settings": shown})
    return anyio.run(_run, main, service, loaded, load, backend="asyncio")


async def _run(
    main: Main[S],
    service: str,
    loaded: settings_module.Loaded[S],
    load: Callable[..., settings_module.Loaded[S]],
) -> int:
    def settings_file(registry: CollectorRegistry) -> SettingsFile[S]:
        def again(content: bytes) -> settings_module.Loaded[S]:
            return load(content=content)

        return SettingsFile(loaded, load=again, service=service, registry=registry)

    context = ServiceContext(service=service, settings=loaded.settings, settings_file=settings_file)
    try:
        await _until_stopped(main, context)
    except Exception as error:  # noqa: BLE001 - the last line of the process: errors become codes
        return _exit_code(error, was_ready=context.ready.was_set)
    finally:
        with finish_within(context.settings.grace_s):
            await anyio.to_thread.run_sync(context.tracing.close, abandon_on_cancel=True)
    _log.info("stopped", extra={"asked": context.stopping.is_set()})
    return EXIT_STOPPED


async def _until_stopped(main: Main[S], context: ServiceContext[S]) -> None:
    async with anyio.create_task_group() as group:
        work = anyio.CancelScope()
        await group.start(_obey_signals, context, work)
        group.start_soon(context.settings_file.watch, context.clock)
        with work:
            await main(context)
        if work.cancelled_caught and context.ready.was_set:
            _log.warning("cancelled after grace", extra={"grace_s": context.settings.grace_s})
        group.cancel_scope.cancel()


async def _obey_signals(
    context: ServiceContext[S],
    work: anyio.CancelScope,
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    with anyio.open_signal_receiver(*_SIGNALS) as received:
        task_status.started()
        async for number in received:
            _log.info("asked to stop", extra={"signal": number.name})
            # From now on a signal ends the process even when the loop is stuck.
            for name in _SIGNALS:
                signal.signal(name, _exit_at_once)
            context.stop()
            if not context.ready.was_set:
                work.cancel()
            work.deadline = anyio.current_time() + context.settings.grace_s


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(EXIT_BUG)


def _exit_code(error: Exception, *, was_ready: bool) -> int:
    leaves = list(_leaves(error))
    if all(isinstance(leaf, SettingsInvalid) for leaf in leaves):
        for leaf in leaves:
            _log.critical("settings are not valid", extra={"problem": str(leaf)})
        return EXIT_SETTINGS
    if not was_ready and all(isinstance(leaf, Unavailable) for leaf in leaves):
        for leaf in leaves:
            _log.critical("a dependency is missing at start", extra={"problem": str(leaf)})
        return EXIT_DEPENDENCY
    _log.critical("unexpected error", exc_info=error)
    return EXIT_BUG


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
