# SPDX-License-Identifier: Apache-2.0
"""An agent's view of the ledger without a consumer of its own (design D23, port ``Feed``).

The server republishes every accepted ledger record on ``hami.v1.alloc.<node>.<pod-uid>`` with its
sequence and the sequence of the record that the same key had before. The feed subscribes first,
then reads the latest record of each key, then merges by sequence. Gaps show in three ways: the
previous sequence of a key is not the one we know; the connection was renewed or our queue was full;
or a look at the node's newest sequence, every ``check_s``, finds one that never came (the only way
to miss a key whose first record was lost). Each leads to reading the latest records again.
"""

import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio

from hami_common import subjects
from hami_common.errors import HamiError, NotFound, Unavailable, WireInvalid
from hami_common.ports import Entry, Reset, Synced
from hami_common.runtime.natsio.bucket import NatsBucket
from hami_common.runtime.natsio.connection import Bus, Message, Subscription
from hami_common.runtime.natsio.consume import parse_time_s
from hami_common.runtime.natsio.jetstream import user_headers
from hami_common.runtime.tasks import Backoff

_log = logging.getLogger(__name__)


class RepublishedFeed:
    """Port ``Feed`` over the republished ledger of one node."""

    def __init__(self, bus: Bus, node: str, *, check_s: float = 20.0) -> None:
        """``check_s`` is spread by chance, because thousands of agents do the same."""
        self._bus = bus
        self._node = node
        self._check_s = check_s
        self._bucket = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.gap_count = 0
        """Gaps found and closed so far."""

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Entry | Synced | Reset]]:
        """See the port."""
        async with self._bus.subscribe(subjects.alloc_feed(self._node)) as subscription:
            items = self._items(subscription)
            try:
                yield items
            finally:
                await items.aclose()

    async def _items(
        self, subscription: Subscription
    ) -> AsyncGenerator[Entry | Synced | Reset, None]:
        revision_by_key: dict[str, int] = {}
        created = ""
        backoff = Backoff(first_s=0.05, most_s=2.0)
        while True:
            try:
                generation = await self._bus.wait_connected()
                lost_count = subscription.lost_count
                identity = await self._bucket.identity()
                entries = await self._bucket.latest(subjects.node_keys(self._node))
            except (Unavailable, NotFound) as error:
                _log.debug("feed interrupted", extra={"problem": str(error)})
                await backoff.wait()
                continue
            backoff.reset()
            first = not created
            if created not in ("", identity):
                revision_by_key.clear()
                first = True
                yield Reset()
            created = identity
            for entry in entries:
                if entry.revision > revision_by_key.get(entry.key, 0):
                    revision_by_key[entry.key] = entry.revision
                    yield entry
            newest = max(revision_by_key.values(), default=0)
            if first:
                yield Synced(revision=newest)
            # Live until something was missed.
            check_at = self._next_check()
            whole = True
            while whole:
                received = await subscription.receive(
                    timeout_s=max(0.0, check_at - anyio.current_time())
                )
                for message in received:
                    entry_or_none = self._entry(message)
                    if entry_or_none is None:
                        continue
                    entry, previous = entry_or_none
                    known = revision_by_key.get(entry.key, 0)
                    if entry.revision <= known:
                        continue
                    if previous > known:
                        whole = False
                    revision_by_key[entry.key] = entry.revision
                    newest = max(newest, entry.revision)
                    yield entry
                if self._bus.generation != generation or subscription.lost_count != lost_count:
                    whole = False
                elif anyio.current_time() >= check_at:
                    whole = whole and not await self._is_behind(newest)
                    check_at = self._next_check()
            self.gap_count += 1

    def _next_check(self) -> float:
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards no secret
        return anyio.current_time() + self._check_s * spread

    async def _is_behind(self, newest: int) -> bool:
        try:
            return await self._bucket.last_revision(subjects.node_fence(self._node)) > newest
        except HamiError:
            return False  # the bus is away; its return is noticed by the connection's generation

    def _entry(self, message: Message) -> tuple[Entry, int] | None:
        """The record and the sequence its key had before."""
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
