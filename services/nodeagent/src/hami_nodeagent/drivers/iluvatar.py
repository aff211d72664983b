# SPDX-License-Identifier: Apache-2.0
"""Iluvatar CoreX through ixsmi: the table, and ``-L`` for the UUIDs."""

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.parse import iluvatar as parse
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.reader import Signs, ToolReader
from hami_nodeagent.drivers.rules import Neighbour

SIGNS = Signs(pci_vendors=("1e3e",))


class IluvatarReader(ToolReader):
    """ixsmi."""

    vendor = "iluvatar"
    tool_name = "ixsmi"
    rules = parse.RULES

    async def glance(self) -> Sight:
        """The table; chips are known by their addresses."""
        chips, version = await self.ask(parse.table)
        return Sight(devices=chips, driver_version=version)

    async def survey(self) -> Sight:
        """The table, the UUIDs and the links."""
        sight = await self.glance()
        uuids = await self.ask(parse.uuids, "-L")
        place_by_number = {chip.index: chip.place for chip in sight.devices}
        views: dict[tuple[str, str], Neighbour] = {}
        try:
            for (a, b), view in (await self.ask(parse.topology, "topo", "-m")).items():
                if a in place_by_number and b in place_by_number:
                    views[place_by_number[a], place_by_number[b]] = view
        except (AnswerUnknown, NotSupported):
            views = {}
        return replace(
            sight,
            devices=tuple(replace(chip, uuid=uuids.get(chip.index, "")) for chip in sight.devices),
            views=views,
        )
