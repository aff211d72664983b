# SPDX-License-Identifier: Apache-2.0
"""Enflame DRS instances through efsmi, on cards that are in DRS mode.

``efsmi -i N --drs --create-instance <profile number>`` prints only its success, and the card
chooses position, number and UUID: the new entry of ``efsmi -L`` is the created instance. Commands
follow Enflame's gcushare device plugin; the layout of both lists was not verified on a machine. An
administrator sets the mode: the agent never switches a card, because that needs an idle card.
"""

from typing import Protocol

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.enflame import parse
from hami_nodeagent.drivers.partition_tool import Decision, Picture, ToolPartitioner, refused
from hami_nodeagent.drivers.sources import LibrarySource


class DrsCard(Struct, frozen=True, kw_only=True):
    """One card in DRS mode."""

    index: int
    profiles: dict[str, Profile]
    instances: tuple[parse.Instance, ...]


class CardSource(LibrarySource, Protocol):
    """The cards of a node."""

    @property
    def knows_division(self) -> bool:
        """Return true if efsmi can report DRS, or has reported it."""
        ...


class EnflamePartitioner(ToolPartitioner[DrsCard]):
    """DRS instances."""

    vendor = "enflame"

    def __init__(self, reader: CardSource) -> None:
        """Use the reader's tool."""
        super().__init__()
        self._reader = reader

    async def look(self) -> Picture[DrsCard]:
        """The table for modes, one list of instances, and the sizes of each card in DRS mode."""
        return await self._reader.either(self._look_beside, self._look)

    async def _look_beside(self) -> Picture[DrsCard]:
        """Read DRS through efsmi where the library reports the cards."""
        return await self._look() if self._reader.knows_division else Picture({}, ())

    async def _look(self) -> Picture[DrsCard]:
        seen, _ = await self._reader.ask(parse.table)
        divided = {card.index: card.uuid for card in seen if card.mode == "drs"}
        if not divided:
            return Picture({}, ())
        found = await self._reader.ask(parse.instances, "-L")
        cards: dict[str, DrsCard] = {}
        for index, uuid in divided.items():
            told = await self._reader.ask(
                parse.profiles, "-i", str(index), "--drs", "--list-profile"
            )
            cards[uuid] = DrsCard(
                index=index,
                profiles={one.name: one for one in told.get(index, ())},
                instances=tuple(one for one in found if one.device == index),
            )
        instances = tuple(
            Instance(
                uuid=uuid,
                instance_id=str(one.id),
                profile=one.profile if one.profile in card.profiles else "",
                handles={"instance_uuid": one.uuid},
            )
            for uuid, card in cards.items()
            for one in card.instances
        )
        return Picture(cards, instances)

    def decide(self, wanted: Wanted, card: DrsCard) -> Decision:
        """Choose a size of the card that fits its free slices; the card chooses the rest."""
        profile = card.profiles.get(wanted.profile)
        if profile is None or profile.native_id is None:
            known = ", ".join(sorted(card.profiles)) or "none"
            raise refused(wanted, f"no DRS profile {wanted.profile!r}; there are {known}")
        total = max(one.resources["slices"] for one in card.profiles.values())
        taken = sum(
            card.profiles[one.profile].resources["slices"]
            for one in card.instances
            if one.profile in card.profiles
        )
        if profile.resources["slices"] > total - taken:
            needed = profile.resources["slices"]
            raise refused(wanted, f"{needed} slices needed, {total - taken} of {total} left")
        return Decision(wanted)

    async def make(self, decision: Decision, card: DrsCard) -> None:
        """One command."""
        number = card.profiles[decision.wanted.profile].native_id
        await self._reader.change("-i", str(card.index), "--drs", "--create-instance", str(number))

    async def remove(self, instance: Instance, card: DrsCard) -> None:
        """One command."""
        await self._reader.change(
            "-i",
            str(card.index),
            "--drs",
            "--destroy-instance",
            instance.instance_id,
        )
