# SPDX-License-Identifier: Apache-2.0
"""Ascend vNPUs: templates of a chip, made and removed by number, through DCMI or npu-smi.

Commands, calls and answers follow Huawei's manuals of npu-smi and DCMI and recorded output of
machines; the reader chooses between the two interfaces. A chip with physical id P uses the numbers
``16 P + 100`` and the next 7 (310P) or 15 (910). The agent chooses the number, so that it can
identify the vNPU of a call that was killed. Before the call the agent checks the chip's free AI
cores, AI CPUs, memory and DVPP units; values that the chip does not report (``NA``, 910A) are not
checked.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.ascend import parse
from hami_nodeagent.drivers.ascend.way import Look, Way
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceBusy, NotSupported
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused

_FIRST, _PER_CHIP = 100, 16
_IDS_310P = 8
_GIB_MIB = 1024

T = TypeVar("T")


class ChipCard(Struct, frozen=True, kw_only=True):
    """One chip, as far as dividing it goes."""

    key: parse.ChipKey
    type: str
    physical: int
    has_processes: bool
    division: parse.Division
    templates: dict[str, Profile]

    def numbers(self) -> range:
        """Numbers that vNPUs of the chip may have."""
        first = self.physical * _PER_CHIP + _FIRST
        return range(first, first + (_IDS_310P if self.type == "Ascend310P" else _PER_CHIP))

    def lacks(self, template: Profile) -> str:
        """Return the resource that is insufficient for another partition; empty: none."""
        live = [self.templates.get(one.template) for one in self.division.instances]
        for name, total in self.division.totals.items():
            need = template.resources.get(name, 0)
            taken = sum(one.resources.get(name, 0) for one in live if one is not None)
            left = min(total - taken, self.division.free.get(name, total))
            if need > left:
                return f"{name}: {need} needed, {max(0, left)} of {total} left"
        memory = self.division.memory_gib * _GIB_MIB
        taken = sum(one.memory_mib for one in live if one is not None)
        if memory and template.memory_mib > memory - taken:
            return f"memory: {template.memory_mib} MiB needed, {memory - taken} of {memory} left"
        return ""


class ChipSource(Protocol):
    """The chips of a node, through DCMI or npu-smi."""

    async def look(self) -> Look:
        """Read all chips with their divisions."""
        ...

    async def through(self, call: Callable[[Way], Awaitable[T]]) -> T:
        """Make a call through the interface in use."""
        ...


class AscendPartitioner(ToolPartitioner[ChipCard]):
    """vNPUs."""

    vendor = "ascend"

    def __init__(self, reader: ChipSource) -> None:
        """Use the reader's tool and its cached boards."""
        super().__init__()
        self._reader = reader
        self._keeps = False

    async def look(self) -> Picture[ChipCard]:
        """Read the chips whose division is reported; chips that cannot be divided are left out."""
        cards: dict[str, ChipCard] = {}
        instances: list[Instance] = []
        for one in (await self._reader.look()).chips:
            if one.division is None or not one.die:
                continue
            templates = {template.name: template for template in one.templates}
            cards[one.die] = ChipCard(
                key=one.chip.key,
                type=parse.type_of(one.chip.name),
                physical=one.physical,
                has_processes=bool(one.chip.processes),
                division=one.division,
                templates=templates,
            )
            instances += [_instance(one.die, live, templates) for live in one.division.instances]
        return Picture(cards, tuple(instances))

    def decide(self, wanted: Wanted, card: ChipCard) -> Decision:
        """A template that the chip has room for, and the lowest free number."""
        template = card.templates.get(wanted.profile)
        if template is None:
            known = ", ".join(sorted(card.templates)) or "none"
            raise refused(wanted, f"no template {wanted.profile!r}; there are {known}")
        if missing := card.lacks(template):
            raise refused(wanted, f"too little room for {wanted.profile}: {missing}")
        if card.has_processes and not card.division.instances:
            detail = "processes use the whole chip: it is divided only when it is idle"
            raise DeviceBusy(doing=f"divide {wanted.uuid}", detail=detail)
        used = {one.id for one in card.division.instances}
        free = next((number for number in card.numbers() if number not in used), None)
        if free is None:
            raise refused(wanted, f"all {len(card.numbers())} vNPU numbers of the chip are used")
        return Decision(wanted, str(free))

    async def make(self, decision: Decision, card: ChipCard) -> None:
        """Create the vNPU with one call; before the first call, make vNPUs survive host reboots."""
        await self._keep()
        profile, number = decision.wanted.profile, decision.instance_id
        await self._reader.through(lambda way: way.create(card.key, profile, number))

    async def remove(self, instance: Instance, card: ChipCard) -> None:
        """One call."""
        number = instance.instance_id
        await self._reader.through(lambda way: way.destroy(card.key, number))

    async def _keep(self) -> None:
        """Enable recovery if it is disabled; drivers without the setting always recover."""
        if self._keeps:
            return
        try:
            await self._reader.through(lambda way: way.keep())
        except (NotSupported, AnswerUnknown):
            return
        self._keeps = True


def _instance(uuid: str, one: parse.Instance, templates: dict[str, Profile]) -> Instance:
    return Instance(
        uuid=uuid,
        instance_id=str(one.id),
        profile=one.template if one.template in templates else "",
        is_busy=one.used,
        handles={"vnpu_id": str(one.id)},
    )
