# SPDX-License-Identifier: Apache-2.0
"""Dead-letters events that an integration terminated or that exceeded its maximum deliveries.

The server reports them in an advisory, which the dead-letter stream itself stores, so that none is
missed while no registry runs. Replicas share the work; an advisory is done once the letter is
stored, or the event is gone from its stream.
"""

import logging

import msgspec
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import HamiError, WireInvalid
from hami_common.events import codec
from hami_common.ports import Publisher
from hami_common.runtime.natsio import Bus, Delivery, pull_events
from hami_common.runtime.natsio.deadletters import (
    ADVISORIES,
    MAX_DELIVERIES,
    TERMINATED,
    DeadLetter,
    put_away,
    read_stored,
)
from hami_common.runtime.quarantine import Quarantine
from hami_registry.shell.deliveries import Deliveries
from hami_registry.shell.metrics import Metrics

DURABLE = "registry-dead-letters"
_RETRY_S = 2.0

_log = logging.getLogger(__name__)


class Advisory(Struct, frozen=True, kw_only=True):
    """Common fields of both kinds of advisory (schema io.nats.jetstream.advisory.v1)."""

    type: str
    stream: str
    consumer: str
    stream_seq: int
    deliveries: int
    reason: str = ""


class DeadLetters:
    """Follows the advisories."""

    def __init__(
        self, *, bus: Bus, publisher: Publisher, metrics: Metrics, quarantine: Quarantine
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._metrics = metrics
        self._deliveries = Deliveries(
            kind="advisory",
            stream=subjects.DEAD_LETTERS_STREAM,
            # One subject has the advisories of many events.
            key=lambda delivery: f"{delivery.subject} {delivery.sequence}",
            handle=self._handle,
            quarantine=quarantine,
            publisher=publisher,
            metrics=metrics,
        )

    async def run(self) -> None:
        """Dead-letter events indefinitely."""
        async with pull_events(
            self._bus,
            subjects.DEAD_LETTERS_STREAM,
            durable=DURABLE,
            filter_subjects=ADVISORIES,
        ) as deliveries:
            await self._deliveries.each(deliveries)

    async def _handle(self, delivery: Delivery) -> None:
        try:
            advisory = codec.decode(delivery.data, Advisory, what=delivery.subject)
        except WireInvalid as error:
            _log.error("advisory not understood", extra={"problem": str(error)})
            await delivery.term(reason="does not decode")
            return
        try:
            outcome = await self._put_away(advisory)
        except HamiError as error:
            _log.warning("dead letter not stored", extra={"problem": str(error)})
            await delivery.nak(delay_s=_RETRY_S)
            return
        self._metrics.dead_letters.labels(reason=outcome).inc()
        _log.warning(
            "event dead-lettered",
            extra={"outcome": outcome, "advisory": msgspec.to_builtins(advisory)},
        )
        await delivery.ack()

    async def _put_away(self, advisory: Advisory) -> str:
        stored = await read_stored(self._bus, advisory.stream, advisory.stream_seq)
        if stored is None:
            return "gone"
        is_terminated = advisory.type.endswith(".terminated")
        problem = f"delivered {advisory.deliveries} times and never acknowledged"
        if is_terminated:
            problem = advisory.reason or "the consumer gave no reason"
        letter = DeadLetter(
            consumer=advisory.consumer,
            reason=TERMINATED if is_terminated else MAX_DELIVERIES,
            problem=problem,
            subject=stored.subject,
            data=stored.data,
            headers=stored.headers,
            stream=advisory.stream,
            sequence=advisory.stream_seq,
            deliveries=advisory.deliveries,
        )
        await put_away(self._publisher, letter)
        return letter.reason
