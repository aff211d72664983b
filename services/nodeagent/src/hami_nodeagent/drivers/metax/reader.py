# SPDX-License-Identifier: Apache-2.0
"""MetaX through its library MXSML, or through mx-smi.

mx-smi: ``-L`` for identity and availability, the table for memory and load.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.metax import binding as mxsml
from hami_nodeagent.drivers.metax import parse
from hami_nodeagent.drivers.metax.partitioner import MetaxPartitioner
from hami_nodeagent.drivers.parse import library
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import ToolSettings, drm_of
from hami_nodeagent.drivers.rules import Neighbour

_SGPU_SHARES = 16


class MetaxReader(TwoWayReader):
    """MXSML, or mx-smi."""

    vendor = "metax"
    tool_name = "mx-smi"
    rules = parse.RULES
    program = mxsml.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = MetaxPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Slices of a GPU."""
        return self._partitioner

    async def glance_library(self) -> Sight:
        """One run for all GPUs."""
        return await self._told("glance")

    async def survey_library(self) -> Sight:
        """The same, the device nodes and the links."""
        return await self._with_nodes(await self._told("survey"))

    async def _told(self, word: str) -> Sight:
        sight = await self.library.ask(library.devices, word)
        devices = tuple(replace(seen, type=parse.type_of(seen.type)) for seen in sight.devices)
        return replace(sight, devices=devices)

    async def glance_tool(self) -> Sight:
        """Read both lists; an unavailable GPU has no UUID and is identified by its address."""
        listed = await self.ask(parse.listed, "-L")
        rows, version = await self.ask(parse.table)
        row_by_place = {row.place: row for row in rows}
        devices = tuple(_joined(one, row_by_place.get(one.bus_id)) for one in listed)
        return Sight(devices=devices, driver_version=version)

    async def survey_tool(self) -> Sight:
        """A glance, the device nodes and the links."""
        sight = await self._with_nodes(await self.glance_tool())
        place_by_number = {seen.index: seen.place for seen in sight.devices}
        views: dict[tuple[str, str], Neighbour] = {}
        try:
            for (a, b), view in (await self.ask(parse.topology, "topo", "-m")).items():
                if a in place_by_number and b in place_by_number:
                    views[place_by_number[a], place_by_number[b]] = view
        except (AnswerUnknown, NotSupported):
            views = {}
        return replace(sight, views=views)

    async def _with_nodes(self, sight: Sight) -> Sight:
        """Add the numbers of device nodes from sysfs, and the limit of sharers."""
        devices: list[Seen] = []
        for seen in sight.devices:
            card, render = await self.read_files(drm_of, self.settings.sysfs_root, seen.bus_id)
            attributes = dict(seen.attributes)
            if render is not None:
                attributes["render"] = str(render)
            devices.append(
                replace(
                    seen,
                    minor=card,
                    max_shares=_SGPU_SHARES if seen.mode == "sgpu" else 0,
                    attributes=attributes,
                )
            )
        return replace(sight, devices=tuple(devices))


def _joined(listed: parse.Listed, row: Seen | None) -> Seen:
    if not listed.uuid:
        return Seen(
            place=listed.bus_id,
            index=listed.index,
            bus_id=listed.bus_id,
            condition=Condition.BAD,
            reason=listed.trouble,
        )
    if row is None:
        return Seen(
            place=listed.bus_id,
            index=listed.index,
            uuid=listed.uuid,
            type=listed.model,
            bus_id=listed.bus_id,
            mode="whole",
            condition=Condition.DOUBTFUL,
            reason="it is not in the table of mx-smi",
        )
    return replace(row, index=listed.index, uuid=listed.uuid, type=listed.model)
