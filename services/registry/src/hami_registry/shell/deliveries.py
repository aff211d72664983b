# SPDX-License-Identifier: Apache-2.0
"""Passes each message of a stream to its handler and isolates failures.

A delivery whose handler raises is quarantined and delivered again, after a pause that doubles with
each delivery. After ``DELIVERIES_MOST`` it is dead-lettered and acknowledged: no message is lost or
blocks the ones behind it. Times in seconds.
"""

import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from functools import partial
from typing import Final

from hami_common.errors import HamiError
from hami_common.ports import Publisher
from hami_common.runtime.natsio import Delivery
from hami_common.runtime.natsio.deadletters import MAX_DELIVERIES, DeadLetter, put_away
from hami_common.runtime.quarantine import Quarantine
from hami_registry.shell.metrics import Metrics

DELIVERIES_MOST: Final = 5
"""Failed deliveries of one message before it is dead-lettered."""
PAUSE_MOST_S: Final = 60.0
"""Longest pause before a message is delivered again."""
_RETRY_S: Final = 2.0

_log = logging.getLogger(__name__)

Handle = Callable[[Delivery], Awaitable[None]]
"""Handles a delivery and ends it; an exception is the message's failure."""


class Deliveries:
    """One consumer of a stream."""

    def __init__(
        self,
        *,
        kind: str,
        stream: str,
        key: Callable[[Delivery], str],
        handle: Handle,
        quarantine: Quarantine,
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        """``kind`` and ``key`` name a message in quarantine; ``stream`` is where it is stored."""
        self._kind = kind
        self._stream = stream
        self._key = key
        self._handle = handle
        self._quarantine = quarantine
        self._publisher = publisher
        self._metrics = metrics

    async def each(self, deliveries: AsyncIterable[Delivery]) -> None:
        """Handle all deliveries, indefinitely."""
        async for delivery in deliveries:
            await self.take(delivery)

    async def take(self, delivery: Delivery) -> None:
        """Handle one delivery; on failure have it delivered again, or dead-letter it."""
        key = self._key(delivery)
        attempt = partial(self._handle, delivery)
        if await self._quarantine.run(self._kind, key, attempt, size_bytes=len(delivery.data)):
            return
        if delivery.delivered_count < DELIVERIES_MOST:
            await delivery.nak(delay_s=min(PAUSE_MOST_S, 2.0**delivery.delivered_count))
            return
        known = self._quarantine.get(self._kind, key)
        await self.dead_letter(
            delivery, MAX_DELIVERIES, known.problem if known is not None else "it cannot be handled"
        )

    async def dead_letter(self, delivery: Delivery, reason: str, problem: str) -> bool:
        """Store a dead letter and end the delivery; returns whether the bus accepted the letter."""
        _log.warning(
            "message dead-lettered", extra={"subject": delivery.subject, "problem": problem}
        )
        letter = DeadLetter(
            consumer="registry",
            reason=reason,
            problem=problem,
            subject=delivery.subject,
            data=delivery.data,
            headers=delivery.headers,
            stream=self._stream,
            sequence=delivery.sequence,
            deliveries=delivery.delivered_count,
        )
        try:
            await put_away(self._publisher, letter)
        except HamiError as failure:
            _log.warning("dead letter not stored", extra={"problem": str(failure)})
            await delivery.nak(delay_s=_RETRY_S)
            return False
        self._metrics.dead_letters.labels(reason=reason).inc()
        await delivery.ack()  # a termination would be an advisory, and a second letter
        self._quarantine.forget(self._kind, self._key(delivery))
        return True
