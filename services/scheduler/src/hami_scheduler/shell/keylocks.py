# SPDX-License-Identifier: Apache-2.0
"""Locks by key inside this process: first come, first served, dropped when unused.

They only avoid races between tasks of one process. Between processes the ledger's fence and the
preconditions of the Kubernetes API decide (design D3, D4). Seconds throughout.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from hami_common.errors import Unavailable


class KeyLocks:
    """One lock per key; ``what`` names the kind of key in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._locks: dict[str, tuple[anyio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, key: str, *, wait_s: float) -> AsyncIterator[None]:
        """Hold the lock of ``key`` for the block; ``Unavailable`` after waiting ``wait_s``."""
        lock, users = self._locks.get(key, (None, 0))
        if lock is None:
            lock = anyio.Lock()
        self._locks[key] = (lock, users + 1)
        try:
            with anyio.move_on_after(wait_s) as waiting:
                await lock.acquire()
            if waiting.cancelled_caught:
                raise Unavailable(
                    peer="scheduler",
                    detail=f"other work on {self._what} {key} has not ended in {wait_s:g} s",
                )
            try:
                yield
            finally:
                lock.release()
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = (lock, users - 1)

    def __len__(self) -> int:
        """Return the number of keys in use."""
        return len(self._locks)
