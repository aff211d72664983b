# SPDX-License-Identifier: Apache-2.0
"""AWS Neuron through neuron-ls, and one report of neuron-monitor for errors and load.

Devices have no identity of their own: HAMi names them by node and index, and so do we. Where
neuron-monitor is not installed, load and errors are not told.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceHung, DriverMissing
from hami_nodeagent.drivers.parse import awsneuron as parse
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.reader import Signs, ToolReader, ToolSettings, read_text
from hami_nodeagent.drivers.rules import Neighbour
from hami_nodeagent.drivers.tool import Tool

SIGNS = Signs(paths=("devices/virtual/neuron_device", "class/neuron_device"))
_MONITOR = "neuron-monitor"


class AwsNeuronReader(ToolReader):
    """neuron-ls and neuron-monitor."""

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
        """Devices and links, then one report."""
        devices, peers = await self.ask(parse.devices, "-j")
        report = await self._report()
        kinds = {one.index: await self.read_files(self._kind, one.index) for one in devices}
        views = {
            (str(a), str(b)): Neighbour(level="node", fabric_links=1)
            for a, others in peers.items()
            for b in others
            if a in others_of(peers, b)
        }
        return Sight(
            devices=tuple(self._judged(one, report, kinds[one.index]) for one in devices),
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

    def _kind(self, number: int) -> str:
        root = Path(self.settings.sysfs_root) / "devices/virtual/neuron_device"
        text = read_text(root / f"neuron{number}/info/architecture/device_name").strip().lower()
        return text if text.isascii() and text.isalnum() else ""

    def _judged(self, seen: Seen, report: parse.Monitored | None, kind: str) -> Seen:
        errors = 0 if report is None else report.ecc_by_device.get(seen.index, 0)
        cores = int(seen.attributes["cores"])
        return replace(
            seen,
            uuid=f"{self.settings.node}-AWSNeuron-{seen.index}",
            type=kind or (report.type if report is not None else "") or "neuron",
            max_shares=cores,
            condition=Condition.BAD if errors else Condition.GOOD,
            reason=f"{errors} uncorrectable memory errors" if errors else "",
            core_pct=None
            if report is None
            else parse.load_of(seen.attributes["core_ids"], report.core_pct_by_core, cores),
        )


def others_of(peers: dict[int, tuple[int, ...]], device: int) -> tuple[int, ...]:
    """Which devices ``device`` is connected to; of a device that is not listed nothing is said."""
    return peers.get(device, ())
