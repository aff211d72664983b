# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin vXPUs: a card is divided into two or four equal virtual functions, one per share.

``xpumlDeviceSetSriovVfNum``, or ``xpu-smi --set-sriov-numvfs=N --id=I`` (from the tool's own help),
divides an idle card as a whole; the kernel then shows the functions as ``virtfn<k>`` of the card,
and library and tool list them as further rows, whose number is that of ``/dev/xpu<N>``. The row and
device node per function follow from SR-IOV in general; they were not observed on this vendor's
hardware.

Only the agent records which function belongs to a share: each allocated function has a small file
below ``shares_root``, named by its address. A partition is a function that exists and has such a
file; after a reboot the functions do not exist and the files are ignored. The agent removes the
functions of a card that it divided when none of them is allocated any more. The driver has 32
handles per node, cards included.
"""

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from hami_common.vendors import kunlunxin as pure
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceBusy, DriverError
from hami_nodeagent.drivers.files import entries, remove, write
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.reader import read_text
from hami_nodeagent.drivers.sources import FileSource

_HANDLES = 32
_CUT = "cut-"
"""Prefix of the names of files that record cards divided by the agent."""


class Function(Struct, frozen=True, kw_only=True):
    """One virtual function."""

    address: str
    number: int
    """N of ``/dev/xpu<N>``."""
    is_given: bool
    is_busy: bool


class XpuCard(Struct, frozen=True, kw_only=True):
    """One card."""

    index: int
    address: str
    memory_mib: int
    """Of the whole card."""
    parts: int
    functions: tuple[Function, ...]
    is_ours: bool
    """True if the agent divided the card."""
    has_processes: bool
    free_handles: int
    """Of the node."""


class XpuSource(FileSource, Protocol):
    """The cards and functions of a node, and the command that divides a card."""

    def uuid_of(self, address: str) -> str:
        """Return the identity of the card at this PCI address."""
        ...

    async def rows(self) -> Sight:
        """Read all cards and functions."""
        ...

    async def cut(self, address: str, index: int, parts: int) -> None:
        """Divide an idle card into equal parts; 0 makes it whole again."""
        ...


class KunlunxinPartitioner(ToolPartitioner[XpuCard]):
    """vXPUs."""

    vendor = "kunlunxin"
    words_last = False
    """Numbers may change when another card is cut; the address stays."""

    def __init__(self, reader: XpuSource) -> None:
        """Use the reader's tool."""
        super().__init__()
        self._reader = reader
        self._folder = Path(reader.settings.shares_root) / "kunlunxin"

    async def look(self) -> Picture[XpuCard]:
        """Read the list of cards, with the state of each card from sysfs and the agent's files."""
        rows = [row for row in (await self._reader.rows()).devices if row.bus_id]
        given = set(await self._reader.read_files(entries, self._folder))
        links = await self._reader.read_files(
            functions_by_card, self._reader.settings.sysfs_root, tuple(r.bus_id for r in rows)
        )
        row_by_address = {row.bus_id: row for row in rows}
        cards: dict[str, XpuCard] = {}
        instances: list[Instance] = []
        for row in rows:
            if row.bus_id not in links:
                continue
            uuid = self._reader.uuid_of(row.bus_id)
            addresses = links[row.bus_id]
            functions = tuple(
                Function(
                    address=address,
                    number=found.index if found.minor is None else found.minor,
                    is_given=address in given,
                    is_busy=bool(found.processes),
                )
                for address in addresses
                if (found := row_by_address.get(address)) is not None
            )
            parts = len(addresses)
            profile = pure.name_of(parts)
            cards[uuid] = XpuCard(
                index=row.index,
                address=row.bus_id,
                memory_mib=(row.memory_mib or 0) * (parts or 1),
                parts=parts,
                functions=functions,
                is_ours=f"{_CUT}{row.bus_id}" in given,
                has_processes=bool(row.processes),
                free_handles=_HANDLES - len(links) - sum(map(len, links.values())),
            )
            instances += [
                Instance(
                    uuid=uuid,
                    instance_id=one.address,
                    profile=profile,
                    is_busy=one.is_busy,
                    handles={"number": str(one.number)},
                )
                for one in functions
                if one.is_given
            ]
        return Picture(cards, tuple(instances))

    def decide(self, wanted: Wanted, card: XpuCard) -> Decision:
        """A free function of a card that is cut so; any, when the card can be cut so now."""
        sizes = {one.name: one for one in pure.partitions_of(card.memory_mib) if one.name}
        if wanted.profile not in sizes:
            raise refused(wanted, f"no size {wanted.profile!r}; there are {', '.join(sizes)}")
        parts = pure.parts_of(wanted.profile)
        if card.parts == parts:
            free = next((one for one in card.functions if not one.is_given), None)
            if free is None:
                raise refused(wanted, f"all {parts} vXPUs of the card are given")
            return Decision(wanted, free.address)
        if any(one.is_given for one in card.functions):
            raise refused(wanted, f"the card is cut into {card.parts}, and parts of it are given")
        if parts > card.free_handles + card.parts:
            left = card.free_handles + card.parts
            raise refused(wanted, f"{parts} handles needed, {left} of the node's {_HANDLES} left")
        if card.has_processes or any(one.is_busy for one in card.functions):
            detail = "processes use the card: it is cut only when it is idle"
            raise DeviceBusy(doing=f"cut {wanted.uuid}", detail=detail)
        return Decision(wanted)

    async def make(self, decision: Decision, card: XpuCard) -> None:
        """Divide the card if necessary, then allocate one of its functions."""
        address = decision.instance_id
        if not address:
            await self._cut(card, pure.parts_of(decision.wanted.profile))
            after = (await self.look()).cards.get(decision.wanted.uuid)
            functions = () if after is None else after.functions
            if after is None or after.parts != pure.parts_of(decision.wanted.profile):
                detail = "the tool said that the card was cut, and it is not"
                raise AnswerUnknown(doing=f"cut {decision.wanted.uuid}", detail=detail)
            free = next((one.address for one in functions if not one.is_given), "")
            if not free:
                detail = "the functions of a card that was cut are not listed"
                raise AnswerUnknown(doing=f"cut {decision.wanted.uuid}", detail=detail)
            address = free
        await self._reader.read_files(write, self._folder / address, decision.wanted.profile)

    async def remove(self, instance: Instance, card: XpuCard) -> None:  # noqa: ARG002 - the file is all there is of it
        """Release the function."""
        await self._reader.read_files(remove, self._folder / instance.instance_id)

    async def tidy(self, card: XpuCard) -> None:
        """Remove the functions of a card that the agent divided, if none is allocated."""
        now = (await self.look()).cards
        found = next((one for one in now.values() if one.address == card.address), None)
        if found is None or not found.is_ours or any(one.is_given for one in found.functions):
            return
        if found.parts:
            try:
                await self._set(found, 0)
            except DriverError:
                return  # it stays cut and serves this size, until it can be put together
        await self._reader.read_files(remove, self._folder / f"{_CUT}{found.address}")

    async def _cut(self, card: XpuCard, parts: int) -> None:
        await self._reader.read_files(write, self._folder / f"{_CUT}{card.address}", str(parts))
        if card.parts:
            await self._set(card, 0)
        await self._set(card, parts)

    async def _set(self, card: XpuCard, parts: int) -> None:
        await self._reader.cut(card.address, card.index, parts)


def functions_by_card(sysfs_root: str, addresses: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Addresses of the virtual functions of each card; functions are no cards themselves."""
    devices = Path(sysfs_root) / "bus/pci/devices"
    found: dict[str, tuple[str, ...]] = {}
    for address in addresses:
        home = devices / address
        if (home / "physfn").exists():
            continue
        count = read_text(home / "sriov_numvfs").strip()
        turns = range(int(count)) if count.isdecimal() and len(count) < len("1000") else ()
        links = (home / f"virtfn{turn}" for turn in turns)
        found[address] = tuple(link.resolve().name for link in links if link.is_symlink())
    return found
