# SPDX-License-Identifier: Apache-2.0
"""Shows the memory pressure of overcommitted devices, and gives thrashing ones exclusive quanta.

Takes the figures of the last usage sample (``shell.usage``), so the driver is not asked again.
Every ``LOOK_S`` they are judged by ``core.pressure`` and ``core.thrash``; every ``QUANTA_S`` while
containers have a device one at a time. Begin and end of a condition are reported as Events on the
node and on the pods of the device, and as log lines. A tenant writes its own usage region, so its
usage counts at most as its limit. When the loop ends, all gates are opened. Memory in MiB, times in
seconds of CLOCK_MONOTONIC.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from hami_common.model.device import MANAGED, Device
from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_common.runtime.quarantine import sift
from hami_common.units import MIB_BYTES
from hami_nodeagent.core.holders import LIMITED_VENDORS, Holder, holders_of
from hami_nodeagent.core.pressure import (
    NODE,
    Change,
    DeviceMemory,
    HostMemory,
    Kind,
    PressureBook,
    signals_of,
)
from hami_nodeagent.core.priorities import ContainerKey, key_of, level_of
from hami_nodeagent.core.recall import ReportKind
from hami_nodeagent.core.region import Region
from hami_nodeagent.core.thrash import DeviceUse, Facts, SetGate, Tenant, Thrash
from hami_nodeagent.core.usage import Row
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.eventqueue import EventQueue
from hami_nodeagent.shell.gates import Gates
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.regions import read_region, region_of
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usagemetrics import Look

LOOK_S = 1.0
QUANTA_S = 0.25
_NS_PER_S = 1e9
_KIB_PER_MIB = 1024
_MEMINFO = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.MULTILINE)
REASONS: Mapping[Kind, tuple[str, str]] = {
    "spilled": ("DeviceMemorySpilled", "DeviceMemoryFits"),
    "thrashing": ("DeviceMemoryThrashing", "DeviceMemoryCalm"),
    "host-memory": ("HostMemoryShort", "HostMemorySufficient"),
}
"""Reasons of the Events at begin and end of each condition."""

_log = logging.getLogger(__name__)


class OvercommitWatch:
    """Watches the overcommitted devices of one node."""

    def __init__(
        self,
        *,
        site: Site,
        bells: Doorbells,
        gates: Gates,
        look: Callable[[], Look],
        events: Callable[[], EventRecorder | None],
    ) -> None:
        """Create the watch; ``events`` returns ``None`` before the API server was reached."""
        self._site = site
        self._picture = site.picture
        self._gates = gates
        self._look = look
        self._proc = Path(site.settings.host_proc)
        self._living = Living(self._proc)
        self._book = PressureBook()
        self._thrash = Thrash()
        self._waits_s: dict[ContainerKey, float] = {}
        """Time of the last report of a waiting thread."""
        self._launches: dict[ContainerKey, tuple[int, float | None]] = {}
        """Launches of each container at the last look, and the time at which they had changed."""
        self._held: set[ContainerKey] = set()
        self.events = EventQueue(events)
        bells.listeners.append(self._heard)

    async def run(self) -> None:
        """Watch until cancelled; then no container is held back any more."""
        self._thrash = Thrash()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self.events.run)
                while True:
                    changed = self._picture.changed
                    if await self.look():
                        wait_s = QUANTA_S if self._thrash.has_quanta else LOOK_S
                        await self._site.clock.sleep(wait_s)
                    else:
                        await changed.wait()
        finally:
            for key in tuple(self._held):
                self._set(SetGate(key=key))

    async def look(self) -> bool:
        """Judge the last sample, set gates, report changes, and set the metrics.

        Returns whether any device is overcommitted.
        """
        now_s, sample = self._site.clock.monotonic_s(), self._look()
        devices = {
            uuid: device
            for uuid, device in self._picture.view.devices_by_uuid.items()
            if device.vendor in LIMITED_VENDORS and device.capacity_mib > device.memory_mib
        }
        holders = [
            one
            for one in holders_of(
                self._picture.entries_by_uid,
                self._picture.pods,
                self._picture.grants,
                self._picture.view.devices_by_uuid,
            )
            if one.uuid in devices
        ]
        memory = _memory_of(devices, holders, sample.rows)
        await self._hold_back(devices, holders, memory, sample, now_s)
        host = await anyio.to_thread.run_sync(self._host_memory) if devices else None
        signals = {**signals_of(memory, host), **self._thrash.signals()}
        for change in self._book.look(signals, now_s=now_s):
            self._note(change, holders)
        self._show(memory, host)
        return bool(devices)

    # Exclusive quanta

    def _heard(self, key: ContainerKey, pid: int, kind: ReportKind, turn: int | None) -> None:
        del pid, turn
        if kind == "waits":
            self._waits_s[key] = self._site.clock.monotonic_s()

    async def _hold_back(
        self,
        devices: Mapping[str, Device],
        holders: Sequence[Holder],
        memory: Sequence[DeviceMemory],
        sample: Look,
        now_s: float,
    ) -> None:
        managed = {uuid for uuid, one in devices.items() if one.overcommit == MANAGED}
        groups: dict[ContainerKey, list[Holder]] = {}
        for one in holders:
            if one.uuid in managed and not one.is_whole:
                groups.setdefault(key_of(one), []).append(one)
        self._waits_s = {key: at for key, at in self._waits_s.items() if key in groups}
        self._launches = {key: one for key, one in self._launches.items() if key in groups}
        read, failed = await anyio.to_thread.run_sync(
            lambda: sift(groups, lambda key: self._tenant(key, groups[key]))
        )
        for key, error in failed:
            _log.error("container not observed", extra={"container": "/".join(key)}, exc_info=error)
        usages = {device.uuid: usage for device, usage in sample.devices}
        facts = Facts(
            now_s=now_s,
            tenants=tuple(tenant for _, tenant in read),
            devices=tuple(
                DeviceUse(
                    uuid=one.uuid,
                    memory_mib=one.memory_mib,
                    used_mib=one.used_mib,
                    traffic_mib_s=usages[one.uuid].pcie_mib_s,
                    sampled_s=sample.asked_s,
                )
                for one in memory
                if one.uuid in managed and one.uuid in usages
            ),
        )
        for action in self._thrash.look(facts, self._site.settings.thrash):
            self._set(action)
        self._held &= groups.keys()
        self._gates.keep_only(groups)

    def _tenant(self, key: ContainerKey, holders: Sequence[Holder]) -> Tenant:
        is_open = self._gates.is_open(key)
        first = holders[0]
        region = read_region(region_of(self._site.settings, first), self._living.dead_of)
        return Tenant(
            key=key,
            level=min(level_of(one) for one in holders),
            uuids=frozenset(one.uuid for one in holders),
            has_gate=is_open is not None,
            is_held=is_open is False,
            used_s=self._used_s(key, region) if isinstance(region, Region) else None,
            waits_s=self._waits_s.get(key),
        )

    def _used_s(self, key: ContainerKey, region: Region) -> float | None:
        """Return the time of the last call; without a gate or limits only launches are counted."""
        launches = sum(one.launches for one in (*region.processes, *region.ended))
        before, _ = self._launches.get(key, (launches, None))
        if launches != before:
            self._launches[key] = launches, self._site.clock.monotonic_s()
        else:
            self._launches.setdefault(key, (launches, None))
        seen_ns = max(region.touched_ns, region.last_launch_ns)
        known = (seen_ns / _NS_PER_S if seen_ns else None, self._launches[key][1])
        return max((at for at in known if at is not None), default=None)

    def _set(self, action: SetGate) -> None:
        until_s = action.closed_until_s
        try:
            self._gates.set(
                action.key,
                is_open=until_s is None,
                lease_until_ns=0 if until_s is None else int(until_s * _NS_PER_S),
            )
        except OSError as error:
            extra = {"container": "/".join(action.key), "problem": error.strerror}
            _log.error("gate not set", extra=extra)
        if until_s is None:
            self._held.discard(action.key)
        else:
            self._held.add(action.key)

    # Reports

    def _host_memory(self) -> HostMemory | None:
        """Return the memory of the node; ``None`` where the kernel does not report it."""
        try:
            text = (self._proc / "meminfo").read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            _log.debug("memory of the node not read", extra={"problem": str(error)})
            return None
        found = {name: int(kib) // _KIB_PER_MIB for name, kib in _MEMINFO.findall(text)}
        if len(found) < 2:  # noqa: PLR2004 - the two names of the pattern
            return None
        return HostMemory(total_mib=found["MemTotal"], available_mib=found["MemAvailable"])

    def _note(self, change: Change, holders: Collection[Holder]) -> None:
        """Log a change, and put its Events into the queue."""
        reason = REASONS[change.kind][0 if change.is_begin else 1]
        level = logging.WARNING if change.is_begin else logging.INFO
        _log.log(level, reason, extra={"device": change.uuid, "text": change.text})
        node = self._site.node
        regarding = [ObjectRef(kind="Node", name=node, uid=node)]
        pods = {
            one.pod_uid: ObjectRef(
                kind="Pod", namespace=one.namespace, name=one.pod, uid=one.pod_uid
            )
            for one in holders
            if one.uuid == change.uuid != NODE
        }
        for one in (*regarding, *pods.values()):
            self.events.put(
                one,
                reason=reason,
                message=change.text,
                kind="Warning" if change.is_begin else "Normal",
            )

    def _show(self, memory: Sequence[DeviceMemory], host: HostMemory | None) -> None:
        """Set the metrics; series of devices that are no longer overcommitted end."""
        metrics = self._site.metrics.overcommit
        for gauge in (metrics.promised, metrics.used, metrics.spilled):
            gauge.clear()
        for one in memory:
            metrics.promised.labels(device_uuid=one.uuid).set(one.promised_mib * MIB_BYTES)
            metrics.used.labels(device_uuid=one.uuid).set(one.used_mib * MIB_BYTES)
            metrics.spilled.labels(device_uuid=one.uuid).set(one.spilled_mib * MIB_BYTES)
        metrics.headroom.clear()
        if host is not None:
            headroom_mib = host.headroom_mib(memory)
            metrics.headroom.labels(node=self._site.node).set(headroom_mib * MIB_BYTES)
        metrics.pressure.clear()
        for kind, uuid in self._book.going:
            metrics.pressure.labels(kind=kind, device_uuid=uuid).set(1)
        for uuid, count in self._thrash.take_changes().items():
            metrics.changes.labels(device_uuid=uuid).inc(count)
        metrics.held.set(len(self._held))


def _memory_of(
    devices: Mapping[str, Device], holders: Sequence[Holder], rows: Sequence[Row]
) -> tuple[DeviceMemory, ...]:
    """Return the memory of each overcommitted device."""
    promised_mib = dict.fromkeys(devices, 0)
    for one in holders:
        promised_mib[one.uuid] += one.limit_mib
    used_mib = dict.fromkeys(devices, 0)
    for row in rows:
        if row.holder.uuid in used_mib:
            row_mib = row.used_bytes // MIB_BYTES
            used_mib[row.holder.uuid] += min(row_mib, row.holder.limit_mib)
    return tuple(
        DeviceMemory(
            uuid=uuid,
            memory_mib=device.memory_mib,
            promised_mib=promised_mib[uuid],
            used_mib=used_mib[uuid],
        )
        for uuid, device in devices.items()
    )
