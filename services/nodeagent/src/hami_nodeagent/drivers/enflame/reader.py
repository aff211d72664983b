# SPDX-License-Identifier: Apache-2.0
"""Enflame GCU through the library EFML or efsmi.

The library has no call for DRS: efsmi reports which cards are in that mode, their sizes and
instances, even if everything else comes from the library. Where efsmi is not installed, or
``interface`` allows only the library, no card is in DRS mode.
"""

import msgspec
from msgspec.structs import replace

from hami_common.model.device import Profile
from hami_nodeagent.drivers.enflame import binding as efml
from hami_nodeagent.drivers.enflame import parse
from hami_nodeagent.drivers.enflame.partitioner import EnflamePartitioner
from hami_nodeagent.drivers.errors import AnswerUnknown, DriverError, NotSupported
from hami_nodeagent.drivers.library import TwoWayReader
from hami_nodeagent.drivers.parse import library
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import ToolSettings

_SOFT_FAILURES = (NotSupported, AnswerUnknown)


class EnflameReader(TwoWayReader):
    """EFML and efsmi."""

    vendor = "enflame"
    tool_name = "efsmi"
    rules = parse.RULES
    program = efml.PROGRAM

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._told: dict[str, Seen] = {}
        """Last modes and divisions that efsmi reported beside the library, by identity."""
        self._partitioner = EnflamePartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """DRS instances."""
        return self._partitioner

    @property
    def knows_division(self) -> bool:
        """Return true if efsmi is available beside the library, or has reported DRS."""
        may_ask = self.settings.interface != "library" and self.tool.find() is not None
        return may_ask or any(card.mode == "drs" for card in self._told.values())

    def forget(self) -> None:
        """Another driver may bring other modes."""
        super().forget()
        self._told = {}

    async def glance_library(self) -> Sight:
        """One list."""
        sight = await self.library.ask(library.devices, "glance")
        return replace(sight, devices=tuple(_named(seen) for seen in sight.devices))

    async def survey_library(self) -> Sight:
        """Return the list with links, and modes and divisions from efsmi if it is installed."""
        sight = await self.library.ask(library.devices, "survey")
        devices = tuple(_named(seen) for seen in sight.devices)
        problems = sight.problems
        if self.knows_division:
            try:
                cards, _ = await self.ask(parse.table)
                told = await self._divided(Sight(devices=cards))
                self._told = {card.uuid: card for card in told.devices}
            except DriverError as error:
                problems = (*problems, f"which cards are in DRS mode is not known: {error}")
        divided = tuple(_divided_as(self._told.get(seen.uuid), seen) for seen in devices)
        return replace(sight, devices=divided, problems=problems)

    async def glance_tool(self) -> Sight:
        """Table and details."""
        cards, version = await self.ask(parse.table)
        details = await self.ask(parse.details, "-q", "-d", "TEMP,MEMORY,USAGE,PCIE")
        return Sight(
            devices=tuple(_joined(card, details.get(card.index)) for card in cards),
            driver_version=version,
        )

    async def survey_tool(self) -> Sight:
        """A glance; for cards in DRS mode their sizes and instances."""
        return await self._divided(await self.glance_tool())

    async def _divided(self, sight: Sight) -> Sight:
        """With the sizes and instances of cards in DRS mode."""
        instances = await self._instances(sight)
        devices: list[Seen] = []
        for seen in sight.devices:
            profiles = await self._profiles(seen) if seen.mode == "drs" else ()
            slices = max((one.resources["slices"] for one in profiles), default=0)
            own = [one for one in instances if one.device == seen.index]
            attributes = dict(seen.attributes)
            if seen.mode == "drs":
                attributes["instances"] = msgspec.json.encode(
                    [{"id": one.id, "profile": one.profile, "uuid": one.uuid} for one in own]
                ).decode()
            devices.append(
                replace(
                    seen,
                    partitions=profiles,
                    resources={"slices": slices} if slices else {},
                    max_shares=slices,
                    attributes=attributes,
                )
            )
        return replace(sight, devices=tuple(devices))

    async def _profiles(self, seen: Seen) -> tuple[Profile, ...]:
        arguments = ("-i", str(seen.index), "--drs", "--list-profile")
        try:
            return (await self.ask(parse.profiles, *arguments)).get(seen.index, ())
        except _SOFT_FAILURES:
            return ()

    async def _instances(self, sight: Sight) -> tuple[parse.Instance, ...]:
        if not any(seen.mode == "drs" for seen in sight.devices):
            return ()
        try:
            return await self.ask(parse.instances, "-L")
        except _SOFT_FAILURES:
            return ()


def _named(seen: Seen) -> Seen:
    """The type as efsmi's parser has it."""
    return replace(seen, type=seen.type.removeprefix("Enflame "))


def _divided_as(told: Seen | None, seen: Seen) -> Seen:
    """Return the library's card with the mode and division that efsmi reported for it."""
    if told is None:
        return seen
    return replace(
        seen,
        mode=told.mode,
        partitions=told.partitions,
        resources=told.resources,
        max_shares=told.max_shares,
        attributes={**told.attributes, **seen.attributes},
    )


def _joined(card: Seen, detail: Seen | None) -> Seen:
    if detail is None:
        return replace(card, condition=Condition.DOUBTFUL, reason="efsmi -q does not list it")
    return replace(
        card,
        memory_mib=detail.memory_mib or card.memory_mib,
        attributes={**card.attributes, **detail.attributes},
        condition=detail.condition,
        reason=detail.reason,
        used_mib=detail.used_mib,
        core_pct=card.core_pct if detail.core_pct is None else detail.core_pct,
    )
