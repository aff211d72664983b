# SPDX-License-Identifier: Apache-2.0
"""Samples usage every few seconds (regions, drivers, processes) for metrics and breach detection.

A sample reads each container's region, asks each driver, and finds the owners of the processes that
the driver names. If a driver does not answer, its devices are missing from the sample and their
breaches keep their state. An error of one container, process or driver is recorded in the
quarantine, and the rest of the sample is taken. Times in seconds; regions count in nanoseconds of
CLOCK_MONOTONIC, which all containers of a host share.
"""

import logging
import random
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
from msgspec.structs import replace

from hami_common.model.device import Device
from hami_common.model.placement import booked_by_device
from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.breach import BreachBook, Outcome, Process, pause_s
from hami_nodeagent.core.foreign import ForeignBook, foreign_mib
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.holders import Holder, holders_of
from hami_nodeagent.core.metering import idle_parts, part_of
from hami_nodeagent.core.region import Region
from hami_nodeagent.core.traffic import Seen, TrafficBook
from hami_nodeagent.core.usage import (
    ContainerKey,
    ContainerRow,
    Counters,
    Part,
    Row,
    ShareKey,
    containers_of,
    rows_of,
)
from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.protocol import DeviceUsage, Driver, InstanceUsage
from hami_nodeagent.shell.breaches import BreachTeller
from hami_nodeagent.shell.ended import EndedLists
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.loaders import LoaderWatch
from hami_nodeagent.shell.owners import ContainerName, Owner, find_owners
from hami_nodeagent.shell.regions import read_region, region_of
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usagemetrics import Look, UsageMetrics

_NS_PER_S = 1e9
_SHARED_MODES = ("soft", "timeslice")
"""In mode ``mps`` the driver attributes the clients' use to the server."""
_UNDIVIDED_MODES = (*_SHARED_MODES, "whole")
"""Modes in which each process uses memory of the whole device."""
_IDLE = 3
"""Samples in a row without a change, after which the next ones are taken less often."""

_log = logging.getLogger(__name__)


class UsageWatch:
    """Takes the periodic samples of one agent."""

    def __init__(self, *, site: Site, drivers: Sequence[Driver], teller: BreachTeller) -> None:
        settings = site.settings
        self._site = site
        self._picture = site.picture
        self._teller = teller
        self._loaders = LoaderWatch(site=site, report=teller.tell_unlimited)
        self._drivers = tuple(drivers)
        self._proc = Path(settings.host_proc)
        self._living = Living(self._proc)
        self._ended = EndedLists(Path(settings.priority.directory))
        self._chance = random.SystemRandom()
        self._book_by_vendor = {
            driver.vendor: BreachBook(
                settings.usage.breach, is_core_forced=settings.core_policy == "force"
            )
            for driver in drivers
        }
        self._going_by_vendor: dict[str, Outcome] = {}
        self._foreign = ForeignBook(settings.usage.foreign)
        self._processes_by_uuid: Mapping[str, Sequence[Process]] = {}
        self._use_by_instance: Mapping[tuple[str, str], InstanceUsage] = {}
        """Last usage that drivers reported per hardware partition: (device UUID, partition id)."""
        self._counters = Counters()
        self._traffic = TrafficBook()
        self._launches: dict[ContainerKey, int] = {}
        """Launches that each container had counted at the last sample."""
        self._last_sample: object = None
        self._equal_samples = 0
        self.metrics = UsageMetrics(site.node, sets=settings.metric_names)
        site.metrics.registry.register(self.metrics)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await self._site.quarantine.run("usage", "look", self.look, is_retried=False)
            await self._site.clock.sleep(pause_s(self.interval_s(), self._chance.random()))

    def interval_s(self) -> float:
        """Return the longest time until the next sample: longer after samples without a change."""
        usage = self._site.settings.usage
        sample = (self._launches, self._processes_by_uuid)
        self._equal_samples = self._equal_samples + 1 if sample == self._last_sample else 0
        self._last_sample = sample
        return (
            max(usage.look_s, usage.idle_look_s) if self._equal_samples >= _IDLE else usage.look_s
        )

    async def look(self) -> None:
        """Take one sample."""
        holders = self._holders()
        region_by_container = await self._regions(holders)
        # Publish the regions' figures first, because a driver may answer late.
        self._show(holders, region_by_container, self._processes_by_uuid, ())
        await self._site.quarantine.run(
            "usage", "loaders", partial(self._loaders.look, holders), is_retried=False
        )
        processes_by_uuid: dict[str, Sequence[Process]] = {}
        usages: list[DeviceUsage] = []
        for driver in self._drivers:
            await self._site.quarantine.run(
                "usage",
                driver.vendor,
                partial(self._look_at, driver, usages, processes_by_uuid),
                is_retried=False,
            )
        self._processes_by_uuid = processes_by_uuid
        self._site.quarantine.call(
            "usage", "foreign", partial(self._note_foreign, processes_by_uuid)
        )
        self._use_by_instance = {
            (usage.uuid, one.instance_id): one for usage in usages for one in usage.instances
        }
        holders = self._holders()
        await self._estimate_traffic(holders, usages)
        self._show(holders, region_by_container, processes_by_uuid, usages)
        self._site.quarantine.call(
            "metering",
            "look",
            partial(self._meter, holders, region_by_container, processes_by_uuid),
        )

    async def _look_at(
        self,
        driver: Driver,
        usages: list[DeviceUsage],
        processes_by_uuid: dict[str, Sequence[Process]],
    ) -> None:
        """Query one driver, and report the breaches that its response shows."""
        try:
            of_vendor = await driver.usage()
        except DriverError as error:
            _log.debug("usage not read", extra={"problem": str(error)})
            return
        usages.extend(of_vendor)
        processes = await self._processes(of_vendor)
        processes_by_uuid |= processes
        # The grants may have changed while the driver was queried.
        outcome = self._book_by_vendor[driver.vendor].look(
            self._holders(),
            self._in_modes(processes, _SHARED_MODES),
            now_s=self._site.clock.monotonic_s(),
        )
        self._going_by_vendor[driver.vendor] = outcome
        await self._teller.tell(outcome, driver.vendor)

    def _note_foreign(self, processes_by_uuid: Mapping[str, Sequence[Process]]) -> None:
        """Let the next report name the memory that processes without an allocation use."""
        holders, breach = self._holders(), self._site.settings.usage.breach
        found = {
            uuid: foreign_mib([one for one in holders if one.uuid == uuid], processes, breach)
            for uuid, processes in self._in_modes(processes_by_uuid, _UNDIVIDED_MODES).items()
        }
        devices = self._picture.view.devices_by_uuid
        measured = {uuid for uuid, one in devices.items() if one.mode in _UNDIVIDED_MODES}
        self._foreign.look(found, measured)
        self._picture.set_foreign(self._foreign.reported)

    async def rows(self) -> tuple[Row, ...]:
        """Return the current usage by regions, with the drivers' figures of the last sample."""
        holders = self._holders()
        regions = await self._regions(holders)
        return self._rows(holders, regions, self._processes_by_uuid)

    def _rows(
        self,
        holders: Sequence[Holder],
        region_by_container: Mapping[ContainerKey, Region],
        processes_by_uuid: Mapping[str, Sequence[Process]],
    ) -> tuple[Row, ...]:
        """Return each holder's usage; a holder whose figures cannot be read is left out."""
        parts = self._parts()
        rows, failed = sift(
            holders, lambda one: rows_of((one,), region_by_container, processes_by_uuid, parts)
        )
        self._note("share", [holder for holder, _ in rows], failed)
        return tuple(self._with_estimates(row) for _, found in rows for row in found)

    def _with_estimates(self, row: Row) -> Row:
        holder = row.holder
        row = replace(row, bound_mib=self._picture.bounds_mib.get((holder.owner, holder.uuid)))
        found = self._traffic.of(holder.uuid, (holder.pod_uid, holder.container))
        if found is None:
            return row
        return replace(row, dram_pct=found.dram_pct, pcie_mib_s=found.pcie_mib_s)

    async def _estimate_traffic(
        self, holders: Sequence[Holder], usages: Sequence[DeviceUsage]
    ) -> None:
        """Estimate the traffic of containers on devices where they take turns."""
        devices = self._picture.view.devices_by_uuid
        uuids: dict[ContainerKey, set[str]] = {}
        for holder in holders:
            uuids.setdefault((holder.pod_uid, holder.container), set()).add(holder.uuid)
        heavy = self._traffic.look(
            {
                one.uuid: Seen(dram_pct=one.dram_pct, pcie_mib_s=one.pcie_mib_s)
                for one in usages
                if one.uuid in devices
                and devices[one.uuid].mode in _SHARED_MODES
                and (one.dram_pct is not None or one.pcie_mib_s is not None)
            },
            {
                (row.holder.pod_uid, row.holder.container): row.counted.device_time_ns
                for row in self.metrics.look.containers
            },
            uuids,
            now_s=self._site.clock.monotonic_s(),
        )
        for one in heavy:
            pod_uid, _ = one.container
            await self._site.quarantine.run(
                "usage",
                f"traffic {one.uuid}",
                partial(self._teller.report_traffic, pod_uid, one.text),
                is_retried=False,
            )

    def _containers(
        self, holders: Sequence[Holder], region_by_container: Mapping[ContainerKey, Region]
    ) -> tuple[ContainerRow, ...]:
        """Return each container's counters; one whose figures cannot be read is left out."""
        now_ns = int(self._site.clock.monotonic_s() * _NS_PER_S)
        first: dict[ContainerKey, Holder] = {}
        for holder in holders:
            first.setdefault((holder.pod_uid, holder.container), holder)
        self._counters.keep_only(frozenset(first))
        rows, failed = sift(
            first.values(),
            lambda one: containers_of((one,), region_by_container, self._counters, now_ns=now_ns),
        )
        self._note("container", [holder for holder, _ in rows], failed)
        return tuple(row for _, found in rows for row in found)

    def _note(
        self,
        kind: str,
        read: Sequence[Holder],
        failed: Sequence[tuple[Holder, Exception]],
    ) -> None:
        """Release readable holders from quarantine, and put the failed ones into it."""
        quarantine = self._site.quarantine
        for one in read:
            quarantine.forget(kind, f"{one.pod_uid}/{one.container}/{one.uuid}")
        for one, error in failed:
            key = f"{one.pod_uid}/{one.container}/{one.uuid}"
            quarantine.failed(kind, key, error, name=(one.namespace, one.pod))

    async def _regions(self, holders: Sequence[Holder]) -> dict[ContainerKey, Region]:
        """Return the regions by container; an unreadable region counts as absent."""
        regions, failed = await anyio.to_thread.run_sync(self._read_regions, holders)
        for pod_uid, container in regions:
            self._site.quarantine.forget("region", f"{pod_uid}/{container}")
        for (pod_uid, container), error in failed:
            names = ((one.namespace, one.pod) for one in holders if one.pod_uid == pod_uid)
            self._site.quarantine.failed(
                "region", f"{pod_uid}/{container}", error, name=next(names, ("", ""))
            )
        return regions

    def _parts(self) -> dict[ShareKey, Part]:
        """Return the partitions that hold shares now, with their last reported usage."""
        found: dict[ShareKey, Part] = {}
        for owner, instance in self._picture.partitions.carried.items():
            use = self._use_by_instance.get((instance.uuid, instance.instance_id))
            found[owner.pod_uid, owner.container, owner.number] = Part(
                instance=instance,
                is_told=use is not None,
                used_mib=use.used_mib if use is not None else None,
                core_pct=use.core_pct if use is not None else None,
            )
        return found

    def _meter(
        self,
        holders: Sequence[Holder],
        region_by_container: Mapping[ContainerKey, Region],
        processes_by_uuid: Mapping[str, Sequence[Process]],
    ) -> None:
        """Distribute the time since the last sample among the pods that held devices."""
        shown, devices = self.metrics.look, self._picture.view.devices_by_uuid
        idle = idle_parts(
            shown.rows,
            shown.containers,
            self._launches,
            with_region=region_by_container,
            seen_uuids=processes_by_uuid,
        )
        self._launches = {
            (one.holder.pod_uid, one.holder.container): one.counted.launches
            for one in shown.containers
        }
        namespaces = {one.owner[0]: one.namespace for one in holders}
        held = {(one.owner[0], one.uuid) for one in holders}
        names = {one.owner[0]: (one.namespace, one.pod) for one in holders}
        found, failed = sift(
            namespaces.items(),
            lambda item: [
                part_of(*item, devices[uuid], booked)
                for uuid, booked in booked_by_device(
                    self._picture.entries_by_uid[item[0]].record.containers
                ).items()
                if uuid in devices and (item[0], uuid) in held
            ],
        )
        for (uid, _), _ in found:
            self._site.quarantine.forget("metering", uid)
        for (uid, _), error in failed:
            self._site.quarantine.failed("metering", uid, error, name=names[uid])
        parts = [part for _, several in found for part in several]
        self.metrics.meter.look(devices, parts, idle, now_s=self._site.clock.monotonic_s())

    def _holders(self) -> tuple[Holder, ...]:
        return holders_of(
            self._picture.entries_by_uid,
            self._picture.pods,
            self._picture.grants,
            self._picture.view.devices_by_uuid,
        )

    def _in_modes(
        self, processes_by_uuid: Mapping[str, Sequence[Process]], modes: Collection[str]
    ) -> dict[str, Sequence[Process]]:
        """Return the processes on known devices in one of these modes."""
        devices = self._picture.view.devices_by_uuid
        return {
            uuid: processes
            for uuid, processes in processes_by_uuid.items()
            if uuid in devices and devices[uuid].mode in modes
        }

    def _read_regions(
        self, holders: Sequence[Holder]
    ) -> tuple[dict[ContainerKey, Region], list[tuple[ContainerKey, Exception]]]:
        paths = {
            (one.pod_uid, one.container): region_of(self._site.settings, one)
            for one in holders
            if one.has_region and not one.is_borrowed
        }
        read, failed = sift(paths, lambda key: self._read_region(paths[key]))
        regions = {key: found for key, found in read if found is not None}
        self._living.keep_only(
            [one.owner for found in regions.values() for one in (*found.processes, *found.ended)]
        )
        self._ended.write(
            {
                holder.owner: [process.owner for process in found.ended]
                for holder in holders
                if (found := regions.get((holder.pod_uid, holder.container))) is not None
            }
        )
        return regions, failed

    def _read_region(self, path: Path) -> Region | None:
        found = read_region(path, self._living.dead_of)
        if isinstance(found, Region):
            return found
        if found.reason != "missing":
            self._site.metrics.regions_refused.labels(reason=found.reason).inc()
        return None

    async def _processes(self, usages: Sequence[DeviceUsage]) -> dict[str, tuple[Process, ...]]:
        """Return processes with a known owner, by device; omit devices without process data."""
        pids = {one.pid for usage in usages for one in usage.processes or ()}
        containers: dict[str, ContainerName] = {
            container_id: (pod.uid, container)
            for pod in self._picture.pods
            for container_id, container in pod.container_by_id.items()
        }
        owners: Mapping[int, Owner] = {}
        if pids:
            owners = await anyio.to_thread.run_sync(
                lambda: find_owners(
                    self._proc, pids, containers, by=self._site.settings.usage.owners
                )
            )
        self._site.metrics.unknown_processes.set(len(pids - owners.keys()))
        return {
            usage.uuid: tuple(
                Process(
                    pid=one.pid,
                    command=owners[one.pid].command,
                    pod_uid=owners[one.pid].pod_uid,
                    container=owners[one.pid].container,
                    used_mib=one.used_mib or 0,
                    core_pct=one.core_pct or 0,
                )
                for one in usage.processes
                if one.pid in owners
            )
            for usage in usages
            if usage.processes is not None
        }

    def _show(
        self,
        holders: Sequence[Holder],
        region_by_container: Mapping[ContainerKey, Region],
        processes_by_uuid: Mapping[str, Sequence[Process]],
        usages: Sequence[DeviceUsage],
    ) -> None:
        last = self.metrics.look
        devices = self._picture.view.devices_by_uuid
        breaches = []
        for outcome in self._going_by_vendor.values():
            for breach in outcome.going:
                pod = self._teller.pod_of(breach)
                names = (pod.namespace, pod.name) if pod is not None else ("", "")
                breaches.append((breach, *names))
        self.metrics.look = Look(
            rows=self._rows(holders, region_by_container, processes_by_uuid),
            containers=self._containers(holders, region_by_container),
            devices=[(devices[one.uuid], one) for one in usages if one.uuid in devices]
            or last.devices,
            breaches=breaches,
            instances=self._instances(),
            asked_s=self._site.clock.monotonic_s() if usages else last.asked_s,
        )

    def _instances(self) -> list[tuple[Device, Instance]]:
        """Return the hardware partitions of known size: the agent's and those made by others."""
        board, devices = self._picture.partitions, self._picture.view.devices_by_uuid
        foreign = [one for several in board.foreign_by_uuid.values() for one in several]
        return [
            (devices[one.uuid], one)
            for one in (*board.carried.values(), *foreign)
            if one.uuid in devices and one.profile
        ]
