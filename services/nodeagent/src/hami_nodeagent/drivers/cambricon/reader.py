# SPDX-License-Identifier: Apache-2.0
"""Cambricon MLU through its library CNDEV, or through cnmon: the table, and ``info`` per card.

Only the library reports links between cards.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.cambricon import binding as cndev
from hami_nodeagent.drivers.cambricon import parse
from hami_nodeagent.drivers.cambricon.partitioner import CambriconPartitioner
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceGone, NotSupported
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse import library
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import ToolSettings

_SMLU_SHARES = 100
"""Shares have a granularity of one hundredth of a card."""


class CambriconReader(TwoWayReader):
    """CNDEV, or cnmon."""

    vendor = "cambricon"
    tool_name = "cnmon"
    rules = parse.RULES
    program = cndev.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = CambriconPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Instances of sMLU profiles."""
        return self._partitioner

    async def glance_library(self) -> Sight:
        """One run for all cards."""
        return _in_modes(await self.library.ask(library.devices, "glance"))

    async def survey_library(self) -> Sight:
        """The same, and the links."""
        return _in_modes(await self.library.ask(library.devices, "survey"))

    async def glance_tool(self) -> Sight:
        """See ``survey_tool``: identity and health come from the same query."""
        return await self.survey_tool()

    async def survey_tool(self) -> Sight:
        """List the cards from the table; read each card's identity and health with ``info``."""
        cards, version = await self.ask(parse.table)
        devices = [await self._card(card) for card in cards]
        return _in_modes(Sight(devices=tuple(devices), driver_version=version))

    async def _card(self, row: Seen) -> Seen:
        number = row.index
        try:
            card = await self.ask(lambda text: parse.card(text, number), "info", "-c", str(number))
        except DeviceGone as error:
            return replace(row, condition=Condition.BAD, reason=str(error))
        except (AnswerUnknown, NotSupported) as error:
            return replace(row, condition=Condition.DOUBTFUL, reason=str(error))
        return replace(
            card,
            type=card.type or row.type,
            memory_mib=card.memory_mib or row.memory_mib,
            bus_id=card.bus_id or row.bus_id,
            mode=row.mode,
            used_mib=row.used_mib if card.used_mib is None else card.used_mib,
            core_pct=row.core_pct if card.core_pct is None else card.core_pct,
            temperature_c=card.temperature_c or row.temperature_c,
            power_w=row.power_w if card.power_w is None else card.power_w,
            processes=row.processes,
        )


def _in_modes(sight: Sight) -> Sight:
    """Mark cards in sMLU mode as shared; others are allocated as a whole."""
    return replace(
        sight,
        devices=tuple(
            replace(
                seen,
                mode=seen.mode or "whole",
                max_shares=_SMLU_SHARES if seen.mode == "smlu" else 0,
            )
            for seen in sight.devices
        ),
    )
