# SPDX-License-Identifier: Apache-2.0
"""Packs nodes, devices and allocations into snapshots and deltas of the fleet (ADR 41).

The unit of change is a node: a delta contains the whole new content of each changed node, so a
reader replaces nodes and never merges fields. Snapshot and delta are one document, written as
columns: the devices of a node follow each other, as do its allocations and their shares, and
repeated words are numbers into a list. The position names the newest revision read of each source;
it is comparable between replicas, so that a reader can go on at another one. Memory in MiB, compute
in percent of one device, times in Unix seconds.
"""

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar
from zlib import crc32

from msgspec import Struct

from hami_common.errors import RequestInvalid
from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, Booked, booked_by_device
from hami_registry.core.capacity import Offer, burst_mib, offer_of
from hami_registry.core.projection import Projection

CORDONED: Final = 1
UNHEALTHY: Final = 2
EXCLUSIVE: Final = 4
"""Bits of ``DeviceColumns.flags``; of ``ShareColumns.flags`` only ``EXCLUSIVE``."""
ABSENT: Final = -1
"""``ShareColumns.device`` of a device that its node no longer reports."""

SOURCES: Final = ("devices", "ledger", "states")
T = TypeVar("T", bound=Struct)


class Position(NamedTuple):
    """Newest revision of each source that changed something."""

    devices: int = 0
    ledger: int = 0
    states: int = 0
    bus: int = 0
    """Checksum of the identities of the buckets' streams: a bus that lost its data has others."""

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        return "-".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Read a position; ``RequestInvalid`` when it is none."""
        parts = text.split("-")
        if len(parts) != len(cls._fields) or not all(p.isascii() and p.isdigit() for p in parts):
            raise RequestInvalid(
                field="since",
                problem=f"{text[:80]!r} is not a position",
                fix="give the id of a snapshot of /v1/fleet, or of the last event",
            )
        if max(map(len, parts)) > len(str(1 << 64)):
            raise RequestInvalid(field="since", problem="is too large", fix="load /v1/fleet again")
        return cls(*map(int, parts))


class NodeColumns(Struct, frozen=True, kw_only=True):
    """One value per node."""

    name: tuple[str, ...]
    problem: tuple[int, ...]
    """Word: reason for which devices of the node cannot be listed."""
    devices: tuple[int, ...]
    """Number of its devices, which follow those of the node before."""
    allocations: tuple[int, ...]
    """Number of its listed allocations, which follow those of the node before."""


class DeviceColumns(Struct, frozen=True, kw_only=True):
    """One value per device; within a node sorted by vendor and index."""

    vendor: tuple[int, ...]
    """Word."""
    index: tuple[int, ...]
    model: tuple[int, ...]
    """Word."""
    mode: tuple[int, ...]
    """Word."""
    memory_mib: tuple[int, ...]
    """Physical memory."""
    capacity_mib: tuple[int, ...]
    used_mib: tuple[int, ...]
    """Booked by all allocations, as for compute and slots."""
    capacity_core_pct: tuple[int, ...]
    used_core_pct: tuple[int, ...]
    slots: tuple[int, ...]
    used_slots: tuple[int, ...]
    flags: tuple[int, ...]
    """Sum of 1: cordoned, 2: unhealthy, 4: held by an exclusive share."""
    reason: tuple[int, ...]
    """Word: why it is unhealthy."""
    partitions: tuple[int, ...]
    """Word: hardware partitions in use, such as ``1g.10gb@0 3g.40gb@4``; a number before a profile
    without position counts it.
    """
    foreign_mib: tuple[int, ...]
    """Memory in use that no allocation covers; it is not offered."""
    burst_mib: tuple[int, ...]
    """Memory that pods use beyond their requests; it is not offered until they end."""
    offer_mib: tuple[int, ...]
    """Memory of the largest share that it can still give."""
    offer_core_pct: tuple[int, ...]
    """Compute that such a share can have."""
    stranded_by: tuple[int, ...]
    """Word: why its free memory cannot be given, a cause of ``/v1/capacity``; empty: it can."""


class AllocationColumns(Struct, frozen=True, kw_only=True):
    """One value per allocation; a tenant gets those of its namespace."""

    namespace: tuple[int, ...]
    """Word."""
    pod: tuple[str, ...]
    """Name of the pod, or of the object for whose pods the shares are held."""
    state: tuple[int, ...]
    """Word."""
    queue: tuple[int, ...]
    """Word: queue that the pod names; empty: its namespace decides."""
    priority_class: tuple[int, ...]
    """Word."""
    held_for: tuple[int, ...]
    """Word: purpose of a reservation that no bind has made or taken over yet."""
    origin: tuple[int, ...]
    """Word: ``claim`` for a ResourceClaim, whose name is then in ``pod``; ``hami`` for a pod that
    was taken over from HAMi.
    """
    reserved_s: tuple[int, ...]
    shares: tuple[int, ...]
    """Number of its shares, which follow those of the allocation before."""


class ShareColumns(Struct, frozen=True, kw_only=True):
    """One value per allocation and device: the peak that the pod books there."""

    device: tuple[int, ...]
    """Position among the devices of the node; -1: the node no longer reports the device."""
    memory_mib: tuple[int, ...]
    core_pct: tuple[int, ...]
    slots: tuple[int, ...]
    flags: tuple[int, ...]
    """4: exclusive."""


class FleetDocument(Struct, frozen=True, kw_only=True):
    """Nodes with all their content: of a snapshot all nodes, of an event the changed ones.

    A value that is described as a word is a position in ``words``.
    """

    id: str
    """Position: the content includes all changes up to it."""
    time_s: float
    namespace: str
    """Only allocations of this namespace are listed; empty: of all."""
    words: tuple[str, ...]
    nodes: NodeColumns
    devices: DeviceColumns
    allocations: AllocationColumns
    shares: ShareColumns
    silent: tuple[str, ...] | None
    """All nodes whose agents are silent, sorted; null: unchanged."""


class _DeviceRow(NamedTuple):
    vendor: str
    number: int
    model: str
    mode: str
    memory_mib: int
    capacity_mib: int
    used_mib: int
    capacity_core_pct: int
    used_core_pct: int
    slots: int
    used_slots: int
    flags: int
    reason: str
    partitions: str
    foreign_mib: int
    burst_mib: int
    offer_mib: int
    offer_core_pct: int
    stranded_by: str


class _AllocationRow(NamedTuple):
    namespace: str
    pod: str
    state: str
    queue: str
    priority_class: str
    held_for: str
    origin: str
    reserved_s: int
    shares: int


class _ShareRow(NamedTuple):
    device: int
    memory_mib: int
    core_pct: int
    slots: int
    flags: int


_WORDS: Final = {
    DeviceColumns: {"vendor", "model", "mode", "reason", "partitions", "stranded_by"},
    AllocationColumns: {"namespace", "state", "queue", "priority_class", "held_for", "origin"},
    ShareColumns: set[str](),
}


class Block(Struct, frozen=True, kw_only=True):
    """Content of one node; frozen, so that a thread may read it."""

    node: str
    problem: str
    devices: tuple[_DeviceRow, ...]
    allocations: tuple[tuple[_AllocationRow, tuple[_ShareRow, ...]], ...]
    offers: tuple[tuple[Device, Booked, Offer], ...]
    """As ``devices``."""


class Fleet:
    """Blocks of all nodes, and what changed in them since any position."""

    def __init__(self, projection: Projection) -> None:
        """Start without any node."""
        self._projection = projection
        self._blocks: dict[str, Block] = {}
        self._read = dict.fromkeys(SOURCES, 0)
        self._changed_at: dict[str, dict[str, int]] = {source: {} for source in SOURCES}
        """Newest revision that changed a node, by source and node."""
        self._identities: dict[str, str] = {}
        self._floor: dict[str, int] = {}
        """Position from which on the changes of each source are known."""
        self._dirty: set[str] = set()
        self._rebuilt: set[str] = set()
        self.position = Position()
        """Position of the blocks, as of the last ``changes``."""
        self.silent: tuple[str, ...] = ()
        """Nodes whose agents are silent, as of the last ``beat``."""
        self._is_silent_new = True

    # --- feeding --------------------------------------------------------------------------------

    def seen(self, source: str, revision: int, node: str) -> None:
        """Note that an entry about ``node`` was folded into the projection."""
        read = self._read[source]
        # An entry that was folded late, after a failure, is new to all readers.
        self._changed_at[source][node] = max(revision, read + 1)
        self._read[source] = max(revision, read)
        self._dirty.add(node)

    def complete(self, source: str, identity: str = "") -> None:
        """Note that all stored entries of ``source`` were folded: from here on changes are known.

        Compaction may have removed older entries, so that changes before are not. ``identity``:
        of the stream, which changes with its loss.
        """
        self._identities[source] = identity
        self._floor[source] = self._read[source]

    def reset(self, source: str) -> None:
        """Drop what is known of a source that the bus lost; ``complete`` follows."""
        self._read[source] = 0
        self._floor.pop(source, None)
        self._dirty.update(self._blocks)
        self._changed_at[source].clear()

    def beat(self, *, now_s: float) -> None:
        """Find the nodes whose agents are silent."""
        silent = tuple(self._projection.silent(now_s=now_s))
        if silent != self.silent:
            self.silent, self._is_silent_new = silent, True

    # --- reading --------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """True when all stored entries of every source were folded."""
        return len(self._floor) == len(SOURCES)

    def blocks(self) -> list[Block]:
        """Return all blocks, sorted by node."""
        return [block for _, block in sorted(self._blocks.items())]

    def rebuild(self, most: int) -> bool:
        """Rebuild up to ``most`` changed blocks; return whether more are left."""
        for _ in range(most):
            if not self._dirty:
                return False
            node = self._dirty.pop()
            self._blocks[node] = self._block(node)
            self._rebuilt.add(node)
        return bool(self._dirty)

    def changes(self) -> tuple[list[Block], tuple[str, ...] | None]:
        """Return blocks rebuilt since the last call, and the silent nodes if they changed.

        To be called when ``rebuild`` has left nothing: the blocks then are at the new position.
        """
        self.position = Position(**self._read, bus=self._bus())
        blocks = [self._blocks[node] for node in sorted(self._rebuilt)]
        silent = self.silent if self._is_silent_new else None
        self._rebuilt.clear()
        self._is_silent_new = False
        return blocks, silent

    def since(self, position: Position) -> list[Block] | None:
        """Return the blocks that changed after ``position``.

        ``None`` when that is not known, or when a snapshot is smaller: then it is to be loaded.
        """
        known = dict(zip(SOURCES, position, strict=False))
        if not self.is_complete or position.bus != self._bus():
            return None
        if any(known[s] < self._floor[s] for s in SOURCES):
            return None
        # A position ahead of ours: this replica is behind.
        if any(known[s] > self._read[s] for s in SOURCES):
            return None
        nodes = {
            node
            for source, changed_at in self._changed_at.items()
            for node, revision in changed_at.items()
            if revision > known[source]
        }
        if len(nodes) > max(16, len(self._blocks) // 2):
            return None
        return [self._blocks[node] for node in sorted(nodes)]

    def _bus(self) -> int:
        return crc32(repr(sorted(self._identities.items())).encode())

    # --- one node -------------------------------------------------------------------------------

    def _block(self, node: str) -> Block:
        published = self._projection.devices_of(node)
        devices = sorted(
            (device for one in published for device in one.devices),
            key=lambda device: (device.vendor, device.index),
        )
        places = {device.uuid: number for number, device in enumerate(devices)}
        total: dict[str, Booked] = {}
        allocations = []
        for view in self._projection.live_of(node):
            booked = booked_by_device(view.containers)
            for uuid, one in booked.items():
                total[uuid] = total.get(uuid, NOTHING).plus(one)
            shares = tuple(
                _ShareRow(
                    device=places.get(uuid, ABSENT),
                    memory_mib=one.memory_mib,
                    core_pct=one.core_pct,
                    slots=one.slots,
                    flags=EXCLUSIVE if one.exclusive else 0,
                )
                for uuid, one in booked.items()
            )
            row = _AllocationRow(
                namespace=view.namespace,
                pod=view.pod,
                state=view.state,
                queue=view.queue,
                priority_class=view.priority_class,
                held_for=view.held_for,
                origin=view.origin,
                reserved_s=int(view.reserved_s),
                shares=len(shares),
            )
            allocations.append((row, shares))
        offers = [
            (device, held, offer_of(device, held))
            for device in devices
            for held in (total.get(device.uuid, NOTHING),)
        ]
        return Block(
            node=node,
            problem="; ".join(one.problem for one in published if one.problem),
            devices=tuple(_device_row(*one) for one in offers),
            allocations=tuple(allocations),
            offers=tuple(offers),
        )


def _device_row(device: Device, booked: Booked, offer: Offer) -> _DeviceRow:
    return _DeviceRow(
        vendor=device.vendor,
        number=device.index,
        model=device.type,
        mode=device.mode,
        memory_mib=device.memory_mib,
        capacity_mib=device.capacity_mib,
        used_mib=booked.memory_mib,
        capacity_core_pct=device.capacity_core_pct,
        used_core_pct=booked.core_pct,
        slots=device.slots,
        used_slots=booked.slots,
        flags=CORDONED * device.cordoned
        + UNHEALTHY * (not device.healthy)
        + EXCLUSIVE * booked.exclusive,
        reason=device.health_reason,
        partitions=" ".join(
            part if count == 1 else f"{count} {part}"
            for part, count in sorted(booked.parts.items())
        ),
        foreign_mib=device.foreign_mib,
        burst_mib=burst_mib(device),
        offer_mib=offer.memory_mib,
        offer_core_pct=offer.core_pct,
        stranded_by=offer.cause,
    )


class _Words:
    """Words of one document; the empty word is the first."""

    def __init__(self) -> None:
        self._numbers = {"": 0}

    def packed(self, column: Iterable[str]) -> tuple[int, ...]:
        words = tuple(column)
        for word in dict.fromkeys(words):
            self._numbers.setdefault(word, len(self._numbers))
        return tuple(map(self._numbers.__getitem__, words))

    def all(self) -> tuple[str, ...]:
        return tuple(self._numbers)


def document(
    blocks: Collection[Block],
    *,
    position: Position,
    time_s: float,
    namespace: str,
    silent: tuple[str, ...] | None,
) -> FleetDocument:
    """Pack the blocks for readers of one namespace, or of all when it is empty."""
    listed = [
        [pair for pair in block.allocations if namespace in ("", pair[0].namespace)]
        for block in blocks
    ]
    words = _Words()
    nodes = NodeColumns(
        name=tuple(block.node for block in blocks),
        problem=words.packed(block.problem for block in blocks),
        devices=tuple(len(block.devices) for block in blocks),
        allocations=tuple(map(len, listed)),
    )
    pairs = [pair for several in listed for pair in several]
    devices = _columns(DeviceColumns, [row for block in blocks for row in block.devices], words)
    allocations = _columns(AllocationColumns, list(map(itemgetter(0), pairs)), words)
    shares = _columns(ShareColumns, [row for _, several in pairs for row in several], words)
    return FleetDocument(
        id=str(position),
        time_s=time_s,
        namespace=namespace,
        words=words.all(),
        nodes=nodes,
        devices=devices,
        allocations=allocations,
        shares=shares,
        silent=silent,
    )


def _columns(kind: type[T], rows: Sequence[tuple[Any, ...]], words: _Words) -> T:
    names = kind.__struct_fields__
    columns = zip(*rows, strict=True) if rows else (() for _ in names)
    packed = _WORDS[kind]
    return kind(
        **{
            name: words.packed(column) if name in packed else tuple(column)
            for name, column in zip(names, columns, strict=True)
        }
    )
