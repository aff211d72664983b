# SPDX-License-Identifier: Apache-2.0
"""Takes agents' reports off the bus and into the inventory.

Every replica reads all reports, the newest of each (node, vendor) first of all, then those that
come; nothing is shared and nothing remembered on the bus, so a replica that was killed knows as
much as before once it has read them again. A report that does not decode, or speaks for another
node than its subject says, goes to the dead letters and is never delivered again.
"""

import logging

from hami_common import subjects
from hami_common.errors import HamiError, WireInvalid
from hami_common.events import codec
from hami_common.events.inventory import NodeReport
from hami_common.ports import Publisher
from hami_common.runtime.natsio import Bus, Delivery, pull_events
from hami_common.runtime.natsio.deadletters import UNDECODABLE, DeadLetter, put_away
from hami_registry.shell.canonical import CanonicalWriter
from hami_registry.shell.metrics import Metrics

_RETRY_S = 2.0

_log = logging.getLogger(__name__)


class Reports:
    """Feeds the inventory behind ``writer``."""

    def __init__(
        self, *, bus: Bus, writer: CanonicalWriter, publisher: Publisher, metrics: Metrics
    ) -> None:
        self._bus = bus
        self._writer = writer
        self._publisher = publisher
        self._metrics = metrics

    async def run(self) -> None:
        """Handle reports for ever."""
        async with pull_events(
            self._bus,
            subjects.REPORTS_STREAM,
            filter_subjects=(f"{subjects.REPORT_PREFIX}.>",),
            deliver="last_per_subject",
        ) as deliveries:
            async for delivery in deliveries:
                await self._handle(delivery)

    async def _handle(self, delivery: Delivery) -> None:
        try:
            report = codec.decode_on(delivery.subject, delivery.data, NodeReport)
        except WireInvalid as error:
            await self._put_away(delivery, error)
            return
        accepted = self._writer.inventory.accept(report)
        self._metrics.reports.labels(outcome="accepted" if accepted else "stale").inc()
        if accepted:
            self._writer.mark([(report.node, report.vendor)])
        else:
            _log.info(
                "report is older than the known one",
                extra={"node": report.node, "vendor": report.vendor, "boot_id": report.boot_id},
            )
        await delivery.ack()

    async def _put_away(self, delivery: Delivery, error: WireInvalid) -> None:
        self._metrics.reports.labels(outcome="poison").inc()
        _log.warning("report put away", extra={"subject": delivery.subject, "problem": str(error)})
        try:
            await put_away(
                self._publisher,
                DeadLetter(
                    consumer="registry",
                    reason=UNDECODABLE,
                    problem=str(error),
                    subject=delivery.subject,
                    data=delivery.data,
                    headers=delivery.headers,
                    stream=subjects.REPORTS_STREAM,
                    sequence=delivery.sequence,
                    deliveries=delivery.delivered_count,
                ),
            )
        except HamiError as failure:
            _log.warning("dead letter not stored", extra={"problem": str(failure)})
            await delivery.nak(delay_s=_RETRY_S)
            return
        self._metrics.dead_letters.labels(reason=UNDECODABLE).inc()
        await delivery.term(reason="does not decode")
