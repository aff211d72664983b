# SPDX-License-Identifier: Apache-2.0
"""Divides NVIDIA devices into MIG instances: runs ``mig``'s blocking calls in the cards' lanes.

The partitioner caches nothing: each call reads the instances from the cards. A lost card has no
instances to report. A card that answers with an error makes the read fail, because an incomplete
list would look like removed instances. One call at a time per card, in the card's own lane.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from hami_common.model.device import DeviceFacts
from hami_nodeagent.core.hardware import Instance, Wanted
from hami_nodeagent.drivers.errors import DeviceGone
from hami_nodeagent.drivers.nvidia import mig, nvml

T = TypeVar("T")


class Cards(Protocol):
    """Interface of the driver: its cards, and a way to run calls on one."""

    async def listed(self) -> tuple[DeviceFacts, ...]:
        """All cards that were ever listed; lists them if that never happened."""
        ...

    async def ask_card(self, uuid: str, doing: str, fn: Callable[[nvml.Handle], T]) -> T:
        """Run ``fn`` in the card's lane; ``DeviceGone`` if the card is lost or unknown."""
        ...


class MigPartitioner:
    """Partitioner protocol over NVML."""

    def __init__(self, cards: Cards, proc_root: str) -> None:
        """``proc_root``: directory that lists the device nodes of instances."""
        self._cards = cards
        self._proc_root = proc_root

    @property
    def vendor(self) -> str:
        """The word ``nvidia``."""
        return nvml.VENDOR

    async def instances(self) -> tuple[Instance, ...]:
        """Return every instance on every card in MIG mode, complete or not, by any creator."""
        found: list[Instance] = []
        for facts in await self._cards.listed():
            try:
                found += await self._ask(facts, "read MIG instances", mig.read_instances)
            except DeviceGone:
                continue
        return tuple(found)

    async def create(self, wanted: Wanted) -> Instance:
        """Make an instance and the compute instance over all of it."""
        facts = await self._facts(wanted.uuid)
        return await self._ask(facts, "make a MIG instance", lambda at: mig.create(at, wanted))

    async def destroy(self, instance: Instance) -> None:
        """Remove an instance with all compute instances in it."""
        facts = await self._facts(instance.uuid)
        await self._ask(facts, "remove a MIG instance", lambda at: mig.destroy(at, instance))

    async def _facts(self, uuid: str) -> DeviceFacts:
        for facts in await self._cards.listed():
            if facts.uuid == uuid:
                return facts
        raise DeviceGone(doing="find the device", detail=f"the driver never listed {uuid}")

    async def _ask(self, facts: DeviceFacts, doing: str, fn: Callable[[mig.Place], T]) -> T:
        return await self._cards.ask_card(
            facts.uuid,
            doing,
            lambda handle: fn(
                mig.Place(
                    raw=handle.raw,
                    uuid=facts.uuid,
                    minor=facts.minor,
                    proc_root=self._proc_root,
                )
            ),
        )
