# SPDX-License-Identifier: Apache-2.0
"""Follows a bucket and tells several readers what it holds, in stream order.

A value that does not decode is counted, logged and skipped: it must not stop the values behind it.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from hami_common.errors import WireInvalid
from hami_common.ports import Bucket, Entry, Reset
from hami_registry.shell.metrics import Metrics

_log = logging.getLogger(__name__)


class Reader(Protocol):
    """Somebody who wants to know what a bucket holds."""

    def entry(self, entry: Entry) -> None:
        """A value; ``WireInvalid`` when it does not decode."""
        ...

    def reset(self) -> None:
        """What the bucket held is lost; what it holds now follows."""
        ...

    def synced(self) -> None:
        """Everything stored so far has been told."""
        ...


async def follow(
    bucket: Bucket,
    readers: Sequence[Reader],
    metrics: Metrics,
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Tell ``readers`` for ever; started once they were told everything stored."""
    is_started = False
    async with bucket.watch() as items:
        async for item in items:
            if isinstance(item, Entry):
                for reader in readers:
                    _tell(reader, item, bucket.name, metrics)
            elif isinstance(item, Reset):
                metrics.resets.labels(origin=bucket.name).inc()
                _log.warning("bus lost a bucket", extra={"bucket": bucket.name})
                for reader in readers:
                    reader.reset()
            else:
                for reader in readers:
                    reader.synced()
                if not is_started:
                    is_started = True
                    task_status.started()


def _tell(reader: Reader, entry: Entry, origin: str, metrics: Metrics) -> None:
    try:
        reader.entry(entry)
    except WireInvalid as error:
        metrics.values_malformed.labels(origin=origin).inc()
        _log.warning("value skipped", extra={"bucket": origin, "problem": str(error)})
