# SPDX-License-Identifier: Apache-2.0
"""Moore Threads through its library MTML, or through the one table of mthreads-gmi.

The table contains no UUID, so a device is identified by its node and address; the library's UUID is
an attribute, so that the identity is the same for both interfaces. A card that is divided into MPC
instances is not allocated itself: its instances are. The library reports no processes: where
mthreads-gmi is installed and permitted, they come from its table, and errors of that run are
ignored.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.mthreads import binding as mtml
from hami_nodeagent.drivers.mthreads import parse
from hami_nodeagent.drivers.parse.seen import Sight


class MthreadsReader(TwoWayReader):
    """MTML, or mthreads-gmi."""

    vendor = "mthreads"
    tool_name = "mthreads-gmi"
    rules = parse.RULES
    program = mtml.PROGRAM

    async def glance_library(self) -> Sight:
        """One run for all devices, and one of the tool for processes."""
        return await self._told("glance")

    async def survey_library(self) -> Sight:
        """The same, with the links."""
        return await self._told("survey")

    async def glance_tool(self) -> Sight:
        """See ``survey_tool``."""
        return await self.survey_tool()

    async def survey_tool(self) -> Sight:
        """The table."""
        devices, version = await self.ask(parse.table)
        return parse.identified(Sight(devices=devices, driver_version=version), self.settings.node)

    async def _told(self, command: str) -> Sight:
        sight = await self.library.ask(lambda text: parse.told(text, self.settings.node), command)
        if self.settings.interface == "library" or self.tool.find() is None:
            return sight
        try:
            rows, _ = await self.ask(parse.table)
        except DriverError:
            return sight
        by_address = {row.bus_id: row.processes for row in rows}
        return replace(
            sight,
            devices=tuple(
                replace(device, processes=by_address.get(device.bus_id)) for device in sight.devices
            ),
        )
