# SPDX-License-Identifier: Apache-2.0
"""Devices from a hardware profile file, for machines without any; steered by a control file.

The profile is a TOML file in the format that hami_sim/hardware/profile.py describes; this module
reads the keys it needs and ignores the rest. A device's
UUID is derived from node name, vendor and index, so it survives restarts. The control file is JSON
(``Control``), read again whenever it changes; without one all devices work and idle. Memory in MiB,
compute in percent of one device.
"""

import logging
import uuid
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import anyio
import msgspec
import msgspec.structs
from msgspec import Struct

from hami_common import documents
from hami_common.errors import SettingsInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.model.device import DeviceFacts, Profile
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.health import (
    DeviceLost,
    DriverGone,
    FaultSeen,
    ProbeFailed,
    ProbePassed,
    Stimulus,
)
from hami_nodeagent.drivers.errors import DriverMissing, NotSupported
from hami_nodeagent.drivers.partitioner import Partitioner
from hami_nodeagent.drivers.protocol import DeviceUsage, Inventory, ProcessUsage
from hami_nodeagent.drivers.rules import Neighbour, fault_policy, links_of, type_of
from hami_nodeagent.drivers.simulated.partitioner import SimulatedPartitioner, divides

_log = logging.getLogger(__name__)
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "devices.hami.io")
_PASSED_ON = frozenset({"compute_capability", "pci_device_id", "chip", "cores", "serial"})
"""Attributes of the model that the real driver reports, too."""
_POLL_S = 0.05
"""Interval at which a wait reads the control file, in seconds."""


class _DriverPart(Struct, frozen=True):
    version: str = ""


class _ModelPart(Struct, frozen=True):
    name: str
    memory_mib: int
    compute_units: int = 0
    unified_memory: bool = False
    mode: str = "soft"
    max_shares: int = 0
    resources: dict[str, int] = {}
    attributes: dict[str, str] = {}


class _DevicePart(Struct, frozen=True):
    bus_id: str
    minor: int
    numa: int | None = None
    name: str = ""
    memory_mib: int = 0


class _Join(Struct, frozen=True):
    devices: tuple[int, int]
    links: int


class _Fabric(Struct, frozen=True):
    links_per_device: int = 0
    joins: tuple[_Join, ...] = ()


class _Proximity(Struct, frozen=True):
    devices: tuple[int, ...]
    level: str


class _Profile(Struct, frozen=True):
    vendor: str
    model: _ModelPart
    devices: tuple[_DevicePart, ...]
    driver: _DriverPart = _DriverPart()
    uuid_prefix: str = ""
    fabric: _Fabric = _Fabric()
    proximity: tuple[_Proximity, ...] = ()
    partitions: tuple[Profile, ...] = ()


class ControlledFault(Struct, frozen=True, kw_only=True):
    """A fault that a device reports once to every waiting caller; ``seq`` only grows."""

    seq: int
    index: int
    code: int


class ControlledProcess(Struct, frozen=True, kw_only=True):
    """A process on a device."""

    pid: int
    used_mib: int = 0
    core_pct: int = 0


class ControlledDevice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deviations of one device from the profile."""

    absent: bool = False
    """The driver does not list it."""
    lost: str = ""
    """Reason for a permanent loss, empty if the device is not lost."""
    failing: str = ""
    """Reason why its probes fail, empty when they pass."""
    used_mib: int = 0
    core_pct: int = 0
    processes: tuple[ControlledProcess, ...] = ()


class Control(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The control file."""

    driver_missing: str = ""
    """Reason for a missing driver, empty if there is one."""
    devices: dict[str, ControlledDevice] = {}
    """By index, written as text; a device that is not named works and idles."""
    faults: tuple[ControlledFault, ...] = ()


class SimulatedDriverSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the simulated machine."""

    profile: str
    """Path of the hardware profile."""
    node: str
    """Node name, part of every UUID."""
    control: str = ""
    """Path of the control file; empty or not there: all devices work."""
    partitions: str = ""
    """Path of the file of partitions (``drivers.simulated_partitions``); empty: in memory."""
    unified_memory_mib: int = 0
    """Memory to count for devices that share the host's; 0 leaves them out."""
    disable_health_checks: str = ""
    """As for the real driver of the profile's vendor."""
    enable_health_checks: str = ""
    """As for the real driver of the profile's vendor."""


class SimulatedDriver:
    """Driver protocol over a profile and a control file."""

    def __init__(self, settings: SimulatedDriverSettings) -> None:
        """Read the profile; ``SettingsInvalid`` if it is invalid."""
        self._settings = settings
        self._profile = _read_profile(Path(settings.profile))
        self._policy = fault_policy(
            self._profile.vendor,
            disable=settings.disable_health_checks,
            enable=settings.enable_health_checks,
        )
        self._facts_by_index: dict[int, DeviceFacts] = {}
        """Devices that have been listed at least once."""
        self._delivered_seq: int | None = None
        """Newest fault that was delivered; ``None`` before the first wait."""
        self._last_control = Control()
        model = self._profile.model
        self._partitioner = (
            SimulatedPartitioner(
                vendor=self._profile.vendor,
                devices=self._reachable,
                path=Path(settings.partitions) if settings.partitions else None,
            )
            if divides(self._profile.vendor, model.mode, has_table=bool(self._profile.partitions))
            else None
        )

    @property
    def vendor(self) -> str:
        """The vendor of the profile."""
        return self._profile.vendor

    @property
    def partitioner(self) -> Partitioner | None:
        """Partitioner of the devices, if the real ones can be divided."""
        return self._partitioner

    @property
    def is_stuck(self) -> bool:
        """False: simulated calls never hang."""
        return False

    async def discover(self) -> Inventory:
        """List the devices that are not absent."""
        control = await self._control()
        if control.driver_missing:
            raise DriverMissing(doing="open the driver", detail=control.driver_missing)
        present, absent, problems = [], [], []
        for index in range(len(self._profile.devices)):
            device = control.devices.get(str(index), ControlledDevice())
            reason = (
                "the driver does not list the device any more" if device.absent else device.lost
            )
            if not reason and self._memory_mib(index) == 0:
                reason = "the device shares the host's memory; set unified_memory_mib to use it"
            if not reason:
                self._facts_by_index[index] = self._facts(index)
                present.append(self._facts_by_index[index])
            elif index in self._facts_by_index:
                known = self._facts_by_index[index]
                absent.append(msgspec.structs.replace(known, healthy=False, health_reason=reason))
            if reason and not device.absent:
                problems.append(f"device {index}: {reason}")
        links, contradictions = links_of(tuple(present), self._neighbours())
        return Inventory(
            devices=tuple(sorted(present + absent, key=lambda facts: facts.index)),
            links=links,
            driver_version=self._profile.driver.version,
            problems=(*problems, *contradictions),
        )

    async def probe(self) -> tuple[Stimulus, ...]:
        """Return the state of each listed device from the control file."""
        if not self._policy.probes or not self._facts_by_index:
            return ()
        control = await self._control()
        if control.driver_missing:
            return (DriverGone(reason=control.driver_missing),)
        results: list[Stimulus] = []
        in_order = sorted(self._facts_by_index.items(), key=lambda item: item[1].uuid)
        for index, facts in in_order:
            device = control.devices.get(str(index), ControlledDevice())
            if device.lost or device.absent:
                reason = device.lost or "the driver does not list the device any more"
                results.append(DeviceLost(uuid=facts.uuid, reason=reason))
            elif device.failing:
                results.append(ProbeFailed(uuid=facts.uuid, reason=device.failing))
            else:
                results.append(ProbePassed(uuid=facts.uuid))
        return tuple(results)

    async def wait_faults(self, limit_s: float) -> tuple[Stimulus, ...]:
        """Faults added to the control file since the last call."""
        deadline_s = anyio.current_time() + limit_s
        while True:
            control = await self._control()
            if control.driver_missing:
                await anyio.sleep(limit_s)
                return (DriverGone(reason=control.driver_missing),)
            faults = self._new_faults(control)
            left_s = deadline_s - anyio.current_time()
            if faults or left_s <= 0:
                return faults
            await anyio.sleep(min(_POLL_S, left_s))

    async def usage(self) -> tuple[DeviceUsage, ...]:
        """Return the values of the control file; zero if it has none."""
        control = await self._control()
        if control.driver_missing:
            raise DriverMissing(doing="read usage", detail=control.driver_missing)
        results = []
        for index, facts in sorted(self._facts_by_index.items()):
            device = control.devices.get(str(index), ControlledDevice())
            if device.absent or device.lost:
                continue
            in_processes_mib = sum(process.used_mib for process in device.processes)
            results.append(
                DeviceUsage(
                    uuid=facts.uuid,
                    used_mib=max(device.used_mib, in_processes_mib),
                    total_mib=facts.memory_mib,
                    core_pct=device.core_pct,
                    processes=tuple(
                        ProcessUsage(pid=p.pid, used_mib=p.used_mib, core_pct=p.core_pct)
                        for p in device.processes
                    ),
                )
            )
        return tuple(results)

    async def listed(self) -> tuple[DeviceFacts, ...]:
        """All devices that were ever listed."""
        await self._control()
        return tuple(facts for _, facts in sorted(self._facts_by_index.items()))

    async def modes(self) -> tuple[CardMode, ...]:
        """Of each device that is in MIG mode, or was until it was switched."""
        listed = await self.listed()
        if not self._has_modes or self._partitioner is None:
            return ()
        found = []
        for facts in listed:
            is_divided = self._partitioner.is_divided(facts.uuid)
            found.append(
                CardMode(uuid=facts.uuid, is_divided=is_divided, is_divided_next=is_divided)
            )
        return tuple(found)

    async def switch_mode(self, uuid: str, *, is_divided: bool) -> None:
        """Take effect at once, on a device without partitions."""
        await self._control()
        if self._partitioner is None:
            raise NotSupported(doing=f"switch the mode of {uuid}", detail="it has none")
        self._partitioner.switch_mode(uuid, is_divided=is_divided)

    async def aclose(self) -> None:
        """No effect: there are no resources to release."""

    def _reachable(self) -> dict[str, DeviceFacts]:
        """Return devices with readable partitions; raise ``DriverMissing`` before discovery."""
        reason = self._last_control.driver_missing
        if reason or not self._facts_by_index:
            raise DriverMissing(doing="reach the devices", detail=reason or "not listed yet")
        return {facts.uuid: facts for facts in self._facts_by_index.values()}

    def _facts(self, index: int) -> DeviceFacts:
        profile, device = self._profile, self._profile.devices[index]
        attributes = {
            key: text for key, text in profile.model.attributes.items() if key in _PASSED_ON
        }
        if profile.model.compute_units:
            attributes["compute_units"] = str(profile.model.compute_units)
        name = f"{self._settings.node}/{profile.vendor}/{index}"
        facts = DeviceFacts(
            uuid=f"{profile.uuid_prefix}{uuid.uuid5(_NAMESPACE, name)}",
            vendor=profile.vendor,
            index=index,
            type=type_of(profile.vendor, device.name or profile.model.name),
            memory_mib=self._memory_mib(index),
            minor=device.minor,
            bus_id=device.bus_id,
            numa=device.numa,
            mode=profile.model.mode,
            partitions=profile.partitions,
            resources=profile.model.resources,
            max_shares=profile.model.max_shares,
            attributes=attributes,
        )
        if not self._has_modes or self._partitioner is None:
            return facts
        if self._partitioner.is_divided(facts.uuid):
            return facts
        return msgspec.structs.replace(facts, mode="soft", partitions=(), resources={})

    @property
    def _has_modes(self) -> bool:
        """Return true if the devices have a mode that can be switched: NVIDIA's MIG."""
        return self.vendor == "nvidia" and self._profile.model.mode == "mig"

    def _memory_mib(self, index: int) -> int:
        if self._profile.model.unified_memory:
            return self._settings.unified_memory_mib
        return self._profile.devices[index].memory_mib or self._profile.model.memory_mib

    def _neighbours(self) -> Mapping[tuple[str, str], Neighbour]:
        profile = self._profile
        level_by_pair = {
            pair: group.level
            for group in profile.proximity
            for pair in permutations(group.devices, 2)
        }
        links_by_pair = {
            pair: join.links
            for join in profile.fabric.joins
            for pair in permutations(join.devices, 2)
        }
        views = {}
        for a, b in permutations(self._facts_by_index, 2):
            numa = profile.devices[a].numa
            near = numa is not None and numa == profile.devices[b].numa
            views[self._facts_by_index[a].uuid, self._facts_by_index[b].uuid] = Neighbour(
                level=level_by_pair.get((a, b), "node" if near else "system"),
                fabric_links=links_by_pair.get((a, b), profile.fabric.links_per_device),
            )
        return views

    def _new_faults(self, control: Control) -> tuple[FaultSeen, ...]:
        """Return faults that came after the first read; older ones preceded this driver."""
        newest = max((fault.seq for fault in control.faults), default=0)
        if self._delivered_seq is None:
            self._delivered_seq = newest
        fresh = sorted(
            (fault for fault in control.faults if fault.seq > self._delivered_seq),
            key=lambda fault: fault.seq,
        )
        self._delivered_seq = newest
        return tuple(
            FaultSeen(
                uuid=self._facts_by_index[fault.index].uuid,
                code=fault.code,
                fatal=self._policy.condemns(fault.code),
                text=f"Xid {fault.code}" if self.vendor == "nvidia" else f"fault {fault.code}",
            )
            for fault in fresh
            if fault.index in self._facts_by_index
        )

    async def _control(self) -> Control:
        """Read the control file; an invalid file keeps the last valid state."""
        if not self._settings.control:
            return self._last_control
        try:
            text = await anyio.Path(self._settings.control).read_bytes()
            self._last_control = msgspec.json.decode(text, type=Control)
        except FileNotFoundError:
            self._last_control = Control()
        except UNDECODABLE as error:
            extra = {"path": self._settings.control, "error": str(error)}
            _log.warning("the control file cannot be understood", extra=extra)
        return self._last_control


def _read_profile(path: Path) -> _Profile:
    try:
        tree = documents.toml(path.read_bytes(), field="drivers.simulated.profile")
        return msgspec.convert(tree, _Profile)
    except (OSError, *UNDECODABLE) as error:
        raise SettingsInvalid(
            field="drivers.simulated.profile",
            problem=f"{path.name}: {error}",
            fix="name a readable hardware profile",
        ) from error
