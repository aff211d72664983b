# SPDX-License-Identifier: Apache-2.0
"""Turns what others write into stimuli: bus watches, heartbeats, faults, the pod watch, the clock.

Each feed is one task that lives as long as the service. Payloads that do not decode are counted,
logged and skipped. When the bus lost its storage, the ledger is emptied and its feeds begin anew;
``Recovery`` then compares it with the pods before anything is bound again. Seconds throughout.
"""

import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common import subjects
from hami_common.errors import Denied, HamiError, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.codec import UNDECODABLE
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.podview import MetadataView, PodView
from hami_common.ports import Bucket, Entry, KubeApi, Reset, Synced, WatchEvent
from hami_common.runtime.tasks import Backoff
from hami_scheduler.core import repair
from hami_scheduler.core.inventory import Inventory
from hami_scheduler.core.podfacts import PodReader
from hami_scheduler.core.stimuli import (
    CapacityReturned,
    FeedSynced,
    RecordSeen,
    StateSeen,
    Tick,
)
from hami_scheduler.settings import Settings
from hami_scheduler.shell.backlog import Backlog
from hami_scheduler.shell.effects import MANAGED, PODS, Chore
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.state import State

T = TypeVar("T")

NODES = "/api/v1/nodes"
GONE_RETRIES = 10
"""A watch has this many times the pause before a retry to say that the storage was lost."""

_log = logging.getLogger(__name__)
_pod_decoder = msgspec.json.Decoder(PodView)


class _NodeView(Struct, frozen=True, kw_only=True):
    metadata: MetadataView


_node_decoder = msgspec.json.Decoder(_NodeView)


class Heard(Protocol):
    """A message as a subscription delivers it."""

    @property
    def subject(self) -> str:
        """Where it was published."""
        ...

    @property
    def data(self) -> bytes:
        """Its payload."""
        ...


Subscribe = Callable[[str], AbstractAsyncContextManager[AsyncIterable[Heard]]]
"""Opens a core subscription for the time of a block; it survives reconnects."""


def always() -> bool:
    """A bus that cannot break off is always heard."""
    return True


class Sources(Struct, frozen=True, kw_only=True):
    """Where the feeds read."""

    devices: Bucket
    """Bucket ``hami_devices``."""
    records: Bucket
    """Bucket ``hami_alloc``."""
    states: Bucket
    """Bucket ``hami_state``."""
    subscribe: Subscribe
    kube: KubeApi
    is_connected: Callable[[], bool]
    """Whether the bus can be heard now; silence of others counts only while it can."""


class Feed:
    """All feeds of one scheduler."""

    def __init__(
        self,
        *,
        sources: Sources,
        state: State,
        inventory: Inventory,
        chores: Backlog[Chore],
        reader: PodReader,
        quota: QuotaKeeper,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Tell ``state`` and ``inventory``; leave what needs other services to ``chores``."""
        self._sources = sources
        self._state = state
        self._inventory = inventory
        self._chores = chores
        self._reader = reader
        self._quota = quota
        self._settings = settings
        self._metrics = metrics
        self.is_withheld: Callable[[str], bool] = lambda _: False
        """Whether nothing may be given on a node yet; set by the composition root."""
        self.wiped = False
        """The bus lost its storage since the last comparison of ledger and pods."""

    async def run(self) -> None:
        """Run every feed, for ever."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._again, "inventory", self._watch_devices)
            group.start_soon(self._again, "ledger", self._watch_ledger)
            group.start_soon(self._again, "pods", self._watch_pods)
            group.start_soon(self._again, "quotas", self._quota.watch)
            if self._settings.queues_file:
                group.start_soon(self._quota.follow_file)
            group.start_soon(self._again, "heartbeats", self._hear_heartbeats)
            group.start_soon(self._again, "faults", self._hear_faults)
            if self._settings.topology_labels:
                group.start_soon(self._again, "nodes", self._watch_nodes)
            group.start_soon(self._tick)

    async def _again(self, name: str, feed: Callable[[], Awaitable[None]]) -> None:
        """Start a feed whenever it ends: when a peer refuses it, or breaks off."""
        backoff = Backoff(first_s=self._settings.retry_s, most_s=10 * self._settings.retry_s)
        while True:
            try:
                await feed()
                backoff.reset()
            except (Unavailable, Denied) as error:
                _log.warning("feed broke off", extra={"feed": name, "problem": str(error)})
                await self._state.clock.sleep(backoff.next_s())
            self._metrics.feed_restarts.labels(feed=name).inc()

    def _decode(self, subject: str, data: bytes, kind: type[T], *, source: str) -> T | None:
        try:
            return codec.decode_on(subject, data, kind)
        except WireInvalid as error:
            self._metrics.undecodable.labels(source=source).inc()
            _log.error("message does not decode", extra={"source": source, "problem": str(error)})
            return None

    # --- the ledger ------------------------------------------------------------------------------

    async def _watch_ledger(self) -> None:
        """Fold records and states; return when the bus lost its storage, to begin with nothing."""
        failures: list[HamiError] = []
        async with anyio.create_task_group() as group:

            async def until_reset(follow: Callable[[], Awaitable[None]]) -> None:
                try:
                    await follow()
                except (Unavailable, Denied) as error:
                    failures.append(error)
                group.cancel_scope.cancel()

            group.start_soon(until_reset, self._follow_records)
            group.start_soon(until_reset, self._follow_states)
            group.start_soon(until_reset, self._until_gone)
        # A new watch cannot tell whether the storage is still the one that was read before.
        _log.error(
            "ledger is built anew, its storage was lost or its watch broke off",
            extra={"problem": str(failures[0]) if failures else "storage was lost"},
        )
        self.wiped = True
        self._quota.reset()
        self._state.empty()
        if failures:
            raise failures[0]

    async def _until_gone(self) -> None:
        """Return when the bus is seen to hold less than was folded, and no watch says so."""
        await self._state.wait_records_gone()
        await self._state.clock.sleep(GONE_RETRIES * self._settings.retry_s)

    async def _follow_records(self) -> None:
        async with self._sources.records.watch() as items:
            async for item in items:
                if isinstance(item, Reset):
                    return
                if isinstance(item, Synced):
                    self._quota.synced()
                    self._delivered("records")
                    continue
                subject = subjects.kv_subject(subjects.ALLOC_BUCKET, item.key)
                record = self._decode(subject, item.value, AllocationRecord, source="records")
                if record is not None:
                    self._state.tell(
                        RecordSeen(
                            seq=item.revision, record=record, now_s=self._state.clock.now_s()
                        )
                    )
                    self._quota.fold(item.revision, record)

    async def _follow_states(self) -> None:
        async with self._sources.states.watch() as items:
            async for item in items:
                if isinstance(item, Reset):
                    return
                if isinstance(item, Synced):
                    self._delivered("states")
                    continue
                subject = subjects.kv_subject(subjects.STATE_BUCKET, item.key)
                record = self._decode(subject, item.value, StateRecord, source="states")
                if record is not None:
                    self._state.tell(
                        StateSeen(seq=item.revision, state=record, now_s=self._state.clock.now_s())
                    )

    def _delivered(self, part: str) -> None:
        state = self._state
        state.delivered(part)
        if state.has("records") and state.has("states"):
            state.tell(FeedSynced(now_s=state.clock.now_s()))
        state.refresh()

    # --- devices ---------------------------------------------------------------------------------

    async def _watch_devices(self) -> None:
        self._inventory.begin_again()
        async with self._sources.devices.watch() as items:
            async for item in items:
                match item:
                    case Reset():
                        self._state.lost("inventory")
                        self._inventory.begin_again()
                    case Synced():
                        self._inventory.end_again()
                        self._delivered("inventory")
                    case Entry():
                        self._take_devices(item)

    def _take_devices(self, entry: Entry) -> None:
        try:
            node, vendor = subjects.parse_devices_key(entry.key)
        except WireInvalid as error:
            self._metrics.undecodable.labels(source="inventory").inc()
            _log.error("key of devices is not ours", extra={"problem": str(error)})
            return
        if not entry.value:
            self._inventory.remove(node, vendor)
            return
        subject = subjects.kv_subject(subjects.DEVICES_BUCKET, entry.key)
        devices = self._decode(subject, entry.value, NodeDevices, source="inventory")
        if devices is None:
            return
        if excess := self._inventory.excess(devices):
            self._metrics.undecodable.labels(source="inventory").inc()
            _log.error("devices beyond bounds", extra={"key": entry.key, "problem": excess})
            return
        now_s = self._state.clock.monotonic_s()
        changed = self._inventory.put(devices, revision=entry.revision, now_s=now_s)
        if changed and self._state.has("inventory"):
            self._chores.add(CapacityReturned(node=node))

    async def _hear_heartbeats(self) -> None:
        async with self._sources.subscribe(f"{subjects.HEARTBEAT_PREFIX}.*") as messages:
            async for message in messages:
                heartbeat = self._decode(
                    message.subject, message.data, Heartbeat, source="heartbeats"
                )
                if heartbeat is not None and self.is_withheld(heartbeat.node):
                    unserved = (*heartbeat.unserved, *heartbeat.vendors)
                    heartbeat = replace(heartbeat, vendors=(), unserved=unserved)
                if heartbeat is not None and self._inventory.hear(
                    heartbeat, now_s=self._state.clock.monotonic_s()
                ):
                    _log.info("agent is heard again", extra={"node": heartbeat.node})
                    self._chores.add(CapacityReturned(node=heartbeat.node))

    async def _hear_faults(self) -> None:
        async with self._sources.subscribe(f"{subjects.FAULT_PREFIX}.*") as messages:
            async for message in messages:
                fault = self._decode(message.subject, message.data, DeviceFault, source="faults")
                if fault is not None and self._inventory.take_fault(fault):
                    _log.warning(
                        "device health changed",
                        extra={
                            "node": fault.node,
                            "device": fault.uuid,
                            "healthy": fault.healthy,
                            "reason": fault.reason,
                        },
                    )
                    if fault.healthy:
                        self._chores.add(CapacityReturned(node=fault.node))

    # --- pods ------------------------------------------------------------------------------------

    async def _watch_pods(self) -> None:
        """Follow every managed pod; a watch that begins anew tells first what is there."""
        told: set[str] | None = set()
        async with self._sources.kube.list_watch(PODS, label_selector=MANAGED) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if told is None:
                        self._doubt_unknown()
                    for pod in [
                        p for p in self._state.pods if told is not None and p.uid not in told
                    ]:
                        self._vanished(pod.uid)
                    told = None
                    self._delivered("pods")
                    continue
                uid = self._take_pod(event)
                if told is not None and uid and event.type != "DELETED":
                    told.add(uid)

    def _take_pod(self, event: WatchEvent) -> str:
        """Uid of the pod that an event is about, empty when that cannot be told."""
        try:
            view = _pod_decoder.decode(event.raw)
        except UNDECODABLE as error:
            self._metrics.undecodable.labels(source="pods").inc()
            _log.error("pod does not decode", extra={"problem": str(error)})
            return ""
        uid = view.metadata.uid
        if event.type == "DELETED":
            self._vanished(uid)
            return uid
        pod = self._reader.facts_of(view, known=self._state.pods.get(uid))
        self._state.pods.put(pod)
        for holding in self._state.ledger.holdings_of_pod(uid):
            judgement, reason = repair.judge(holding, pod)
            if judgement == "release":
                self._chores.add(repair.Release(holding=holding, reason=reason))
        return uid

    def _vanished(self, uid: str) -> None:
        """The pod left our watch: it is gone, or somebody took its label away."""
        self._state.pods.drop(uid)
        for holding in self._state.ledger.holdings_of_pod(uid):
            self._chores.add(repair.Doubt(holding=holding))

    def _doubt_unknown(self) -> None:
        """Listed again: a pod that was bound and went in between was never told as deleted."""
        for holding in list(self._state.ledger.holdings()):
            if self._state.pods.get(holding.record.pod_uid) is None:
                self._chores.add(repair.Doubt(holding=holding))

    # --- nodes -----------------------------------------------------------------------------------

    async def _watch_nodes(self) -> None:
        """Follow where nodes stand in the network; nothing waits for it."""
        table, labels = self._state.table, self._settings.topology_labels
        async with self._sources.kube.list_watch(NODES) as events:
            async for event in events:
                if event.type == "SYNCED":
                    continue
                try:
                    node = _node_decoder.decode(event.raw).metadata
                except UNDECODABLE as error:
                    self._metrics.undecodable.labels(source="nodes").inc()
                    _log.error("node does not decode", extra={"problem": str(error)})
                    continue
                known = {} if event.type == "DELETED" else node.labels or {}
                table.set_domain(node.name, [known.get(label, "") for label in labels])

    # --- time ------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        state = self._state
        while True:
            await state.clock.sleep(self._settings.tick_s)
            if not self._sources.is_connected():
                self._inventory.deaf(now_s=state.clock.monotonic_s())
            for node, vendor in self._inventory.tick(now_s=state.clock.monotonic_s()):
                _log.warning("agent fell silent", extra={"node": node, "vendor": vendor})
            if state.is_complete:
                state.tell(Tick(now_s=state.clock.now_s()))
            self._metrics.served_nodes.set(self._inventory.alive_count())
            self._metrics.silent_nodes.set(self._inventory.silent_count())
