# SPDX-License-Identifier: Apache-2.0
"""How every vendor's devices are divided through a tool: look, decide, act, look again, or undo.

A partitioner of a vendor says how its devices are looked at (``look``), whether and as what a
partition can be made (``decide``), which command makes it and which removes it. The order, and what
happens when something goes wrong in between, is here and the same for all:

* What cannot be is refused from the look, before the hardware is touched.
* After the command the devices are looked at again, whatever the tool said. Only a partition that
  is there and is what was wanted counts; everything that came to be on the way is removed again.
* One change at a time per vendor. Undoing runs to its end also when the caller is cancelled.

Obeys ``partitioner.Partitioner`` and design D24.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

import anyio

from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DeviceGone,
    DriverError,
    PartitionBusy,
    PartitionRefused,
)
from hami_nodeagent.drivers.partitioner import Instance, Wanted

Card = TypeVar("Card")
NOTHING: Mapping[str, str] = {}
_UNDO_S = 60.0
"""Longest time that undoing keeps a caller that was cancelled."""

_log = logging.getLogger(__name__)


class Picture(NamedTuple, Generic[Card]):
    """Everything that one look saw."""

    cards: Mapping[str, Card]
    """By UUID of the device: what the vendor's partitioner needs to know of it."""
    instances: tuple[Instance, ...]


class Decision(NamedTuple):
    """A partition that can be made, and by what name it will be known."""

    wanted: Wanted
    instance_id: str = ""
    """Empty where only the hardware chooses it."""
    words: Mapping[str, str] = NOTHING
    """Handles that it will have, where we choose them."""


class ToolPartitioner(ABC, Generic[Card]):
    """What the partitioners of all vendors have in common."""

    vendor = ""
    words_last = True
    """A partition keeps its handles as long as it is there."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()

    # ---- the vendor's part ----------------------------------------------------------------------

    @abstractmethod
    async def look(self) -> Picture[Card]:
        """All devices that can be divided, and every partition on them."""

    @abstractmethod
    def decide(self, wanted: Wanted, card: Card) -> Decision:
        """What to make of ``wanted``; ``PartitionRefused`` when it cannot be."""

    @abstractmethod
    async def make(self, decision: Decision, card: Card) -> None:
        """Run the commands that make it; whatever they leave is looked at afterwards."""

    @abstractmethod
    async def remove(self, instance: Instance, card: Card) -> None:
        """Run the command that removes it."""

    async def tidy(self, card: Card) -> None:
        """Remove what partitions that are gone have left behind on the device."""

    def is_wanted(self, decision: Decision, instance: Instance, card: Card) -> bool:  # noqa: ARG002 - for those who override
        """Whether the hardware made what was decided, and the whole of it."""
        return instance.profile == decision.wanted.profile and bool(instance.handles)

    # ---- the Partitioner protocol ---------------------------------------------------------------

    async def instances(self) -> tuple[Instance, ...]:
        """See the protocol."""
        async with self._turn:
            return (await self.look()).instances

    async def create(self, wanted: Wanted) -> Instance:
        """See the protocol."""
        async with self._turn:
            before = await self.look()
            card = before.cards.get(wanted.uuid)
            if card is None:
                raise DeviceGone(
                    doing=_doing(wanted), detail="the device is not there or cannot be divided"
                )
            decision = self.decide(wanted, card)
            made: Instance | None = None
            try:
                await self.make(decision, card)
                made = self._made(decision, before, await self.look())
            finally:
                if made is None:
                    with anyio.move_on_after(_UNDO_S, shield=True):
                        await self._undo(decision, before)
            return made

    async def destroy(self, instance: Instance) -> None:
        """See the protocol."""
        async with self._turn:
            picture = await self.look()
            card = picture.cards.get(instance.uuid)
            there = self._same(picture, instance)
            if card is None:
                return
            if there is not None:
                await self._remove(there, card)
            await self.tidy(card)

    # ---- steps ----------------------------------------------------------------------------------

    async def _remove(self, instance: Instance, card: Card) -> None:
        """Remove a partition that is there, and make sure that it is gone."""
        doing = f"remove partition {instance.instance_id} of {instance.uuid}"
        if instance.is_busy:
            raise PartitionBusy(doing=doing, detail="processes use it")
        try:
            await self.remove(instance, card)
        except DriverError as error:
            after = await self.look()
            if self._same(after, instance) is None:
                return
            if isinstance(error, DeviceBusy):
                raise PartitionBusy(doing=doing, detail=error.detail, code=error.code) from error
            raise
        if (still := self._same(await self.look(), instance)) is not None:
            detail = "the tool said that it was removed, and it is still there"
            if still.is_busy:
                raise PartitionBusy(doing=doing, detail="processes use it")
            raise AnswerUnknown(doing=doing, detail=detail)

    def _same(self, picture: Picture[Card], instance: Instance) -> Instance | None:
        """The partition where it is still that one; its number may carry another by now."""
        for one in picture.instances:
            if (one.uuid, one.instance_id) != (instance.uuid, instance.instance_id):
                continue
            is_other = one.profile != instance.profile and one.profile and instance.profile
            has_other = one.handles != instance.handles and one.handles and instance.handles
            return None if is_other or (self.words_last and has_other) else one
        return None

    def _new(
        self, decision: Decision, before: Picture[Card], now: Picture[Card]
    ) -> tuple[Instance, ...]:
        """What came to be on the device since ``before``, by our doing."""
        known = {(one.uuid, one.instance_id) for one in before.instances}
        return tuple(
            one
            for one in now.instances
            if one.uuid == decision.wanted.uuid
            and (one.uuid, one.instance_id) not in known
            and decision.instance_id in ("", one.instance_id)
            and all(one.handles.get(key) == word for key, word in decision.words.items())
            and one.profile in ("", decision.wanted.profile)
        )

    def _made(self, decision: Decision, before: Picture[Card], now: Picture[Card]) -> Instance:
        new = self._new(decision, before, now)
        card = now.cards.get(decision.wanted.uuid)
        if len(new) == 1 and card is not None and self.is_wanted(decision, new[0], card):
            return new[0]
        detail = f"the tool said that it was made, and {len(new)} are there that are not it"
        if not new:
            detail = "the tool said that it was made, and it is not there"
        raise AnswerUnknown(doing=_doing(decision.wanted), detail=detail)

    async def _undo(self, decision: Decision, before: Picture[Card]) -> None:
        """Remove what came to be; what stays is seen by the next look."""
        try:
            now = await self.look()
            card = now.cards.get(decision.wanted.uuid)
            if card is None:
                return
            for one in self._new(decision, before, now):
                if not one.is_busy:
                    with suppress(DriverError):
                        await self.remove(one, card)
            await self.tidy(card)
        except DriverError as error:
            _log.warning(
                "what was made of a partition could not be removed",
                extra={"vendor": self.vendor, "uuid": decision.wanted.uuid, "reason": str(error)},
            )


def refused(wanted: Wanted, detail: str) -> PartitionRefused:
    """The error for a partition that the hardware has no room for, or does not know."""
    return PartitionRefused(doing=_doing(wanted), detail=detail)


def _doing(wanted: Wanted) -> str:
    what = wanted.profile or f"{wanted.memory_mib} MiB, {wanted.core_pct} %"
    return f"make partition {what} on {wanted.uuid}"
