# SPDX-License-Identifier: Apache-2.0
"""The driver of every vendor whose devices are read through its tool.

The driver joins each read with earlier ones. The rules, the same for all vendors:

* An unparsable answer changes no state: devices keep their last state, marked ``stale`` in their
  attributes, and the reason is a problem of the inventory.
* A tool that times out, or a device with a doubtful answer or missing from one answer, is a failed
  probe; ``core.health`` condemns after three in a row.
* A device that the vendor's tool itself condemns is lost at once.
* A device that three consecutive reads do not list is removed from the inventory's healthy ones.
* No tool, no driver, no permission: all devices are unreachable.

Devices of few vendors report faults as events; the driver reads those devices at once. Obeys design
D22 and D25.
"""

import logging

import anyio
from msgspec.structs import replace

from hami_common.model.device import DeviceFacts, Link
from hami_nodeagent.core.health import (
    DeviceLost,
    DriverGone,
    ProbeFailed,
    ProbePassed,
    Stimulus,
)
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DriverDenied,
    DriverError,
    DriverMismatch,
    DriverMissing,
    HardwareAbsent,
)
from hami_nodeagent.drivers.parse.seen import Condition, Seen, Sight
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.protocol import DeviceUsage, Inventory
from hami_nodeagent.drivers.reader import Reader, ToolSettings, numa_of
from hami_nodeagent.drivers.rules import fault_policy, links_of

STALE = "stale"
"""Attribute of devices whose state could not be read the last time."""
_LOOKS = 3
_NOT_LISTED = "the driver does not list the device any more"
_OUT_OF_REACH = (DriverMissing, DriverDenied, DriverMismatch)

_log = logging.getLogger(__name__)


class ToolDriver:
    """Driver protocol over a reader."""

    def __init__(self, reader: Reader, settings: ToolSettings) -> None:
        """Store the reader; the first call that needs the tool runs it."""
        self._reader = reader
        self._settings = settings
        self._policy = fault_policy(
            reader.vendor, disable=settings.disable_health_checks, enable=""
        )
        self._facts_by_uuid: dict[str, DeviceFacts] = {}
        """Every device that was listed once, with its facts of then."""
        self._reason_by_uuid: dict[str, str] = {}
        """Reasons for unhealthy devices as of the last discovery."""
        self._uuid_by_place: dict[str, str] = {}
        self._links: tuple[Link, ...] = ()
        self._version = ""
        self._last_complaint = ""
        self._sight: Sight | None = None
        self._sight_at_s = 0.0
        self._looking = anyio.Lock()

    @property
    def vendor(self) -> str:
        """The reader's vendor."""
        return self._reader.vendor

    @property
    def partitioner(self) -> Partitioner | None:
        """Partitioner of the reader, if it has one."""
        return self._reader.partitioner

    @property
    def is_stuck(self) -> bool:
        """A tool was killed and does not die."""
        return any(tool.is_stuck for tool in self._reader.tools)

    # ---- the Driver protocol --------------------------------------------------------------------

    async def discover(self) -> Inventory:
        """List all devices; raises the errors that the protocol lists."""
        try:
            async with self._looking:
                sight = await self._survey()
        except HardwareAbsent:
            return self._inventory(Sight(devices=(), driver_version=self._version))
        except _OUT_OF_REACH:
            self._reader.forget()
            raise
        except DriverError as error:
            if not self._facts_by_uuid:
                raise
            return self._stale_inventory(str(error))
        return self._inventory(sight)

    async def probe(self) -> tuple[Stimulus, ...]:
        """Read all devices once and return a stimulus for each listed one."""
        if not self._policy.probes or not self._facts_by_uuid:
            return ()
        uuids = sorted(self._facts_by_uuid)
        try:
            sight = await self._look()
        except _OUT_OF_REACH as error:
            self._reader.forget()
            return (DriverGone(reason=str(error)),)
        except (AnswerUnknown, DeviceBusy) as error:
            self._complain(error)
            return ()
        except DriverError as error:
            return tuple(ProbeFailed(uuid=uuid, reason=str(error)) for uuid in uuids)
        seen_by_uuid = self._seen_by_uuid(sight)
        return tuple(_stimulus(uuid, seen_by_uuid.get(uuid)) for uuid in uuids)

    async def wait_faults(self, limit_s: float) -> tuple[Stimulus, ...]:
        """Wait for an event of the devices where they send any, then read them at once.

        The event itself condemns no device: the read decides.
        """
        if not await self._reader.wait_news(limit_s) or not self._facts_by_uuid:
            return ()
        async with self._looking:
            self._sight = None
        return tuple(one for one in await self.probe() if not isinstance(one, ProbePassed))

    async def usage(self) -> tuple[DeviceUsage, ...]:
        """Use of each device that the tool shows and does not condemn."""
        try:
            sight = await self._look()
        except HardwareAbsent:
            return ()
        seen_by_uuid = self._seen_by_uuid(sight)
        in_order = sorted(self._facts_by_uuid.values(), key=lambda facts: facts.index)
        return tuple(
            DeviceUsage(
                uuid=facts.uuid,
                used_mib=seen.used_mib,
                total_mib=seen.memory_mib or facts.memory_mib,
                core_pct=seen.core_pct,
                memory_bus_pct=seen.memory_bus_pct,
                temperature_c=seen.temperature_c,
                power_w=seen.power_w,
                processes=seen.processes,
            )
            for facts in in_order
            if (seen := seen_by_uuid.get(facts.uuid)) is not None
            and seen.condition is not Condition.BAD
        )

    async def aclose(self) -> None:
        """Drop the cached state of the driver; no tool runs between two calls."""
        self._reader.forget()
        self._sight = None

    # ---- looking --------------------------------------------------------------------------------

    async def _look(self) -> Sight:
        async with self._looking:
            age_s = anyio.current_time() - self._sight_at_s
            if self._sight is not None and age_s < self._settings.answer_age_s:
                return self._sight
            return self._keep(await self._reader.glance())

    async def _survey(self) -> Sight:
        """Read until no known device is missing, at most three times."""
        sight = self._keep(await self._reader.survey())
        for _ in range(_LOOKS - 1):
            missing = self._facts_by_uuid.keys() - self._seen_by_uuid(sight).keys()
            if missing <= self._reason_by_uuid.keys():
                break
            await anyio.sleep(self._settings.confirm_s)
            sight = self._keep(await self._reader.survey())
        return sight

    def _keep(self, sight: Sight) -> Sight:
        self._sight, self._sight_at_s = sight, anyio.current_time()
        self._last_complaint = ""
        return sight

    def _complain(self, error: DriverError) -> None:
        """Log an unparsable answer, once until it changes."""
        text = str(error)
        if text != self._last_complaint:
            self._last_complaint = text
            extra = {"vendor": self.vendor, "problem": text}
            _log.warning("the vendor's tool was not understood", extra=extra)

    def _seen_by_uuid(self, sight: Sight) -> dict[str, Seen]:
        found = {}
        for seen in sight.devices:
            uuid = seen.uuid or self._uuid_by_place.get(seen.place, "")
            if uuid:
                found[uuid] = seen
        return found

    # ---- results of a read ----------------------------------------------------------------------

    def _inventory(self, sight: Sight) -> Inventory:
        listed: dict[str, DeviceFacts] = {}
        problems: list[str] = []
        reasons: dict[str, str] = {}
        for seen in sight.devices:
            known = self._facts_by_uuid.get(seen.uuid or self._uuid_by_place.get(seen.place, ""))
            facts, trouble = self._facts(seen, known)
            if facts is None:
                problems.append(f"device {seen.index}: {trouble}")
                continue
            if seen.condition is Condition.BAD:
                reasons[facts.uuid] = seen.reason
                problems.append(f"device {seen.index}: {seen.reason}")
            listed[facts.uuid] = facts
            self._uuid_by_place[seen.place] = facts.uuid
        for uuid in self._facts_by_uuid.keys() - listed.keys():
            reasons[uuid] = _NOT_LISTED
        self._facts_by_uuid |= listed
        self._reason_by_uuid = reasons
        if sight.driver_version:
            self._version = sight.driver_version
        views = {
            (self._uuid_by_place[a], self._uuid_by_place[b]): view
            for (a, b), view in sight.views.items()
            if a in self._uuid_by_place and b in self._uuid_by_place
        }
        self._links, contradictions = links_of(tuple(listed.values()), views)
        return Inventory(
            devices=self._judged(),
            links=self._links,
            driver_version=self._version,
            problems=(*sight.problems, *problems, *contradictions),
        )

    def _stale_inventory(self, reason: str) -> Inventory:
        """Return the last successful inventory, with its devices marked as stale."""
        marked = (
            replace(facts, attributes={**facts.attributes, STALE: "true"})
            for facts in self._judged()
        )
        return Inventory(
            devices=tuple(marked),
            links=self._links,
            driver_version=self._version,
            problems=(f"devices are shown as they were seen last: {reason}",),
        )

    def _judged(self) -> tuple[DeviceFacts, ...]:
        in_order = sorted(self._facts_by_uuid.values(), key=lambda facts: (facts.index, facts.uuid))
        return tuple(
            replace(facts, healthy=False, health_reason=reason)
            if (reason := self._reason_by_uuid.get(facts.uuid))
            else facts
            for facts in in_order
        )

    def _facts(self, seen: Seen, known: DeviceFacts | None) -> tuple[DeviceFacts | None, str]:
        """Return the facts, or why there are none; a failed device keeps its last facts."""
        if known is not None and (seen.condition is Condition.BAD or not seen.uuid):
            return known, ""
        if seen.condition is Condition.BAD or not seen.uuid:
            return None, seen.reason or "the tool does not report its identity"
        memory_mib = seen.memory_mib or (known.memory_mib if known is not None else 0)
        kind = seen.type or (known.type if known is not None else "")
        if memory_mib <= 0 or not kind:
            missing = "memory" if kind else "type"
            return None, seen.reason or f"the tool does not report its {missing}"
        numa = seen.numa
        return (
            DeviceFacts(
                uuid=seen.uuid,
                vendor=self.vendor,
                index=seen.index,
                type=kind,
                memory_mib=memory_mib,
                minor=seen.minor,
                bus_id=seen.bus_id,
                numa=numa if numa is not None else numa_of(self._settings.sysfs_root, seen.bus_id),
                mode=seen.mode or "soft",
                partitions=seen.partitions,
                resources=seen.resources,
                max_shares=seen.max_shares,
                attributes=seen.attributes,
            ),
            "",
        )


def _stimulus(uuid: str, seen: Seen | None) -> Stimulus:
    if seen is None:
        return ProbeFailed(uuid=uuid, reason=_NOT_LISTED)
    if seen.condition is Condition.BAD:
        return DeviceLost(uuid=uuid, reason=seen.reason)
    if seen.condition is Condition.DOUBTFUL:
        return ProbeFailed(uuid=uuid, reason=seen.reason or "the tool does not vouch for it")
    return ProbePassed(uuid=uuid)
