# SPDX-License-Identifier: Apache-2.0
"""Small patterns around anyio: background tasks of a block, shielded clean-up, jittered backoff.

Seconds throughout. Cancellation is a level: clean-up that must finish after it runs in
``finish_within``.
"""

import logging
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus

_log = logging.getLogger(__name__)


@asynccontextmanager
async def background() -> AsyncIterator[TaskGroup]:
    """A task group whose tasks are cancelled when the block ends.

    An error raised by the block itself is raised unchanged, not wrapped in an ``ExceptionGroup``; a
    task that fails cancels the block and is raised as a group, as usual.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except Exception as error:  # noqa: BLE001 - raised again below, outside the group
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


@contextmanager
def finish_within(limit_s: float) -> Iterator[anyio.CancelScope]:
    """Shield clean-up that awaits from cancellation, for at most ``limit_s``."""
    with anyio.move_on_after(limit_s, shield=True) as scope:
        yield scope


class StartedOnce:
    """The status of a task whose loop is restarted: only the first ``started`` is reported."""

    def __init__(self, status: TaskStatus[None]) -> None:
        self._status = status

    def started(self, value: None = None) -> None:
        """Report that the task has started, the first time."""
        status, self._status = self._status, anyio.TASK_STATUS_IGNORED
        status.started(value)


class Waiting:
    """Limit and log of the wait for a peer at start.

    ``for_s`` of 0 waits indefinitely. A wait is logged at once and then every ``LOG_S``.
    """

    LOG_S = 30.0

    def __init__(self, peer: str, for_s: float) -> None:
        self.limit_s = for_s or None
        """For ``anyio.move_on_after``."""
        self.problem = "no answer"
        self._peer = peer
        self._log_at_s = 0.0

    def note(self, problem: str) -> None:
        """Record why the last attempt failed."""
        self.problem = problem
        now_s = anyio.current_time()
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + self.LOG_S
            _log.warning("waiting for a peer", extra={"peer": self._peer, "problem": problem})


class Backoff:
    """Delays between attempts: doubling from ``first_s`` to ``most_s``, with random jitter."""

    def __init__(self, *, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """An attempt succeeded."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return the delay before the next attempt."""
        delay_s = self._next_s
        self._next_s = min(self._most_s, delay_s * 2)
        return delay_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret

    async def wait(self) -> None:
        """Sleep for ``next_s``."""
        await anyio.sleep(self.next_s())
