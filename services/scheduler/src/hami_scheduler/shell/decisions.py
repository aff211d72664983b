# SPDX-License-Identifier: Apache-2.0
"""Publishes decisions and their reasons, outside the call that made them (design D14).

One message describes one attempt to place a pod. A filter that found nodes, and the prioritize
after it, wait ``hold_s`` for the bind that they lead to and are sent with it
(``DecisionRecord.before``); without one they are sent alone. All others are sent at once. Decisions
go to the event stream through a bounded queue. One that finds it full, or that the bus refuses, is
dropped and counted: it only explains. Details are evaluated here too; a message that would exceed
the bus's limit is sent without them. Seconds throughout.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import anyio
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bus import grants, subjects
from hami_common.errors import HamiError, WireInvalid
from hami_common.events import codec
from hami_common.events.decision import DecisionRecord
from hami_common.ports import BatchPublisher, Clock, Outgoing
from hami_common.runtime.quarantine import Quarantine
from hami_core.placement.comparison import Comparison
from hami_core.placement.details import Details
from hami_scheduler.shell.backlog import Backlog
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import DECISION

HELD_MOST = 4096
"""Attempts that wait for their bind; beyond, the oldest is sent without it."""
PAYLOAD_MOST = grants.MESSAGE_MAX_BYTES - grants.HEADER_BYTES
"""Bytes of the largest message."""
_LEADING = ("filter", "prioritize")


class Noted(Struct, frozen=True, kw_only=True):
    """A decision, with the state from which its details are made when it is sent."""

    record: DecisionRecord
    details: Details | None = None
    """See ``DecisionRecord.closest``."""
    comparison: Comparison | None = None
    """See ``DecisionRecord.scores``."""

    def detailed(self) -> DecisionRecord:
        """Return the record with its details."""
        record = self.record
        if self.details is not None:
            record = replace(record, closest=self.details.nodes())
        if self.comparison is not None:
            record = replace(record, scores=self.comparison.made())
        return record


class Decision(Struct, frozen=True, kw_only=True):
    """One message that is being sent."""

    noted: Noted
    before: tuple[Noted, ...] = ()
    """Decisions of the same attempt that led to it, oldest first."""
    traceparent: str = ""

    @property
    def record(self) -> DecisionRecord:
        """Return the last decision, which names the pod."""
        return self.noted.record

    def encoded(self) -> bytes:
        """Return the message's content."""
        before = tuple(one.detailed() for one in self.before)
        data = codec.encode(replace(self.noted.detailed(), before=before))
        if len(data) <= PAYLOAD_MOST:
            return data
        return codec.encode(replace(self.record, before=tuple(one.record for one in self.before)))


class _Attempt(Struct, kw_only=True):
    """Decisions about a pod whose bind is still pending."""

    until_s: float
    noted: tuple[Noted, ...]
    traceparent: str


class Decisions:
    """The queue of decisions and its sender."""

    def __init__(  # noqa: PLR0913 - the parts of the queue, by name
        self,
        *,
        publisher: BatchPublisher,
        backlog: Backlog[Decision],
        clock: Clock,
        quarantine: Quarantine,
        timeout_s: float,
        hold_s: float,
        writer: str,
        ids: Callable[[], str],
        observe: Callable[[DecisionRecord], None] | None = None,
    ) -> None:
        """Publish through ``publisher``, waiting up to ``timeout_s`` for each acknowledgment.

        ``observe`` gets each decision at once.
        """
        self._publisher = publisher
        self._backlog = backlog
        self._clock = clock
        self._quarantine = quarantine
        self._timeout_s = timeout_s
        self._hold_s = hold_s
        self.writer = writer
        """Name of this replica."""
        self._ids = ids
        self._observe = observe
        self._attempts: OrderedDict[str, _Attempt] = OrderedDict()
        """By pod, the oldest first."""
        self._wake = anyio.Event()

    def add(
        self,
        record: DecisionRecord,
        *,
        details: Details | None = None,
        comparison: Comparison | None = None,
        traceparent: str = "",
    ) -> None:
        """Queue the decision for publication, with the state of its details."""
        if self._observe is not None:
            self._observe(record)
        noted = Noted(record=record, details=details, comparison=comparison)
        attempt = self._attempts.pop(record.pod_uid, None)
        before = () if attempt is None else attempt.noted
        if attempt is not None and not _continues(before[-1].record, record):
            self._send(attempt)
            before = ()
        if record.verb in _LEADING and record.verdict == "feasible" and record.nodes_feasible:
            self._hold((*before, noted), traceparent)
            return
        self._backlog.add(Decision(noted=noted, before=before, traceparent=traceparent))

    def _hold(self, noted: tuple[Noted, ...], traceparent: str) -> None:
        if len(self._attempts) >= HELD_MOST:
            self._send(self._attempts.popitem(last=False)[1])
        self._attempts[noted[-1].record.pod_uid] = _Attempt(
            until_s=self._clock.monotonic_s() + self._hold_s,
            noted=noted,
            traceparent=traceparent,
        )
        self._wake.set()

    def _send(self, attempt: _Attempt) -> None:
        *before, last = attempt.noted
        self._backlog.add(
            Decision(noted=last, before=tuple(before), traceparent=attempt.traceparent)
        )

    def flush(self) -> None:
        """Stop waiting for binds: send all waiting decisions."""
        while self._attempts:
            self._send(self._attempts.popitem(last=False)[1])

    async def watch(self) -> None:
        """Send decisions that waited for a bind in vain, indefinitely."""
        while True:
            if not self._attempts:
                self._wake = anyio.Event()
                await self._wake.wait()
            await self._clock.sleep(self._hold_s)
            now_s = self._clock.monotonic_s()
            while self._attempts:
                uid, oldest = next(iter(self._attempts.items()))
                if oldest.until_s > now_s:
                    break
                del self._attempts[uid]
                self._send(oldest)

    async def send(self, decisions: Sequence[Decision]) -> list[HamiError]:
        """Publish a message for each; returns the failures, which the queue counts."""
        messages: list[Outgoing] = []
        for decision in decisions:
            record = decision.record
            self._quarantine.call(
                DECISION,
                record.pod_uid,
                partial(self._add_message, decision, messages),
                name=(record.namespace, record.pod),
            )
        with answer_within(self._timeout_s, peer="NATS"):
            answers = await self._publisher.publish_all_stored(messages)
        return [answer for answer in answers if isinstance(answer, HamiError)]

    def _add_message(self, decision: Decision, messages: list[Outgoing]) -> None:
        message = self._message(decision)
        if message is not None:
            messages.append(message)

    def _message(self, decision: Decision) -> Outgoing | None:
        record = decision.record
        event_id = self._ids()
        try:
            subject = subjects.decision_event(record.namespace, record.pod)
        except WireInvalid:
            return None  # no such pod can exist; the call that named it was refused
        return Outgoing(
            subject=subject,
            data=decision.encoded(),
            headers=codec.event_headers(
                event_id=event_id,
                event_type=f"io.hami.decision.{record.verb}.v1",
                source=f"/scheduler/{self.writer}",
                time_s=record.time_s,
                traceparent=decision.traceparent,
            ),
            message_id=event_id,
        )


def _continues(last: DecisionRecord, record: DecisionRecord) -> bool:
    """Return whether ``record`` may belong to the attempt whose newest decision is ``last``."""
    if record.verb == "prioritize":
        return last.verb == "filter"
    return record.verb == "bind"
