# SPDX-License-Identifier: Apache-2.0
"""Columns of all nodes with space for the same number of devices.

Every column is a matrix ``[width, nodes]``: cell ``[d, n]`` is device ``d`` of node ``n``, so a
query of one node is a reduction over the first axis, which numpy answers for all nodes with
``width`` passes over contiguous memory. Columns are dense: the last node moves into the hole that a
removed one leaves. Devices of a node are in the order (vendor, vendor's index, UUID), registered
ones before ghosts of the same index; unused cells have ``vendor`` -1 and are all zero otherwise.

Memory in MiB, compute in percent of one device. Independent of requests and names of vendors.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, TypeVar, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hami_common.vendors.partitions import AMOUNTS_LIMIT

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int32]
Floats = NDArray[np.float64]
Columns = NDArray[np.intp]
Amounts = NDArray[np.int16]

T = TypeVar("T")

NO_VENDOR: Final = -1
NO_NUMA: Final = -1

# Rows of a vendor's totals, see Block.totals.
USED_SLOTS, SLOTS, USED_CORE, CORE, USED_MIB, MIB, DEVICES, LEAST_MIB, MOST_MIB = range(9)
_TOTALS: Final = 9
_MOST_DERIVED: Final = 64
_MOST_FOLLOWED: Final = 16
NO_MIB: Final = int(np.iinfo(np.int64).min)
NO_ROOM: Final = -1
AMOUNT_BITS: Final = 15
"""Bits of compute and of slots in ``Block.room``; memory has the bits above those."""
MOST_AMOUNT: Final = (1 << AMOUNT_BITS) - 1
MIB_SHIFT: Final = 2 * AMOUNT_BITS
MOST_ROOM_MIB: Final = (1 << (63 - MIB_SHIFT)) - 1
PART_WORTH_IT: Final = 4
"""Columns are evaluated one by one while fewer than one in this many changed."""

_MATRICES: Final[dict[str, Any]] = {
    "memory_mib": np.int64,
    "capacity_mib": np.int64,
    "largest_mib": np.int64,
    "foreign_mib": np.int64,
    "burst_mib": np.int64,
    "used_mib": np.int64,
    "free_mib": np.int64,
    "capacity_core": np.int32,
    "used_core": np.int32,
    "free_core": np.int32,
    "slots": np.int32,
    "used_slots": np.int32,
    "exclusive_holders": np.int32,
    "vendor": np.int32,
    "type": np.int32,
    "mode": np.int32,
    "numa": np.int32,
    "index": np.int32,
    "board": np.int32,
    "division": np.int32,
    "taken": np.int32,
    "kind": np.int32,
    "known": np.bool_,
    "healthy": np.bool_,
    "cordoned": np.bool_,
    "alive": np.bool_,
    "withheld": np.bool_,
    "per_slot": np.float64,
    "per_core": np.float64,
    "per_mib": np.float64,
    "fullness": np.float64,
    "offered_mib": np.int64,
    "room": np.int64,
    "has_slot": np.bool_,
    "unheld": np.bool_,
    "idle": np.bool_,
}


MOST_SMALL: Final = (1 << 31) - 1
"""Largest number of a 32-bit column."""
MOST_MEMORY_MIB: Final = (1 << 47) - 1
"""Largest memory of a device; sums over a node stay within 64 bits."""
_SMALL: Final = (
    "index",
    "board",
    "type",
    "mode",
    "division",
    "capacity_core",
    "slots",
    "used_core",
    "used_slots",
    "exclusive_holders",
)
_MEMORY: Final = (
    "memory_mib",
    "capacity_mib",
    "largest_mib",
    "foreign_mib",
    "burst_mib",
    "used_mib",
)


class Cell(Struct, kw_only=True):
    """One device while a node's column is being rewritten."""

    uuid: str
    vendor: int
    index: int = 0
    board: int = 0
    type: int = 0
    mode: int = 0
    numa: int = NO_NUMA
    division: int = 0
    memory_mib: int = 0
    capacity_mib: int = 0
    largest_mib: int = 0
    """As in ``Block``."""
    foreign_mib: int = 0
    """As in ``Block``."""
    burst_mib: int = 0
    capacity_core: int = 0
    slots: int = 0
    used_mib: int = 0
    used_core: int = 0
    used_slots: int = 0
    exclusive_holders: int = 0
    known: bool = False
    """Registered now. A device that is not known is a ghost: it vanished while booked."""
    healthy: bool = False
    cordoned: bool = False
    alive: bool = False
    withheld: bool = False

    def is_booked(self) -> bool:
        """Return whether any pod has a share of it."""
        return bool(self.used_mib or self.used_core or self.used_slots or self.exclusive_holders)


def require_in_range(cells: Iterable[Cell]) -> None:
    """Raise ``ValueError`` unless every number of the devices fits its column."""
    for cell in cells:
        for names, most in ((_SMALL, MOST_SMALL), (_MEMORY, MOST_MEMORY_MIB)):
            for name in names:
                if not 0 <= getattr(cell, name) <= most:
                    raise ValueError(f"device {cell.uuid}: {name} is outside 0..{most}")
        if not NO_NUMA <= cell.numa <= MOST_SMALL:
            raise ValueError(f"device {cell.uuid}: numa is outside {NO_NUMA}..{MOST_SMALL}")


class Block:
    """Nodes with up to ``width`` devices each."""

    memory_mib: Ints
    """Physical memory."""
    capacity_mib: Ints
    largest_mib: Ints
    """Memory of the largest share that the device can serve; 0: no bound but its capacity."""
    foreign_mib: Ints
    """Memory in use that no share books, ``burst_mib`` included: not offered, but no shares are
    over capacity because of it."""
    burst_mib: Ints
    """The part of ``foreign_mib`` that pods use beyond their requests."""
    used_mib: Ints
    free_mib: Ints
    """Memory to offer: ``capacity_mib - foreign_mib - used_mib``, which may be negative."""
    capacity_core: Shorts
    used_core: Shorts
    free_core: Shorts
    slots: Shorts
    used_slots: Shorts
    exclusive_holders: Shorts
    vendor: Shorts
    type: Shorts
    mode: Shorts
    numa: Shorts
    index: Shorts
    """The vendor's own enumeration."""
    board: Shorts
    """Physical card of which the device is a part; equal on its parts, 0: it is a card itself."""
    division: Shorts
    """Number of the device's table of partitions, see ``table``; 0: its shares have any size."""
    taken: Shorts
    """Positions of the device's grid that partitions occupy, as bits."""
    kind: Shorts
    """Kind of the shares on the device; 0: no particular kind."""
    spent: Amounts
    """``[resource, device, node]``: use of the division's named resources by partitions."""
    known: Bools
    healthy: Bools
    cordoned: Bools
    alive: Bools
    """The node's agent sends heartbeats for this vendor."""
    withheld: Bools
    """The node's bookings or devices are not known for certain: see ``table``."""
    per_slot: Floats
    """1 / slots, 0 without slots."""
    per_core: Floats
    per_mib: Floats
    fullness: Floats
    """Sum of the used fractions of slots, compute and memory, in this order."""
    has_slot: Bools
    """One more container may share the device."""
    unheld: Bools
    """No pod uses the device exclusively."""
    idle: Bools
    """No pod has a share."""
    offered_mib: Ints
    """``free_mib`` where one more container may share the device, else ``NO_MIB``."""
    room: Ints
    """Free capacity of a device that may serve one more share, else ``NO_ROOM``.

    Memory, compute and slots as one number, ordered as they are listed.
    """

    def __init__(self, width: int, *, room: int = 16) -> None:
        """Create an empty block for ``room`` nodes with at most ``width`` devices; it grows."""
        self.width = width
        self.count = 0
        self.names: list[str] = []
        """Node names by column."""
        self.uuids: list[tuple[str, ...]] = []
        """UUIDs of a node's devices, in cell order."""
        self.links: Columns = np.zeros(0, np.intp)
        """Number of each node's link matrix, see ``links.LinkClass``."""
        self.domains: Columns = np.zeros(0, np.intp)
        """Position of each node in the network, see ``domains.Domains``."""
        self.totals: dict[int, Ints] = {}
        """By vendor: sums over its known devices, one row per constant above."""
        self.inventory_version = 0
        """Grows when anything except usage changes."""
        self.is_copy = False
        """True for a copy: places in the table are of the original."""
        self._room = 0
        self._derived: dict[Hashable, object] = {}
        self._derived_version = 0
        self._followed: dict[Hashable, object] = {}
        """The least recently used first."""
        self._changes: list[int] = []
        self._changes_before = 0
        self._grow(room)

    def copy_of(self, columns: Columns) -> "Block":
        """Return a block of copies of some columns, for later evaluation; it is never written."""
        copy = Block(self.width, room=0)
        copy.count, copy.is_copy = len(columns), True
        copy.names = [self.names[column] for column in columns]
        copy.uuids = [self.uuids[column] for column in columns]
        copy.links, copy.domains = self.links.take(columns), self.domains.take(columns)
        copy.totals = {vendor: some.take(columns, axis=1) for vendor, some in self.totals.items()}
        for name in _MATRICES:
            setattr(copy, name, getattr(self, name).take(columns, axis=1))
        copy.spent = self.spent.take(columns, axis=2)
        return copy

    @property
    def version(self) -> int:
        """Grows with every change of a column."""
        return self._changes_before + len(self._changes)

    def changed_since(self, version: int) -> Columns | None:
        """Return columns that changed after ``version``.

        ``None`` when it is too old to determine them.
        """
        skip = version - self._changes_before
        if skip < 0:
            return None
        return np.fromiter(set(self._changes[skip:]), np.intp)

    def stale_since(self, version: int) -> Columns | None:
        """Return columns to recompute after ``version``; ``None`` for all."""
        if version < 0:
            return None
        changed = self.changed_since(version)
        if changed is None or len(changed) * PART_WORTH_IT > self.count:
            return None
        return changed[changed < self.count]

    def touch(self, column: int) -> None:
        """Record that ``column`` changed."""
        self._changes.append(column)
        if len(self._changes) > 2 * self._room + 1024:
            half = len(self._changes) // 2
            del self._changes[:half]
            self._changes_before += half

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make``, cached until the inventory changes.

        ``key`` determines the value.
        """
        if self._derived_version != self.inventory_version or len(self._derived) > _MOST_DERIVED:
            self._derived.clear()
            self._derived_version = self.inventory_version
        if key not in self._derived:
            self._derived[key] = make()
        return cast("T", self._derived[key])

    def followed(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of ``make``, cached for long.

        It follows the block's versions by itself.
        """
        found = self._followed.pop(key, None)
        if found is None:
            found = make()
            if len(self._followed) == _MOST_FOLLOWED:
                del self._followed[next(iter(self._followed))]
        self._followed[key] = found
        return cast("T", found)

    def _grow(self, room: int) -> None:
        for name, dtype in _MATRICES.items():
            matrix = np.zeros((self.width, room), dtype)
            if name == "vendor":
                matrix.fill(NO_VENDOR)
            if self._room:
                matrix[:, : self.count] = getattr(self, name)[:, : self.count]
            setattr(self, name, matrix)
        spent = np.zeros((AMOUNTS_LIMIT, self.width, room), np.int16)
        if self._room:
            spent[:, :, : self.count] = self.spent[:, :, : self.count]
        self.spent = spent
        for name in ("links", "domains"):
            line = np.zeros(room, np.intp)
            line[: self.count] = getattr(self, name)[: self.count]
            setattr(self, name, line)
        for vendor, totals in self.totals.items():
            wider = np.zeros((_TOTALS, room), np.int64)
            wider[:, : self.count] = totals[:, : self.count]
            self.totals[vendor] = wider
        self._room = room

    def add(self, name: str, *, domain: int = 0) -> int:
        """Add an empty column for node ``name`` at position ``domain``; returns its number."""
        if self.count == self._room:
            self._grow(self._room + self._room // 2)
        column = self.count
        self.count += 1
        self.names.append(name)
        self.uuids.append(())
        self.domains[column] = domain
        self.write(column, (), link_class=0)
        return column

    def remove(self, column: int) -> str | None:
        """Drop a column; returns the node that moved into it, ``None`` when none had to."""
        last = self.count - 1
        moved: str | None = None
        if column != last:
            for name in _MATRICES:
                matrix = getattr(self, name)
                matrix[:, column] = matrix[:, last]
            self.spent[:, :, column] = self.spent[:, :, last]
            for totals in self.totals.values():
                totals[:, column] = totals[:, last]
            self.links[column] = self.links[last]
            self.domains[column] = self.domains[last]
            self.uuids[column] = self.uuids[last]
            moved = self.names[column] = self.names[last]
            self.touch(column)
        self.names.pop()
        self.uuids.pop()
        self.count = last
        self.inventory_version += 1
        self.touch(last)
        return moved

    def write(self, column: int, cells: Iterable[Cell], *, link_class: int) -> None:
        """Replace everything in a column. ``cells`` are in cell order."""
        row = 0
        uuids: list[str] = []
        for name in _MATRICES:
            getattr(self, name)[:, column] = NO_VENDOR if name == "vendor" else 0
        self.spent[:, :, column] = 0
        for row, cell in enumerate(cells):
            uuids.append(cell.uuid)
            at = row, column
            self.memory_mib[at] = cell.memory_mib
            self.capacity_mib[at] = cell.capacity_mib
            self.largest_mib[at] = cell.largest_mib
            self.foreign_mib[at] = cell.foreign_mib
            self.burst_mib[at] = cell.burst_mib
            self.used_mib[at] = cell.used_mib
            self.capacity_core[at] = cell.capacity_core
            self.used_core[at] = cell.used_core
            self.slots[at] = cell.slots
            self.used_slots[at] = cell.used_slots
            self.exclusive_holders[at] = cell.exclusive_holders
            self.vendor[at] = cell.vendor
            self.type[at] = cell.type
            self.mode[at] = cell.mode
            self.numa[at] = cell.numa
            self.index[at] = cell.index
            self.board[at] = cell.board
            self.division[at] = cell.division
            self.known[at] = cell.known
            self.healthy[at] = cell.healthy
            self.cordoned[at] = cell.cordoned
            self.alive[at] = cell.alive
            self.withheld[at] = cell.withheld
            self.per_slot[at] = 1.0 / cell.slots if cell.slots else 0.0
            self.per_core[at] = 1.0 / cell.capacity_core if cell.capacity_core else 0.0
            self.per_mib[at] = 1.0 / cell.capacity_mib if cell.capacity_mib else 0.0
            self._derive(row, column)
        self.uuids[column] = tuple(uuids)
        self.links[column] = link_class
        self._total(column)
        self.inventory_version += 1
        self.touch(column)

    def _derive(self, row: int, column: int) -> None:
        at = row, column
        used_slots, used_core = int(self.used_slots[at]), int(self.used_core[at])
        used_mib = int(self.used_mib[at])
        free_mib = int(self.capacity_mib[at]) - int(self.foreign_mib[at]) - used_mib
        free_core = int(self.capacity_core[at]) - used_core
        self.free_mib[at], self.free_core[at] = free_mib, free_core
        self.fullness[at] = (
            used_slots * self.per_slot[at] + used_core * self.per_core[at]
        ) + used_mib * self.per_mib[at]
        self.has_slot[at] = used_slots < self.slots[at]
        self.unheld[at] = self.exclusive_holders[at] == 0
        self.idle[at] = used_slots == 0
        self.offered_mib[at], self.room[at] = self.offer_of(row, column)

    def offer_of(self, row: int, column: int) -> tuple[int, int]:
        """Return a cell of ``offered_mib`` and ``room``, recomputed."""
        at = row, column
        if not self.has_slot[at] or not self.unheld[at]:
            return NO_MIB, NO_ROOM
        free_mib, free_core = int(self.free_mib[at]), int(self.free_core[at])
        # Without free compute a device serves no share, unless the device has no compute at all.
        if free_mib < 0 or (free_core <= 0 and self.capacity_core[at]):
            return free_mib, NO_ROOM
        core, slots = max(free_core, 0), int(self.slots[at] - self.used_slots[at])
        amounts = (min(core, MOST_AMOUNT) << AMOUNT_BITS) | min(slots, MOST_AMOUNT)
        return free_mib, (min(free_mib, MOST_ROOM_MIB) << MIB_SHIFT) | amounts

    def _total(self, column: int) -> None:
        known = self.known[:, column]
        vendors = self.vendor[:, column]
        for vendor in {int(v) for v in vendors} - {NO_VENDOR}:
            if vendor not in self.totals:
                self.totals[vendor] = np.zeros((_TOTALS, self._room), np.int64)
        for vendor, totals in self.totals.items():
            totals[:, column] = self.totals_of(column, known & (vendors == vendor))

    def totals_of(self, column: int, mask: Bools) -> Ints:
        """Return the rows of ``totals`` for the masked devices of one node, recomputed."""
        memory = self.memory_mib[:, column][mask]
        sums = [
            matrix[:, column][mask].sum()
            for matrix in (
                self.used_slots,
                self.slots,
                self.used_core,
                self.capacity_core,
                self.used_mib,
                self.capacity_mib,
            )
        ]
        extremes = (memory.min(), memory.max()) if memory.size else (0, 0)
        return np.array([*sums, mask.sum(), *extremes], np.int64)

    def book(
        self, row: int, column: int, *, mib: int, core: int, slots: int, exclusive: int
    ) -> None:
        """Add to (or, negative, subtract from) the usage of one device."""
        at = row, column
        used_mib, used_core = int(self.used_mib[at]) + mib, int(self.used_core[at]) + core
        used_slots = int(self.used_slots[at]) + slots
        if used_mib > MOST_MEMORY_MIB or used_core > MOST_SMALL or used_slots > MOST_SMALL:
            uuid = self.uuids[column][row]
            raise ValueError(f"device {uuid}: what is booked is more than any device has")
        self.used_mib[at] = used_mib
        self.used_core[at] = used_core
        self.used_slots[at] = used_slots
        self.exclusive_holders[at] += exclusive
        self._derive(row, column)
        if self.known[at]:
            totals = self.totals[int(self.vendor[at])]
            totals[USED_SLOTS, column] += slots
            totals[USED_CORE, column] += core
            totals[USED_MIB, column] += mib
        self.touch(column)

    def divide(self, row: int, column: int, *, taken: int, spent: Amounts, kind: int) -> None:
        """Set the usage of the partitions on one device, and the kind of its shares."""
        self.taken[row, column] = taken
        self.spent[:, row, column] = spent
        self.kind[row, column] = kind
        self.touch(column)

    def read(self, column: int) -> list[Cell]:
        """Return the devices of one node, in cell order."""
        return [
            Cell(
                uuid=uuid,
                vendor=int(self.vendor[row, column]),
                index=int(self.index[row, column]),
                board=int(self.board[row, column]),
                type=int(self.type[row, column]),
                mode=int(self.mode[row, column]),
                numa=int(self.numa[row, column]),
                division=int(self.division[row, column]),
                memory_mib=int(self.memory_mib[row, column]),
                capacity_mib=int(self.capacity_mib[row, column]),
                largest_mib=int(self.largest_mib[row, column]),
                foreign_mib=int(self.foreign_mib[row, column]),
                burst_mib=int(self.burst_mib[row, column]),
                capacity_core=int(self.capacity_core[row, column]),
                slots=int(self.slots[row, column]),
                used_mib=int(self.used_mib[row, column]),
                used_core=int(self.used_core[row, column]),
                used_slots=int(self.used_slots[row, column]),
                exclusive_holders=int(self.exclusive_holders[row, column]),
                known=bool(self.known[row, column]),
                healthy=bool(self.healthy[row, column]),
                cordoned=bool(self.cordoned[row, column]),
                alive=bool(self.alive[row, column]),
                withheld=bool(self.withheld[row, column]),
            )
            for row, uuid in enumerate(self.uuids[column])
        ]
