# SPDX-License-Identifier: Apache-2.0
"""Cambricon MLU through cnmon: the table of all cards, and ``info`` for each."""

from collections.abc import Sequence

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceGone, NotSupported
from hami_nodeagent.drivers.parse import cambricon as parse
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partition_cambricon import CambriconPartitioner
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import Signs, ToolReader, ToolSettings
from hami_nodeagent.drivers.tool import Tool

SIGNS = Signs(pci_vendors=("cabc",), pci_classes=("12",))
_SMLU_SHARES = 100
"""Shares are taken in steps of one hundredth of a card."""


class CambriconReader(ToolReader):
    """cnmon."""

    vendor = "cambricon"
    tool_name = "cnmon"
    rules = parse.RULES

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = CambriconPartitioner(self)

    @property
    def tools(self) -> Sequence[Tool]:
        """cnmon, and the library in a process of its own."""
        return (self.tool, self._partitioner.library.tool)

    @property
    def partitioner(self) -> Partitioner:
        """Instances of sMLU profiles."""
        return self._partitioner

    async def glance(self) -> Sight:
        """See ``survey``: identity and health come from the same query."""
        return await self.survey()

    async def survey(self) -> Sight:
        """The table names the cards, ``info`` tells each card's identity and health."""
        cards, version = await self.ask(parse.table)
        devices = [await self._card(card) for card in cards]
        return Sight(devices=tuple(devices), driver_version=version)

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
            max_shares=_SMLU_SHARES if row.mode == "smlu" else 0,
            used_mib=row.used_mib if card.used_mib is None else card.used_mib,
            core_pct=row.core_pct if card.core_pct is None else card.core_pct,
            temperature_c=card.temperature_c or row.temperature_c,
            power_w=row.power_w if card.power_w is None else card.power_w,
            processes=row.processes,
        )
