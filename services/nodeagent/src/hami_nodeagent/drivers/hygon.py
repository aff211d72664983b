# SPDX-License-Identifier: Apache-2.0
"""Hygon DCU through hy-smi, and the vDCUs of this host from their files.

``/etc/vdev/vdev<N>.conf`` describes a virtual DCU; files whose count is not that of their masks are
told as problems. Queries that some installations lack (virtual, NUMA, health) leave facts out.
"""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.parse import hygon as parse
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partition_hygon import HygonPartitioner
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import Signs, ToolReader, ToolSettings, drm_of, read_text

SIGNS = Signs(
    pci_vendors=("1d94",),
    pci_classes=("0380", "0302", "12"),
    paths=("module/hycu", "module/hydcu"),
)
_FACTS = (
    "--showuniqueid", "--showserial", "--showbus", "--showmeminfo", "vram", "--showproductname",
    "--json",
)  # fmt: skip
_SHARES = 4
"""vDCUs that fit on one card."""
_SOFT_FAILURES = (NotSupported, AnswerUnknown)


class HygonReader(ToolReader):
    """hy-smi."""

    vendor = "hygon"
    tool_name = "hy-smi"
    rules = parse.RULES
    facts = _FACTS
    """The query that tells identity, address and memory."""

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = HygonPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Virtual DCUs."""
        return self._partitioner

    async def glance(self) -> Sight:
        """Identity with memory in use, then load and health."""
        cards = await self.ask(parse.cards, *_FACTS)
        rows = await self.ask(parse.table)
        health = await self._health()
        return Sight(devices=tuple(_joined(card, rows, health) for card in cards))

    async def survey(self) -> Sight:
        """A glance, and what does not change: NUMA, compute units, device nodes, vDCU files."""
        sight = await self.glance()
        numa = await self._numa()
        units = await self.units()
        vdcus, problems = await self.read_files(self._vdcus)
        devices: list[Seen] = []
        for seen in sight.devices:
            card, render = await self.read_files(drm_of, self.settings.sysfs_root, seen.bus_id)
            attributes = dict(seen.attributes)
            if render is not None:
                attributes["render"] = str(render)
            if seen.index in units:
                attributes["compute_units"] = str(units[seen.index])
            own = [one for one in vdcus if one.bus_id == seen.bus_id]
            if own:
                attributes["instances"] = msgspec.json.encode(
                    [
                        {"id": one.vdev, "cu": one.cu_count, "memory_mib": one.memory_mib}
                        for one in own
                    ]
                ).decode()
            devices.append(
                replace(
                    seen,
                    minor=seen.index if card is None else card,
                    numa=numa.get(seen.index),
                    max_shares=_SHARES,
                    attributes=attributes,
                )
            )
        version = await self.read_files(self._version)
        return Sight(devices=tuple(devices), driver_version=version, problems=problems)

    async def _health(self) -> dict[int, tuple[Condition, str]]:
        try:
            return await self.ask(parse.health, "--showhealth")
        except _SOFT_FAILURES:
            return {}

    async def _numa(self) -> dict[int, int]:
        try:
            return await self.ask(parse.numa, "--showtoponuma")
        except _SOFT_FAILURES:
            return {}

    async def units(self) -> dict[int, int]:
        """Compute units by card number; empty where the tool has no such query."""
        try:
            return await self.ask(parse.compute_units, "virtual", "-show-device-info")
        except _SOFT_FAILURES:
            return {}

    def _version(self) -> str:
        module = Path(self.settings.sysfs_root) / "module"
        texts = (read_text(module / name / "version").strip() for name in ("hycu", "hydcu"))
        return next((text for text in texts if text), "")

    def _vdcus(self) -> tuple[tuple[parse.Vdcu, ...], tuple[str, ...]]:
        found: list[parse.Vdcu] = []
        problems: list[str] = []
        for path in sorted((Path(self.settings.etc_root) / "vdev").glob("vdev*.conf")):
            try:
                found.append(parse.vdcu(read_text(path)))
            except AnswerUnknown as error:
                problems.append(f"{path.name}: {error.doing}: not as it must be")
        return tuple(found), tuple(problems)


def _joined(card: Seen, rows: dict[int, Seen], health: dict[int, tuple[Condition, str]]) -> Seen:
    row = rows.get(card.index)
    condition, reason = Condition.DOUBTFUL, "hy-smi does not list it"
    if row is not None:
        condition, reason = row.condition, row.reason
    if card.index in health and health[card.index][0] is not Condition.GOOD:
        condition, reason = health[card.index][0], f"health {health[card.index][1]}"
    return replace(
        card,
        condition=condition,
        reason=reason,
        core_pct=None if row is None else row.core_pct,
        temperature_c=None if row is None else row.temperature_c,
        power_w=None if row is None else row.power_w,
    )
