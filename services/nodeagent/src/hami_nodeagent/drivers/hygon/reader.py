# SPDX-License-Identifier: Apache-2.0
"""Hygon DCU through the libraries RSMI and DMI or through hy-smi, and vDCUs from their files.

``/etc/vdev/vdev<N>.conf`` describes a virtual DCU; files whose unit count does not match their
masks are reported as problems. Where an installation lacks a query (virtual, NUMA, health), its
facts are left out. Only the library reports processes and links.
"""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.hygon import binding as rsmi
from hami_nodeagent.drivers.hygon import parse
from hami_nodeagent.drivers.hygon.partitioner import HygonPartitioner
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse import library as library_answers
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import ToolSettings, drm_of, read_text

_FACTS = (
    "--showuniqueid", "--showserial", "--showbus", "--showmeminfo", "vram", "--showproductname",
    "--json",
)  # fmt: skip
_SHARES = 4
"""vDCUs that fit on one card."""
_SOFT_FAILURES = (NotSupported, AnswerUnknown)


class HygonReader(TwoWayReader):
    """RSMI, or hy-smi."""

    vendor = "hygon"
    tool_name = "hy-smi"
    rules = parse.RULES
    program = rsmi.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = HygonPartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """Virtual DCUs."""
        return self._partitioner

    async def glance_tool(self) -> Sight:
        """Identity with memory in use, then load and health."""
        cards = await self.ask(parse.cards, *_FACTS)
        rows = await self.ask(parse.table)
        health = await self._health()
        return Sight(devices=tuple(_joined(card, rows, health) for card in cards))

    async def glance_library(self) -> Sight:
        """One run."""
        sight = await self.library.ask(library_answers.devices, "glance")
        return replace(sight, devices=tuple(map(_named, sight.devices)))

    async def survey_tool(self) -> Sight:
        """Return a glance and static values: NUMA, compute units, device nodes, vDCU files."""
        sight = await self.glance_tool()
        numa = await self._numa()
        units = await self._units_of_tool()
        devices = tuple(
            _with_units(replace(seen, numa=numa.get(seen.index)), units.get(seen.index))
            for seen in sight.devices
        )
        return await self._complete(replace(sight, devices=devices))

    async def survey_library(self) -> Sight:
        """The same facts, and links."""
        sight = await self.library.ask(library_answers.devices, "survey")
        return await self._complete(replace(sight, devices=tuple(map(_named, sight.devices))))

    async def _complete(self, sight: Sight) -> Sight:
        """Add the facts that this host's files contain."""
        vdcus, problems = await self.read_files(self._vdcus)
        devices: list[Seen] = []
        for seen in sight.devices:
            card, render = await self.read_files(drm_of, self.settings.sysfs_root, seen.bus_id)
            attributes = dict(seen.attributes)
            if render is not None:
                attributes["render"] = str(render)
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
                    max_shares=_SHARES,
                    attributes=attributes,
                )
            )
        version = await self.read_files(self._version)
        return replace(
            sight,
            devices=tuple(devices),
            driver_version=version,
            problems=(*sight.problems, *problems),
        )

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

    async def cards(self) -> tuple[Seen, ...]:
        """Return cards, each with an identity, and with ``compute_units`` where it is reported."""
        return await self.either(self._cards_of_library, self._cards_of_tool)

    async def _cards_of_library(self) -> tuple[Seen, ...]:
        sight = await self.library.ask(library_answers.devices, "survey")
        if unnamed := [seen for seen in sight.devices if not seen.uuid]:
            raise forms.unknown("the serial number of a card", unnamed[0].reason)
        return tuple(map(_named, sight.devices))

    async def _cards_of_tool(self) -> tuple[Seen, ...]:
        cards = await self.ask(parse.cards, *_FACTS)
        units = await self._units_of_tool()
        return tuple(_with_units(card, units.get(card.index)) for card in cards)

    async def _units_of_tool(self) -> dict[int, int]:
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


def _named(seen: Seen) -> Seen:
    """A card of the library's list as hy-smi names it."""
    return replace(
        seen,
        uuid=f"DCU-{seen.uuid}" if seen.uuid else "",
        type=f"DCU-{seen.type}" if seen.type else "",
    )


def _with_units(seen: Seen, units: int | None) -> Seen:
    told = {} if units is None else {"compute_units": str(units)}
    return replace(seen, attributes={**seen.attributes, **told})
