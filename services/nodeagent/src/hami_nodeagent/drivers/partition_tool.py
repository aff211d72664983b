# SPDX-License-Identifier: Apache-2.0
"""Divides devices of any vendor through a tool: read, decide, execute, verify, or roll back.

The partitioner of a vendor defines how to read its devices (``look``), if and how a partition can
be made (``decide``), and the commands that make and remove it. This module defines the sequence and
the error handling, the same for all vendors:

* Impossible requests are rejected from the state that was read, before any command runs.
* After the command the devices are read again, whatever the tool printed. The call succeeds only if
  the partition exists as requested; everything else that the command created is removed.
* One change at a time per vendor. The rollback completes even if the caller is cancelled.

Obeys ``partitioner.Partitioner`` and design D24.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

import anyio

from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DeviceGone,
    DriverError,
    PartitionBusy,
    PartitionRefused,
)

Card = TypeVar("Card")
NOTHING: Mapping[str, str] = {}
_UNDO_S = 60.0
"""Longest time that undoing keeps a caller that was cancelled."""

_log = logging.getLogger(__name__)


class Picture(NamedTuple, Generic[Card]):
    """Result of one read."""

    cards: Mapping[str, Card]
    """State that the vendor's partitioner needs, by UUID of the device."""
    instances: tuple[Instance, ...]


class Decision(NamedTuple):
    """A partition that can be made, and the handles that identify it."""

    wanted: Wanted
    instance_id: str = ""
    """Empty if only the hardware chooses it."""
    words: Mapping[str, str] = NOTHING
    """Handles of the new partition that the agent chooses."""


class ToolPartitioner(ABC, Generic[Card]):
    """Base of the partitioners of all vendors."""

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
        """Return the partition to make for ``wanted``; raise ``PartitionRefused`` if impossible."""

    @abstractmethod
    async def make(self, decision: Decision, card: Card) -> None:
        """Run the commands that make it; the caller then reads the devices to verify the result."""

    @abstractmethod
    async def remove(self, instance: Instance, card: Card) -> None:
        """Run the command that removes it."""

    async def tidy(self, card: Card) -> None:
        """Remove leftovers of removed partitions on the device."""

    def is_wanted(self, decision: Decision, instance: Instance, card: Card) -> bool:  # noqa: ARG002 - for those who override
        """Return true if the hardware made exactly and completely the decided partition."""
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
        """Remove an existing partition and verify the removal."""
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
        """Return the partition if it is still the same; its number may have been reused."""
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
        """Return the partitions that this decision created on the device since ``before``."""
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
        """Remove new partitions; the next read shows any that remain."""
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
    """Return the error for a partition without capacity or of an unknown size."""
    return PartitionRefused(doing=_doing(wanted), detail=detail)


def _doing(wanted: Wanted) -> str:
    what = wanted.profile or f"{wanted.memory_mib} MiB, {wanted.core_pct} %"
    return f"make partition {what} on {wanted.uuid}"
