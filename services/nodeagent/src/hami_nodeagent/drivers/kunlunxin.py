# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin XPU through its xpu-smi: one table.

It tells no UUID, so an XPU is known by its node and address. A card that can be cut by SR-IOV
carries the sizes of its parts; of one that is cut the table shows the size of one part, and further
rows for the parts, which are no devices of their own.
"""

from msgspec.structs import replace

from hami_common.vendors import kunlunxin as pure
from hami_nodeagent.drivers.parse import kunlunxin as parse
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.partition_kunlunxin import KunlunxinPartitioner, functions_by_card
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import Signs, ToolReader, ToolSettings

SIGNS = Signs(pci_vendors=("1d22",), pci_classes=("12", "03"))


class KunlunxinReader(ToolReader):
    """xpu-smi."""

    vendor = "kunlunxin"
    tool_name = "xpu-smi"
    rules = parse.RULES

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = KunlunxinPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Parts of a card."""
        return self._partitioner

    def uuid_of(self, address: str) -> str:
        """Identity of a card."""
        return f"XPU-{self.settings.node}-{address.replace(':', '-')}"

    async def glance(self) -> Sight:
        """See ``survey``."""
        return await self.survey()

    async def survey(self) -> Sight:
        """The table, and from sysfs which of its rows are parts of a card."""
        rows, version = await self.ask(parse.table)
        functions = await self.read_files(
            functions_by_card, self.settings.sysfs_root, tuple(row.bus_id for row in rows)
        )
        return Sight(
            devices=tuple(
                self._card(row, len(functions[row.bus_id]))
                for row in rows
                if row.bus_id in functions
            ),
            driver_version=version,
        )

    def _card(self, row: Seen, parts: int) -> Seen:
        memory_mib = (row.memory_mib or 0) * (parts or 1)
        divisible = "sriov" in row.attributes
        return replace(
            row,
            uuid=self.uuid_of(row.bus_id),
            memory_mib=memory_mib or None,
            partitions=pure.partitions_of(memory_mib) if divisible else (),
        )
