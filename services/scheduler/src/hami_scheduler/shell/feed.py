# SPDX-License-Identifier: Apache-2.0
"""Turns external writes into stimuli: bus watches, heartbeats, faults, the pod watch, the clock.

Each feed is one task that lives as long as the service. Each object goes through the quarantine:
one that does not decode, or cannot be folded, is isolated and retried while the others continue;
the node of such a record or device is withheld meanwhile. When the bus lost its storage, the ledger
is emptied and its feeds restart; ``Recovery`` then compares it with the pods before any pod is
bound again. Seconds throughout.
"""

import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol, TypeVar

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import Denied, Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord, is_of_claim
from hami_common.events.inventory import DeviceFault, Heartbeat, NodeDevices
from hami_common.pods.podview import MetadataView, PodView
from hami_common.ports import Bucket, Entry, KubeApi, Reset, Synced, WatchEvent
from hami_common.runtime.quarantine import Attempt
from hami_core.ledger import repair
from hami_core.ledger.podfacts import PodReader
from hami_core.ledger.stimuli import (
    BusUnheard,
    CapacityReturned,
    DevicesBegin,
    DevicesEnd,
    DevicesPut,
    DevicesRemoved,
    FaultHeard,
    FeedSynced,
    HeartbeatHeard,
    NodeStands,
    RecordSeen,
    SilenceJudged,
    StateSeen,
    Tick,
)
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.effects import Effects
from hami_scheduler.shell.isolation import (
    DEVICES,
    FAULT,
    HEARTBEAT,
    NODE,
    POD,
    RECORD,
    RESTORE,
    STATE,
    TICK,
    forget_pod,
    pod_name,
)
from hami_scheduler.shell.metrics import Metrics
from hami_scheduler.shell.podapi import MANAGED, PODS, bare_pod
from hami_scheduler.shell.quota import QuotaKeeper
from hami_scheduler.shell.state import State

T = TypeVar("T")

NODES = "/api/v1/nodes"
GONE_RETRIES = 10
"""A watch has this multiple of the retry pause to report that the storage was lost."""

_log = logging.getLogger(__name__)
_pod_decoder = msgspec.json.Decoder(PodView)


class _NodeView(Struct, frozen=True, kw_only=True):
    metadata: MetadataView


_node_decoder = msgspec.json.Decoder(_NodeView)


class Heard(Protocol):
    """A message as a subscription delivers it."""

    @property
    def subject(self) -> str:
        """Subject on which it was published."""
        ...

    @property
    def data(self) -> bytes:
        """Its payload."""
        ...


Subscribe = Callable[[str], AbstractAsyncContextManager[AsyncIterable[Heard]]]
"""Opens a core subscription for the time of a block; it survives reconnects."""


def always() -> bool:
    """Report a bus that cannot disconnect as connected."""
    return True


class Sources(Struct, frozen=True, kw_only=True):
    """Sources of the feeds."""

    devices: Bucket
    """Bucket ``hami_devices``."""
    records: Bucket
    """Bucket ``hami_alloc``."""
    states: Bucket
    """Bucket ``hami_state``."""
    subscribe: Subscribe
    kube: KubeApi
    is_connected: Callable[[], bool]
    """Returns whether the bus is connected; silence of agents counts only while it is."""


class Feed:
    """All feeds of one scheduler."""

    def __init__(
        self,
        *,
        sources: Sources,
        state: State,
        effects: Effects,
        is_withheld: Callable[[str], bool],
        reader: PodReader,
        quota: QuotaKeeper,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        """Feed ``state``. ``is_withheld``: the node waits for the takeover from HAMi."""
        self._sources = sources
        self._state = state
        self._core = state.core
        self._reader = reader
        self._quota = quota
        self._settings = settings
        self._metrics = metrics
        self._supervisor = state.supervisor
        self._quarantine = state.quarantine
        self._view: PodView | None = None
        """The pod of the event that is being handled."""
        self._ledger = effects.ledger
        self._settling = effects.settling
        self._is_withheld = is_withheld
        self._keeper = effects.keeper
        self.wiped = False
        """The bus lost its storage since the last comparison of ledger and pods."""

    async def run(self) -> None:
        """Run every feed, indefinitely."""
        keep = self._supervisor.keep
        async with anyio.create_task_group() as group:
            group.start_soon(self._again, "inventory", self._watch_devices)
            group.start_soon(self._again, "ledger", self._watch_ledger)
            group.start_soon(self._again, "pods", self._watch_pods)
            group.start_soon(self._again, "quotas", self._quota.watch)
            group.start_soon(self._again, "heartbeats", self._hear_heartbeats)
            group.start_soon(self._again, "faults", self._hear_faults)
            if self._settings.topology_labels:
                group.start_soon(self._again, "nodes", self._watch_nodes)
            group.start_soon(keep, "tick", self._tick)

    async def _again(self, name: str, feed: Callable[[], Awaitable[None]]) -> None:
        """Restart a feed whenever it ends: when a peer refuses it, or disconnects."""

        async def once() -> None:
            try:
                await feed()
            finally:
                self._metrics.feed_restarts.labels(feed=name).inc()

        await self._supervisor.keep(
            f"feed {name}", once, expected=(Unavailable, Denied), is_endless=True
        )

    def _decode(self, subject: str, data: bytes, kind: type[T], *, source: str) -> T:
        try:
            return codec.decode_on(subject, data, kind)
        except WireInvalid:
            self._metrics.undecodable.labels(source=source).inc()
            raise

    # --- the ledger ------------------------------------------------------------------------------

    async def _watch_ledger(self) -> None:
        """Fold records and states; return when the bus lost its storage, to restart empty."""
        failures: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def until_reset(follow: Callable[[], Awaitable[None]]) -> None:
                try:
                    await follow()
                except Exception as error:  # noqa: BLE001 - raised below, after the ledger is emptied
                    failures.append(error)
                group.cancel_scope.cancel()

            group.start_soon(until_reset, self._follow_records)
            group.start_soon(until_reset, self._follow_states)
            group.start_soon(until_reset, self._until_gone)
        # A new watch cannot detect whether the storage is still the one that was read before.
        _log.error(
            "ledger rebuilt, its storage was lost or its watch ended",
            extra={"problem": str(failures[0]) if failures else "storage was lost"},
        )
        self.wiped = True
        self._quota.reset()
        self._state.empty()
        if failures:
            raise failures[0]

    async def _until_gone(self) -> None:
        """Return when the bus contains less than was folded and no watch reports it."""
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
                await self._quarantine.run(
                    RECORD, item.key, self._record_attempt(item), name=self._names_of(item.key)
                )

    def _record_attempt(self, item: Entry) -> Attempt:
        """Return an attempt that folds a record, and on retry the node's present records."""
        is_first = True

        def attempt() -> Awaitable[None] | None:
            nonlocal is_first
            if not is_first:
                return self._read_again(item.key)
            is_first = False
            self._take_record(item)
            return None

        return attempt

    def _take_record(self, item: Entry) -> None:
        try:
            subject = subjects.kv_subject(subjects.ALLOC_BUCKET, item.key)
            record = self._decode(subject, item.value, AllocationRecord, source="records")
            now_s = self._state.clock.now_s()
            self._state.fold(RecordSeen(seq=item.revision, record=record, now_s=now_s))
            self._quota.fold(item.revision, record)
        except Exception as error:
            self._withhold_for(item.key, error)
            raise
        if len(self._state.withheld):
            self._state.withheld.lift(RECORD, item.key)

    def _withhold_for(self, key: str, error: Exception) -> None:
        try:
            node, _ = subjects.parse_allocation_key(key)
        except WireInvalid:
            return  # not the key of a share
        self._state.withheld.add(RECORD, key, error, node=node)

    async def _read_again(self, key: str) -> None:
        """Fold the newest record under a key; returns too when an operator removed it."""
        node, _ = subjects.parse_allocation_key(key)
        await self._ledger.refresh_node(node)
        problem = self._state.withheld.problem(RECORD, key)
        if problem is not None:
            raise problem

    def _names_of(self, key: str) -> tuple[str, str]:
        """Return namespace and name of the pod of an allocation's key, empty when unknown."""
        _, _, uid = key.partition(".")
        return pod_name(self._state.pods.get(uid))

    async def _follow_states(self) -> None:
        async with self._sources.states.watch() as items:
            async for item in items:
                if isinstance(item, Reset):
                    return
                if isinstance(item, Synced):
                    self._delivered("states")
                    continue
                await self._quarantine.run(
                    STATE, item.key, self._state_attempt(item), name=self._names_of(item.key)
                )

    def _state_attempt(self, item: Entry) -> Attempt:
        """Return an attempt that folds a state, and on retry the present one under its key."""
        is_first = True

        def attempt() -> Awaitable[None] | None:
            nonlocal is_first
            if not is_first:
                return self._read_state_again(item.key)
            is_first = False
            self._take_state(item)
            return None

        return attempt

    async def _read_state_again(self, key: str) -> None:
        with answer_within(self._settings.bus_timeout_s, peer="NATS"):
            entry = await self._sources.states.get(key)
        if entry is not None:
            self._take_state(entry)

    def _take_state(self, item: Entry) -> None:
        subject = subjects.kv_subject(subjects.STATE_BUCKET, item.key)
        state = self._decode(subject, item.value, StateRecord, source="states")
        now_s = self._state.clock.now_s()
        self._state.fold(StateSeen(seq=item.revision, state=state, now_s=now_s))

    def _delivered(self, part: str) -> None:
        state = self._state
        state.delivered(part)
        if state.has("records") and state.has("states"):
            state.tell(FeedSynced(now_s=state.clock.now_s()))
        state.refresh()

    # --- devices ---------------------------------------------------------------------------------

    async def _watch_devices(self) -> None:
        self._core.answer(DevicesBegin())
        async with self._sources.devices.watch() as items:
            async for item in items:
                match item:
                    case Reset():
                        self._state.lost("inventory")
                        self._core.answer(DevicesBegin())
                    case Synced():
                        self._core.answer(DevicesEnd())
                        self._delivered("inventory")
                    case Entry():
                        await self._quarantine.run(
                            DEVICES,
                            item.key,
                            partial(self._take_devices, item),
                            size_bytes=len(item.value),
                        )

    def _take_devices(self, entry: Entry) -> None:
        """Fold a value, or withhold the vendor's devices on the node until a valid one arrives."""
        try:
            node, vendor = subjects.parse_devices_key(entry.key)
        except WireInvalid:
            self._metrics.undecodable.labels(source="inventory").inc()
            raise
        with self._state.withheld.unless_handled(DEVICES, entry.key, node=node, vendor=vendor):
            self._put_devices(entry, node, vendor)

    def _put_devices(self, entry: Entry, node: str, vendor: str) -> None:
        if not entry.value:
            self._core.answer(DevicesRemoved(node=node, vendor=vendor))
            return
        subject = subjects.kv_subject(subjects.DEVICES_BUCKET, entry.key)
        devices = self._decode(subject, entry.value, NodeDevices, source="inventory")
        if excess := self._core.inventory.excess(devices):
            self._metrics.undecodable.labels(source="inventory").inc()
            raise WireInvalid(what=entry.key, problem=excess)
        now_s = self._state.clock.monotonic_s()
        changed = self._core.answer(
            DevicesPut(devices=devices, revision=entry.revision, now_s=now_s)
        )
        if changed and self._state.has("inventory"):
            self._state.later(CapacityReturned(node=node))

    async def _hear_heartbeats(self) -> None:
        async with self._sources.subscribe(f"{subjects.HEARTBEAT_PREFIX}.*") as messages:
            async for message in messages:
                # Not retried: the next heartbeat reports the state of that time.
                self._quarantine.call(
                    HEARTBEAT, message.subject, partial(self._take_heartbeat, message)
                )

    def _take_heartbeat(self, message: Heard) -> None:
        heartbeat = self._decode(message.subject, message.data, Heartbeat, source="heartbeats")
        if self._is_withheld(heartbeat.node):
            unserved = (*heartbeat.unserved, *heartbeat.vendors)
            heartbeat = replace(heartbeat, vendors=(), unserved=unserved)
        now_s = self._state.clock.monotonic_s()
        if self._core.answer(HeartbeatHeard(heartbeat=heartbeat, now_s=now_s)):
            _log.info("agent heartbeat resumed", extra={"node": heartbeat.node})
            self._state.later(CapacityReturned(node=heartbeat.node))

    async def _hear_faults(self) -> None:
        async with self._sources.subscribe(f"{subjects.FAULT_PREFIX}.*") as messages:
            async for message in messages:
                found: list[DeviceFault] = []
                self._quarantine.call(
                    FAULT, message.subject, partial(self._decode_fault, message, found)
                )
                for fault in found:
                    await self._quarantine.run(
                        FAULT, f"{message.subject}/{fault.uuid}", partial(self._take_fault, fault)
                    )

    def _decode_fault(self, message: Heard, found: list[DeviceFault]) -> None:
        found.append(self._decode(message.subject, message.data, DeviceFault, source="faults"))

    def _take_fault(self, fault: DeviceFault) -> None:
        if not self._core.answer(FaultHeard(fault=fault)):
            return
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
            self._state.later(CapacityReturned(node=fault.node))

    # --- pods ------------------------------------------------------------------------------------

    async def _watch_pods(self) -> None:
        """Follow every managed pod; a restarted watch first lists the existing pods."""
        listed: set[str] | None = set()
        async with self._sources.kube.list_watch(PODS, label_selector=MANAGED) as events:
            async for event in events:
                if event.type == "SYNCED":
                    if listed is None:
                        self._doubt_unknown()
                    for pod in [
                        p for p in self._state.pods if listed is not None and p.uid not in listed
                    ]:
                        self._quarantine.call(POD, pod.uid, partial(self._vanished, pod.uid))
                    listed = None
                    self._delivered("pods")
                    continue
                uid, names = self._who(event)
                await self._quarantine.run(
                    POD,
                    uid,
                    partial(self._take_pod, event, uid),
                    name=names,
                    size_bytes=len(event.raw),
                )
                if listed is not None and event.type != "DELETED":
                    listed.add(uid)  # a pod that cannot be read exists all the same

    def _who(self, event: WatchEvent) -> tuple[str, tuple[str, str]]:
        """Return (uid, (namespace, name)) of the pod that an event is about.

        The document is read here, once for an event that can be handled.
        """
        try:
            self._view = view = _pod_decoder.decode(event.raw)
        except Exception:  # noqa: BLE001 - raised again when the event is handled
            self._view = None
            pod = bare_pod(event.raw)
            return pod.metadata.uid, pod.names()
        metadata = view.metadata
        return metadata.uid, (metadata.namespace or "default", metadata.name)

    def _take_pod(self, event: WatchEvent, uid: str) -> None:
        view, self._view = self._view, None
        if event.type == "DELETED":
            self._vanished(uid)
            return
        if view is None or view.metadata.uid != uid:
            try:
                view = _pod_decoder.decode(event.raw)
            except Exception:
                self._metrics.undecodable.labels(source="pods").inc()
                raise
        pod = self._reader.facts_of(view, known=self._state.pods.get(uid))
        self._state.pods.put(pod)
        self._keeper.see_pod(pod)
        if len(self._state.withheld):
            self._state.withheld.lift(POD, uid)
        for holding in self._state.ledger.holdings_of_pod(uid):
            judgement, reason = repair.judge(holding, pod)
            if judgement == "release":
                self._state.later(repair.Release(holding=holding, reason=reason))
            elif judgement == "confirm" and self._settling.is_expected(holding):
                self._state.later(repair.Confirm(holding=holding))

    def _vanished(self, uid: str) -> None:
        """Doubt the allocations of a pod that left our watch: it is gone, or lost our label."""
        self._state.pods.drop(uid)
        forget_pod(self._quarantine, uid)
        if len(self._state.withheld):
            self._state.withheld.lift(POD, uid)
            self._state.withheld.lift(RESTORE, uid)
        for holding in self._state.ledger.holdings_of_pod(uid):
            self._state.later(repair.Doubt(holding=holding))

    def _doubt_unknown(self) -> None:
        """Doubt pods that the new list lacks: they ended while no watch could report it."""
        for holding in list(self._state.ledger.holdings()):
            is_pod = not is_of_claim(holding.record)
            if is_pod and self._state.pods.get(holding.record.pod_uid) is None:
                self._state.later(repair.Doubt(holding=holding))

    # --- nodes -----------------------------------------------------------------------------------

    async def _watch_nodes(self) -> None:
        """Follow the positions of nodes in the network; no other task waits for it."""
        async with self._sources.kube.list_watch(NODES) as events:
            async for event in events:
                if event.type == "SYNCED":
                    continue
                await self._quarantine.run(
                    NODE,
                    bare_pod(event.raw).metadata.name,
                    partial(self._take_node, event),
                    size_bytes=len(event.raw),
                )

    def _take_node(self, event: WatchEvent) -> None:
        try:
            node = _node_decoder.decode(event.raw).metadata
        except Exception:
            self._metrics.undecodable.labels(source="nodes").inc()
            raise
        known = {} if event.type == "DELETED" else node.labels or {}
        path = tuple(known.get(label, "") for label in self._settings.topology_labels)
        self._core.answer(NodeStands(node=node.name, path=path))

    # --- time ------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        state, quarantine = self._state, self._quarantine
        while True:
            await state.clock.sleep(self._settings.tick_s)
            quarantine.call(TICK, "silence", self._judge_silence)
            if state.is_complete:
                quarantine.call(TICK, "leases", self._end_leases)
            self._metrics.served_nodes.set(self._core.inventory.alive_count())
            self._metrics.silent_nodes.set(self._core.inventory.silent_count())
            self._metrics.withheld_nodes.set(state.withheld.node_count())

    def _judge_silence(self) -> None:
        now_s = self._state.clock.monotonic_s()
        if not self._sources.is_connected():
            self._core.answer(BusUnheard(now_s=now_s))
        for node, vendor in self._core.answer(SilenceJudged(now_s=now_s)):
            _log.warning("agent fell silent", extra={"node": node, "vendor": vendor})

    def _end_leases(self) -> None:
        self._state.tell(Tick(now_s=self._state.clock.now_s()))
