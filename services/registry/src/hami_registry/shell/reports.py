# SPDX-License-Identifier: Apache-2.0
"""Consumes agents' reports from the bus into the inventory.

Every replica reads all reports, the newest of each (node, vendor) first, then new ones. Replicas
share no state and keep none on the bus, so a restarted replica recovers by reading the reports
again. A report that does not decode, or names another node than its subject, is dead-lettered and
never delivered again; one whose handling fails for another reason is retried first
(``shell.deliveries``).
"""

import logging

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.inventory import NodeReport
from hami_common.ports import Publisher
from hami_common.runtime.natsio import Bus, Delivery, pull_events
from hami_common.runtime.natsio.deadletters import UNDECODABLE
from hami_common.runtime.quarantine import Quarantine
from hami_registry.shell.canonical import CanonicalWriter
from hami_registry.shell.deliveries import Deliveries
from hami_registry.shell.metrics import Metrics

_log = logging.getLogger(__name__)


class Reports:
    """Feeds the inventory behind ``writer``."""

    def __init__(
        self,
        *,
        bus: Bus,
        writer: CanonicalWriter,
        publisher: Publisher,
        metrics: Metrics,
        quarantine: Quarantine,
    ) -> None:
        self._bus = bus
        self._writer = writer
        self._metrics = metrics
        self._deliveries = Deliveries(
            kind="report",
            stream=subjects.REPORTS_STREAM,
            key=lambda delivery: delivery.subject,
            handle=self._handle,
            quarantine=quarantine,
            publisher=publisher,
            metrics=metrics,
        )

    async def run(self) -> None:
        """Handle reports indefinitely."""
        async with pull_events(
            self._bus,
            subjects.REPORTS_STREAM,
            filter_subjects=(f"{subjects.REPORT_PREFIX}.>",),
            deliver="last_per_subject",
        ) as deliveries:
            await self._deliveries.each(deliveries)

    async def _handle(self, delivery: Delivery) -> None:
        try:
            report = codec.decode_on(delivery.subject, delivery.data, NodeReport)
        except WireInvalid as error:
            self._metrics.reports.labels(outcome="poison").inc()
            await self._deliveries.dead_letter(delivery, UNDECODABLE, str(error))
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
