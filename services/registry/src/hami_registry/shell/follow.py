# SPDX-License-Identifier: Apache-2.0
"""Follows a bucket and passes its entries to several readers, in stream order.

Each value is isolated for each reader: one that a reader cannot fold, because it does not decode or
for any other reason, is quarantined until a newer one of its key is folded, and blocks neither the
values behind it nor the other readers.
"""

import logging
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from hami_common.errors import WireInvalid
from hami_common.ports import Bucket, Entry, Reset
from hami_common.runtime.quarantine import Quarantine
from hami_registry.shell.metrics import Metrics

SYNCED = "synced"
"""Key of a reader's work once all stored entries were delivered."""

_log = logging.getLogger(__name__)


class Reader(Protocol):
    """A consumer of a bucket's entries."""

    @property
    def kind(self) -> str:
        """Kind of the values in quarantine; no two readers have the same."""
        ...

    def entry(self, entry: Entry) -> None:
        """Fold a value; ``WireInvalid`` when it does not decode."""
        ...

    def reset(self) -> None:
        """Drop the former content of the bucket, which is lost; its present content follows."""
        ...

    def synced(self) -> Awaitable[None] | None:
        """Note that all entries stored so far were delivered."""
        ...


async def follow(
    bucket: Bucket,
    readers: Sequence[Reader],
    metrics: Metrics,
    quarantine: Quarantine,
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Pass entries to ``readers`` indefinitely; started once they have all stored entries.

    Starts with ``reset``: a new watch delivers all stored entries.
    """
    is_started = False
    for reader in readers:
        _forget(reader.kind, quarantine)
        reader.reset()
    async with bucket.watch() as items:
        async for item in items:
            if isinstance(item, Entry):
                for reader in readers:
                    await _deliver(reader, item, bucket.name, metrics, quarantine)
            elif isinstance(item, Reset):
                metrics.resets.labels(origin=bucket.name).inc()
                _log.warning("bus lost a bucket", extra={"bucket": bucket.name})
                # Not isolated: a retry would wipe entries delivered since. The watch restarts.
                for reader in readers:
                    _forget(reader.kind, quarantine)
                    reader.reset()
            else:
                for reader in readers:
                    await quarantine.run(reader.kind, SYNCED, reader.synced)
                if not is_started:
                    is_started = True
                    task_status.started()


async def _deliver(
    reader: Reader, entry: Entry, origin: str, metrics: Metrics, quarantine: Quarantine
) -> None:
    attempt = partial(reader.entry, entry)
    refusals: list[WireInvalid] = []

    def counted() -> None:
        try:
            attempt()
        except WireInvalid as error:
            refusals.append(error)
            if len(refusals) == 1:  # a retry of the same bytes is no further value
                metrics.values_malformed.labels(origin=origin).inc()
            raise

    await quarantine.run(reader.kind, entry.key, counted, size_bytes=len(entry.value))


def _forget(kind: str, quarantine: Quarantine) -> None:
    """Release the values of a bucket that is lost: a retry would use stale values."""
    for entry in quarantine.entries():
        if entry.kind == kind:
            quarantine.forget(kind, entry.key)
