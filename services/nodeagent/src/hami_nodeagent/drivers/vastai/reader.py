# SPDX-License-Identifier: Apache-2.0
"""Vastai through vasmi: ``getmem`` for the devices, ``summary`` for their power."""

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.reader import ToolReader
from hami_nodeagent.drivers.vastai import parse

_JSON = "--display-format=json"


class VastaiReader(ToolReader):
    """vasmi."""

    vendor = "vastai"
    tool_name = "vasmi"

    async def glance(self) -> Sight:
        """See ``survey``."""
        return await self.survey()

    async def survey(self) -> Sight:
        """Run both queries; without the second, power is not reported."""
        devices = await self.ask(parse.devices, "getmem", _JSON)
        power: dict[str, float] = {}
        try:
            power = await self.ask(parse.power_by_address, "summary", _JSON)
        except (AnswerUnknown, NotSupported):
            power = {}
        return Sight(devices=tuple(replace(one, power_w=power.get(one.bus_id)) for one in devices))
