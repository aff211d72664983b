# SPDX-License-Identifier: Apache-2.0
"""Ascend vNPUs through npu-smi: templates of a chip, made and removed by number.

Commands and answers as Huawei's manual "npu-smi command reference" has them (create-vnpu,
destroy-vnpu, info-vnpu, template-info, vnpu-cfg-recover) and machines printed them. Of a chip with
physical id P the numbers are ``16 P + 100`` and the next 7 (310P) or 15 (910). We choose the
number, so that what a command made is known also when the command was killed. A chip's AI cores,
AI CPUs, memory and DVPP units are counted before the command; columns that it does not tell
(``NA``, 910A) are not.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceBusy, NotSupported
from hami_nodeagent.drivers.parse import ascend as parse
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.partitioner import Instance, Wanted

if TYPE_CHECKING:
    from hami_nodeagent.drivers.ascend import AscendReader

_FIRST, _PER_CHIP = 100, 16
_IDS_310P = 8
_GIB_MIB = 1024


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
        """What there is too little of for another one; empty: nothing."""
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


class AscendPartitioner(ToolPartitioner[ChipCard]):
    """vNPUs."""

    vendor = "ascend"

    def __init__(self, reader: "AscendReader") -> None:
        """Use the reader's tool and what it remembers of boards."""
        super().__init__()
        self._reader = reader
        self._keeps = False

    async def look(self) -> Picture[ChipCard]:
        """Chips whose division npu-smi tells; those it refuses to divide are left out."""
        chips, version = await self._reader.ask(parse.info, "info")
        places = await self._reader.ask(parse.mapping, "info", "-m")
        try:
            told = await self._reader.ask(parse.templates, "info", "-t", "template-info")
        except NotSupported:
            return Picture({}, ())
        templates = {template.name: template for template in told}
        cards: dict[str, ChipCard] = {}
        instances: list[Instance] = []
        for chip in chips:
            place = places.get(chip.key)
            board = await self._reader.board(chip, version)
            if place is None or not board.die:
                continue
            npu, number = map(str, chip.key)
            try:
                division = await self._reader.ask(
                    parse.division, "info", "-t", "info-vnpu", "-i", npu, "-c", number
                )
            except NotSupported:
                continue
            numbers = (place.physical, chip.physical, place.logic)
            cards[board.die] = ChipCard(
                key=chip.key,
                type=parse.type_of(chip.name),
                physical=next(one for one in numbers if one is not None),
                has_processes=bool(chip.processes),
                division=division,
                templates=templates,
            )
            instances += [_instance(board.die, one, templates) for one in division.instances]
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
        """One command; before the first, vNPUs are told to outlive a reboot of the host."""
        await self._keep()
        npu, chip = map(str, card.key)
        await self._reader.ask(
            parse.created,
            *("set", "-t", "create-vnpu", "-i", npu, "-c", chip),
            *("-f", decision.wanted.profile, "-v", decision.instance_id),
        )

    async def remove(self, instance: Instance, card: ChipCard) -> None:
        """One command."""
        npu, chip = map(str, card.key)
        await self._reader.ask(
            parse.destroyed,
            *("set", "-t", "destroy-vnpu", "-i", npu, "-c", chip, "-v", instance.instance_id),
        )

    async def _keep(self) -> None:
        """Switch recovery on where it is off; tools that do not know it recover always."""
        if self._keeps:
            return
        try:
            keeps = await self._reader.ask(parse.recovers, "info", "-t", "vnpu-cfg-recover")
            if not keeps:
                await self._reader.ask(
                    parse.recovery_set, "set", "-t", "vnpu-cfg-recover", "-d", "1"
                )
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
