# SPDX-License-Identifier: Apache-2.0
"""Moore Threads through mthreads-gmi: one table tells all that it tells.

It tells no UUID, so a device is known by its node and address. A card that is divided into MPC
instances is not given: its instances are.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.parse import mthreads as parse
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.reader import Signs, ToolReader

SIGNS = Signs(pci_vendors=("1ed5",))


class MthreadsReader(ToolReader):
    """mthreads-gmi."""

    vendor = "mthreads"
    tool_name = "mthreads-gmi"
    rules = parse.RULES

    async def glance(self) -> Sight:
        """See ``survey``."""
        return await self.survey()

    async def survey(self) -> Sight:
        """The table."""
        devices, version = await self.ask(parse.table)
        node = self.settings.node
        return Sight(
            devices=tuple(
                replace(device, uuid=f"MTT-{node}-{device.bus_id.replace(':', '-')}")
                for device in devices
                if device.attributes.get("kind") != parse.PARENT
            ),
            driver_version=version,
        )
