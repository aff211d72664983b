# SPDX-License-Identifier: Apache-2.0
"""AMD: assigns compute units of a GPU to shares as masks that do not overlap.

The hardware is not partitioned: ``HSA_CU_MASK`` restricts a container to the units that it names,
and an invalid mask means all units. Each mask is a file below ``shares_root``, and these files are
the only record of the assignments. ``amd-smi static`` reports the number of units of a GPU. Compute
partitions (CPX, DPX) are managed by an administrator; each is a device of its own with its own
units.
"""

import re
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from hami_common.units import whole
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers import masks
from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.files import entries, remove, write
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.reader import read_text
from hami_nodeagent.drivers.sources import FileSource

_UNITS_MOST = 1024
_MOST = 512
"""Shares on one GPU: more than any has units."""


class Given(Struct, frozen=True, kw_only=True):
    """Contents of one file: units and the request for them."""

    mask: str
    """Hexadecimal."""
    memory_mib: int
    core_pct: int

    @property
    def bits(self) -> int:
        """The mask as a number."""
        return int(self.mask, 16)


class MaskedCard(Struct, frozen=True, kw_only=True):
    """One GPU and the masks on it, by name."""

    folder: Path
    units: int
    given: dict[str, Given]

    def taken(self) -> int:
        """Units that are assigned to a share."""
        found = 0
        for one in self.given.values():
            found |= one.bits
        return found


class GpuSource(FileSource, Protocol):
    """The GPUs of a node."""

    async def survey(self) -> Sight:
        """Read all GPUs."""
        ...


class AmdPartitioner(ToolPartitioner[MaskedCard]):
    """Masks of compute units."""

    vendor = "amd"

    def __init__(self, reader: GpuSource) -> None:
        """Use the reader's tool to read the GPUs."""
        super().__init__()
        self._reader = reader
        self._folder = Path(reader.settings.shares_root) / "amd"

    async def look(self) -> Picture[MaskedCard]:
        """GPUs from one survey, and the files of each."""
        sight = await self._reader.survey()
        cards: dict[str, MaskedCard] = {}
        instances: list[Instance] = []
        for seen in sight.devices:
            if not re.fullmatch(r"[\w-]{1,64}", seen.uuid):
                continue
            units = seen.attributes.get("compute_units", "")
            folder = self._folder / seen.uuid
            card = MaskedCard(
                folder=folder,
                units=whole(units) or 0,
                given=await self._reader.read_files(_given_in, folder),
            )
            cards[seen.uuid] = card
            instances += [
                Instance(
                    uuid=seen.uuid,
                    instance_id=name,
                    memory_mib=one.memory_mib,
                    core_pct=one.core_pct,
                    handles={"cu_mask": masks.ranges_of(one.bits)},
                )
                for name, one in card.given.items()
            ]
        return Picture(cards, tuple(instances))

    def decide(self, wanted: Wanted, card: MaskedCard) -> Decision:
        """The lowest free units, under the lowest free name."""
        if not card.units:
            detail = "the GPU's number of compute units is unknown"
            raise NotSupported(doing=f"divide {wanted.uuid}", detail=detail)
        if _mask(wanted, card) is None:
            needed = masks.units_of(wanted.core_pct, card.units)
            left = card.units - card.taken().bit_count()
            raise refused(wanted, f"{needed} compute units needed, {left} of {card.units} left")
        return Decision(wanted, next(str(n) for n in range(_MOST) if str(n) not in card.given))

    async def make(self, decision: Decision, card: MaskedCard) -> None:
        """One file."""
        mask = _mask(decision.wanted, card)
        if mask is not None:
            wanted = decision.wanted
            given = Given(mask=f"{mask:x}", memory_mib=wanted.memory_mib, core_pct=wanted.core_pct)
            text = msgspec.json.encode(given).decode()
            await self._reader.read_files(write, card.folder / decision.instance_id, text)

    async def remove(self, instance: Instance, card: MaskedCard) -> None:
        """One file."""
        await self._reader.read_files(remove, card.folder / instance.instance_id)


def _given_in(folder: Path) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for name in entries(folder):
        one = _given(read_text(folder / name))
        if one is None:
            detail = f"{folder / name} is not a mask; remove it when no container uses it"
            raise AnswerUnknown(doing="read the masks of compute units", detail=detail)
        found[name] = one
    return found


def _given(text: str) -> Given | None:
    try:
        one = msgspec.json.decode(text, type=Given)
        return one if 0 < one.bits < 1 << _UNITS_MOST else None
    except ValueError:
        return None


def _mask(wanted: Wanted, card: MaskedCard) -> int | None:
    count = masks.units_of(wanted.core_pct, card.units)
    return masks.lowest_free(count, card.taken(), card.units)
