# SPDX-License-Identifier: Apache-2.0
"""Report objects in quarantine: on the bus, and as Events of the Kubernetes objects concerned.

One object is reported at its first failure, at most every ``REPEAT_LEAST_S`` while it stays, at
least every ``REPEAT_MOST_S``, and once when it is over; changes in between are coalesced. At most
``AT_ONCE`` reports are sent per second. A lost report is covered by the next one. Seconds.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import anyio

from hami_common.bus import subjects
from hami_common.errors import HamiError
from hami_common.events import codec
from hami_common.events.quarantine import (
    REPEAT_LEAST_S,
    REPEAT_MOST_S,
    QuarantineRecord,
    QuarantineService,
)
from hami_common.ports import Clock, Publisher
from hami_common.runtime.kubeio.recorder import EventRecorder, ObjectRef
from hami_common.runtime.quarantine import Quarantine, Quarantined

REASON: Final = "ObjectQuarantined"
"""Reason of the Events, a stable word."""
AT_ONCE: Final = 20
"""Reports sent per ``PAUSE_S``."""
PAUSE_S: Final = 1.0
SEND_S: Final = 5.0
"""Longest time that one report may take."""
REMEMBERED: Final = 20_000
"""Objects whose last report is remembered, so that a flapping object is not reported each time."""

Refer = Callable[[Quarantined], ObjectRef | None]
"""Returns the object that the Event of an entry is about, ``None`` where there is none."""

_Key = tuple[str, str]
_log = logging.getLogger(__name__)


def pod_reference(entry: Quarantined) -> ObjectRef | None:
    """Return the pod of an entry whose key is the pod's uid and whose name is the pod's."""
    if entry.kind != "pod" or not entry.name:
        return None
    return ObjectRef(kind="Pod", name=entry.name, namespace=entry.namespace, uid=entry.key)


class QuarantineReporter:
    """Sends the reports of one replica."""

    def __init__(
        self,
        quarantine: Quarantine,
        *,
        publisher: Publisher,
        clock: Clock,
        service: QuarantineService,
        replica: str,
        ids: Callable[[], str],
        events: EventRecorder | None = None,
        refer: Refer = pod_reference,
    ) -> None:
        """Set the callbacks of ``quarantine``; ``ids`` makes unique identifiers.

        ``events``: writes an Event about the object that ``refer`` returns; none without it.
        """
        self._quarantine = quarantine
        self._publisher = publisher
        self._clock = clock
        self._service = service
        self._replica = replica
        self._subject = subjects.quarantine_event(service, replica)
        self._ids = ids
        self._events = events
        self._refer = refer
        self._pending: OrderedDict[_Key, tuple[Quarantined, bool]] = OrderedDict()
        self._sent_s: OrderedDict[_Key, float] = OrderedDict()
        self._wake = anyio.Event()
        quarantine.entered = self._entered
        quarantine.released = self._released

    def _entered(self, entry: Quarantined) -> None:
        self._pending[entry.kind, entry.key] = (entry, False)
        self._wake.set()

    def _released(self, entry: Quarantined) -> None:
        key = (entry.kind, entry.key)
        if key in self._sent_s:
            self._pending[key] = (entry, True)
            self._wake.set()
        else:
            self._pending.pop(key, None)  # it was never reported

    async def work(self) -> None:
        """Send reports, indefinitely."""
        while True:
            if not self._pending and not self._quarantine.entries():
                self._wake = anyio.Event()
                await self._wake.wait()
            await self.send_due()
            await self._clock.sleep(PAUSE_S)

    async def send_due(self) -> None:
        """Send the reports that are due, ``AT_ONCE`` at most."""
        now_s = self._clock.monotonic_s()
        for entry in self._quarantine.entries():
            key = (entry.kind, entry.key)
            if now_s - self._sent_s.get(key, now_s) >= REPEAT_MOST_S:
                self._pending.setdefault(key, (entry, False))
        due = [
            key
            for key in self._pending
            if key not in self._sent_s or now_s - self._sent_s[key] >= REPEAT_LEAST_S
        ]
        for key in due[:AT_ONCE]:
            report = self._pending.pop(key, None)
            if report is None:
                continue  # released while another report was being sent
            entry, is_over = report
            self._sent_s[key] = now_s
            self._sent_s.move_to_end(key)
            while len(self._sent_s) > REMEMBERED:
                self._sent_s.popitem(last=False)
            try:
                with anyio.move_on_after(SEND_S):
                    await self._send(entry, is_over=is_over)
            except Exception as error:  # noqa: BLE001 - reports are repeated, and never end a service
                _log.warning(
                    "quarantine not reported",
                    extra={"kind": entry.kind, "key": entry.key, "problem": str(error)},
                )

    async def _send(self, entry: Quarantined, *, is_over: bool) -> None:
        event_id = self._ids()
        record = QuarantineRecord(
            service=self._service,
            replica=self._replica,
            kind=entry.kind,
            key=entry.key,
            namespace=entry.namespace,
            name=entry.name,
            problem=entry.problem,
            failures=entry.failures,
            first_s=entry.first_s,
            last_s=entry.last_s,
            is_over=is_over,
        )
        try:
            await self._publisher.publish_stored(
                self._subject,
                codec.encode(record),
                headers=codec.event_headers(
                    event_id=event_id,
                    event_type=f"io.hami.quarantine.{'released' if is_over else 'entered'}.v1",
                    source=f"/{self._service}/{self._replica}",
                    time_s=self._clock.now_s(),
                ),
                message_id=event_id,
            )
        except HamiError as error:
            _log.warning("quarantine not published", extra={"problem": str(error)})
        reference = None if is_over or self._events is None else self._refer(entry)
        if self._events is not None and reference is not None:
            await self._events.record(
                reference,
                reason=REASON,
                kind="Warning",
                message=f"{self._service} cannot handle this {entry.kind} and retries it:"
                f" {entry.problem}",
            )
