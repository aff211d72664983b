# SPDX-License-Identifier: Apache-2.0
"""An agent's view of the ledger without a consumer of its own (design D23, port ``Feed``).

The server republishes every accepted ledger record on ``hami.v1.alloc.<node>.<pod-uid>`` with its
sequence and the sequence of the previous record of the same key. The feed subscribes first, then
reads the latest record of each key, then merges by sequence. It detects gaps in three ways:

- the previous sequence of a key is not the last one received;
- the connection was renewed or the queue was full;
- a check of the node's newest sequence, every ``check_s``, finds one that never arrived (the only
  way to notice a key of which no message ever arrived).

Each leads to reading the latest records again. While they cannot be read, because the answering
replica is unavailable, republished records are still delivered.
"""

import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio

from hami_common.bus import subjects
from hami_common.errors import HamiError, NotFound, Unavailable, WireInvalid
from hami_common.ports import Entry, Reset, Synced
from hami_common.runtime.natsio.bucket import NatsBucket
from hami_common.runtime.natsio.client import Message
from hami_common.runtime.natsio.connection import Bus, Subscription
from hami_common.runtime.natsio.consume import parse_time_s
from hami_common.runtime.natsio.jetstream import user_headers
from hami_common.runtime.tasks import Backoff

_log = logging.getLogger(__name__)


class RepublishedFeed:
    """Port ``Feed`` over the republished ledger of one node."""

    def __init__(
        self, bus: Bus, node: str, *, bucket: NatsBucket | None = None, check_s: float = 20.0
    ) -> None:
        """Read the ledger through ``bucket``, which may reject some of the reads.

        ``check_s`` has random jitter, because thousands of agents check at the same rate.
        """
        self._bus = bus
        self._node = node
        self._bucket = bucket or NatsBucket(bus, subjects.ALLOC_BUCKET)
        self._check_s = check_s
        self.gap_count = 0
        """Times that records were or may have been missed and were read again."""

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Entry | Synced | Reset]]:
        """See the port."""
        async with self._bus.subscribe(subjects.alloc_feed(self._node)) as subscription:
            view = _View(self._bus, self._bucket, self._node, subscription, check_s=self._check_s)
            items = self._items(view)
            try:
                yield items
            finally:
                await items.aclose()

    async def _items(self, view: "_View") -> AsyncGenerator[Entry | Synced | Reset, None]:
        backoff = Backoff(first_s=0.05, most_s=2.0)
        while True:
            try:
                for item in await view.read_again():
                    yield item
            except (Unavailable, NotFound) as error:
                _log.debug("feed interrupted", extra={"problem": str(error)})
                again_at = anyio.current_time() + backoff.next_s()
                while published := await view.receive(until=again_at):
                    for entry in published:
                        yield entry
                continue
            backoff.reset()
            while not await view.has_gap():
                for entry in await view.receive():
                    yield entry
            self.gap_count += 1


class _View:
    """State of one watch: the node's records received so far."""

    def __init__(
        self,
        bus: Bus,
        bucket: NatsBucket,
        node: str,
        subscription: Subscription,
        *,
        check_s: float,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._node = node
        self._subscription = subscription
        self._check_s = check_s
        self._identity = ""
        self._revision_by_key: dict[str, int] = {}
        self._newest = 0
        self._missed = False
        self._generation = 0
        self._lost_count = 0
        self._check_at = 0.0

    async def read_again(self) -> list[Entry | Synced | Reset]:
        """Read the latest record of each key; return those not yet delivered."""
        self._generation = await self._bus.wait_connected()
        self._lost_count = self._subscription.lost_count
        identity = await self._bucket.identity()
        entries = await self._bucket.latest(subjects.node_keys(self._node))
        items: list[Entry | Synced | Reset] = []
        is_other = self._identity not in ("", identity) or any(
            entry.revision < self._revision_by_key.get(entry.key, 0) for entry in entries
        )
        if is_other:
            self._revision_by_key.clear()
            self._newest = 0
            items.append(Reset())
        items.extend(entry for entry in entries if self._is_news(entry))
        if is_other or not self._identity:
            items.append(Synced(revision=self._newest))
        self._identity = identity
        self._missed = False
        self._plan_check()
        return items

    async def receive(self, *, until: float | None = None) -> list[Entry]:
        """Records that arrived since, in order of arrival; if none, those found by a check."""
        wait_s = max(0.0, (self._check_at if until is None else until) - anyio.current_time())
        news = []
        for message in await self._subscription.receive(timeout_s=wait_s):
            record = _record(message)
            if record is None:
                continue
            entry, previous = record
            known = self._revision_by_key.get(entry.key, 0)
            if self._is_news(entry):
                self._missed = self._missed or previous > known
                news.append(entry)
        return news

    async def has_gap(self) -> bool:
        """True when a record was, or may have been, missed."""
        if self._missed or self._subscription.lost_count != self._lost_count:
            return True
        if self._bus.generation != self._generation:
            return True
        if anyio.current_time() < self._check_at:
            return False
        self._plan_check()
        try:
            newest = await self._bucket.last_revision(subjects.node_fence(self._node))
        except HamiError:
            return False  # the bus is unavailable; its generation shows recovery
        return newest > self._newest

    def _is_news(self, entry: Entry) -> bool:
        if entry.revision <= self._revision_by_key.get(entry.key, 0):
            return False
        self._revision_by_key[entry.key] = entry.revision
        self._newest = max(self._newest, entry.revision)
        return True

    def _plan_check(self) -> None:
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret
        self._check_at = anyio.current_time() + self._check_s * spread


def _record(message: Message) -> tuple[Entry, int] | None:
    """The republished record and the sequence of the key's previous record."""
    headers = message.headers
    try:
        entry = Entry(
            key=subjects.key_of(subjects.ALLOC_BUCKET, headers["Nats-Subject"]),
            value=message.data,
            revision=int(headers["Nats-Sequence"]),
            headers=user_headers(message),
            time_s=parse_time_s(headers["Nats-Time-Stamp"]),
        )
        return entry, int(headers["Nats-Last-Sequence"])
    except (KeyError, ValueError, WireInvalid):
        _log.warning("not a republished record", extra={"subject": message.subject})
        return None
