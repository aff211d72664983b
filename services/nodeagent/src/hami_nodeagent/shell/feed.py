# SPDX-License-Identifier: Apache-2.0
"""Copies the ledger records of this node into the agent's state (design D23).

The last known records stay while the bus is unavailable; only a ledger that was replaced by another
one (``Reset``) removes them. Of two records of one pod the one with the higher revision is
valid. A record that a kubelet call waits for is read directly from the bucket: the feed may have
missed it, and the registry replica from which the feed re-reads all records may be unavailable.
"""

import logging
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskStatus

from hami_common.bus import subjects
from hami_common.errors import HamiError, WireInvalid
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode_on
from hami_common.ports import Bucket, Feed, Publisher, Reset, Synced
from hami_common.ports import Entry as Stored
from hami_common.runtime.natsio.deadletters import UNDECODABLE, DeadLetter, put_away
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.shell.site import Site

KIND: Final = "record"
"""Kind of a ledger record in quarantine, and what cannot be read then."""

_log = logging.getLogger(__name__)


class LedgerFeed:
    """Follows one node's part of the ledger."""

    def __init__(self, *, site: Site, feed: Feed, bucket: Bucket, publisher: Publisher) -> None:
        """``bucket`` stores the records that ``feed`` delivers."""
        self._feed = feed
        self._bucket = bucket
        self._picture = site.picture
        self._publisher = publisher
        self._metrics = site.metrics
        self._quarantine = site.quarantine

    async def follow(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow indefinitely; started once everything stored so far is in.

        A record that cannot be taken is retried, and until a newer one of its pod is taken kubelet
        is refused for the pod: the ledger may have released its share.
        """
        async with self._feed.watch() as items:
            async for item in items:
                if isinstance(item, Synced):
                    self._picture.ledger_known = True
                    task_status.started()
                    task_status = anyio.TASK_STATUS_IGNORED
                elif isinstance(item, Reset):
                    self._metrics.feed_resets.inc()
                    _log.warning("the ledger was replaced, its records are dropped")
                    self._picture.ledger_known = False
                    self._picture.entries_by_uid.clear()
                    self._forget_all()
                else:
                    await self._isolated(item)
                self._picture.note_change()

    def _forget_all(self) -> None:
        """Release what was in quarantine of a ledger that is no more."""
        for entry in self._quarantine.entries():
            if entry.kind == KIND:
                self._quarantine.forget(KIND, entry.key)
        for uid, what in list(self._picture.unreadable_by_uid):
            if what == KIND:
                self._picture.note_unreadable(uid, KIND, "")

    async def _isolated(self, stored: Stored) -> None:
        self._metrics.records.inc()
        is_taken = await self._quarantine.run(
            KIND, stored.key, partial(self._take, stored), size_bytes=len(stored.value)
        )
        known = self._quarantine.get(KIND, stored.key)
        if not is_taken:
            problem = known.problem if known is not None else "see the agent's log"
            self._picture.note_unreadable(_uid_of(stored.key), KIND, problem)
            await self._put_away_undecodable(stored)

    async def read_one(self, uid: str, *, timeout_s: float) -> None:
        """Read the newest record of one pod; keep the known one if the bus does not answer."""
        with anyio.move_on_after(timeout_s):
            try:
                stored = await self._bucket.get(subjects.allocation_key(self._picture.node, uid))
                if stored is not None:
                    self._enter(stored, _record(stored))
            except HamiError as error:  # the feed reports records that do not decode
                _log.debug("record not read", extra={"problem": str(error)})

    def _take(self, stored: Stored) -> None:
        self._enter(stored, _record(stored))

    def _enter(self, stored: Stored, record: AllocationRecord) -> None:
        self._picture.note_unreadable(record.pod_uid, KIND, "")
        known = self._picture.entries_by_uid.get(record.pod_uid)
        if known is None or known.sequence < stored.revision:
            self._picture.entries_by_uid[record.pod_uid] = Entry(
                record=record,
                sequence=stored.revision,
                traceparent=stored.headers.get("traceparent", ""),
            )
            self._picture.note_change()

    async def _put_away_undecodable(self, stored: Stored) -> None:
        """Store a dead letter of a record that does not decode, once."""
        try:
            _record(stored)
        except WireInvalid as error:
            self._metrics.undecodable.labels(what="ledger record").inc()
            await self._put_away(stored, error)

    async def _put_away(self, stored: Stored, error: WireInvalid) -> None:
        letter = DeadLetter(
            consumer="nodeagent",
            reason=UNDECODABLE,
            problem=str(error),
            subject=subjects.kv_subject(subjects.ALLOC_BUCKET, stored.key),
            data=stored.value,
            headers=stored.headers,
            stream=subjects.stream_of(subjects.ALLOC_BUCKET),
            sequence=stored.revision,
        )
        try:
            await put_away(self._publisher, letter)
        except HamiError as failure:
            # The record stays in the ledger; the log and the metric have reported it.
            _log.warning("dead letter not stored", extra={"problem": str(failure)})


def _uid_of(key: str) -> str:
    """Uid of the pod whose record has this key; empty when it is none of ours."""
    try:
        return subjects.parse_allocation_key(key)[1]
    except WireInvalid:
        return ""


def _record(stored: Stored) -> AllocationRecord:
    subject = subjects.kv_subject(subjects.ALLOC_BUCKET, stored.key)
    return decode_on(subject, stored.value, AllocationRecord)
