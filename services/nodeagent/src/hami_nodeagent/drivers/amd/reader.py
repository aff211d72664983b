# SPDX-License-Identifier: Apache-2.0
"""AMD Instinct through AMD SMI's library, amd-smi, or rocm-smi with the kernel's KFD tree.

The library and amd-smi report the same identities, rocm-smi reports different ones. The agent
therefore uses rocm-smi only if neither amd-smi nor the library is installed, regardless of which
tool currently answers. Only the library reports links.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hami_common.bounds import INDEX_MOST
from hami_common.units import whole
from hami_nodeagent.drivers.amd import binding as amdsmi
from hami_nodeagent.drivers.amd import parse
from hami_nodeagent.drivers.amd.partitioner import AmdPartitioner
from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse import library as library_answers
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.protocol import ProcessUsage
from hami_nodeagent.drivers.reader import ToolSettings, drm_of, read_text
from hami_nodeagent.drivers.tool import Tool

_SOFT_FAILURES = (NotSupported, AnswerUnknown)
_OLD_TOOL = "rocm-smi"


class AmdReader(TwoWayReader):
    """AMD SMI's library, amd-smi, rocm-smi, KFD."""

    vendor = "amd"
    tool_name = "amd-smi"
    rules = parse.RULES
    program = amdsmi.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        beside = Path(settings.tool_path).with_name(_OLD_TOOL) if settings.tool_path else None
        self._old = Tool(_OLD_TOOL, path=str(beside or ""), limit_s=settings.query_limit_s)
        self._partitioner = AmdPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Masks of compute units."""
        return self._partitioner

    @property
    def tools(self) -> Sequence[Tool]:
        """All three."""
        return (*super().tools, self._old)

    @property
    def _uses_old(self) -> bool:
        if self.tool.find() is not None or self._old.find() is None:
            return False
        return self.settings.interface == "tool" or self.library.find() is None

    async def glance_library(self) -> Sight:
        """One run."""
        return await self.library.ask(library_answers.devices, "glance")

    async def survey_library(self) -> Sight:
        """One run, and the device nodes."""
        sight = await self.library.ask(library_answers.devices, "survey")
        return replace(sight, devices=tuple([await self._placed(one) for one in sight.devices]))

    async def _placed(self, seen: Seen) -> Seen:
        """With the numbers of its device nodes."""
        card, render = await self.read_files(drm_of, self.settings.sysfs_root, seen.bus_id)
        nodes = {} if render is None else {"render": str(render)}
        return replace(seen, minor=card, attributes={**seen.attributes, **nodes})

    async def glance_tool(self) -> Sight:
        """Identity, use, processes."""
        if self._uses_old:
            return await self._old_sight()
        gpus = await self.ask(parse.gpus, "list", "--json")
        metric = await self.ask(parse.metric, "metric", "--json")
        processes = await self._processes()
        return Sight(
            devices=tuple(
                _joined(gpu, metric.get(gpu.index), processes.get(gpu.index)) for gpu in gpus
            )
        )

    async def survey_tool(self) -> Sight:
        """A glance and the static facts."""
        if self._uses_old:
            return await self._old_sight()
        sight = await self.glance_tool()
        static, version = await self.ask(parse.static, "static", "--json")
        devices: list[Seen] = []
        for seen in sight.devices:
            fixed = static.get(seen.index)
            if fixed is None:
                devices.append(seen)
                continue
            told = replace(
                seen,
                type=fixed.type,
                memory_mib=fixed.memory_mib or seen.memory_mib,
                numa=fixed.numa,
                attributes={**seen.attributes, **fixed.attributes},
            )
            devices.append(await self._placed(told))
        return Sight(devices=tuple(devices), driver_version=version)

    async def _processes(self) -> dict[int, tuple[ProcessUsage, ...]]:
        try:
            return await self.ask(parse.processes, "process", "--json")
        except _SOFT_FAILURES:
            return {}

    async def _old_sight(self) -> Sight:
        rows = await self.ask(parse.concise, tool=self._old)
        nodes = await self.read_files(self._kfd)
        version = await self.read_files(
            lambda: read_text(Path(self.settings.sysfs_root) / "module/amdgpu/version").strip()
        )
        devices: list[Seen] = []
        for index, node in enumerate(nodes):
            row = rows.get(
                index,
                Seen(
                    place=str(index),
                    index=index,
                    condition=Condition.DOUBTFUL,
                    reason="rocm-smi does not list it",
                ),
            )
            card, _ = await self.read_files(drm_of, self.settings.sysfs_root, node.bus_id)
            share = int(row.attributes.get("vram_pct", "0"))
            devices.append(
                replace(
                    row,
                    place=str(index),
                    uuid=node.uuid,
                    type="",  # unknown: a made-up name would pass lists of denied types
                    memory_mib=node.memory_mib,
                    minor=card,
                    bus_id=node.bus_id,
                    attributes={
                        "compute_units": str(node.compute_units),
                        "render": str(node.render),
                    },
                    used_mib=node.memory_mib * share // 100,
                )
            )
        return Sight(devices=tuple(devices), driver_version=version)

    def _kfd(self) -> list[parse.KfdNode]:
        root = Path(self.settings.sysfs_root) / "class/kfd/kfd/topology/nodes"
        found = (whole(path.name, most=INDEX_MOST) for path in root.glob("[0-9]*"))
        numbers = sorted(number for number in found if number is not None)
        nodes = []
        for number in numbers:
            properties = read_text(root / str(number) / "properties")
            banks = "\n".join(
                read_text(path / "properties")
                for path in sorted((root / str(number) / "mem_banks").glob("*"))
            )
            node = parse.kfd_node(properties, banks)
            if node is not None:
                nodes.append(node)
        return nodes


def _joined(gpu: Seen, use: Seen | None, processes: tuple[ProcessUsage, ...] | None) -> Seen:
    if use is None:
        return replace(gpu, condition=Condition.DOUBTFUL, reason="amd-smi metric does not list it")
    return replace(
        use,
        place=gpu.place,
        index=gpu.index,
        uuid=gpu.uuid,
        bus_id=gpu.bus_id,
        attributes=gpu.attributes,
        processes=processes,
    )
