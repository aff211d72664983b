# SPDX-License-Identifier: Apache-2.0
"""Types shared by both readers of Ascend chips, npu-smi and DCMI.

A look can be strict: partitioning needs the divisions of all chips, so an unreadable division is an
error. A survey is not strict: it shows such a chip as not divided.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.drivers.ascend.parse import Chip, ChipKey, Division
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceBusy, NotSupported
from hami_nodeagent.drivers.rules import Neighbour

SOFT_FAILURES = (NotSupported, AnswerUnknown, DeviceBusy)
"""After these a chip is shown without its division."""


class ChipSight(Struct, frozen=True, kw_only=True):
    """One chip in all its numberings, with its division."""

    chip: Chip
    logic: int
    physical: int
    die: str
    """Empty: not reported."""
    name: str
    """Name that the chip reports, such as ``910B3``."""
    division: Division | None = None
    """``None``: the chip cannot be divided."""
    templates: tuple[Profile, ...] = ()
    """Templates into which the chip can be divided, without ``core_pct``."""
    is_shared: bool | None = None
    """True if several containers may open the whole chip; ``None``: not reported."""
    attributes: dict[str, str] = {}


class Look(Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    chips: tuple[ChipSight, ...]
    version: str
    problems: tuple[str, ...] = ()
    views: Mapping[tuple[ChipKey, ChipKey], Neighbour] = {}


class Glance(Struct, frozen=True, kw_only=True):
    """Values that change between reads."""

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
        """Read everything; links and attributes only if not ``strict``."""
        ...

    async def create(self, key: ChipKey, template: str, number: str) -> None:
        """Create one vNPU with the number that the agent chose."""
        ...

    async def destroy(self, key: ChipKey, number: str) -> None:
        """Remove one."""
        ...

    async def keep(self) -> None:
        """Make vNPUs survive a reboot of the host, where that is configurable."""
        ...

    async def share(self, key: ChipKey) -> bool:
        """Let several containers open the whole chip; ``False``: this way cannot."""
        ...

    def forget(self) -> None:
        """Drop the cached state of the driver."""
        ...


def place_of(key: ChipKey) -> str:
    """Return the name of the chip in tables."""
    return f"{key[0]}/{key[1]}"
