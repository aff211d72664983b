# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin XPU through its xpu-smi: one table.

It tells no UUID, so an XPU is known by its node and address. A card that was cut by SR-IOV shows
the size of one part; which parts exist is told by the vendor's plugin only.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.parse import kunlunxin as parse
from hami_nodeagent.drivers.parse.seen import Sight
from hami_nodeagent.drivers.reader import Signs, ToolReader

SIGNS = Signs(pci_vendors=("1d22",), pci_classes=("12", "03"))


class KunlunxinReader(ToolReader):
    """xpu-smi."""

    vendor = "kunlunxin"
    tool_name = "xpu-smi"
    rules = parse.RULES

    async def glance(self) -> Sight:
        """See ``survey``."""
        return await self.survey()

    async def survey(self) -> Sight:
        """The table."""
        xpus, version = await self.ask(parse.table)
        node = self.settings.node
        return Sight(
            devices=tuple(
                replace(xpu, uuid=f"XPU-{node}-{xpu.bus_id.replace(':', '-')}") for xpu in xpus
            ),
            driver_version=version,
        )
