# SPDX-License-Identifier: Apache-2.0
"""Publishes the usage of the node's containers at a fixed interval, from the last sample.

Each interval sends one message per node, independent of the number of containers. Messages are not
queued: counters are cumulative, so the next message includes the content of a lost one. A node that
has no share in use and no device known to its driver publishes nothing. Sizes in MiB, times in
seconds.
"""

import logging
import secrets
from collections.abc import Callable, Sequence

from hami_common.bounds import INT64_MAX
from hami_common.bus import subjects
from hami_common.errors import HamiError
from hami_common.events.codec import encode, event_headers
from hami_common.events.usage import ContainerUsage, DeviceUse, RecallUse, ShareUsage, UsageRecord
from hami_common.ports import Publisher
from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.usage import ContainerRow, Row
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usagemetrics import Look

EVENT_TYPE = "io.hami.usage.sampled.v1"
_MIB_SHIFT = 20
_NS = 1e-9

_log = logging.getLogger(__name__)


class UsageTeller:
    """Publishes the usage messages of one agent."""

    def __init__(
        self,
        *,
        site: Site,
        look: Callable[[], Look],
        recalls: Callable[[], Sequence[RecallUse]],
        publisher: Callable[[], Publisher | None],
    ) -> None:
        """``look`` returns the last sample, ``publisher`` ``None`` before the first connection."""
        self._site = site
        self._look = look
        self._recalls = recalls
        self._publisher = publisher
        self._every_s = site.settings.usage.event_s

    async def run(self) -> None:
        """Publish until cancelled; return at once if ``usage.event_s`` is 0."""
        while self._every_s > 0:
            await self._site.clock.sleep(self._every_s)
            await self._site.quarantine.once("message", self.tell)

    async def tell(self) -> None:
        """Publish one message; it is dropped if the bus does not accept it."""
        publisher, look = self._publisher(), self._look()
        if publisher is None or not (look.rows or look.devices):
            return
        record = self._record(look)
        event_id = secrets.token_hex(16)
        try:
            await publisher.publish_stored(
                subjects.usage_event(record.node),
                encode(record),
                headers=event_headers(
                    event_id=event_id,
                    event_type=EVENT_TYPE,
                    source=f"/nodeagent/{record.node}",
                    time_s=record.time_s,
                ),
                message_id=event_id,
            )
        except HamiError as error:
            _log.debug("usage not published", extra={"problem": str(error)})

    def _record(self, look: Look) -> UsageRecord:
        site = self._site
        return UsageRecord(
            node=site.node,
            boot_id=site.sequence.boot_id,
            seq=site.sequence.next(),
            time_s=site.clock.now_s(),
            every_s=self._every_s,
            shares=tuple(found for _, found in sift(look.rows, _share)[0]),
            containers=tuple(found for _, found in sift(look.containers, _container)[0]),
            devices=tuple(
                DeviceUse(
                    vendor=device.vendor,
                    uuid=device.uuid,
                    memory_mib=usage.total_mib or device.memory_mib,
                    used_mib=usage.used_mib or 0,
                    core_pct=usage.core_pct or 0,
                )
                for device, usage in look.devices
            ),
            recalls=tuple(self._recalls()),
        )


def _share(row: Row) -> ShareUsage:
    holder = row.holder
    return ShareUsage(
        namespace=holder.namespace,
        pod=holder.pod,
        pod_uid=holder.pod_uid,
        container=holder.container,
        vendor=holder.vendor,
        uuid=holder.uuid,
        allocation_id=holder.allocation_id,
        limit_mib=holder.limit_mib,
        used_mib=row.used_bytes >> _MIB_SHIFT,
        limit_core_pct=holder.core_pct,
        core_pct=row.core_pct,
        starved_s=row.starved_ns * _NS,
        is_whole=holder.is_whole,
    )


def _container(row: ContainerRow) -> ContainerUsage:
    holder = row.holder
    return ContainerUsage(
        namespace=holder.namespace,
        pod=holder.pod,
        pod_uid=holder.pod_uid,
        container=holder.container,
        processes=row.processes,
        launches=min(row.counted.launches, INT64_MAX),
        waited_s=row.counted.waited_ns * _NS,
        device_time_s=row.counted.device_time_ns * _NS,
        refusals=min(row.counted.refusals, INT64_MAX),
    )
