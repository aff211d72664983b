# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin XPU through the library XPUML or its xpu-smi: one list.

The library and the tool report no common UUID, so an XPU is identified by its node and address. A
card that SR-IOV can divide has the sizes of its parts; for a divided card the list shows the size
of one part, and further rows for the parts, which are not devices. No published call of the library
reports memory errors: where xpu-smi is installed and permitted, they come from its table, and
errors of that run are ignored.
"""

from msgspec.structs import replace

from hami_common.vendors import kunlunxin as pure
from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.kunlunxin import binding as xpuml
from hami_nodeagent.drivers.kunlunxin import parse
from hami_nodeagent.drivers.kunlunxin.partitioner import KunlunxinPartitioner, functions_by_card
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse import forms, library
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import ToolSettings


class KunlunxinReader(TwoWayReader):
    """XPUML, or xpu-smi."""

    vendor = "kunlunxin"
    tool_name = "xpu-smi"
    rules = parse.RULES
    program = xpuml.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._condemned: dict[str, str] = {}
        """Last reasons why the tool condemned cards, by address, while the library is in use."""
        self._partitioner = KunlunxinPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Parts of a card."""
        return self._partitioner

    def forget(self) -> None:
        """Errors are counted since the driver was loaded."""
        super().forget()
        self._condemned = {}

    def uuid_of(self, address: str) -> str:
        """Identity of a card."""
        return f"XPU-{self.settings.node}-{address.replace(':', '-')}"

    async def rows(self) -> Sight:
        """Cards and their parts as the vendor lists them."""
        return await self.either(self._rows_of_library, self._rows_of_tool)

    async def cut(self, address: str, index: int, parts: int) -> None:
        """Cut an idle card into equal parts, or put it together with 0."""
        words = (f"--set-sriov-numvfs={parts}", f"--id={index}")
        await self.either(
            lambda: self.library.run("cut", address, str(parts)),
            lambda: self.change(*words),
        )

    async def glance_library(self) -> Sight:
        """See ``survey_library``."""
        return await self.survey_library()

    async def glance_tool(self) -> Sight:
        """See ``survey_tool``."""
        return await self.survey_tool()

    async def survey_library(self) -> Sight:
        """Read the library's list; add memory errors from the tool's table if available."""
        sight = await self._rows_of_library()
        if self.settings.interface != "library" and self.tool.find() is not None:
            try:
                rows = (await self._rows_of_tool()).devices
                bad = [row for row in rows if row.condition is Condition.BAD]
                self._condemned = {row.bus_id: row.reason for row in bad}
            except DriverError:
                pass
        devices = tuple(self._judged(row) for row in sight.devices)
        return await self._cards(replace(sight, devices=devices))

    async def survey_tool(self) -> Sight:
        """The table."""
        return await self._cards(await self._rows_of_tool())

    async def _rows_of_library(self) -> Sight:
        return await self.library.ask(_listed, "look")

    async def _rows_of_tool(self) -> Sight:
        rows, version = await self.ask(parse.table)
        return Sight(devices=rows, driver_version=version)

    async def _cards(self, sight: Sight) -> Sight:
        """Select the rows that are cards, from sysfs; cards without an address use their place."""
        addresses = tuple(row.bus_id for row in sight.devices if row.bus_id)
        functions = await self.read_files(functions_by_card, self.settings.sysfs_root, addresses)
        return replace(
            sight,
            devices=tuple(
                self._card(row, len(functions[row.bus_id])) if row.bus_id else row
                for row in sight.devices
                if not row.bus_id or row.bus_id in functions
            ),
        )

    def _judged(self, row: Seen) -> Seen:
        reason = self._condemned.get(row.bus_id, "")
        if not reason or row.condition is Condition.BAD:
            return row
        return replace(row, condition=Condition.BAD, reason=reason)

    def _card(self, row: Seen, parts: int) -> Seen:
        memory_mib = (row.memory_mib or 0) * (parts or 1)
        divisible = "sriov" in row.attributes
        return replace(
            row,
            uuid=self.uuid_of(row.bus_id),
            memory_mib=memory_mib or None,
            minor=row.index if row.minor is None else row.minor,
            partitions=pure.partitions_of(memory_mib) if divisible else (),
        )


def _listed(text: str) -> Sight:
    """The library's list; two at one address are no answer."""
    sight = library.devices(text)
    addresses = [row.bus_id for row in sight.devices if row.bus_id]
    if len(set(addresses)) != len(addresses):
        raise forms.unknown("the addresses of XPUs", " ".join(addresses))
    return sight
