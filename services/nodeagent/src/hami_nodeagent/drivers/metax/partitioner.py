# SPDX-License-Identifier: Apache-2.0
"""MetaX sGPUs through the library MXSML, or ``mx-smi sgpu``, on GPUs that are in sGPU mode.

The library is preferred where it is installed. Commands of mx-smi follow MetaX's manual (``sgpu
--create``, ``--remove``, ``--set-sched-class``); the output of ``mx-smi sgpu`` is not published, so
sGPUs are always listed through the library. An sGPU has any multiple of 128 MiB, and the alias that
the agent chooses identifies the sGPU that a command made. All sGPUs of a GPU have one scheduling
class: it is set only while the GPU has no sGPUs. An administrator sets the mode.
"""

from msgspec import Struct

from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.metax import parse
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.sources import LibrarySource

_STEP_MIB = 128
_GIB_MIB = 1024
_KIND_BY_SCHEDULING = {number: kind for kind, number in parse.SCHEDULING_BY_KIND.items() if number}
"""Kinds by scheduling class, without class 0, which serves several kinds."""
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

    def __init__(self, reader: LibrarySource) -> None:
        """Use the reader's tool, and the library that belongs to it."""
        super().__init__()
        self._reader = reader

    async def look(self) -> Picture[SgpuCard]:
        """GPUs in sGPU mode that are available."""
        return await self._reader.either(self._look_library, self._look_tool)

    async def _look_library(self) -> Picture[SgpuCard]:
        """Everything from one run."""
        gpus = await self._reader.library.ask(parse.sgpus, "list")
        return _picture({gpu.uuid: _card(gpu) for gpu in gpus if gpu.uuid})

    async def _look_tool(self) -> Picture[SgpuCard]:
        """Read both lists of mx-smi; use the library only if a GPU is in sGPU mode."""
        listed = await self._reader.ask(parse.listed, "-L")
        rows, _ = await self._reader.ask(parse.table)
        sizes = {row.place: row.memory_mib or 0 for row in rows if row.mode == "sgpu"}
        there = [one for one in listed if one.uuid and one.bus_id in sizes]
        if not there:
            return Picture({}, ())
        divided = {gpu.bus_id: gpu for gpu in await self._reader.library.ask(parse.sgpus, "list")}
        if lacking := [one.bus_id for one in there if one.bus_id not in divided]:
            raise forms.unknown("the list of sGPUs: a GPU is missing", lacking[0])
        return _picture(
            {
                one.uuid: _card(divided[one.bus_id], index=one.index, size=sizes[one.bus_id])
                for one in there
            }
        )

    def decide(self, wanted: Wanted, card: SgpuCard) -> Decision:
        """Choose a unique alias for an sGPU that fits and has the GPU's scheduling class."""
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
        """Set the class if the GPU has no sGPU yet, then create the sGPU."""
        await self._reader.either(
            lambda: self._make_library(decision, card), lambda: self._make_tool(decision, card)
        )

    async def _make_library(self, decision: Decision, card: SgpuCard) -> None:
        wanted = decision.wanted
        scheduling = () if card.sgpus else (str(scheduling_of(wanted.kind)),)
        size = (str(wanted.memory_mib), str(_compute(wanted)))
        words = (*size, decision.words["alias"], *scheduling)
        await self._reader.library.run("create", str(card.index), *words)

    async def _make_tool(self, decision: Decision, card: SgpuCard) -> None:
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
        gpu, number = str(card.index), instance.instance_id

        async def by_library() -> None:
            await self._reader.library.run("remove", gpu, number)

        await self._reader.either(
            by_library, lambda: self._reader.change("sgpu", "--remove", number, "-i", gpu)
        )

    def _new(
        self, decision: Decision, before: Picture[SgpuCard], now: Picture[SgpuCard]
    ) -> tuple[Instance, ...]:
        """Also one without an alias: the library sets it by a second call, which may be cut off."""
        nameless = decision._replace(words={"alias": ""})
        return (*super()._new(decision, before, now), *super()._new(nameless, before, now))

    def is_wanted(self, decision: Decision, instance: Instance, card: SgpuCard) -> bool:
        """Return true if alias, size, compute and class are as requested."""
        sgpu = card.sgpus.get(instance.instance_id)
        wanted = decision.wanted
        return (
            sgpu is not None
            and sgpu.alias == decision.words["alias"]
            and sgpu.memory_mib == wanted.memory_mib
            and sgpu.compute_pct == _compute(wanted)
            and card.scheduling == scheduling_of(wanted.kind)
        )


def _card(gpu: parse.SgpuGpu, *, index: int | None = None, size: int | None = None) -> SgpuCard:
    """Return a GPU as the library shows it, with index and size from mx-smi where given."""
    return SgpuCard(
        index=gpu.index if index is None else index,
        memory_mib=gpu.memory_mib if size is None else size,
        scheduling=gpu.scheduling,
        sgpus={str(sgpu.number): sgpu for sgpu in gpu.sgpus},
    )


def _picture(cards: dict[str, SgpuCard]) -> Picture[SgpuCard]:
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


def _compute(wanted: Wanted) -> int:
    return wanted.core_pct or parse.FULL_PCT
