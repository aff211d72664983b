# SPDX-License-Identifier: Apache-2.0
"""Collects the facts of ``core.recall``: regions, processes, gates, cgroups and device memory.

A process belongs to a container where a slot of the container's region or the driver's list names
it and the kernel confirms its container: the region is written by the tenant. If the facts of one
container cannot be read, its last facts are used, because a container that is missing would lose
its room on the device. Blocks for reads from memory; not thread-safe.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_common.model.device import RECALL, Device
from hami_common.runtime.quarantine import sift
from hami_common.units import MIB_BYTES
from hami_nodeagent.core.holders import LIMITED_VENDORS, Holder
from hami_nodeagent.core.living import Owner as SlotOwner
from hami_nodeagent.core.living import parse_stat
from hami_nodeagent.core.priorities import ContainerKey, key_of, level_of
from hami_nodeagent.core.recall import UNKNOWN_MIB, ProcessFacts, Tenant
from hami_nodeagent.core.region import Refused, Region
from hami_nodeagent.drivers.protocol import DeviceUsage
from hami_nodeagent.shell.gates import Gates
from hami_nodeagent.shell.headroom import Headroom, HostMemory
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.owners import Owner
from hami_nodeagent.shell.regions import read_region, region_path

_NS = 1e-9
_STOPPED = frozenset("Tt")
NO_LIMIT = HostMemory(headroom_mib=None)

FindOwners = Callable[[Collection[int]], Mapping[int, Owner]]
"""Return the pod and container of processes of the host; those that ended are missing."""


class Group(Struct, frozen=True, kw_only=True):
    """A container with shares of recalled devices."""

    holders: tuple[Holder, ...]
    has_gate: bool

    @property
    def key(self) -> ContainerKey:
        """Return the container."""
        return key_of(self.holders[0])


def groups_of(
    holders: Collection[Holder],
    devices_by_uuid: Mapping[str, Device],
    has_gate: Callable[[ContainerKey], bool],
) -> tuple[Group, ...]:
    """Return the containers that share a device with recall, or with a container that has a gate.

    A container keeps its gate if its device's configuration changes.
    """
    soft = [one for one in holders if one.vendor in LIMITED_VENDORS]
    gated = {key for key in {key_of(one) for one in soft} if has_gate(key)}
    uuids = {one.uuid for one in soft if key_of(one) in gated}
    uuids |= {uuid for uuid, one in devices_by_uuid.items() if one.overcommit == RECALL}
    keys = {key_of(one) for one in soft if one.uuid in uuids}
    found: dict[ContainerKey, list[Holder]] = {}
    for holder in soft:
        if key_of(holder) in keys:
            found.setdefault(key_of(holder), []).append(holder)
    return tuple(Group(holders=tuple(own), has_gate=key in gated) for key, own in found.items())


def rooms_of(groups: Sequence[Group], devices_by_uuid: Mapping[str, Device]) -> dict[str, int]:
    """Return the memory in MiB that residents have together, of devices with recall by UUID.

    A device whose configuration changed keeps the bound of its memory while a container has a gate.
    """
    uuids = {one.uuid for group in groups if group.has_gate for one in group.holders}
    return {
        uuid: device.largest_mib or device.memory_mib
        for uuid, device in devices_by_uuid.items()
        if device.largest_mib or uuid in uuids
    }


def memory_by_pid(usages: Sequence[DeviceUsage]) -> dict[int, dict[str, int]]:
    """Return the device memory in MiB of each process that the driver lists, by UUID.

    ``UNKNOWN_MIB`` where it reports none.
    """
    found: dict[int, dict[str, int]] = {}
    for usage in usages:
        for process in usage.processes or ():
            used_mib = UNKNOWN_MIB if process.used_mib is None else process.used_mib
            found.setdefault(process.pid, {})[usage.uuid] = used_mib
    return found


class Observer:
    """Reader of one node's recalled containers."""

    def __init__(
        self, *, proc: Path, pods_dir: Path, gates: Gates, owners: FindOwners, headroom: Headroom
    ) -> None:
        self._proc = proc
        self._pods_dir = pods_dir
        self._gates = gates
        self._owners = owners
        self._headroom = headroom
        self._living = Living(proc)
        self._last: dict[ContainerKey, Tenant] = {}

    def tenants(
        self, groups: Sequence[Group], memory: Mapping[int, Mapping[str, int]]
    ) -> tuple[tuple[Tenant, ...], list[tuple[Group, Exception]]]:
        """Return the containers, and the errors of those whose last facts are returned."""
        regions = {one.key: self._region(one) for one in groups if one.has_gate}
        pid_by_owner = self._living.pids_of(
            {
                process.owner
                for region in regions.values()
                if isinstance(region, Region)
                for process in region.processes
            }
        )
        owner_by_pid = self._owners({*pid_by_owner.values(), *memory})
        read, failed = sift(
            groups,
            lambda one: self._tenant(one, regions.get(one.key), pid_by_owner, owner_by_pid, memory),
        )
        found = {tenant.key: tenant for _, tenant in read}
        for group, _ in failed:
            found[group.key] = self._last.get(group.key) or _without_gate(group)
        self._last = found
        return tuple(found.values()), failed

    def _region(self, group: Group) -> Region | Refused:
        first = group.holders[0]
        path = region_path(self._pods_dir, first.pod_uid, first.volume)
        return read_region(path, self._living.dead_of)

    def _tenant(
        self,
        group: Group,
        region: Region | Refused | None,
        pid_by_owner: Mapping[SlotOwner, int],
        owner_by_pid: Mapping[int, Owner],
        memory: Mapping[int, Mapping[str, int]],
    ) -> Tenant:
        tenant = _without_gate(group)
        is_open = self._gates.is_open(group.key)
        if not group.has_gate or is_open is None:
            return tenant
        slots, is_complete = set[int](), True
        if isinstance(region, Region):
            known = [pid_by_owner.get(one.owner) for one in region.processes]
            slots = {pid for pid in known if pid is not None}
            is_complete = None not in known
        elif region is not None:
            is_complete = region.reason == "missing"
        mine = {pid for pid in {*slots, *memory} if _is_of(owner_by_pid.get(pid), group.key)}
        is_complete = is_complete and not any(
            owner.pod_uid == group.key[0] and not owner.container for owner in owner_by_pid.values()
        )
        host = self._headroom.of(min(mine)) if mine else NO_LIMIT
        processes = [
            self._process(pid, memory.get(pid, {}), has_slot=pid in slots, host=host)
            for pid in sorted(mine)
        ]
        return replace(
            tenant,
            has_gate=True,
            is_gate_open=is_open,
            is_new=group.key in self._gates.new,
            is_complete=is_complete,
            processes=tuple(one for one in processes if one is not None),
            touched_s=_touched_s(region),
            headroom_mib=host.headroom_mib,
            used_mib=_used_mib(region),
        )

    def _process(
        self, pid: int, memory_mib: Mapping[str, int], *, has_slot: bool, host: HostMemory
    ) -> ProcessFacts | None:
        """Return the facts of a process; ``None`` if it has ended."""
        try:
            text = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        stat = parse_stat(text)
        if stat is None or stat[1]:
            return None
        state = text.rpartition(") ")[2][:1]
        return ProcessFacts(
            pid=pid,
            start_ticks=stat[0],
            has_slot=has_slot,
            is_stopped=host.is_frozen or state in _STOPPED,
            memory_mib=memory_mib,
        )


def _without_gate(group: Group) -> Tenant:
    """Return the container as one that keeps its room: without a gate."""
    return Tenant(
        key=group.key,
        level=min(level_of(one) for one in group.holders),
        limit_mib={one.uuid: one.limit_mib for one in group.holders},
        has_gate=False,
    )


def _is_of(owner: Owner | None, key: ContainerKey) -> bool:
    return owner is not None and (owner.pod_uid, owner.container) == key


def _touched_s(region: Region | Refused | None) -> float | None:
    if not isinstance(region, Region):
        return None
    newest_ns = max(region.touched_ns, region.last_launch_ns)
    return newest_ns * _NS if newest_ns else None


def _used_mib(region: Region | Refused | None) -> dict[str, int]:
    if not isinstance(region, Region):
        return {}
    return {
        uuid: -(-(use.used_bytes + use.context_bytes + use.module_bytes) // MIB_BYTES)
        for uuid, use in region.devices.items()
    }
