# SPDX-License-Identifier: Apache-2.0
"""Background tasks: effects of the ledger and repairs, which run after the calls that caused them.

They are queued in a ``Backlog``; tasks that a full queue drops are found again by the next
comparison of ledger and pods. Seconds throughout.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from hami_common.errors import Conflict, Unavailable
from hami_common.ports import Clock
from hami_common.runtime.tasks import Backoff
from hami_core.ledger import repair
from hami_core.ledger.holding import Holding
from hami_core.ledger.stimuli import CapacityReturned, Examine, Over, Task
from hami_scheduler.settings import Settings
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.wakeup import Waker

TRIES: Final = 4
"""Attempts at one task while bus or API server are unavailable; then the next comparison has it."""

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Runs tasks, one per call."""

    def __init__(
        self,
        *,
        effects: Effects,
        waker: Waker,
        align: Callable[[Holding], Awaitable[str]],
        clock: Clock,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """``align`` writes a record's shares into its pod's annotations; returns the outcome."""
        self._effects = effects
        self._waker = waker
        self._align = align
        self._clock = clock
        self._settings = settings
        self._metrics = metrics

    async def run(self, task: Task) -> None:
        """Run one task; retry with backoff while a peer is unavailable."""
        backoff = Backoff(first_s=self._settings.retry_s, most_s=10 * self._settings.retry_s)
        for attempt in range(1, TRIES + 1):
            try:
                await self._attempt(task)
            except (Unavailable, Conflict) as error:
                if attempt == TRIES:
                    raise
                _log.debug("background task retried", extra={"problem": str(error)})
                await self._clock.sleep(backoff.next_s())
            else:
                return

    async def _attempt(self, task: Task) -> None:
        match task:
            case Examine(holding=holding):
                finding = await self._effects.settling.examine(holding)
                self._metrics.examined.labels(finding=finding).inc()
            case CapacityReturned(node=node):
                self._waker.wake(node)
            case Over(node=node, uuids=uuids):
                self._metrics.over_booked.inc()
                _log.warning("devices are over-booked", extra={"node": node, "devices": uuids})
            case repair.Release(holding=holding, reason=reason):
                await self._effects.ledger.release(holding, reason)
            case repair.Doubt(holding=holding):
                await self._effects.settling.doubt(holding)
            case repair.Confirm(holding=holding):
                await self._effects.ledger.confirm(holding)
            case repair.Align(holding=holding):
                outcome = await self._align(holding)
                self._metrics.repairs.labels(action=outcome).inc()
            case repair.Restore():
                outcome = await self._effects.settling.restore(task)
                self._metrics.repairs.labels(action=outcome).inc()
