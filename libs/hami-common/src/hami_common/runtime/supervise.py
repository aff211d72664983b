# SPDX-License-Identifier: Apache-2.0
"""Restart the loops of a service that end, with backoff; the service itself keeps running.

An object that fails belongs to ``Quarantine``, which keeps its loop going. A loop ends only because
of its source, or a defect. Seconds throughout.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from hami_common.ports import Clock
from hami_common.runtime.tasks import Backoff

STEADY_S: Final = 60.0
"""A loop that ran this long before it ended is restarted with the first delay again."""

_log = logging.getLogger(__name__)


class Supervisor:
    """Runs the loops of one service."""

    def __init__(
        self,
        *,
        clock: Clock,
        registry: CollectorRegistry,
        first_s: float = 1.0,
        most_s: float = 30.0,
    ) -> None:
        """Restart after ``first_s``, doubling up to ``most_s``; declare metrics in ``registry``."""
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._restarts = Counter(
            "hami_loop_restarts",
            "Times a loop of the service ended with an error and was restarted, by loop.",
            ["loop"],
            registry=registry,
        )

    async def keep(
        self,
        name: str,
        loop: Callable[[], Awaitable[None]],
        *,
        expected: tuple[type[Exception], ...] = (),
        is_endless: bool = False,
    ) -> None:
        """Run ``loop`` until it returns; restart it whenever it raises.

        ``expected``: errors of a peer, logged as warnings. ``is_endless``: restart it also when it
        returns.
        """
        self._restarts.labels(loop=name)
        backoff = Backoff(first_s=self._first_s, most_s=self._most_s)
        while True:
            begin_s = self._clock.monotonic_s()
            try:
                await loop()
            except expected as error:
                _log.warning("loop broke off", extra={"loop": name, "problem": str(error)})
            except Exception as error:  # noqa: BLE001 - the second net: a loop never ends the service
                _log.critical(
                    "loop failed, it is restarted",
                    extra={"loop": name, "problem": f"{type(error).__name__}: {error}"[:500]},
                    exc_info=error,
                )
            else:
                if not is_endless:
                    return
                backoff.reset()
                self._restarts.labels(loop=name).inc()
                continue
            self._restarts.labels(loop=name).inc()
            if self._clock.monotonic_s() - begin_s >= STEADY_S:
                backoff.reset()
            await self._clock.sleep(backoff.next_s())
