# SPDX-License-Identifier: Apache-2.0
"""Publishes idle periods of allocations, from the agents' samples on the event stream.

Every replica does. At its start each reads the newest message of every subject and the samples of
the last ``after_s``, so periods that began before are published on time. A message is stored only
if the newest one of its subject is the one that this replica knows: of several replicas one
succeeds, the others read its message. Seconds throughout.
"""

import logging
from contextlib import aclosing
from functools import partial
from typing import Final

from hami_common.bus import subjects
from hami_common.errors import Conflict, HamiError, SettingsInvalid
from hami_common.events import codec
from hami_common.events.idle import IdleRecord
from hami_common.events.usage import UsageRecord
from hami_common.ports import Clock
from hami_common.runtime.natsio import Bus
from hami_common.runtime.natsio.history import Event, History
from hami_common.runtime.natsio.jetstream import EXPECTED_LAST_SUBJECT_SEQUENCE, MESSAGE_ID, store
from hami_common.runtime.quarantine import Quarantine
from hami_registry.core.idle import Due, IdleBook, event_id
from hami_registry.shell.metrics import Metrics
from hami_registry.shell.views import Views

LOOK_S: Final = 5.0
"""Longest time between two searches for messages that are due."""
LOOKS: Final = 10
"""Searches in the idle time after which a message is sent, at least."""
INFINITE_S: Final = 7 * 86_400.0
"""Idle times are below the age at which events are removed."""
MARGIN_S: Final = 120.0
"""Time before that idle time whose samples are read too, for the work that ended before it."""

_log = logging.getLogger(__name__)


class IdleWatch:
    """Follows the samples and publishes what is due."""

    def __init__(
        self,
        *,
        bus: Bus,
        history: History,
        views: Views,
        after_s: float,
        replica: str,
        clock: Clock,
        metrics: Metrics,
        quarantine: Quarantine,
    ) -> None:
        """Publish idle periods longer than ``after_s``; 0: none. ``SettingsInvalid`` otherwise."""
        if not 0 <= after_s < INFINITE_S:
            raise SettingsInvalid(
                field="idle_after_s",
                problem=f"{after_s:g} is no time",
                fix="give seconds such as 1800, or 0 for no events",
            )
        self._bus = bus
        self._history = history
        self._views = views
        self._after_s = after_s
        self._replica = replica
        self._clock = clock
        self._metrics = metrics
        self._quarantine = quarantine
        self._look_s = min(LOOK_S, after_s / LOOKS)
        self._next_s = 0.0

    async def run(self) -> None:
        """Publish until the service stops; return at once if no idle time is configured."""
        if not self._after_s:
            return
        book = IdleBook(after_s=self._after_s, writer=self._replica)
        await self._read_newest(book, f"{subjects.EVENT_PREFIX}.idle.*.*")
        since_s = self._clock.now_s() - self._after_s - MARGIN_S
        samples = self._history.follow([f"{subjects.EVENT_PREFIX}.usage.*"], since_s=since_s)
        async with aclosing(samples) as events:
            async for event in events:
                if event is not None:
                    # No retry: the next sample of the node replaces this one.
                    await self._quarantine.once("idle", partial(self._fold, book, event))
                if self._clock.monotonic_s() >= self._next_s:
                    self._next_s = self._clock.monotonic_s() + self._look_s
                    await self._look(book)

    def _fold(self, book: IdleBook, event: Event) -> None:
        sample = event.record(UsageRecord)
        if sample is None:
            return  # counted by the reader of the fleet
        if not self._views.ledger.is_complete:
            return  # without its allocations; counters grow, so the next sample covers its time
        projection = self._views.projection
        live = projection.live_records(sample.node)
        book.fold(sample, live, projection.devices_of(sample.node))

    async def _look(self, book: IdleBook) -> None:
        """Publish what is due; what the bus does not accept is due again at the next look."""
        now_s = self._clock.now_s()
        idle = list(book.idle(now_s=now_s))
        self._metrics.idle_allocations.set(len(idle))
        self._metrics.idle_devices.set(sum(devices for _, devices in idle))
        for due in book.due(now_s=now_s):
            try:
                await self._publish(book, due)
            except HamiError as error:
                _log.warning("idle time not published", extra={"problem": str(error)})
                return

    async def _publish(self, book: IdleBook, due: Due) -> None:
        record = due.record
        subject, own_id = subjects.idle_event(record.node, record.pod_uid), event_id(record)
        headers = codec.event_headers(
            event_id=own_id,
            event_type=f"io.hami.allocation.{record.change}.v1",
            source=f"/registry/{self._replica}",
            time_s=record.time_s,
        )
        headers[MESSAGE_ID] = f"{subject}/{own_id}"
        headers[EXPECTED_LAST_SUBJECT_SEQUENCE] = str(due.sequence)
        try:
            sequence = await store(self._bus, subject, codec.encode(record), headers=headers)
        except Conflict:
            if not await self._read_newest(book, subject):
                book.unpublished(record.node, record.pod_uid)
            return
        book.published(record, sequence)
        self._metrics.idle_events.labels(change=record.change).inc()
        _log.info(
            "allocation idle" if record.change == "idle" else "allocation active again",
            extra={
                "namespace": record.namespace,
                "pod": record.pod,
                "node": record.node,
                "since_s": record.since_s,
                "lost_s": record.lost_s,
            },
        )

    async def _read_newest(self, book: IdleBook, filter_subject: str) -> int:
        """Read the newest message of each subject of the filter; return their number."""
        async with self._history.read([filter_subject], is_newest_only=True) as reading:
            async for event in reading:
                await self._quarantine.once("idle", partial(_take, book, event))
        return reading.count


def _take(book: IdleBook, event: Event) -> None:
    record = event.record(IdleRecord)
    if record is not None:
        book.published(record, event.sequence)
