# SPDX-License-Identifier: Apache-2.0
"""The DeviceTable: all devices of the cluster as columns, with their bookings.

Nodes with space for equally many devices (1, 2, 4, 8 …) form one ``Block``; a node's place is
(block, column). Every change is incremental: one node's column is rewritten when its inventory
changes, a few cells when a pod is booked. No decision rebuilds anything here.

The table is its own snapshot: it is read and written from one event loop only, and a decision never
yields while it reads, so it sees one state. ``version`` names that state; a block's
``changed_since`` returns the columns that differ from an earlier one.

Devices that vanish from the inventory while a pod has a share of them stay as ghosts: booked,
counted in ``usages``, never offered. They become real again when they are registered again, and are
removed with the last share. A node, or one vendor's devices on it, is withheld while something
about it could not be ingested: it gets no new allocations. Memory in MiB, compute in percent of one
device. Independent of pods and policies.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Final, Generic, TypeVar
from zlib import crc32

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import BOARD, Device, Link
from hami_common.model.placement import (
    MIXED,
    NOTHING,
    Booked,
    ContainerShares,
    booked_by_device,
    kind_of_all,
    may_join,
)
from hami_common.vendors.partitions import Division
from hami_core.table.block import MOST_SMALL, NO_NUMA, Block, Cell, Ints, require_in_range
from hami_core.table.domains import Domains
from hami_core.table.links import LinkClass

T = TypeVar("T")
W = TypeVar("W", bound=Hashable)

COLUMN_BITS: Final = 32
COLUMN_MASK: Final = (1 << COLUMN_BITS) - 1
_LAST: Final = 2**31 - 1
_LINKS_PER_NODE: Final = 2
_LINKS_SPARE: Final = 64
"""Unused link matrices are dropped when there are more than this plus two for each node."""
_encoder: Final = msgspec.json.Encoder(order="deterministic")
_ALLOCATOR_HINT_BYTES: Final = 16 << 20


class Usage(Struct, frozen=True, kw_only=True):
    """Booked amounts of one device."""

    memory_mib: int
    core_pct: int
    slots: int
    exclusive_holders: int


class Words(Generic[W]):
    """Numbers for words that repeat in a column."""

    def __init__(self, *words: W) -> None:
        """Number ``words`` from 0."""
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(words)}

    def number(self, word: W) -> int:
        """Return the word's number; a new word gets the next."""
        number = self._numbers.get(word)
        if number is None:
            number = self._numbers[word] = len(self.words)
            self.words.append(word)
        return number

    def find(self, word: W) -> int | None:
        """Return the word's number, ``None`` when it was never seen."""
        return self._numbers.get(word)


class Place(Struct, kw_only=True):
    """Position of a node, and its attributes that are not in columns."""

    block: Block
    column: int
    rows: dict[str, int] = {}
    """Cell by UUID."""
    alive: dict[int, bool] = {}
    """By vendor: the agent is alive."""
    links: dict[int, tuple[Link, ...]] = {}
    """By vendor."""
    parts: dict[str, dict[str, int]] = {}
    """By UUID: partitions that are booked, by ``Share.part``."""
    kinds: dict[str, dict[str, int]] = {}
    """By UUID: number of pods with shares of each kind."""
    bursts: dict[str, dict[str, int]] = {}
    """By UUID: memory that pods use beyond their requests, by uid."""

    def free_mib(self, uuid: str) -> int:
        """Return the device's memory to offer; negative: it lacks memory."""
        return int(self.block.free_mib[self.rows[uuid], self.column])


class DeviceTable:
    """All devices with their capacity and bookings."""

    def __init__(self) -> None:
        """An empty table."""
        # Columns and the arrays computed from them are some 100 KiB each. glibc returns such memory
        # to the system at each free, until a larger piece was freed once: without this, pages would
        # be cleared again in each decision, which is a third of its time.
        np.empty(_ALLOCATOR_HINT_BYTES, np.uint8)
        self.version = 0
        """Grows with every change."""
        self.places_version = 0
        """Grows when a node is added, removed or moved."""
        self.inventory_revision = 0
        """Highest revision of the canonical inventory that was put."""
        self.vendors: Words[str] = Words()
        self.types = Words("")
        self.modes = Words(("", False))
        """Mode of sharing, and whether the driver limits memory: ``Device.memory_cap``."""
        self.kinds = Words("", MIXED)
        self.divisions: list[Division] = [Division((), {})]
        """Tables of partitions, by number; the first is that of devices without any."""
        self.blocks: list[Block] = []
        self.bursting: set[str] = set()
        """Nodes with pods that use more memory than they request."""
        self.codes: dict[str, int] = {}
        """Location of each node: block number and, in the low ``COLUMN_BITS``, column."""
        self.link_classes: dict[int, LinkClass] = {}
        """By number, as in ``Block.links``; unused ones are dropped at times."""
        self._links_made = 0
        self.domains = Domains()
        """Positions of nodes in the network; also of nodes without devices."""
        self._division_numbers: dict[bytes, int] = {}
        self._link_numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._places: dict[str, Place] = {}
        self._ranks: tuple[int, list[Ints]] = (-1, [])
        self._nodes_by_uuid: dict[str, tuple[str, ...]] = {}
        self._block_by_width: dict[int, Block] = {}
        self._withheld: dict[str, set[str]] = {}
        """By node: vendors, empty for all; also of nodes without devices."""

    @property
    def has_divisions(self) -> bool:
        """True once any device had a table of partitions."""
        return len(self.divisions) > 1

    # --- reading ---------------------------------------------------------------------------------

    def __contains__(self, node: str) -> bool:
        return node in self._places

    def __len__(self) -> int:
        return len(self._places)

    def nodes(self) -> list[str]:
        """Return the names of all nodes, sorted."""
        return sorted(self._places)

    def place(self, node: str) -> Place | None:
        """Return the place of ``node``."""
        return self._places.get(node)

    def name_ranks(self, block: Block) -> Ints:
        """Return the node's place in the order of all names, by column of ``block``."""
        version, ranks = self._ranks
        if version != self.places_version:
            ranks = [np.zeros(some.count, np.int64) for some in self.blocks]
            for rank, node in enumerate(sorted(self.codes)):
                code = self.codes[node]
                ranks[code >> COLUMN_BITS][code & COLUMN_MASK] = rank
            self._ranks = (self.places_version, ranks)
        return ranks[self.blocks.index(block)]

    def nodes_with(self, uuid: str) -> tuple[str, ...]:
        """Return the nodes that have a device with this UUID.

        There is one, unless a vendor assigns a UUID twice.
        """
        return self._nodes_by_uuid.get(uuid, ())

    def usages(self) -> Iterator[tuple[str, str, Usage]]:
        """Yield (node, UUID, booked amounts) of every device."""
        for node, place in self._places.items():
            for uuid in place.rows:
                yield node, uuid, self._usage(place, uuid)

    def usage(self, node: str, uuid: str) -> Usage | None:
        """Return the booked amounts of one device, ``None`` when it does not exist."""
        place = self._places.get(node)
        if place is None or uuid not in place.rows:
            return None
        return self._usage(place, uuid)

    def burst_mib(self, node: str, pod_uid: str) -> int:
        """Return the memory of the node's devices that the pod uses beyond its request."""
        if node not in self.bursting:
            return 0
        return sum(by_pod.get(pod_uid, 0) for by_pod in self._places[node].bursts.values())

    def _usage(self, place: Place, uuid: str) -> Usage:
        block, at = place.block, (place.rows[uuid], place.column)
        return Usage(
            memory_mib=int(block.used_mib[at]),
            core_pct=int(block.used_core[at]),
            slots=int(block.used_slots[at]),
            exclusive_holders=int(block.exclusive_holders[at]),
        )

    # --- inventory -------------------------------------------------------------------------------

    def upsert_node(self, devices: NodeDevices, *, revision: int = 0) -> None:
        """Replace one vendor's devices on one node.

        A vendor that is new on the node counts as alive until ``set_node_alive`` marks it as not.
        """
        vendor = self.vendors.number(devices.vendor)
        place = self._places.get(devices.node)
        if place is None and not devices.devices:
            self.inventory_revision = max(self.inventory_revision, revision)
            return
        alive = True if place is None else place.alive.get(vendor, True)
        before = [] if place is None else place.block.read(place.column)
        old = {cell.uuid: cell for cell in before}
        cells = [cell for cell in before if cell.vendor != vendor]
        for device in devices.devices:
            known = old.pop(device.uuid, None)
            if known is not None and known.vendor != vendor:
                cells = [cell for cell in cells if cell.uuid != device.uuid]
            cells.append(self._cell(device, vendor, known, alive=alive))
        cells.extend(_ghost(cell) for cell in old.values() if cell.vendor == vendor)
        require_in_range(cells)
        _require_links(devices.links)
        is_new, links = place is None, None if place is None else place.links.get(vendor)
        place = place or self._add(devices.node)
        was_alive, bursts = place.alive.get(vendor), place.bursts
        place.alive[vendor] = alive
        place.links[vendor] = devices.links
        place.bursts = bursts | {one.uuid: _bursts(one) for one in devices.devices}
        try:
            self._rewrite(devices.node, place, cells)
        except Exception:
            # Restore the former state: the caller isolates the record, and the node's other devices
            # stay usable.
            _restore(place.alive, vendor, was_alive)
            _restore(place.links, vendor, links)
            place.bursts = bursts
            self._rewrite(devices.node, place, [] if is_new else before)
            raise
        self.inventory_revision = max(self.inventory_revision, revision)

    def remove_node(self, node: str, vendor: str | None = None) -> None:
        """Remove a node's devices, of one vendor or all; booked devices stay as ghosts."""
        place = self._places.get(node)
        if place is None:
            return
        gone = None if vendor is None else self.vendors.find(vendor)
        if vendor is not None and gone is None:
            return
        for number in list(place.alive):
            if gone is None or number == gone:
                del place.alive[number]
                place.links.pop(number, None)
        cells = [
            _ghost(cell) if gone is None or cell.vendor == gone else cell
            for cell in place.block.read(place.column)
        ]
        self._rewrite(node, place, cells)

    def set_health(self, node: str, uuid: str, *, healthy: bool) -> bool:
        """Disable or enable a device until the next ``upsert_node``.

        Returns whether that changed anything.
        """
        place = self._places.get(node)
        row = None if place is None else place.rows.get(uuid)
        if place is None or row is None:
            return False
        block, at = place.block, (row, place.column)
        if not block.known[at] or bool(block.healthy[at]) == healthy:
            return False
        block.healthy[at] = healthy
        self._inventory_changed(place)
        return True

    def set_node_alive(self, node: str, vendor: str, *, alive: bool) -> bool:
        """Set whether the node's agent is alive for this vendor.

        Returns whether that changed anything.
        """
        place = self._places.get(node)
        number = self.vendors.find(vendor)
        if place is None or number is None or place.alive.get(number) in (None, alive):
            return False
        place.alive[number] = alive
        mine = place.block.vendor[:, place.column] == number
        place.block.alive[:, place.column] = np.where(
            mine,
            alive & place.block.known[:, place.column],
            place.block.alive[:, place.column],
        )
        self._inventory_changed(place)
        return True

    def set_withheld(self, node: str, vendor: str = "", *, withheld: bool) -> bool:
        """Start or stop refusing new allocations on a node, or of one vendor there.

        Returns whether that changed anything. Booked shares stay.
        """
        vendors = self._withheld.get(node, set())
        if withheld == (vendor in vendors):
            return False
        if withheld:
            self._withheld[node] = vendors | {vendor}
        elif vendors - {vendor}:
            self._withheld[node] = vendors - {vendor}
        else:
            del self._withheld[node]
        place = self._places.get(node)
        if place is not None:
            for row, number in enumerate(place.block.vendor[:, place.column].tolist()):
                is_withheld = number >= 0 and self.is_withheld(node, self.vendors.words[number])
                place.block.withheld[row, place.column] = is_withheld
            self._inventory_changed(place)
        return True

    def is_withheld(self, node: str, vendor: str = "") -> bool:
        """Return whether a node refuses new allocations of a vendor or of any."""
        vendors = self._withheld.get(node)
        return vendors is not None and ("" in vendors or vendor in vendors)

    def withheld(self) -> list[tuple[str, str]]:
        """Return the (node, vendor) pairs without new allocations; empty vendor: the whole node."""
        return sorted((node, vendor) for node, some in self._withheld.items() for vendor in some)

    def set_domain(self, node: str, path: Iterable[str]) -> None:
        """Set a node's position in the network, see ``domains``; placing does not depend on it.

        An empty path is that of a node with an unknown position.
        """
        number = self.domains.put(node, path)
        place = self._places.get(node)
        if place is not None:
            place.block.domains[place.column] = number

    def _inventory_changed(self, place: Place) -> None:
        place.block.inventory_version += 1
        place.block.touch(place.column)
        self.version += 1

    def _cell(self, device: Device, vendor: int, before: Cell | None, *, alive: bool) -> Cell:
        used = before or Cell(uuid=device.uuid, vendor=vendor)
        burst_mib = sum(_bursts(device).values())
        return Cell(
            uuid=device.uuid,
            vendor=vendor,
            index=device.index,
            board=_board(device),
            type=self.types.number(device.type),
            mode=self.modes.number((device.mode, device.memory_cap)),
            numa=NO_NUMA if device.numa is None or device.numa < 0 else device.numa,
            division=self._division(device),
            memory_mib=device.memory_mib,
            capacity_mib=device.capacity_mib,
            largest_mib=device.largest_mib,
            foreign_mib=device.foreign_mib + burst_mib,
            burst_mib=burst_mib,
            capacity_core=device.capacity_core_pct,
            slots=device.slots,
            used_mib=used.used_mib,
            used_core=used.used_core,
            used_slots=used.used_slots,
            exclusive_holders=used.exclusive_holders,
            known=True,
            healthy=device.healthy,
            cordoned=device.cordoned,
            alive=alive,
        )

    def _division(self, device: Device) -> int:
        """Return the number of the device's table of partitions. An unusable table has no sizes."""
        if not device.partitions:
            return 0
        key = _encoder.encode((device.partitions, device.resources))
        number = self._division_numbers.get(key)
        if number is None:
            usable = not Division.check(device.partitions, device.resources)
            division = Division(device.partitions, device.resources) if usable else Division((), {})
            number = self._division_numbers[key] = len(self.divisions)
            self.divisions.append(division)
        return number

    def _add(self, node: str) -> Place:
        block = self._block(1)
        place = self._places[node] = Place(
            block=block, column=block.add(node, domain=self.domains.of(node))
        )
        self._locate(node, place)
        return place

    def _block(self, width: int) -> Block:
        block = self._block_by_width.get(width)
        if block is None:
            block = self._block_by_width[width] = Block(width)
            self.blocks.append(block)
        return block

    def _locate(self, node: str, place: Place) -> None:
        number = self.blocks.index(place.block)
        self.codes[node] = (number << COLUMN_BITS) | place.column
        self.places_version += 1

    def _rewrite(self, node: str, place: Place, cells: Iterable[Cell]) -> None:
        """Replace a node's devices with exactly these, less the ghosts without bookings.

        A node that is left without a device and without a vendor is removed.
        """
        kept = [cell for cell in cells if cell.known or cell.is_booked()]
        kept.sort(key=lambda cell: (cell.vendor, cell.index, not cell.known, cell.uuid))
        for uuid in place.rows:
            others = tuple(name for name in self._nodes_by_uuid[uuid] if name != node)
            if others:
                self._nodes_by_uuid[uuid] = others
            else:
                del self._nodes_by_uuid[uuid]
        self.version += 1
        if not kept and not place.alive:
            self._take_out(place)
            del self._places[node], self.codes[node]
            self.bursting.discard(node)
            self.places_version += 1
            return
        width = 1 << max(0, len(kept) - 1).bit_length()
        if width != place.block.width:
            self._take_out(place)
            place.block = self._block(width)
            place.column = place.block.add(node, domain=self.domains.of(node))
            self._locate(node, place)
        if node in self._withheld or any(cell.withheld for cell in kept):
            for cell in kept:
                cell.withheld = self.is_withheld(node, self.vendors.words[cell.vendor])
        place.rows = {cell.uuid: row for row, cell in enumerate(kept)}
        for uuid in place.rows:
            self._nodes_by_uuid[uuid] = (*self._nodes_by_uuid.get(uuid, ()), node)
        place.block.write(place.column, kept, link_class=self._link_class(place, kept))
        for uuid in place.parts.keys() | place.kinds.keys():
            self._divide(place, uuid)
        bursts = ((cell.uuid, place.bursts.get(cell.uuid)) for cell in kept if cell.known)
        place.bursts = {uuid: by_pod for uuid, by_pod in bursts if by_pod}
        if place.bursts:
            self.bursting.add(node)
        else:
            self.bursting.discard(node)

    def _take_out(self, place: Place) -> None:
        moved = place.block.remove(place.column)
        if moved is not None:
            other = self._places[moved]
            other.column = place.column
            self._locate(moved, other)

    def _link_class(self, place: Place, cells: list[Cell]) -> int:
        width = place.block.width
        matrix = np.zeros((width, width), np.int64)
        for links in place.links.values():
            for link in links:
                a, b = place.rows.get(link.a), place.rows.get(link.b)
                if a is not None and b is not None and a != b:
                    matrix[a, b] = matrix[b, a] = link.score
        vendors = tuple(cell.vendor for cell in cells)
        vendors += (-1,) * (width - len(vendors))
        key = (vendors, matrix.tobytes())
        number = self._link_numbers.get(key)
        if number is None:
            if len(self.link_classes) > _LINKS_PER_NODE * len(self._places) + _LINKS_SPARE:
                self._drop_unused_links()
            number = self._link_numbers[key] = self._links_made
            self.link_classes[number] = LinkClass(vendors, matrix)
            self._links_made += 1
        return number

    def _drop_unused_links(self) -> None:
        """Drop matrices of nodes that have newer ones: an agent may report new ones at any time.

        Numbers are never used again, so that values derived from one cannot be mistaken.
        """
        used: set[int] = set()
        for block in self.blocks:
            used.update(block.links[: block.count].tolist())
        self.link_classes = {n: one for n, one in self.link_classes.items() if n in used}
        self._link_numbers = {key: n for key, n in self._link_numbers.items() if n in used}

    # --- booking ---------------------------------------------------------------------------------

    def book(self, node: str, containers: Iterable[ContainerShares]) -> tuple[str, ...]:
        """Book the peak of a pod's containers. Returns the devices that are now over capacity.

        Never refuses: the ledger decides, and it may have to record running pods. A device or node
        that is not registered is added as a ghost.
        """
        containers = tuple(containers)
        booked = booked_by_device(containers)
        place = self._places.get(node) or self._add(node)
        unknown = [uuid for uuid in booked if uuid not in place.rows]
        if unknown:
            vendor_of = {s.uuid: s.vendor for c in containers for s in c.shares}
            cells = place.block.read(place.column)
            cells += [
                Cell(
                    uuid=uuid,
                    vendor=self.vendors.number(vendor_of[uuid]),
                    index=_LAST,
                    used_slots=1,
                )
                for uuid in unknown
            ]
            self._rewrite(node, place, cells)
            for uuid in unknown:
                place.block.book(
                    place.rows[uuid], place.column, mib=0, core=0, slots=-1, exclusive=0
                )
        over: list[str] = []
        block = place.block
        for uuid, held in booked.items():
            row = place.rows[uuid]
            self._book(place, row, held, sign=1)
            at = row, place.column
            if block.known[at] and (
                block.free_mib[at] + block.foreign_mib[at] < 0
                or block.free_core[at] < 0
                or block.used_slots[at] > block.slots[at]
                or (block.exclusive_holders[at] and block.used_slots[at] > held.slots)
                or self.divisions[block.division[at]].is_over(place.parts.get(uuid, {}))
            ):
                over.append(uuid)
        self.version += 1
        return tuple(over)

    def unbook(self, node: str, containers: Iterable[ContainerShares]) -> None:
        """Subtract the amounts that ``book`` added for the same containers."""
        place = self._places.get(node)
        if place is None:
            raise InvariantBroken(what=f"node {node} has nothing booked that could be released")
        block = place.block
        emptied = False
        for uuid, held in booked_by_device(containers).items():
            row = place.rows.get(uuid)
            if row is None:
                raise InvariantBroken(
                    what=f"device {uuid} on {node} has nothing booked that could be released"
                )
            self._book(place, row, held, sign=-1)
            at = row, place.column
            emptied |= bool(not block.known[at] and block.used_slots[at] == 0)
        self.version += 1
        if emptied:
            self._rewrite(node, place, block.read(place.column))

    def lower_bursts(self, node: str, pod_uid: str) -> None:
        """Offer the memory that the pod uses beyond its request, until ``restore_bursts``.

        For questions about a time when the pod has ended, or about its own shares.
        """
        self._free_bursts(node, pod_uid, sign=1)

    def restore_bursts(self, node: str, pod_uid: str) -> None:
        """Undo ``lower_bursts`` for the same pod."""
        self._free_bursts(node, pod_uid, sign=-1)

    def _free_bursts(self, node: str, pod_uid: str, *, sign: int) -> None:
        if node not in self.bursting:
            return
        # Booked as a negative amount: ``foreign_mib`` is a fact of the inventory, from which
        # results are derived that are kept until the inventory changes.
        place = self._places[node]
        for uuid, by_pod in place.bursts.items():
            row, mib = place.rows[uuid], sign * by_pod.get(pod_uid, 0)
            if mib:
                place.block.book(row, place.column, mib=-mib, core=0, slots=0, exclusive=0)
        self.version += 1

    def rebook(self, node: str, holdings: Iterable[Iterable[ContainerShares]]) -> None:
        """Book exactly these shares on a node, whatever was booked there.

        Rolls back a partial change.
        """
        place = self._places.get(node)
        if place is not None:
            place.parts.clear()
            place.kinds.clear()
            cells = place.block.read(place.column)
            for cell in cells:
                cell.used_mib = cell.used_core = cell.used_slots = cell.exclusive_holders = 0
            self._rewrite(node, place, cells)
        for containers in holdings:
            self.book(node, containers)

    def _book(self, place: Place, row: int, held: Booked, *, sign: int) -> None:
        place.block.book(
            row,
            place.column,
            mib=sign * held.memory_mib,
            core=sign * held.core_pct,
            slots=sign * held.slots,
            exclusive=sign * held.exclusive,
        )
        if held.parts or held.kind:
            uuid = place.block.uuids[place.column][row]
            kinds = {held.kind: 1} if held.kind else {}
            for counts, amounts in ((place.parts, held.parts), (place.kinds, kinds)):
                left = _summed(counts.pop(uuid, {}), amounts, sign=sign)
                if left:
                    counts[uuid] = left
            self._divide(place, uuid)

    def _divide(self, place: Place, uuid: str) -> None:
        """Compute the columns that depend on partitions and kinds."""
        row = place.rows[uuid]
        division = self.divisions[place.block.division[row, place.column]]
        taken, spent = division.spent(place.parts.get(uuid, {}))
        kind = kind_of_all(place.kinds.get(uuid, {}))
        place.block.divide(
            row, place.column, taken=taken, spent=spent, kind=self.kinds.number(kind)
        )

    def shortfall(
        self,
        node: str,
        containers: Iterable[ContainerShares],
        *,
        without: Iterable[ContainerShares] = (),
        own: str = "",
        believe: bool = False,
    ) -> tuple[str, ...]:
        """Return the devices on which these shares are not free once ``without`` is released.

        Checks arithmetic only: health, cordon and selectors do not matter for shares that a pod
        already has. Memory in use that no share books is lacking for shares that grow, except what
        the pod with the uid ``own`` uses itself. A device that is not registered counts as lacking.
        The caller may have reason to ``believe`` that the shares were free when they were assigned:
        then neither counts.
        """
        place = self._places.get(node)
        containers, mine = tuple(containers), booked_by_device(without)
        lacking: list[str] = []
        for uuid, need in booked_by_device(containers).items():
            row = None if place is None else place.rows.get(uuid)
            if place is None or row is None or not place.block.known[row, place.column]:
                if not believe:
                    lacking.append(uuid)
                continue
            have = mine.get(uuid, NOTHING)
            at, block = (row, place.column), place.block
            foreign_mib = int(block.foreign_mib[at]) - place.bursts.get(uuid, {}).get(own, 0)
            if believe or need.memory_mib <= have.memory_mib:
                foreign_mib = 0
            free_mib = int(block.capacity_mib[at] - block.used_mib[at]) - foreign_mib
            others = int(block.used_slots[at]) - have.slots
            holders = int(block.exclusive_holders[at]) - have.exclusive
            if (
                (need.memory_mib and free_mib + have.memory_mib < need.memory_mib)
                or (need.core_pct and block.free_core[at] + have.core_pct < need.core_pct)
                or others + need.slots > block.slots[at]
                or holders > 0
                or (need.exclusive and others > 0)
                or self._is_divided_otherwise(place, uuid, need, have)
                or (
                    block.largest_mib[at]
                    and block.largest_mib[at] - foreign_mib < _largest(containers, uuid)
                )
            ):
                lacking.append(uuid)
        return tuple(lacking)

    def _is_divided_otherwise(self, place: Place, uuid: str, need: Booked, have: Booked) -> bool:
        """Return whether partitions or kinds of others conflict with the needed ones."""
        if need.kind:
            mine = {have.kind: 1} if have.kind else {}
            others = kind_of_all(_summed(place.kinds.get(uuid, {}), mine, sign=-1))
            if not may_join(need.kind, others):
                return True
        if not need.parts:
            return False
        parts = _summed(place.parts.get(uuid, {}), have.parts, sign=-1)
        division = self.divisions[int(place.block.division[place.rows[uuid], place.column])]
        return division.is_over(_summed(parts, need.parts, sign=1))

    # --- checking --------------------------------------------------------------------------------

    def check(self) -> None:
        """Recompute all derived values; ``InvariantBroken`` names the first difference."""
        placed = 0
        for number, block in enumerate(self.blocks):
            placed += block.count
            for column in range(block.count):
                self._check_node(number, block, column)
        if not placed == len(self._places) == len(self.codes) or self.bursting - self.codes.keys():
            raise InvariantBroken(what=f"{placed} columns hold {len(self._places)} nodes")
        for uuid, nodes in self._nodes_by_uuid.items():
            if any(uuid not in self._places[node].rows for node in nodes):
                raise InvariantBroken(what=f"index of device {uuid} names a node without it")

    def _check_node(self, number: int, block: Block, column: int) -> None:
        node = block.names[column]
        place = self._places.get(node)
        cells = block.read(column)
        rows = {cell.uuid: row for row, cell in enumerate(cells)}
        if (
            place is None
            or place.block is not block
            or place.column != column
            or place.rows != rows
            or self.codes[node] != (number << COLUMN_BITS) | column
            or block.domains[column] != self.domains.of(node)
        ):
            raise InvariantBroken(what=f"node {node} is not where the table looks for it")
        for uuid, row in rows.items():
            at = row, column
            if node not in self._nodes_by_uuid.get(uuid, ()):
                raise InvariantBroken(what=f"device {uuid} on {node} is missing in the index")
            if (
                block.free_mib[at]
                != block.capacity_mib[at] - block.foreign_mib[at] - block.used_mib[at]
                or block.free_core[at] != block.capacity_core[at] - block.used_core[at]
                or block.burst_mib[at] != sum(place.bursts.get(uuid, {}).values())
                or block.idle[at] != (block.used_slots[at] == 0)
                or block.has_slot[at] != (block.used_slots[at] < block.slots[at])
                or block.unheld[at] != (block.exclusive_holders[at] == 0)
                or (int(block.offered_mib[at]), int(block.room[at])) != block.offer_of(row, column)
            ):
                raise InvariantBroken(what=f"device {uuid} on {node} has stale derived columns")
            taken, spent = self.divisions[block.division[at]].spent(place.parts.get(uuid, {}))
            kind = self.kinds.number(kind_of_all(place.kinds.get(uuid, {})))
            vendor = self.vendors.words[block.vendor[at]]
            if bool(block.withheld[at]) != self.is_withheld(node, vendor):
                raise InvariantBroken(what=f"device {uuid} on {node} is withheld, or not, wrongly")
            if (block.taken[at], block.kind[at]) != (taken, kind) or (
                block.spent[(slice(None), *at)] != spent
            ).any():
                raise InvariantBroken(what=f"device {uuid} on {node} has stale partitions")
        if (node in self.bursting) != bool(place.bursts) or place.bursts.keys() - rows.keys():
            raise InvariantBroken(what=f"node {node} has stale bursts")
        if (place.parts.keys() | place.kinds.keys()) - rows.keys():
            raise InvariantBroken(what=f"node {node} has partitions on a device that it lacks")
        for vendor, totals in block.totals.items():
            mine = block.known[:, column] & (block.vendor[:, column] == vendor)
            if (totals[:, column] != block.totals_of(column, mine)).any():
                raise InvariantBroken(
                    what=f"totals of {self.vendors.words[vendor]} on {node} are stale"
                )


def _require_links(links: Iterable[Link]) -> None:
    for link in links:
        if not -MOST_SMALL <= link.score <= MOST_SMALL:
            raise ValueError(
                f"link {link.a}-{link.b}: score is outside -{MOST_SMALL}..{MOST_SMALL}"
            )


def _restore(known: dict[int, T], key: int, value: T | None) -> None:
    if value is None:
        known.pop(key, None)
    else:
        known[key] = value


def _largest(containers: Iterable[ContainerShares], uuid: str) -> int:
    """Return the memory of the largest share of the device."""
    return max(share.memory_mib for one in containers for share in one.shares if share.uuid == uuid)


def _summed(counts: dict[str, int], amounts: dict[str, int], *, sign: int) -> dict[str, int]:
    """Return ``counts`` with ``amounts`` added or subtracted, without entries that become 0."""
    summed = {key: counts.get(key, 0) + sign * amounts.get(key, 0) for key in {**counts, **amounts}}
    return {key: count for key, count in summed.items() if count > 0}


def _bursts(device: Device) -> dict[str, int]:
    """Return the memory that pods use beyond their requests, by uid."""
    summed: dict[str, int] = {}
    for one in device.bursts:
        summed[one.pod_uid] = summed.get(one.pod_uid, 0) + one.memory_mib
    return summed


def _board(device: Device) -> int:
    """Return a number for the device's physical card, 0 where it is the card."""
    name = device.attributes.get(BOARD, "")
    return crc32(f"{device.vendor}/{name}".encode()) & MOST_SMALL or 1 if name else 0


def _ghost(cell: Cell) -> Cell:
    """Return the cell of a device that is not registered (any more)."""
    foreign_mib = cell.foreign_mib - cell.burst_mib
    return replace(
        cell, known=False, healthy=False, alive=False, foreign_mib=foreign_mib, burst_mib=0
    )
