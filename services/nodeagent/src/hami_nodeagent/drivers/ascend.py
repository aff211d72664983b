# SPDX-License-Identifier: Apache-2.0
"""Huawei Ascend through npu-smi: chips, their die ids, vNPU templates and links.

A glance is one run of ``npu-smi info``. A survey asks besides for the numberings, for each chip's
board (remembered while chip, address and driver stay the same) and division, and for templates.
Where npu-smi tells how a chip is divided, its facts carry the templates and the whole chip; vNPUs
are made by ``partition_ascend`` before a container starts, which every divisible chip allows.
"""

import msgspec
from msgspec.structs import replace

from hami_common.model.device import Profile
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceBusy, NotSupported
from hami_nodeagent.drivers.parse import ascend as parse
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.partition_ascend import AscendPartitioner
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import Signs, ToolReader, ToolSettings
from hami_nodeagent.drivers.rules import Neighbour

SIGNS = Signs(pci_vendors=("19e5",), pci_classes=("12",), paths=("class/davinci_manager",))
_SOFT_FAILURES = (NotSupported, AnswerUnknown, DeviceBusy)


class AscendReader(ToolReader):
    """npu-smi."""

    vendor = "ascend"
    tool_name = "npu-smi"
    rules = parse.RULES

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._board_by_chip: dict[tuple[parse.ChipKey, str, str], parse.Board] = {}
        self._partitioner = AscendPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Hard vNPUs."""
        return self._partitioner

    def forget(self) -> None:
        """Another driver may number other boards."""
        self._board_by_chip.clear()

    async def glance(self) -> Sight:
        """The summary table."""
        chips, version = await self.ask(parse.info, "info")
        return Sight(devices=tuple(_seen(chip) for chip in chips), driver_version=version)

    async def survey(self) -> Sight:
        """Everything."""
        chips, version = await self.ask(parse.info, "info")
        places = await self.ask(parse.mapping, "info", "-m")
        templates = await self._templates()
        problems: list[str] = []
        devices: list[Seen] = []
        for chip in chips:
            place = places.get(chip.key)
            if place is None:
                problems.append(f"chip {_place(chip.key)} has no logic id in npu-smi info -m")
                continue
            board = await self.board(chip, version)
            seen = replace(
                _seen(chip),
                index=place.logic,
                minor=_first(place.physical, chip.physical, place.logic),
                uuid=board.die,
                attributes={"chip": board.chip_name or chip.name, "npu": _place(chip.key)},
            )
            if templates:
                seen = await self._divided(seen, chip, templates)
            devices.append(seen)
        views = await self._views(devices)
        return Sight(
            devices=tuple(devices),
            views=views,
            driver_version=version,
            problems=tuple(problems),
        )

    async def board(self, chip: parse.Chip, version: str) -> parse.Board:
        """The chip's board query, then the card's where the first tells no identity."""
        key = (chip.key, chip.bus_id, version)
        if key not in self._board_by_chip:
            npu, number = map(str, chip.key)
            board = await self.ask(parse.board, "info", "-t", "board", "-i", npu, "-c", number)
            if not board.die:
                card = await self.ask(parse.board, "info", "-t", "board", "-i", npu)
                die = f"{card.serial}-{number}" if card.serial else ""
                board = replace(board, die=die)
            self._board_by_chip[key] = board
        return self._board_by_chip[key]

    async def _templates(self) -> tuple[Profile, ...]:
        try:
            return await self.ask(parse.templates, "info", "-t", "template-info")
        except _SOFT_FAILURES:
            return ()

    async def _divided(self, seen: Seen, chip: parse.Chip, templates: tuple[Profile, ...]) -> Seen:
        """The chip with its templates, whole chip and live vNPUs, where npu-smi tells of them."""
        npu, number = map(str, chip.key)
        arguments = ("info", "-t", "info-vnpu", "-i", npu, "-c", number)
        try:
            division = await self.ask(parse.division, *arguments)
        except _SOFT_FAILURES:
            return seen
        cores = division.totals.get("aicore", 0)
        if not cores or seen.memory_mib is None:
            return seen
        fitting = tuple(
            replace(
                template,
                core_pct=100 * template.resources.get("aicore", 0) // cores,
                resources={n: v for n, v in template.resources.items() if n in division.totals},
            )
            for template in templates
            if template.memory_mib <= seen.memory_mib
            and template.resources.get("aicore", 0) <= cores
        )
        whole = Profile(memory_mib=seen.memory_mib, core_pct=100, resources=dict(division.totals))
        instances = [
            {
                "id": one.id,
                "profile": one.template,
                "used": one.used,
                **({"container": one.container} if one.owner else {}),
            }
            for one in division.instances
        ]
        return replace(
            seen,
            mode="vnpu",
            partitions=(*fitting, whole) if fitting else (),
            resources=dict(division.totals),
            attributes={
                **seen.attributes,
                "instances": msgspec.json.encode(instances).decode(),
            },
        )

    async def _views(self, devices: list[Seen]) -> dict[tuple[str, str], Neighbour]:
        try:
            views = await self.ask(parse.topology, "info", "-t", "topo")
        except _SOFT_FAILURES:
            return {}
        place_by_number = {seen.index: seen.place for seen in devices}
        return {
            (place_by_number[a], place_by_number[b]): view
            for (a, b), view in views.items()
            if a in place_by_number and b in place_by_number
        }


def _place(key: parse.ChipKey) -> str:
    return f"{key[0]}/{key[1]}"


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _seen(chip: parse.Chip) -> Seen:
    return Seen(
        place=_place(chip.key),
        index=chip.key[0],
        type=parse.type_of(chip.name),
        memory_mib=chip.total_mib,
        bus_id=chip.bus_id,
        mode="whole",
        condition=chip.condition,
        reason="" if chip.condition == "good" else f"npu-smi health: {chip.health or 'not told'}",
        used_mib=chip.used_mib,
        core_pct=chip.core_pct,
        temperature_c=chip.temperature_c,
        power_w=chip.power_w,
        processes=chip.processes,
    )
