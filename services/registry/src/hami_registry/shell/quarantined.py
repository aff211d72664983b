# SPDX-License-Identifier: Apache-2.0
"""Reads the quarantine reports of all services from the event stream.

Begins with the reports of the last ``STALE_S`` before the start: a replica repeats its reports more
often than that. A report that names another service or replica than its subject is counted and
ignored, as is one that does not decode: its sender repeats it.
"""

import logging
from datetime import UTC, datetime
from functools import partial

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.quarantine import STALE_S, QuarantineRecord
from hami_common.ports import Clock
from hami_common.runtime.natsio import Bus, Delivery, pull_events
from hami_common.runtime.quarantine import Quarantine
from hami_registry.core.quarantined import Quarantined
from hami_registry.core.system import Observed
from hami_registry.shell.metrics import Metrics

_log = logging.getLogger(__name__)


def decode_report(subject: str, data: bytes) -> QuarantineRecord:
    """Decode the report; ``WireInvalid`` when it is not of the replica that its subject names."""
    record = codec.decode(data, QuarantineRecord, what=subject)
    if (record.service, record.replica) != subjects.parse_quarantine_event(subject):
        raise WireInvalid(what=subject, problem=f"is of {record.service} {record.replica}")
    return record


async def follow_quarantine(
    bus: Bus,
    *,
    rows: Quarantined,
    observed: Observed,
    clock: Clock,
    metrics: Metrics,
    quarantine: Quarantine,
) -> None:
    """Keep ``rows`` up to date, indefinitely."""

    def take(delivery: Delivery) -> None:
        try:
            record = decode_report(delivery.subject, delivery.data)
        except WireInvalid as error:
            metrics.values_malformed.labels(origin="quarantine").inc()
            _log.warning("quarantine report skipped", extra={"problem": str(error)})
            return
        rows.seen(record, now_s=clock.monotonic_s())
        if record.service != "nodeagent":
            observed.message_seen(
                record.service, record.replica, "quarantine", time_s=delivery.time_s
            )

    async with pull_events(
        bus,
        subjects.EVENTS_STREAM,
        filter_subjects=(f"{subjects.EVENT_PREFIX}.quarantine.*.*",),
        deliver=datetime.fromtimestamp(clock.now_s() - STALE_S, tz=UTC),
    ) as deliveries:
        async for delivery in deliveries:
            # No entry of its own: that would be reported, and arrive here again.
            await quarantine.once("quarantine", partial(take, delivery))
            await delivery.ack()
