# SPDX-License-Identifier: Apache-2.0
"""Ascend chips through npu-smi: the summary, the numberings, each chip's board and division.

Boards are remembered while chip, address and driver stay the same.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from hami_common.model.device import Profile
from hami_nodeagent.drivers.ascend import parse
from hami_nodeagent.drivers.ascend.way import SOFT_FAILURES, ChipSight, Glance, Look, place_of
from hami_nodeagent.drivers.errors import NotSupported
from hami_nodeagent.drivers.rules import Neighbour

T = TypeVar("T")


class Ask(Protocol):
    """Runs npu-smi and parses its output, as ``ToolReader.ask`` does."""

    async def __call__(self, parse: Callable[[str], T], /, *arguments: str) -> T:
        """See ``ToolReader.ask``."""
        ...


class NpuSmi:
    """The way through the tool."""

    def __init__(self, ask: Ask) -> None:
        """Use the reader's tool."""
        self._ask = ask
        self._board_by_chip: dict[tuple[parse.ChipKey, str, str], parse.Board] = {}

    def forget(self) -> None:
        """Another driver may number other boards."""
        self._board_by_chip.clear()

    async def glance(self) -> Glance:
        """The summary table."""
        chips, version = await self._ask(parse.info, "info")
        return Glance(chips=chips, version=version)

    async def look(self, *, strict: bool) -> Look:
        """One run for the table, the numberings and templates each, two for each chip."""
        soft = (NotSupported,) if strict else SOFT_FAILURES
        chips, version = await self._ask(parse.info, "info")
        places = await self._ask(parse.mapping, "info", "-m")
        try:
            templates = await self.templates()
        except soft:
            templates = ()
        problems, sights = [], []
        for chip in chips:
            place = places.get(chip.key)
            if place is None:
                where = place_of(chip.key)
                problems.append(f"chip {where} has no logic id in npu-smi info -m")
                continue
            board = await self._board(chip, version)
            division = None
            if templates:
                division = await self._division(chip.key, soft)
            numbers = (place.physical, chip.physical, place.logic)
            sights.append(
                ChipSight(
                    chip=chip,
                    logic=place.logic,
                    physical=next(one for one in numbers if one is not None),
                    die=board.die,
                    name=board.chip_name or chip.name,
                    division=division,
                    templates=templates,
                )
            )
        views = {} if strict else await self._views(sights)
        return Look(chips=tuple(sights), version=version, problems=tuple(problems), views=views)

    async def templates(self) -> tuple[Profile, ...]:
        """The node's templates."""
        return await self._ask(parse.templates, "info", "-t", "template-info")

    async def _board(self, chip: parse.Chip, version: str) -> parse.Board:
        """Query the chip's board, then the card's board if the first has no identity."""
        key = (chip.key, chip.bus_id, version)
        if key not in self._board_by_chip:
            npu, number = map(str, chip.key)
            board = await self._ask(parse.board, "info", "-t", "board", "-i", npu, "-c", number)
            if not board.die:
                card = await self._ask(parse.board, "info", "-t", "board", "-i", npu)
                die = f"{card.serial}-{number}" if card.serial else ""
                board = parse.Board(
                    die=die, chip_name=board.chip_name, bus_id=board.bus_id, serial=board.serial
                )
            self._board_by_chip[key] = board
        return self._board_by_chip[key]

    async def _division(
        self, key: parse.ChipKey, soft: tuple[type[Exception], ...]
    ) -> parse.Division | None:
        npu, number = map(str, key)
        arguments = ("info", "-t", "info-vnpu", "-i", npu, "-c", number)
        try:
            return await self._ask(parse.division, *arguments)
        except soft:
            return None

    async def _views(
        self, sights: list[ChipSight]
    ) -> dict[tuple[parse.ChipKey, parse.ChipKey], Neighbour]:
        try:
            views = await self._ask(parse.topology, "info", "-t", "topo")
        except SOFT_FAILURES:
            return {}
        key_by_number = {sight.logic: sight.chip.key for sight in sights}
        return {
            (key_by_number[a], key_by_number[b]): view
            for (a, b), view in views.items()
            if a in key_by_number and b in key_by_number
        }

    async def create(self, key: parse.ChipKey, template: str, number: str) -> None:
        """``create-vnpu``."""
        npu, chip = map(str, key)
        await self._ask(
            parse.created,
            *("set", "-t", "create-vnpu", "-i", npu, "-c", chip, "-f", template, "-v", number),
        )

    async def destroy(self, key: parse.ChipKey, number: str) -> None:
        """``destroy-vnpu``."""
        npu, chip = map(str, key)
        await self._ask(
            parse.destroyed, "set", "-t", "destroy-vnpu", "-i", npu, "-c", chip, "-v", number
        )

    async def keep(self) -> None:
        """Enable ``vnpu-cfg-recover`` if it is disabled."""
        keeps = await self._ask(parse.recovers, "info", "-t", "vnpu-cfg-recover")
        if not keeps:
            await self._ask(parse.recovery_set, "set", "-t", "vnpu-cfg-recover", "-d", "1")

    async def share(self, key: parse.ChipKey) -> bool:  # noqa: ARG002 - the tool asks back and gets no answer
        """Return false: the tool asks for confirmation, so an administrator must run it."""
        return False
