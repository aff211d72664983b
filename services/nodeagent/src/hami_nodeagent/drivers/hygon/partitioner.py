# SPDX-License-Identifier: Apache-2.0
"""Hygon vDCUs: files that describe a card's compute units and memory to the vendor's runtime.

A vDCU is a folder below ``shares_root`` with ``vdev0.conf``, which a container mounts, and a copy
of it as ``/etc/vdev/vdev<N>.conf``, which the host's tools read. Lines, limits (four on a card,
numbers 0 to 199 on a node, pipes 0 to 19 on a card) and paths are those of HAMi's plugin and
Hygon's documentation. The runtime does not reject overlapping masks, so every file on the node
counts, including those of ``hy-smi virtual``. An unreadable file makes every call fail until an
operator removes it, because its compute units are unknown.

The container's file has the node's number as ``vdev_id``, as HAMi writes it. Another project found
a driver that expects the position in the container there; that was not settled on hardware.
"""

import re
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from hami_common.units import whole
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers import masks
from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.files import entries, remove, write, write_folder
from hami_nodeagent.drivers.hygon import parse
from hami_nodeagent.drivers.parse.seen import Seen
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.reader import read_text
from hami_nodeagent.drivers.sources import FileSource

_PER_CARD, _NUMBERS, _PIPES = 4, 200, 20
_FILE = "vdev0.conf"
_LOW = (1 << parse.MASK_BITS) - 1
_UNITS_BY_TYPE = {
    "DCU-Z100": 60, "DCU-Z100L": 60, "DCU-K100": 120, "DCU-K100_AI": 120,
    "DCU-K100_LC_AI": 120, "DCU-K100_LC_E_AI": 128, "DCU-BW1000": 80,
}  # fmt: skip
"""Compute units by type, used where ``hy-smi virtual`` is not available."""


class Described(Struct, frozen=True, kw_only=True):
    """Contents of all files that describe one number."""

    number: int
    files: tuple[parse.Vdcu, ...]
    is_whole: bool
    """The agent's folder and the host's copy exist and have the same content."""


class DcuCard(Struct, frozen=True, kw_only=True):
    """One card."""

    index: int
    address: str
    memory_mib: int
    units: int
    vdcus: tuple[Described, ...]
    numbers: frozenset[int]
    """Numbers that are used on the node."""

    def taken(self) -> int:
        """Compute units that are assigned to a vDCU."""
        found = 0
        for one in (file for vdcu in self.vdcus for file in vdcu.files):
            found |= one.masks[0] | one.masks[1] << parse.MASK_BITS
        return found


class CardSource(FileSource, Protocol):
    """The cards of a node."""

    async def cards(self) -> tuple[Seen, ...]:
        """Read all cards."""
        ...


class HygonPartitioner(ToolPartitioner[DcuCard]):
    """Virtual DCUs."""

    vendor = "hygon"

    def __init__(self, reader: CardSource) -> None:
        """Use the reader to read the cards."""
        super().__init__()
        self._reader = reader
        self._folder = Path(reader.settings.shares_root) / "dcu"
        self._host = Path(reader.settings.etc_root) / "vdev"

    async def look(self) -> Picture[DcuCard]:
        """The cards as the reader lists them, and all files."""
        seen = await self._reader.cards()
        found = await self._reader.read_files(self._described)
        cards: dict[str, DcuCard] = {}
        instances: list[Instance] = []
        for card in seen:
            own = tuple(
                vdcu for vdcu in found if any(file.bus_id == card.bus_id for file in vdcu.files)
            )
            cards[card.uuid] = DcuCard(
                index=card.index,
                address=card.bus_id,
                memory_mib=card.memory_mib or 0,
                units=whole(card.attributes.get("compute_units", ""))
                or _UNITS_BY_TYPE.get(card.type, 0),
                vdcus=own,
                numbers=frozenset(vdcu.number for vdcu in found),
            )
            instances += [
                Instance(
                    uuid=card.uuid,
                    instance_id=str(vdcu.number),
                    memory_mib=max(file.memory_mib for file in vdcu.files),
                    handles={"config_directory": str(self._home(vdcu.number))}
                    if vdcu.is_whole
                    else {},
                )
                for vdcu in own
            ]
        return Picture(cards, tuple(instances))

    def decide(self, wanted: Wanted, card: DcuCard) -> Decision:
        """A number of the node, when the card has units and memory left."""
        doing = f"divide {wanted.uuid}"
        if not card.units:
            detail = "the card's number of compute units is not known"
            raise NotSupported(doing=doing, detail=detail)
        if len(card.vdcus) >= _PER_CARD:
            raise refused(wanted, f"the card has {len(card.vdcus)} vDCUs, more are not possible")
        used_mib = sum(max(file.memory_mib for file in vdcu.files) for vdcu in card.vdcus)
        if wanted.memory_mib > card.memory_mib - used_mib:
            left = card.memory_mib - used_mib
            raise refused(wanted, f"{wanted.memory_mib} MiB needed, {left} left")
        if _mask(wanted, card) is None:
            needed = masks.units_of(wanted.core_pct, card.units)
            left = card.units - card.taken().bit_count()
            raise refused(wanted, f"{needed} compute units needed, {left} of {card.units} left")
        number = next((n for n in range(_NUMBERS) if n not in card.numbers), None)
        if number is None:
            raise refused(wanted, f"all {_NUMBERS} vDCU numbers of the node are used")
        return Decision(wanted, str(number))

    async def make(self, decision: Decision, card: DcuCard) -> None:
        """The container's folder, then the host's copy: only both together are a vDCU."""
        number = int(decision.instance_id)
        mask = _mask(decision.wanted, card)
        pipes = {file.pipe for vdcu in card.vdcus for file in vdcu.files}
        pipe = next((n for n in range(_PIPES) if n not in pipes), None)
        if mask is None or pipe is None:
            raise refused(decision.wanted, "no compute units or no pipe left")
        vdcu = parse.Vdcu(
            bus_id=card.address,
            masks=(mask & _LOW, mask >> parse.MASK_BITS),
            cu_count=mask.bit_count(),
            memory_mib=decision.wanted.memory_mib,
            device=0,
            vdev=number,
            pipe=pipe,
        )
        folder, text = self._home(number), parse.vdcu_text(vdcu)
        await self._reader.read_files(write_folder, folder, {_FILE: text})
        host = parse.vdcu_text(vdcu, device=card.index)
        await self._reader.read_files(write, self._host / f"vdev{number}.conf", host)

    async def remove(self, instance: Instance, card: DcuCard) -> None:  # noqa: ARG002 - files name the card
        """Remove the host's copy first: without it the remaining files are no vDCU."""
        number = int(instance.instance_id)
        await self._reader.read_files(remove, self._host / f"vdev{number}.conf")
        await self._reader.read_files(remove, self._home(number))

    def _home(self, number: int) -> Path:
        return self._folder / f"vdev{number}"

    def _described(self) -> tuple[Described, ...]:
        """Every number that any file mentions."""
        places: dict[int, list[Path]] = {}
        for name in entries(self._host):
            if match := re.fullmatch(r"vdev(\d{1,3})\.conf", name):
                places.setdefault(int(match[1]), []).append(self._host / name)
        for name in entries(self._folder):
            if match := re.fullmatch(r"vdev(\d{1,3})", name):
                places.setdefault(int(match[1]), []).append(self._folder / name / _FILE)
        return tuple(_one(number, paths) for number, paths in sorted(places.items()))


def _one(number: int, paths: list[Path]) -> Described:
    files: list[parse.Vdcu] = []
    for path in paths:
        try:
            files.append(parse.vdcu(read_text(path)))
        except AnswerUnknown as error:
            detail = f"{path} is not as it must be; remove it when no container uses it"
            raise AnswerUnknown(doing="read the vDCUs", detail=detail) from error
    same = {(one.bus_id, one.masks, one.memory_mib, one.vdev, one.pipe) for one in files}
    return Described(number=number, files=tuple(files), is_whole=len(files) > 1 and len(same) == 1)


def _mask(wanted: Wanted, card: DcuCard) -> int | None:
    count = masks.units_of(wanted.core_pct, card.units)
    return masks.lowest_free(count, card.taken(), card.units)
