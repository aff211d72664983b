# SPDX-License-Identifier: Apache-2.0
"""Publishes admission records, without ever delaying or failing an admission.

Records wait in a bounded queue; when it is full a new record is dropped and counted. The order of
publication is the order of admission. A record is published until the bus stored it or refused it
permanently. A random id of our own makes a repeated publication idempotent: the request's uid is
the caller's choice, and a forged one would make the bus drop the true event as a duplicate.
"""

import logging
import uuid
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec import Struct

from hami_common.bus import subjects
from hami_common.errors import HamiError, NotFound, Unavailable
from hami_common.events import codec
from hami_common.events.decision import AdmissionRecord
from hami_common.ports import Publisher
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.tasks import Backoff
from hami_webhook.shell.metrics import Metrics

EVENT_TYPE = "io.hami.admission.decided.v1"

_log = logging.getLogger(__name__)


class _Waiting(Struct, frozen=True, kw_only=True):
    record: AdmissionRecord
    event_id: str
    traceparent: str


class AdmissionEvents:
    """The queue between admissions and the bus."""

    def __init__(
        self, *, source: str, limit: int, metrics: Metrics, quarantine: Quarantine
    ) -> None:
        """Queue at most ``limit`` records; ``source`` is the CloudEvents source."""
        self._quarantine = quarantine
        self._source = source
        self._metrics = metrics
        self._send: MemoryObjectSendStream[_Waiting]
        self._receive: MemoryObjectReceiveStream[_Waiting]
        self._send, self._receive = anyio.create_memory_object_stream[_Waiting](limit)

    def offer(self, record: AdmissionRecord, *, traceparent: str) -> None:
        """Queue ``record``; returns at once, whatever the state of the bus."""
        try:
            self._send.send_nowait(
                _Waiting(record=record, event_id=str(uuid.uuid4()), traceparent=traceparent)
            )
        except anyio.WouldBlock:
            self._metrics.events_dropped.labels(cause="queue-full").inc()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._metrics.events_dropped.labels(cause="no-bus").inc()

    def end(self) -> None:
        """Note that no record will follow: ``run`` returns once the queue is empty."""
        self._send.close()

    def close(self) -> None:
        """Drop the waiting records."""
        self._send.close()
        self._receive.close()

    async def run(self, publisher: Publisher) -> None:
        """Publish queued records until ``end`` was called and the queue is empty."""
        backoff = Backoff()
        async for waiting in self._receive:
            # A record that fails for a reason of its own is retried separately; the bus is waited
            # for.
            await self._quarantine.run(
                "event",
                waiting.event_id,
                partial(self._deliver, publisher, waiting, backoff),
                name=(waiting.record.namespace, waiting.record.pod),
            )

    async def _deliver(self, publisher: Publisher, waiting: _Waiting, backoff: Backoff) -> None:
        while not await self._publish(publisher, waiting):
            await backoff.wait()
        backoff.reset()

    async def _publish(self, publisher: Publisher, waiting: _Waiting) -> bool:
        """Publish the record; returns whether it needs no further attempt."""
        record = waiting.record
        try:
            await publisher.publish_stored(
                subjects.admission_event(record.namespace, record.pod),
                codec.encode(record),
                headers=codec.event_headers(
                    event_id=waiting.event_id,
                    event_type=EVENT_TYPE,
                    source=self._source,
                    time_s=record.time_s,
                    traceparent=waiting.traceparent,
                ),
                message_id=waiting.event_id,
            )
        except (Unavailable, NotFound) as error:
            _log.debug("admission event not stored yet", extra={"problem": str(error)})
            return False
        except HamiError as error:
            self._metrics.events_dropped.labels(cause="refused").inc()
            _log.warning("admission event refused", extra={"problem": str(error)})
            return True
        except Exception:  # noqa: BLE001 - one record must not end the service
            self._metrics.events_dropped.labels(cause="error").inc()
            _log.exception("admission event cannot be published", extra={"pod": record.pod})
            return True
        self._metrics.events_published.inc()
        return True
