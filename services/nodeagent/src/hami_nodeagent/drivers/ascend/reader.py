# SPDX-License-Identifier: Apache-2.0
"""Huawei Ascend: chips, their die ids, vNPU templates and links, through DCMI or npu-smi.

The reader uses the library DCMI where it is installed and usable, and otherwise falls back to the
CLI (``dcmi_way``, ``npu_smi``); both report the same facts. Where a chip's division is reported,
its facts include the templates and the whole chip; ``partitioner`` creates vNPUs before a container
starts, which every divisible chip allows. With ``soft_shares`` chips are not divided: several
containers open the same chip, which requires a setting in the driver.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import msgspec
from msgspec.structs import replace

from hami_common.model.device import Profile
from hami_nodeagent.drivers.ascend import binding as dcmi
from hami_nodeagent.drivers.ascend import parse
from hami_nodeagent.drivers.ascend.dcmi_way import DcmiWay
from hami_nodeagent.drivers.ascend.npu_smi import NpuSmi
from hami_nodeagent.drivers.ascend.parse_dcmi import Fault
from hami_nodeagent.drivers.ascend.partitioner import AscendPartitioner
from hami_nodeagent.drivers.ascend.settings import AscendToolSettings
from hami_nodeagent.drivers.ascend.way import ChipSight, Look, Way, place_of
from hami_nodeagent.drivers.errors import (
    DriverDenied,
    DriverError,
    LibraryUnusable,
    NotSupported,
)
from hami_nodeagent.drivers.library import LibraryProgram, LibraryReader
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import ToolSettings
from hami_nodeagent.drivers.tool import Tool

_MOST_TOLD = 1024
_log = logging.getLogger(__name__)
T = TypeVar("T")


class AscendReader(LibraryReader):
    """DCMI, or npu-smi."""

    vendor = "ascend"
    tool_name = "npu-smi"
    rules = parse.RULES
    program = dcmi.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        own = settings if isinstance(settings, AscendToolSettings) else AscendToolSettings()
        self._own = own
        self._smi = NpuSmi(self.ask)
        self._watch = LibraryProgram(self.program, settings)
        self._dcmi = DcmiWay(self.library, self._smi.templates, watch=self._watch)
        self._tells = True
        self._told: set[Fault] = set()
        """Faults already reported: some libraries repeat active faults at each subscription."""
        self._partitioner = AscendPartitioner(self)

    @property
    def partitioner(self) -> Partitioner | None:
        """Partitioner of hard vNPUs; ``None`` where chips are shared softly."""
        return None if self._own.soft_shares else self._partitioner

    @property
    def tools(self) -> Sequence[Tool]:
        """All of them."""
        return (*super().tools, self._watch.tool)

    async def wait_news(self, limit_s: float) -> bool:
        """Wait for a fault that a chip reports through DCMI; return true if there was one."""
        deadline_s = anyio.current_time() + limit_s
        if self._by_library and self._tells:
            try:
                fresh = await self._dcmi.wait(limit_s) - self._told
            except DriverError as error:
                # Waiting is optional; errors of the driver are reported by reads.
                self._tells = not isinstance(error, NotSupported | DriverDenied | LibraryUnusable)
                level = logging.DEBUG if self._tells else logging.INFO
                extra = {"vendor": self.vendor, "problem": str(error)}
                _log.log(level, "fault subscription unavailable, chips are polled", extra=extra)
                fresh = frozenset()
            self._told = (self._told | fresh) if len(self._told) < _MOST_TOLD else set(fresh)
            if fresh:
                _log.info("chip fault reported", extra={"faults": [str(one) for one in fresh]})
                return True
        await anyio.sleep(max(0.0, deadline_s - anyio.current_time()))
        return False

    def forget(self) -> None:
        """Another driver may number other boards, or bring the library."""
        super().forget()
        self._tells = True
        self._told.clear()
        self._smi.forget()
        self._dcmi.forget()

    async def through(self, call: Callable[[Way], Awaitable[T]]) -> T:
        """Make a call the way that is chosen."""
        return await self.either(lambda: call(self._dcmi), lambda: call(self._smi))

    async def glance(self) -> Sight:
        """Health and use."""
        glance = await self.through(lambda way: way.glance())
        return Sight(
            devices=tuple(
                replace(_seen(chip), memory_bus_pct=glance.bandwidth_pct.get(chip.key))
                for chip in glance.chips
            ),
            driver_version=glance.version,
            problems=glance.problems,
        )

    async def look(self) -> Look:
        """Read the state on which partitioning decisions are based."""
        return await self.through(lambda way: way.look(strict=True))

    async def survey(self) -> Sight:
        """Everything."""
        look = await self.through(lambda way: way.look(strict=False))
        problems = list(look.problems)
        devices: list[Seen] = []
        for one in look.chips:
            attributes = {"chip": one.name, "npu": place_of(one.chip.key), **one.attributes}
            if one.is_shared is not None:
                attributes["device_share"] = "on" if one.is_shared else "off"
            seen = replace(
                _seen(one.chip),
                index=one.logic,
                minor=one.physical,
                uuid=one.die,
                attributes=attributes,
            )
            if self._own.soft_shares:
                seen = await self._shared(seen, one, problems)
            else:
                seen = _divided(seen, one)
            devices.append(seen)
        return Sight(
            devices=tuple(devices),
            views={(place_of(a), place_of(b)): view for (a, b), view in look.views.items()},
            driver_version=look.version,
            problems=tuple(problems),
        )

    async def _shared(self, seen: Seen, one: ChipSight, problems: list[str]) -> Seen:
        """The chip as one that several containers open, if the driver lets them."""
        where = f"chip {place_of(one.chip.key)}"
        if one.division is not None and one.division.instances:
            problems.append(f"{where} is divided; soft shares need it whole")
            return seen
        if one.is_shared or await self.through(lambda way: way.share(one.chip.key)):
            return replace(seen, mode="soft", attributes={**seen.attributes, "device_share": "on"})
        problems.append(f"{where}: device-share is off and could not be switched on")
        return seen


def _divided(seen: Seen, one: ChipSight) -> Seen:
    """Add the templates, the whole chip and live vNPUs to the chip, where they are reported."""
    division = one.division
    cores = division.totals.get("aicore", 0) if division is not None else 0
    if division is None or not cores or seen.memory_mib is None or not one.templates:
        return seen
    fitting = tuple(
        replace(
            template,
            core_pct=100 * template.resources.get("aicore", 0) // cores,
            resources={n: v for n, v in template.resources.items() if n in division.totals},
        )
        for template in one.templates
        if template.memory_mib <= seen.memory_mib and template.resources.get("aicore", 0) <= cores
    )
    whole = Profile(memory_mib=seen.memory_mib, core_pct=100, resources=dict(division.totals))
    instances = [
        {
            "id": live.id,
            "profile": live.template,
            "used": live.used,
            **({"container": live.container} if live.owner else {}),
        }
        for live in division.instances
    ]
    return replace(
        seen,
        mode="vnpu",
        partitions=(*fitting, whole) if fitting else (),
        resources=dict(division.totals),
        attributes={**seen.attributes, "instances": msgspec.json.encode(instances).decode()},
    )


def _seen(chip: parse.Chip) -> Seen:
    return Seen(
        place=place_of(chip.key),
        index=chip.key[0],
        type=parse.type_of(chip.name),
        memory_mib=chip.total_mib,
        bus_id=chip.bus_id,
        mode="whole",
        condition=chip.condition,
        reason="" if chip.condition == "good" else f"health: {chip.health or 'unknown'}",
        used_mib=chip.used_mib,
        core_pct=chip.core_pct,
        temperature_c=chip.temperature_c,
        power_w=chip.power_w,
        processes=chip.processes,
    )
