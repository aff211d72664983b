# SPDX-License-Identifier: Apache-2.0
"""Publishes what was decided and why, beside the path of the call that decided it (design D14).

Decisions go to the event stream through a bounded queue. A decision that finds it full, or that the
bus does not take, is dropped and counted: it explains, nothing depends on it.
"""

from collections.abc import Callable

from msgspec import Struct

from hami_common import subjects
from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.decision import DecisionRecord
from hami_common.ports import Publisher
from hami_scheduler.shell.backlog import Backlog
from hami_scheduler.shell.effects import answer_within


class Decision(Struct, frozen=True, kw_only=True):
    """One record on its way out."""

    record: DecisionRecord
    traceparent: str = ""


class Decisions:
    """The queue of decisions and its sender."""

    def __init__(
        self,
        *,
        publisher: Publisher,
        backlog: Backlog[Decision],
        timeout_s: float,
        writer: str,
        ids: Callable[[], str],
    ) -> None:
        """Publish through ``publisher``, waiting up to ``timeout_s`` for each acknowledgement."""
        self._publisher = publisher
        self._backlog = backlog
        self._timeout_s = timeout_s
        self.writer = writer
        """Name of this replica."""
        self._ids = ids

    def add(self, record: DecisionRecord, *, traceparent: str = "") -> None:
        """Have the decision published some time soon."""
        self._backlog.add(Decision(record=record, traceparent=traceparent))

    async def send(self, decision: Decision) -> None:
        """Publish one decision; failures are the queue's to count."""
        record = decision.record
        event_id = self._ids()
        try:
            subject = subjects.decision_event(record.namespace, record.pod)
        except WireInvalid:
            return  # no such pod can exist; the call that named it was refused
        with answer_within(self._timeout_s, peer="NATS"):
            await self._publisher.publish_stored(
                subject,
                codec.encode(record),
                headers=codec.event_headers(
                    event_id=event_id,
                    event_type=f"io.hami.decision.{record.verb}.v1",
                    source=f"/scheduler/{self.writer}",
                    time_s=record.time_s,
                    traceparent=decision.traceparent,
                ),
                message_id=event_id,
            )
