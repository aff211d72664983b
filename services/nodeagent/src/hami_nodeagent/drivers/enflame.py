# SPDX-License-Identifier: Apache-2.0
"""Enflame GCU through efsmi: the table, ``-q`` for health and memory, DRS lists where DRS is on."""

import msgspec
from msgspec.structs import replace

from hami_common.model.device import Profile
from hami_nodeagent.drivers.errors import AnswerUnknown, NotSupported
from hami_nodeagent.drivers.parse import enflame as parse
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partition_enflame import EnflamePartitioner
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.reader import Signs, ToolReader, ToolSettings

SIGNS = Signs(pci_vendors=("1e36",))
_SOFT_FAILURES = (NotSupported, AnswerUnknown)


class EnflameReader(ToolReader):
    """efsmi."""

    vendor = "enflame"
    tool_name = "efsmi"
    rules = parse.RULES

    def __init__(self, settings: ToolSettings) -> None:
        super().__init__(settings)
        self._partitioner = EnflamePartitioner(self)

    @property
    def partitioner(self) -> Partitioner:
        """DRS instances."""
        return self._partitioner

    async def glance(self) -> Sight:
        """Table and details."""
        cards, version = await self.ask(parse.table)
        details = await self.ask(parse.details, "-q", "-d", "TEMP,MEMORY,USAGE,PCIE")
        return Sight(
            devices=tuple(_joined(card, details.get(card.index)) for card in cards),
            driver_version=version,
        )

    async def survey(self) -> Sight:
        """A glance; for cards in DRS mode their sizes and instances."""
        sight = await self.glance()
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
