# SPDX-License-Identifier: Apache-2.0
"""AWS Neuron through neuron-ls, the kernel driver's sysfs, and neuron-monitor for the load.

Devices have no hardware identity: HAMi names them by node and index, and so does this driver.
Health and memory in use come from sysfs (``tree``), further errors from neuron-monitor. Where
neuron-monitor is not installed, the load is not reported. No C library of the vendor can be used as
well: libnrt reserves cores for the process that initializes it, and opening a device node, as its
NDL calls do, attaches a process to the device.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hami_nodeagent.drivers.awsneuron import parse
from hami_nodeagent.drivers.awsneuron import tree as neuron_tree
from hami_nodeagent.drivers.awsneuron.tree import Tree
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceHung, DriverMissing
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.reader import ToolReader, ToolSettings
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.drivers.tool import Tool

_MONITOR = "neuron-monitor"


class AwsNeuronReader(ToolReader):
    """neuron-ls, sysfs and neuron-monitor."""

    vendor = "awsneuron"
    tool_name = "neuron-ls"
    rules = parse.RULES

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        beside = Path(settings.tool_path).with_name(_MONITOR) if settings.tool_path else None
        self._monitor = Tool(_MONITOR, path=str(beside or ""), limit_s=settings.query_limit_s)

    @property
    def tools(self) -> Sequence[Tool]:
        """Both."""
        return (self.tool, self._monitor)

    async def glance(self) -> Sight:
        """See ``survey``."""
        return await self.survey()

    async def survey(self) -> Sight:
        """Read devices and links, then the sysfs values of each device, then one report."""
        devices, peers = await self.ask(parse.devices, "-j")
        trees = {
            one.index: await self.read_files(neuron_tree.read, self.settings.sysfs_root, one.index)
            for one in devices
        }
        report = await self._report()
        views = {
            (str(a), str(b)): Neighbour(level="node", fabric_links=1)
            for a, others in peers.items()
            for b in others
            if a in others_of(peers, b)
        }
        return Sight(
            devices=tuple(self._judged(one, report, trees[one.index]) for one in devices),
            views=views,
        )

    async def _report(self) -> parse.Monitored | None:
        if self._monitor.find() is None:
            return None
        try:
            return await self.ask(parse.monitored, tool=self._monitor, one_line=True)
        except (AnswerUnknown, DeviceHung):
            return None
        except DriverMissing as error:
            if error.code:  # the tool itself is missing or cannot start
                return None
            raise

    def _judged(self, seen: Seen, report: parse.Monitored | None, tree: Tree) -> Seen:
        reported = 0 if report is None else report.ecc_by_device.get(seen.index, 0)
        condition, reason = neuron_tree.condition_of(tree, reported)
        cores = int(seen.attributes["cores"])
        return replace(
            seen,
            uuid=f"{self.settings.node}-AWSNeuron-{seen.index}",
            type=tree.kind or (report.type if report is not None else "") or "neuron",
            max_shares=cores,
            condition=condition,
            reason=reason,
            attributes={**seen.attributes, **tree.attributes},
            used_mib=tree.used_mib,
            core_pct=None
            if report is None
            else parse.load_of(seen.attributes["core_ids"], report.core_pct_by_core, cores),
        )


def others_of(peers: dict[int, tuple[int, ...]], device: int) -> tuple[int, ...]:
    """Return the devices connected to ``device``; empty for a device that is not listed."""
    return peers.get(device, ())
