# SPDX-License-Identifier: Apache-2.0
"""What either way of asking for Ascend chips tells, npu-smi or DCMI: the words of both readers.

A look may be strict: what partitions are made by must be known, and a division that could not be
read is an error. A survey is not: such a chip is shown as one that is not divided.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceBusy, NotSupported
from hami_nodeagent.drivers.parse.ascend import Chip, ChipKey, Division
from hami_nodeagent.drivers.rules import Neighbour

SOFT_FAILURES = (NotSupported, AnswerUnknown, DeviceBusy)
"""After these a chip is shown without its division."""


class ChipSight(Struct, frozen=True, kw_only=True):
    """One chip in all its numberings, with what it is divided into."""

    chip: Chip
    logic: int
    physical: int
    die: str
    """Empty: not told."""
    name: str
    """The chip's own word, such as ``910B3``."""
    division: Division | None = None
    """``None``: it cannot be divided."""
    templates: tuple[Profile, ...] = ()
    """What it can be divided into, without ``core_pct``."""
    is_shared: bool | None = None
    """Several containers may open the whole chip; ``None``: not told."""
    attributes: dict[str, str] = {}


class Look(Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    chips: tuple[ChipSight, ...]
    version: str
    problems: tuple[str, ...] = ()
    views: Mapping[tuple[ChipKey, ChipKey], Neighbour] = {}


class Glance(Struct, frozen=True, kw_only=True):
    """What changes."""

    chips: tuple[Chip, ...]
    version: str
    bandwidth_pct: Mapping[ChipKey, int | None] = {}
    problems: tuple[str, ...] = ()


class Way(Protocol):
    """One way of asking."""

    async def glance(self) -> Glance:
        """Health and use."""
        ...

    async def look(self, *, strict: bool) -> Look:
        """Everything; links and attributes only where it is not ``strict``."""
        ...

    async def create(self, key: ChipKey, template: str, number: str) -> None:
        """Make one vNPU with the number that we chose."""
        ...

    async def destroy(self, key: ChipKey, number: str) -> None:
        """Remove one."""
        ...

    async def keep(self) -> None:
        """See that vNPUs outlive a reboot of the host, where that can be chosen."""
        ...

    async def share(self, key: ChipKey) -> bool:
        """Let several containers open the whole chip; ``False``: this way cannot."""
        ...

    def forget(self) -> None:
        """Drop what was remembered of the driver."""
        ...


def place_of(key: ChipKey) -> str:
    """How tables name the chip."""
    return f"{key[0]}/{key[1]}"
