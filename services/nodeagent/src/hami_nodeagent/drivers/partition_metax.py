# SPDX-License-Identifier: Apache-2.0
"""MetaX sGPUs through ``mx-smi sgpu``, on GPUs that are in sGPU mode.

Commands as MetaX's manual of mx-smi has them (``sgpu --create``, ``--remove``,
``--set-sched-class``); what ``mx-smi sgpu`` prints is in no public text, so which there are is
asked of the library, in a process of its own (``mxsml``). An sGPU has any multiple of 128 MiB, and
the alias that we choose tells which one a command made. All sGPUs of a GPU have one scheduling
class: it is set while the GPU has none, never under others. The mode is an administrator's.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from hami_nodeagent.drivers.library import LibraryProgram
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse import metax as parse
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.partitioner import Instance, Wanted
from hami_nodeagent.libraries import mxsml

if TYPE_CHECKING:
    from hami_nodeagent.drivers.metax import MetaxReader

_STEP_MIB = 128
_GIB_MIB = 1024
_KIND_BY_SCHEDULING = {number: kind for kind, number in parse.SCHEDULING_BY_KIND.items() if number}
"""Class 0 serves several kinds, so it tells none."""
_FIXED = parse.SCHEDULING_BY_KIND["fixed-share"]


class SgpuCard(Struct, frozen=True, kw_only=True):
    """One GPU in sGPU mode."""

    index: int
    memory_mib: int
    scheduling: int
    """As ``parse.SgpuGpu`` has it."""
    sgpus: dict[str, parse.Sgpu]
    """By number."""


def scheduling_of(kind: str) -> int:
    """The scheduling class for ``Share.kind``; online and offline sharers run as best effort."""
    return parse.SCHEDULING_BY_KIND.get(kind, 0)


class MetaxPartitioner(ToolPartitioner[SgpuCard]):
    """Slices of a GPU."""

    vendor = "metax"

    def __init__(self, reader: "MetaxReader") -> None:
        """Use the reader's tool, and the library that belongs to it."""
        super().__init__()
        self._reader = reader
        self.library = LibraryProgram(mxsml.PROGRAM, reader.settings)

    async def look(self) -> Picture[SgpuCard]:
        """GPUs in sGPU mode that are available; where there is none the library is not asked."""
        listed = await self._reader.ask(parse.listed, "-L")
        rows, _ = await self._reader.ask(parse.table)
        sizes = {row.place: row.memory_mib or 0 for row in rows if row.mode == "sgpu"}
        there = [one for one in listed if one.uuid and one.bus_id in sizes]
        if not there:
            return Picture({}, ())
        divided = {gpu.bus_id: gpu for gpu in await self.library.ask(parse.sgpus, "list")}
        if lacking := [one.bus_id for one in there if one.bus_id not in divided]:
            raise forms.unknown("the list of sGPUs: a GPU is missing", lacking[0])
        cards = {
            one.uuid: SgpuCard(
                index=one.index,
                memory_mib=sizes[one.bus_id],
                scheduling=divided[one.bus_id].scheduling,
                sgpus={str(sgpu.number): sgpu for sgpu in divided[one.bus_id].sgpus},
            )
            for one in there
        }
        instances = tuple(
            Instance(
                uuid=uuid,
                instance_id=number,
                memory_mib=sgpu.memory_mib,
                core_pct=sgpu.compute_pct % parse.FULL_PCT,
                kind=_KIND_BY_SCHEDULING.get(card.scheduling, ""),
                is_busy=True if sgpu.used else None,
                handles={"sgpu": number, "alias": sgpu.alias},
            )
            for uuid, card in cards.items()
            for number, sgpu in card.sgpus.items()
        )
        return Picture(cards, instances)

    def decide(self, wanted: Wanted, card: SgpuCard) -> Decision:
        """An alias of its own for what fits beside the others and is scheduled as they are."""
        others = card.sgpus.values()
        if len(others) >= parse.MOST_SGPUS:
            raise refused(wanted, f"the GPU has {len(others)} sGPUs, more are not possible")
        if wanted.memory_mib % _STEP_MIB:
            raise refused(wanted, f"{wanted.memory_mib} MiB is no multiple of {_STEP_MIB}")
        left = card.memory_mib - sum(one.memory_mib for one in others)
        if wanted.memory_mib > left:
            raise refused(wanted, f"{wanted.memory_mib} MiB needed, {left} left")
        scheduling = scheduling_of(wanted.kind)
        if others and card.scheduling != scheduling:
            detail = f"the GPU's sGPUs are scheduled by class {card.scheduling}, not {scheduling}"
            raise refused(wanted, detail)
        free_pct = parse.FULL_PCT - sum(one.compute_pct for one in others)
        if scheduling == _FIXED and _compute(wanted) > free_pct:
            raise refused(wanted, f"{_compute(wanted)} % of compute needed, {free_pct} % left")
        used = {one.alias for one in others}
        alias = next(name for n in range(parse.MOST_SGPUS) if (name := f"hami{n}") not in used)
        return Decision(wanted, words={"alias": alias})

    async def make(self, decision: Decision, card: SgpuCard) -> None:
        """The class where the GPU has no sGPU yet, then the sGPU."""
        wanted, gpu = decision.wanted, str(card.index)
        if not card.sgpus:
            scheduling = str(scheduling_of(wanted.kind))
            await self._reader.change("sgpu", "-i", gpu, "--set-sched-class", scheduling)
        gib, rest = divmod(wanted.memory_mib, _GIB_MIB)
        await self._reader.change(
            *("sgpu", "-i", gpu, "--create"),
            *("--vram", f"{wanted.memory_mib}M" if rest else f"{gib}G"),
            *("--compute", str(_compute(wanted)), "--alias", decision.words["alias"]),
        )

    async def remove(self, instance: Instance, card: SgpuCard) -> None:
        """One command."""
        await self._reader.change("sgpu", "--remove", instance.instance_id, "-i", str(card.index))

    def is_wanted(self, decision: Decision, instance: Instance, card: SgpuCard) -> bool:
        """Of the size, compute and class that were asked for."""
        sgpu = card.sgpus.get(instance.instance_id)
        wanted = decision.wanted
        return (
            sgpu is not None
            and sgpu.memory_mib == wanted.memory_mib
            and sgpu.compute_pct == _compute(wanted)
            and card.scheduling == scheduling_of(wanted.kind)
        )


def _compute(wanted: Wanted) -> int:
    return wanted.core_pct or parse.FULL_PCT
