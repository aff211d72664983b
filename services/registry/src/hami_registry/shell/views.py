# SPDX-License-Identifier: Apache-2.0
"""Feeds the read models from the bus and passes changes to listeners.

Sources: the three buckets, decisions from the event stream (the last of each pod, then live) and
heartbeats. The revision read of each bucket is kept, so that an answer can report how fresh it is.
A listener has a bounded queue; one that reads too slowly is notified and disconnected.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec import Struct

from hami_common.bus import grants, subjects
from hami_common.errors import Unavailable, WireInvalid
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.decision import DecisionRecord
from hami_common.events.inventory import Heartbeat, NodeDevices
from hami_common.ports import Clock, Entry, Publisher
from hami_common.runtime.natsio import Bus, Delivery, Message, pull_events
from hami_common.runtime.natsio.deadletters import UNDECODABLE
from hami_common.runtime.places import Places
from hami_common.runtime.quarantine import Quarantine
from hami_registry.core.projection import Projection
from hami_registry.core.system import Observed
from hami_registry.core.waiting import WaitingPods
from hami_registry.shell.deliveries import Deliveries
from hami_registry.shell.fleet import FleetFeed
from hami_registry.shell.metrics import Metrics

T = TypeVar("T")

HEARTBEATS_S = 0.1
"""Interval at which gathered heartbeats are processed; they are valid for seconds."""
NODE_WAITING = 64
"""Maximum waiting heartbeats of one node; each vendor's agent sends one in 5 s."""

_log = logging.getLogger(__name__)


class Change(Struct, frozen=True, kw_only=True):
    """A change sent to the listeners of ``/v1/watch``."""

    kind: str
    """``allocation``, ``state``, ``device`` or ``decision``."""
    sequence: int
    """Stream sequence of the record within its kind."""
    node: str
    """Empty for a decision that chose none."""
    namespace: str
    """Empty for a device."""
    record: msgspec.Raw
    record_for_namespace: msgspec.Raw | None = None
    """Record for readers of one namespace only; ``None``: the same."""


class Views:
    """The projection with its freshness and its listeners."""

    def __init__(
        self,
        *,
        projection: Projection,
        clock: Clock,
        metrics: Metrics,
        quarantine: Quarantine,
        queue_size: int,
        places: Places,
        fleet: FleetFeed,
        identify: Callable[[str], Awaitable[str]],
    ) -> None:
        """``places`` bounds the listeners, each of which has a queue of ``queue_size``.

        ``identify`` returns the identity of a bucket's stream.
        """
        self.projection = projection
        self.waiting = WaitingPods()
        self.observed = Observed()
        self._fleet = fleet
        bucket = partial(_Bucket, fleet=fleet, identify=identify)
        self.devices = bucket(
            "devices",
            self._take_devices,
            projection.reset_devices,
            source="devices",
            name=subjects.DEVICES_BUCKET,
        )
        self.ledger = bucket(
            "record",
            self._take_record,
            projection.reset_ledger,
            source="ledger",
            name=subjects.ALLOC_BUCKET,
        )
        self.states = bucket(
            "state",
            self._take_state,
            projection.reset_states,
            source="states",
            name=subjects.STATE_BUCKET,
        )
        self._quarantine = quarantine
        self._clock = clock
        self._metrics = metrics
        self._queue_size = queue_size
        self._places = places
        self._listeners: set[MemoryObjectSendStream[Change]] = set()
        self._is_closed = False

    @property
    def is_synced(self) -> bool:
        """True when all buckets were read to their ends at least once."""
        return all(b.is_synced for b in (self.devices, self.ledger, self.states))

    # --- feeding --------------------------------------------------------------------------------

    def _take_devices(self, entry: Entry) -> None:
        devices = _decode(subjects.DEVICES_BUCKET, entry, NodeDevices)
        self.projection.devices_seen(devices)
        self._fleet.seen("devices", entry.revision, devices.node)
        self._notify("device", entry, node=devices.node, namespace="")

    def _take_record(self, entry: Entry) -> None:
        record = _decode(subjects.ALLOC_BUCKET, entry, AllocationRecord)
        self.projection.record_seen(entry.key, entry.revision, record)
        self.observed.message_seen("scheduler", record.writer, "record", time_s=record.time_s)
        self._fleet.seen("ledger", entry.revision, record.node)
        self._notify("allocation", entry, node=record.node, namespace=record.namespace)

    def _take_state(self, entry: Entry) -> None:
        state = _decode(subjects.STATE_BUCKET, entry, StateRecord)
        self.projection.state_seen(entry.key, entry.revision, state)
        self._fleet.seen("states", entry.revision, state.node)
        self._notify("state", entry, node=state.node, namespace=state.namespace)

    async def follow_decisions(self, bus: Bus, publisher: Publisher) -> None:
        """Read decisions indefinitely."""
        reading = Deliveries(
            kind="decision",
            stream=subjects.EVENTS_STREAM,
            key=lambda delivery: delivery.subject,
            handle=lambda delivery: self._take_decision(delivery, reading),
            quarantine=self._quarantine,
            publisher=publisher,
            metrics=self._metrics,
        )
        async with pull_events(
            bus,
            subjects.EVENTS_STREAM,
            filter_subjects=(f"{subjects.EVENT_PREFIX}.decision.>",),
            deliver="last_per_subject",
        ) as deliveries:
            await reading.each(deliveries)

    async def _take_decision(self, delivery: Delivery, reading: Deliveries) -> None:
        try:
            decision = codec.decode(delivery.data, DecisionRecord, what=delivery.subject)
        except WireInvalid as error:
            self._skip("decision", error)
            await reading.dead_letter(delivery, UNDECODABLE, str(error))
            return
        self.projection.decision_seen(decision)
        self.waiting.decision_seen(decision)
        self.observed.decision_seen(decision)
        entry = Entry(key=delivery.subject, value=delivery.data, revision=delivery.sequence)
        plain = decision.for_namespace() if self._listeners else decision
        self._notify(
            "decision",
            entry,
            node=decision.node,
            namespace=decision.namespace,
            for_namespace=None if plain is decision else codec.encode(plain),
        )
        await delivery.ack()

    async def follow_heartbeats(self, bus: Bus) -> None:
        """Receive heartbeats of agents indefinitely."""
        async with bus.subscribe(
            f"{subjects.HEARTBEAT_PREFIX}.*", per_subject=NODE_WAITING, gather_s=HEARTBEATS_S
        ) as subscription:
            async for message in subscription:
                # A retry must not turn an old heartbeat into a new one.
                attempt = partial(self._take_heartbeat, message, self._clock.now_s())
                await self._quarantine.run("heartbeat", message.subject, attempt)

    def _take_heartbeat(self, message: Message, now_s: float) -> None:
        try:
            beat = codec.decode_on(message.subject, message.data, Heartbeat)
        except WireInvalid as error:
            self._skip("heartbeat", error)
            return
        vendors = tuple(vendor for vendor in beat.vendors if vendor in grants.VENDORS)
        self.projection.heartbeat_seen(beat.node, vendors, now_s=now_s)
        self.observed.heartbeat_seen(beat)

    def _skip(self, origin: str, error: WireInvalid) -> None:
        self._metrics.values_malformed.labels(origin=origin).inc()
        _log.warning("message skipped", extra={"origin": origin, "problem": str(error)})

    # --- listeners ------------------------------------------------------------------------------

    def check_room(self, caller: str, *, is_operator: bool) -> None:
        """Raise ``Unavailable`` or ``TooManyRequests`` when the caller cannot listen now."""
        if self._is_closed:
            raise Unavailable(peer="this replica", detail="it is stopping")
        self._places.check(caller, is_operator=is_operator)

    @contextmanager
    def listen(
        self, caller: str, *, is_operator: bool
    ) -> Iterator[MemoryObjectReceiveStream[Change]]:
        """Yield changes from now on; the stream ends when the listener was too slow or we stop."""
        self.check_room(caller, is_operator=is_operator)
        with self._places.hold(caller, is_operator=is_operator):
            send, receive = anyio.create_memory_object_stream[Change](self._queue_size)
            self._listeners.add(send)
            self._metrics.listeners.inc()
            try:
                yield receive
            finally:
                self._metrics.listeners.dec()
                self._listeners.discard(send)
                send.close()
                receive.close()

    def close_listeners(self) -> None:
        """End all listeners' streams and accept no new ones."""
        self._is_closed = True
        for listener in list(self._listeners):
            listener.close()

    def _notify(
        self,
        kind: str,
        entry: Entry,
        *,
        node: str,
        namespace: str,
        for_namespace: bytes | None = None,
    ) -> None:
        if not self._listeners:
            return
        change = Change(
            kind=kind,
            sequence=entry.revision,
            node=node,
            namespace=namespace,
            record=msgspec.Raw(entry.value),
            record_for_namespace=None if for_namespace is None else msgspec.Raw(for_namespace),
        )
        for listener in list(self._listeners):
            try:
                listener.send_nowait(change)
            except anyio.WouldBlock:
                self._metrics.listeners_lagged.inc()
                self._listeners.discard(listener)
                listener.close()
            except anyio.BrokenResourceError:
                self._listeners.discard(listener)


class _Bucket:
    """One bucket as the views read it (a ``follow.Reader``)."""

    def __init__(
        self,
        kind: str,
        take: Callable[[Entry], None],
        forget: Callable[[], None],
        *,
        fleet: FleetFeed,
        identify: Callable[[str], Awaitable[str]],
        source: str,
        name: str,
    ) -> None:
        self.kind = kind
        self._fleet = fleet
        self._identify = identify
        self._source = source
        self._name = name
        self._take = take
        self._forget = forget
        self.sequence = 0
        """Newest revision read."""
        self.is_synced = False
        """Read to its end at least once."""
        self.is_complete = False
        """Read to its end, and not being read again after a reconnect or a loss."""

    def entry(self, entry: Entry) -> None:
        self.sequence = max(self.sequence, entry.revision)
        self._take(entry)

    def reset(self) -> None:
        self.sequence = 0
        self.is_complete = False
        self._forget()
        self._fleet.reset(self._source)

    async def synced(self) -> None:
        self._fleet.complete(self._source, await self._identify(self._name))
        self.is_synced = self.is_complete = True


def _decode(bucket: str, entry: Entry, kind: type[T]) -> T:
    """Decode a bucket's value; ``WireInvalid`` when it does not belong to its key."""
    return codec.decode_on(subjects.kv_subject(bucket, entry.key), entry.value, kind)


async def server_sent_events(
    views: Views,
    wanted: Callable[[Change], bool],
    *,
    caller: str,
    is_operator: bool,
    keep_alive_s: float,
) -> AsyncGenerator[bytes, None]:
    """Yield wanted changes as server-sent events; an operator reads all namespaces.

    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    with views.listen(caller, is_operator=is_operator) as changes:
        yield b": listening\n\n"
        while True:
            change: Change | None = None
            with anyio.move_on_after(keep_alive_s):
                try:
                    change = await changes.receive()
                except anyio.EndOfStream:
                    break
            if change is None:
                yield b": still here\n\n"
            elif wanted(change):
                narrowed = None if is_operator else change.record_for_namespace
                record = change.record if narrowed is None else narrowed
                data = bytes(record).replace(b"\n", b" ")
                head = f"event: {change.kind}\nid: {change.kind}-{change.sequence}\ndata: "
                yield head.encode() + data + b"\n\n"
    yield b"event: end\ndata: {}\n\n"
