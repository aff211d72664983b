# SPDX-License-Identifier: Apache-2.0
"""Publishes the creation, adoption, removal and failure of hardware partitions on the bus.

One message per change that a reading of the hardware showed, and one per share that gets no
partition (docs/wire.md). Messages that the bus does not accept are kept, up to a limit, and sent
later: they are informational, and no decision depends on them.
"""

from collections.abc import Callable

from hami_common.bus import subjects
from hami_common.events.partition import PartitionChange, PartitionRecord
from hami_common.ports import Publisher
from hami_nodeagent.core.hardware import Wanted
from hami_nodeagent.core.partitions import Change, ChangeKind, Owner
from hami_nodeagent.shell.outbox import Letter, Outbox
from hami_nodeagent.shell.site import Site

LOST = "partition-lost"
"""Code of the removal of an instance that this agent did not request."""
_AGAIN_S = 1.0

_WORDS: dict[ChangeKind, PartitionChange] = {
    "created": "created",
    "adopted": "adopted",
    "removed": "removed",
    "lost": "removed",
}


class PartitionTeller:
    """Publishes messages about one node's partitions."""

    def __init__(self, *, site: Site, publisher: Callable[[], Publisher | None]) -> None:
        """``publisher`` is called at each use: ``None`` before the first connection."""
        self._site = site
        self._outbox = Outbox(publisher, site.quarantine)

    def tell(self, vendor: str, change: Change, *, took_s: float = 0.0) -> None:
        """Queue a message about a change that the hardware showed.

        ``took_s``: duration of the step that caused the change; 0: not measured.
        """
        record = self._record(
            _WORDS[change.kind],
            vendor,
            change.owner,
            change.wanted,
            instance_id=change.instance_id,
            code=LOST if change.kind == "lost" else "",
            reason="it was there and is gone" if change.kind == "lost" else "",
            duration_ms=round(took_s * 1000, 3),
        )
        self._keep(record)

    def tell_failed(
        self, vendor: str, owner: Owner, wanted: Wanted, *, code: str, reason: str
    ) -> None:
        """Queue a message about a share that gets no partition."""
        self._keep(self._record("failed", vendor, owner, wanted, code=code, reason=reason))

    async def run(self) -> None:
        """Send queued messages until cancelled."""
        while True:
            changed = self._site.picture.changed
            if self._outbox:
                await self._outbox.send()
            await self._site.picture.wait_change(changed, _AGAIN_S if self._outbox else 60.0)

    def _record(
        self,
        change: PartitionChange,
        vendor: str,
        owner: Owner,
        wanted: Wanted,
        *,
        instance_id: str = "",
        code: str = "",
        reason: str = "",
        duration_ms: float = 0.0,
    ) -> PartitionRecord:
        site = self._site
        entry = site.picture.entries_by_uid.get(owner.pod_uid)
        pod = site.picture.pods.find(owner.pod_uid)
        known = entry.record if entry is not None else None
        return PartitionRecord(
            change=change,
            node=site.node,
            vendor=vendor,
            uuid=wanted.uuid,
            boot_id=site.sequence.boot_id,
            seq=site.sequence.next(),
            time_s=site.clock.now_s(),
            instance_id=instance_id,
            profile=wanted.profile,
            start=wanted.start,
            kind=wanted.kind,
            memory_mib=wanted.memory_mib,
            core_pct=wanted.core_pct,
            namespace=known.namespace if known is not None else pod.namespace if pod else "",
            pod=known.pod if known is not None else pod.name if pod else "",
            pod_uid=owner.pod_uid,
            allocation_id=owner.allocation_id,
            code=code,
            reason=reason,
            duration_ms=duration_ms,
        )

    def _keep(self, record: PartitionRecord) -> None:
        self._outbox.put(
            Letter(
                subject=subjects.partition_event(record.node, record.vendor),
                event_type=f"io.hami.partition.{record.change}.v1",
                source=f"/nodeagent/{record.node}",
                time_s=record.time_s,
                record=record,
            )
        )
