# SPDX-License-Identifier: Apache-2.0
"""Iluvatar CoreX through its library IXML, or through ixsmi: the table, and ``-L`` for UUIDs.

Only the library reports health. Where it reports the vendor's own links, ``topo -m`` has the same.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.iluvatar import binding as ixml
from hami_nodeagent.drivers.iluvatar import parse
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.rules import Neighbour


class IluvatarReader(TwoWayReader):
    """IXML, or ixsmi."""

    vendor = "iluvatar"
    tool_name = "ixsmi"
    rules = parse.RULES
    program = ixml.PROGRAM

    async def glance_library(self) -> Sight:
        """One run for all chips."""
        return await self.library.ask(parse.told, "glance")

    async def survey_library(self) -> Sight:
        """The same, with the links."""
        return await self.library.ask(parse.told, "survey")

    async def glance_tool(self) -> Sight:
        """Read the table; chips are identified by their addresses."""
        chips, version = await self.ask(parse.table)
        return Sight(devices=chips, driver_version=version)

    async def survey_tool(self) -> Sight:
        """The table, the UUIDs and the links."""
        sight = await self.glance_tool()
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
