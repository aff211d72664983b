# SPDX-License-Identifier: Apache-2.0
"""Serves snapshots and events of the fleet to many viewers (ADR 41).

Changes are collected for ``FLUSH_S`` and encoded once for all viewers with the same rights, that is
of the same namespace. Each viewer has a bounded queue of references to encoded events; one whose
queue is full is disconnected. A snapshot is encoded and compressed in a thread, one at a time, and
reused for ``SNAPSHOT_S``. Without viewers nothing is packed.
"""

import gzip
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec import Struct

from hami_common.errors import Unavailable
from hami_common.ports import Clock
from hami_common.runtime.natsio.history import History
from hami_common.runtime.places import Places
from hami_registry.core import fleet as packing
from hami_registry.core.capacity import CAUSES, Capacity, Measured, Share, measure
from hami_registry.core.fleet import EXCLUSIVE, Block, Fleet, Position
from hami_registry.core.projection import Projection
from hami_registry.shell.metrics import Metrics
from hami_registry.shell.pastfleet import fleet_at

FLUSH_S: Final = 0.1
"""Interval at which changes are sent."""
SNAPSHOT_S: Final = 1.0
"""Time for which an encoded snapshot is reused; events continue from its position."""
SNAPSHOTS_KEPT: Final = 4
"""Encoded snapshots that are kept, each of one namespace."""
CAPACITY_S: Final = 30.0
"""Interval at which the metrics of capacity are computed."""
_CHUNK: Final = 32
"""Blocks that are packed between two pauses: some milliseconds."""
_GZIP_LEVEL: Final = 6
LOAD = "load /v1/fleet again, then continue from its id"

_encoder = msgspec.json.Encoder()


def _last(event: str, reason: str) -> bytes:
    """Return the last event of a stream; the empty id makes clients forget their position."""
    return f"event: {event}\nid\ndata: ".encode() + _encoder.encode({"reason": reason}) + b"\n\n"


_STOPPED = b"event: end\ndata: {}\n\n"
_LAGGED = b'event: end\ndata: {"reason":"events were not read fast enough"}\n\n'
_UNKNOWN = _last("reset", f"changes since this position are not known: {LOAD}")
_LOST = _last("reset", f"the bus lost its data: {LOAD}")


class _Viewer:
    """One open stream."""

    def __init__(self, queue_size: int) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[bytes](queue_size)
        self.last = _STOPPED
        """Event that is sent after the queue is closed."""

    def offer(self, event: bytes) -> bool:
        """Queue an event; False when the viewer is too slow or gone."""
        try:
            self._send.send_nowait(event)
        except anyio.WouldBlock:
            self.end(_LAGGED)
            return False
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    def end(self, last: bytes) -> None:
        """Drop what is queued; ``last`` is sent and the stream ends."""
        self.last = last
        self._send.close()
        while True:
            try:
                self._receive.receive_nowait()
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                return

    async def events(self, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
        """Yield events, or a comment when there is none for ``keep_alive_s``."""
        while True:
            event = b": still here\n\n"
            with anyio.move_on_after(keep_alive_s):
                try:
                    event = await self._receive.receive()
                except anyio.EndOfStream:
                    break
            yield event
        yield self.last

    def close(self) -> None:
        self._send.close()
        self._receive.close()


class _Encoded(Struct, frozen=True, kw_only=True):
    at_s: float
    position: Position
    plain: bytes
    compressed: bytes


class FleetFeed:
    """The fleet with its viewers."""

    def __init__(
        self,
        *,
        projection: Projection,
        history: History,
        clock: Clock,
        metrics: Metrics,
        places: Places,
        queue_size: int,
    ) -> None:
        """``places`` bounds the viewers, each of which has a queue of ``queue_size`` events."""
        self._projection = projection
        self._history = history
        self._fleet = Fleet(projection)
        self._clock = clock
        self._metrics = metrics
        self._places = places
        self._queue_size = queue_size
        self._viewers: dict[str, set[_Viewer]] = {}
        """By namespace; empty: all."""
        self._is_closed = False
        self._flushing = anyio.Lock()
        self._building = anyio.Lock()
        self._snapshots: OrderedDict[str, _Encoded] = OrderedDict()
        self._capacity_labels: dict[str, set[tuple[str, ...]]] = {}

    # --- feeding --------------------------------------------------------------------------------

    def seen(self, source: str, revision: int, node: str) -> None:
        """Note that an entry about ``node`` was folded into the projection."""
        self._fleet.seen(source, revision, node)

    def complete(self, source: str, identity: str) -> None:
        """Note that all stored entries of ``source`` were folded; ``identity``: of its stream."""
        self._fleet.complete(source, identity)

    def reset(self, source: str) -> None:
        """Drop what is known of a source that the bus lost."""
        self._fleet.reset(source)
        self._snapshots.clear()
        self._end_all(_LOST)

    # --- events ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send changes to the viewers indefinitely."""
        while True:
            await anyio.sleep(FLUSH_S)
            if any(self._viewers.values()):
                async with self._flushing:
                    await self._flush()

    async def _flush(self) -> None:
        """Pack what changed and send it; the caller holds ``_flushing``."""
        is_more = True
        while is_more:
            is_more = self._fleet.rebuild(_CHUNK)
            if is_more:
                await anyio.lowlevel.checkpoint()
        self._fleet.beat(now_s=self._clock.now_s())
        blocks, silent = self._fleet.changes()
        if not blocks and silent is None:
            return
        # The caller may be a viewer that leaves: the others must get the event nevertheless.
        with anyio.CancelScope(shield=True):
            for namespace in list(self._viewers):
                await anyio.lowlevel.checkpoint()
                self._send(namespace, blocks, silent)

    def _send(
        self, namespace: str, blocks: Sequence[Block], silent: tuple[str, ...] | None
    ) -> None:
        viewers = self._viewers.get(namespace)
        if not viewers:
            return
        event = self._event(blocks, namespace, silent)
        for viewer in list(viewers):
            if not viewer.offer(event):
                viewers.discard(viewer)
                self._metrics.fleet_viewers_lagged.inc()

    def _event(
        self, blocks: Sequence[Block], namespace: str, silent: tuple[str, ...] | None
    ) -> bytes:
        position = self._fleet.position
        self._metrics.fleet_events.inc()
        document = packing.document(
            blocks,
            position=position,
            time_s=self._clock.now_s(),
            namespace=namespace,
            silent=silent,
        )
        head = f"event: fleet\nid: {position}\ndata: ".encode()
        return head + _encoder.encode(document) + b"\n\n"

    def check_room(self, caller: str, *, is_operator: bool) -> None:
        """Raise ``Unavailable`` or ``TooManyRequests`` when the caller cannot view now."""
        if self._is_closed:
            raise Unavailable(peer="this replica", detail="it is stopping")
        self._places.check(caller, is_operator=is_operator)

    async def events(
        self,
        since: Position,
        *,
        namespace: str,
        caller: str,
        is_operator: bool,
        keep_alive_s: float,
    ) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events with all changes after ``since``.

        Format: https://html.spec.whatwg.org/multipage/server-sent-events.html.
        """
        self.check_room(caller, is_operator=is_operator)
        with self._places.hold(caller, is_operator=is_operator), self._viewer(namespace) as viewer:
            yield b": listening\n\n"
            async with self._flushing:
                await self._flush()
                blocks = self._fleet.since(since)
                if blocks is None:
                    viewer.end(_UNKNOWN)
                elif self._is_closed:
                    viewer.end(_STOPPED)
                else:
                    viewer.offer(self._event(blocks, namespace, self._fleet.silent))
                    self._viewers.setdefault(namespace, set()).add(viewer)
            async for event in viewer.events(keep_alive_s):
                yield event

    @contextmanager
    def _viewer(self, namespace: str) -> Iterator[_Viewer]:
        viewer = _Viewer(self._queue_size)
        self._metrics.fleet_viewers.inc()
        try:
            yield viewer
        finally:
            self._metrics.fleet_viewers.dec()
            viewers = self._viewers.get(namespace, set())
            viewers.discard(viewer)
            if not viewers:
                self._viewers.pop(namespace, None)
            viewer.close()

    def close_viewers(self) -> None:
        """End all streams and accept no new ones."""
        self._is_closed = True
        self._end_all(_STOPPED)

    def _end_all(self, last: bytes) -> None:
        for viewers in self._viewers.values():
            for viewer in viewers:
                viewer.end(last)
            viewers.clear()

    # --- snapshots ------------------------------------------------------------------------------

    async def snapshot(self, namespace: str, *, compressed: bool) -> bytes:
        """Return the whole fleet for readers of ``namespace``, as JSON, gzip if ``compressed``."""
        async with self._building:
            known = self._snapshots.get(namespace)
            now_s = self._clock.monotonic_s()
            if known is None or known.at_s + SNAPSHOT_S < now_s:
                position, blocks = await self._present()
                document = partial(
                    packing.document,
                    blocks,
                    position=position,
                    time_s=self._clock.now_s(),
                    namespace=namespace,
                    silent=self._fleet.silent,
                )
                plain, small = await anyio.to_thread.run_sync(_encoded, document)
                self._metrics.fleet_snapshots.inc()
                known = _Encoded(at_s=now_s, position=position, plain=plain, compressed=small)
                self._snapshots[namespace] = known
                self._snapshots.move_to_end(namespace)
                while len(self._snapshots) > SNAPSHOTS_KEPT:
                    self._snapshots.popitem(last=False)
            return known.compressed if compressed else known.plain

    async def at(self, at_s: float, namespace: str, *, compressed: bool) -> bytes:
        """Return the fleet at a past time, as ``snapshot``."""
        return await fleet_at(
            self._history,
            self._projection,
            at_s=at_s,
            namespace=namespace,
            compressed=compressed,
        )

    async def _present(self) -> tuple[Position, list[Block]]:
        """Return all blocks and their position."""
        async with self._flushing:
            await self._flush()
            return self._fleet.position, self._fleet.blocks()

    # --- capacity -------------------------------------------------------------------------------

    async def capacity(self, *, namespace: str, asked: tuple[int, int] | None) -> Capacity:
        """Return what can still be given; computed in a thread."""
        async with self._building:
            _, blocks = await self._present()
            silent = frozenset(self._fleet.silent)
            return await anyio.to_thread.run_sync(
                lambda: measure(_measured(blocks, silent), asked=asked, namespace=namespace)
            )

    async def measure_capacity(self) -> None:
        """Keep the metrics of capacity up to date indefinitely."""
        while True:
            if self._fleet.is_complete:
                self._show(await self.capacity(namespace="", asked=None))
            await anyio.sleep(CAPACITY_S)

    def _show(self, capacity: Capacity) -> None:
        metrics = self._metrics
        gauges = {
            "largest": metrics.capacity_largest,
            "core": metrics.capacity_largest_core,
            "free": metrics.capacity_free,
            "foreign": metrics.capacity_foreign,
            "burst": metrics.capacity_burst,
            "fits": metrics.capacity_fitting,
            "stranded": metrics.capacity_stranded,
        }
        values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in gauges}
        for one in capacity.items:
            key = (one.vendor, one.model)
            values["largest"][key] = one.largest_mib
            values["core"][key] = one.largest_core_pct
            values["free"][key] = one.free_mib
            values["foreign"][key] = one.foreign_mib
            values["burst"][key] = one.burst_mib
            values["fits"].update({(*key, fit.size): fit.count for fit in one.fits})
            stranded = {part.cause: part.memory_mib for part in one.stranded}
            values["stranded"].update({(*key, cause): stranded.get(cause, 0) for cause in CAUSES})
        for name, gauge in gauges.items():
            for labels in self._capacity_labels.get(name, set()) - values[name].keys():
                gauge.remove(*labels)
            for labels, value in values[name].items():
                gauge.labels(*labels).set(value)
            self._capacity_labels[name] = set(values[name])


def _encoded(document: Callable[[], packing.FleetDocument]) -> tuple[bytes, bytes]:
    plain = _encoder.encode(document())
    return plain, gzip.compress(plain, _GZIP_LEVEL, mtime=0)


def _measured(blocks: Sequence[Block], silent: frozenset[str]) -> Iterator[Measured]:
    for block in blocks:
        shares: dict[int, list[Share]] = {}
        for row, several in block.allocations:
            for one in several:
                shares.setdefault(one.device, []).append(
                    Share(row.namespace, one.core_pct, one.slots, bool(one.flags & EXCLUSIVE))
                )
        for number, (device, booked, offer) in enumerate(block.offers):
            yield Measured(
                block.node, block.node in silent, device, booked, offer, shares.get(number, ())
            )
