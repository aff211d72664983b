# SPDX-License-Identifier: Apache-2.0
"""Cambricon sMLU instances through CNDEV, on cards in sMLU mode.

cnmon's commands for sMLU are unpublished, so the library creates instances, in a process of its
own (``binding``). An instance has any quota and memory; each needs a profile of its size, of which
a card has sixteen at most, so unused profiles are removed with their last instance. The name that
the agent chooses identifies the instance that a command created. The mode is an administrator's
(``cnmon set -c N -smlu on``): switching needs an idle card.
"""

from msgspec import Struct

from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.cambricon import parse
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.sources import LibrarySource

_FULL_PCT = 100
_PROFILES = 16
_MIB = 1 << 20
_NAMES = 256


class SmluCard(Struct, frozen=True, kw_only=True):
    """One card in sMLU mode."""

    name: str
    """UUID as the library writes it."""
    memory_mib: int
    instances: dict[str, parse.Smlu]
    """By number."""
    sizes: frozenset[tuple[int, int]]
    """Quota and bytes of its profiles."""


class CambriconPartitioner(ToolPartitioner[SmluCard]):
    """sMLU instances."""

    vendor = "cambricon"

    def __init__(self, reader: LibrarySource) -> None:
        """Use the library that belongs to the reader's tool."""
        super().__init__()
        self._reader = reader
        self.library = reader.library

    async def look(self) -> Picture[SmluCard]:
        """Cards in sMLU mode."""
        return await self._reader.either(self._look_library, self._look_tool)

    async def _look_tool(self) -> Picture[SmluCard]:
        """Read cards through cnmon; use the library only if cnmon shows a card in sMLU mode."""
        rows, _ = await self._reader.ask(parse.table)
        if not any(row.mode == "smlu" for row in rows):
            return Picture({}, ())
        return await self._look_library()

    async def _look_library(self) -> Picture[SmluCard]:
        found = await self.library.ask(parse.smlus, "list")
        cards = {
            f"MLU-{card.uuid}": SmluCard(
                name=card.uuid,
                memory_mib=card.memory_mib,
                instances={str(one.id): one for one in card.instances},
                sizes=frozenset((one.quota, one.memory) for one in card.profiles),
            )
            for card in found
        }
        instances = tuple(
            Instance(
                uuid=uuid,
                instance_id=number,
                memory_mib=one.memory // _MIB,
                core_pct=one.quota % _FULL_PCT,
                is_busy=True if one.used else None,
                handles={"cap_node": one.node, "name": one.name} if one.node else {},
            )
            for uuid, card in cards.items()
            for number, one in card.instances.items()
        )
        return Picture(cards, instances)

    def decide(self, wanted: Wanted, card: SmluCard) -> Decision:
        """Choose a unique name for a partition that fits beside the others."""
        others = card.instances.values()
        left_mib = card.memory_mib - sum(one.memory for one in others) // _MIB
        if wanted.memory_mib > left_mib:
            raise refused(wanted, f"{wanted.memory_mib} MiB needed, {left_mib} left")
        left_pct = _FULL_PCT - sum(one.quota for one in others)
        if _quota(wanted) > left_pct:
            raise refused(wanted, f"{_quota(wanted)} % of compute needed, {left_pct} % left")
        used = {(one.quota, one.memory) for one in others}
        size = (_quota(wanted), wanted.memory_mib * _MIB)
        if size not in used and len(used) >= _PROFILES:
            raise refused(wanted, f"the card has {_PROFILES} sizes, more are not possible")
        names = {one.name for one in others}
        free = next(name for n in range(_NAMES) if (name := f"hami{n}") not in names)
        return Decision(wanted, words={"name": free})

    async def make(self, decision: Decision, card: SmluCard) -> None:
        """Create profile and instance in one process; at the limit, remove unused ones first."""
        wanted = decision.wanted
        size = (_quota(wanted), wanted.memory_mib * _MIB)
        if size not in card.sizes and len(card.sizes) >= _PROFILES:
            await self.library.run("tidy", card.name)
        quota, count = map(str, size)
        await self.library.run("create", card.name, quota, count, decision.words["name"])

    async def remove(self, instance: Instance, card: SmluCard) -> None:
        """The instance, and its profile with the last of its size."""
        await self.library.run("destroy", card.name, instance.instance_id)

    async def tidy(self, card: SmluCard) -> None:
        """Profiles without instances."""
        now = (await self.look()).cards.values()
        found = next((one for one in now if one.name == card.name), None)
        if found is not None:
            used = {(one.quota, one.memory) for one in found.instances.values()}
            if found.sizes - used:
                await self.library.run("tidy", card.name)

    def is_wanted(self, decision: Decision, instance: Instance, card: SmluCard) -> bool:
        """Return true if the instance has the requested size and a device node of its own."""
        one = card.instances.get(instance.instance_id)
        wanted = decision.wanted
        size = (_quota(wanted), wanted.memory_mib * _MIB)
        return one is not None and bool(one.node) and (one.quota, one.memory) == size


def _quota(wanted: Wanted) -> int:
    return wanted.core_pct or _FULL_PCT
