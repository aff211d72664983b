# SPDX-License-Identifier: Apache-2.0
"""Grants containers memory above their request and reports what they use of it (ADR 52).

Each container with a memory limit above its request has a page with its present bound per device,
in the directory of its doorbell, in the form of ``shell.page``. A bound is valid until its lease
ends; then it is the request. Pages are written after each change of the picture and every
``priority.neighbours_s``, after the usage regions of these containers were read; rules:
``core.bursts``. A tenant writes its own region, so a container counts with what the driver showed
in the last usage sample, less the margin of breaches, if that is more. Without a current ledger no
lease is renewed.

A bound that falls below what its container uses is reported as an Event of the pod. The use of pods
above their requests is published at most once in ``REPORT_S``, and after ``REPORTS_AHEAD`` reports
at most once in ``STEADY_S``: containers that grow and shrink without end must not fill the event
stream. Memory in MiB, times in seconds; leases in nanoseconds of CLOCK_MONOTONIC.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from hami_common.runtime.kubeio import EventRecorder, ObjectRef
from hami_common.runtime.quarantine import sift
from hami_common.units import MIB_BYTES
from hami_nodeagent.core.bursts import (
    BurstBook,
    Grants,
    ShareKey,
    Want,
    booked_mib,
    left_mib,
    may_burst,
    reason_of,
    wanting,
)
from hami_nodeagent.core.holders import Holder, holders_of
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.priorities import ContainerKey
from hami_nodeagent.core.region import DeviceUse, Region, owners
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.eventqueue import EventQueue
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.page import LEASE_AT, LONG, DevicePage
from hami_nodeagent.shell.regions import read_region, read_slots, region_of
from hami_nodeagent.shell.site import Site
from hami_nodeagent.shell.usagemetrics import Look

MAGIC = 0x314D52494D414856
FILE_NAME = "room-1"
MEMORY_AT = 80
REASON = "BurstEnded"
REPORT_S = 1.0
"""Shortest interval between two reports of the node that are due to bursts."""
STEADY_S = 10.0
"""Average interval between such reports."""
REPORTS_AHEAD = 10
"""Number of such reports that may be sent before that average holds."""
EVENT_S = 60.0
"""Shortest interval between two Events of one container and device."""
WALK_S = 1.0
"""Interval at which owners of slots are searched among all processes of the host."""
_RENEWALS_PER_LEASE = 3
_NS_PER_S = 1e9

_log = logging.getLogger(__name__)


class BoundPage(DevicePage):
    """The page of one container."""

    def __init__(self, path: Path) -> None:
        """Map the page at ``path``; ``OSError`` without its directory."""
        super().__init__(path, magic=MAGIC)

    def bounds(self, now_ns: int) -> dict[str, int]:
        """Return the bounds by device whose lease has not ended, in MiB."""
        found = {}
        for uuid in self._number_by_uuid:
            at = self._place_of(uuid)
            if at is not None and self._longs[(at + LEASE_AT) // LONG] > now_ns:
                found[uuid] = self._longs[(at + MEMORY_AT) // LONG] // MIB_BYTES
        return found

    def write(self, mib_by_uuid: Mapping[str, int], *, lease_until_ns: int) -> None:
        """Write the bounds of these devices, and end the leases of all others."""
        for uuid in self._number_by_uuid.keys() - mib_by_uuid.keys():
            if (at := self._place_of(uuid)) is not None:
                self._put(at, longs={LEASE_AT: 0, MEMORY_AT: 0})
        for uuid, mib in mib_by_uuid.items():
            if (at := self._place_of(uuid)) is not None:
                self._put(at, longs={LEASE_AT: lease_until_ns, MEMORY_AT: mib * MIB_BYTES})


class BurstKeeper:
    """Grants and reports the bursts of one node."""

    def __init__(
        self,
        *,
        site: Site,
        bells: Doorbells,
        look: Callable[[], Look],
        report: Callable[[], None],
        events: Callable[[], EventRecorder | None],
    ) -> None:
        """``look`` returns the last usage sample.

        ``report`` lets the devices be reported now, if their facts changed.
        """
        self._site = site
        self._picture = site.picture
        self._bells = bells
        self._look = look
        self._report = report
        self._events = EventQueue(events)
        self._living = Living(Path(site.settings.host_proc))
        self._walked_s: float | None = None
        self._dead: dict[ContainerKey, frozenset[Owner]] = {}
        """Owners of slots that were found dead."""
        self._grants = Grants()
        self._book = BurstBook()
        self._pages: dict[ContainerKey, BoundPage] = {}
        self._failed: set[ContainerKey] = set()
        self._seen: anyio.Event | None = None
        """The picture's change event when the fields below were read."""
        self._holders: dict[ShareKey, Holder] = {}
        self._pods: dict[ShareKey, dict[str, ObjectRef]] = {}
        """Pods that use each share, by uid."""
        self._booked_mib: dict[str, int] = {}
        self._used: dict[ShareKey, DeviceUse] = {}
        """Memory that each share uses; of an unreadable region that of the last readable one."""
        self._over: frozenset[ShareKey] = frozenset()
        """Shares that use more than their bound."""
        self._event_s: dict[ShareKey, float] = {}
        """Time of the last Event of each share."""
        self._reported_s: float | None = None
        self._paid_until_s = 0.0
        """Time at which the reports so far are ``STEADY_S`` apart on average."""

    async def run(self) -> None:
        """Grant and report until cancelled; bounds then stay valid until their leases end."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._events.run)
                while True:
                    changed = self._picture.changed
                    if await self.look():
                        await self._picture.wait_change(changed, self._interval_s())
                    else:
                        await changed.wait()
        finally:
            for key in tuple(self._pages):
                self._pages.pop(key).close()
            self._seen = None

    def _interval_s(self) -> float:
        settings = self._site.settings.priority
        return min(settings.neighbours_s, settings.lease_s / _RENEWALS_PER_LEASE)

    async def look(self) -> bool:
        """Read regions and write the pages; return whether another look is due without a change."""
        if not self._is_current():
            return False
        self._follow()
        read, failed = await anyio.to_thread.run_sync(self._read, tuple(self._holders.values()))
        for owner in read:
            self._site.quarantine.forget("region", f"{'/'.join(owner)} memory")
        for owner, error in failed:
            self._site.quarantine.failed("region", f"{'/'.join(owner)} memory", error)
        if not self._is_current():  # the ledger was replaced: some of its records are missing
            return False
        self._follow()  # records may have arrived
        for key, holder in self._holders.items():
            region = read.get(holder.owner)
            if region is not None:
                self._used[key] = region.devices.get(holder.uuid, DeviceUse())
        self._grant()
        return bool(self._holders) or self._picture.has_bursts

    def _is_current(self) -> bool:
        """Return whether all records and pods are known; without them no bound is granted."""
        picture = self._picture
        if picture.view.bus_connected and picture.ledger_known and picture.pods_known:
            return True
        picture.bounds_mib = {}
        return False

    def _follow(self) -> None:
        """Collect the shares and the booked memory after a change of the picture."""
        changed = self._picture.changed
        if self._seen is changed:
            return
        self._seen = changed
        every = holders_of(
            self._picture.entries_by_uid,
            self._picture.pods,
            self._picture.grants,
            self._picture.view.devices_by_uuid,
        )
        # A share that grew to its limit has none: its page covers it until its limits file follows.
        grown = {
            (one.owner, one.uuid): one
            for one in every
            for known in [self._holders.get((one.owner, one.uuid))]
            if known is not None and one.limit_mib >= known.most_mib
        }
        self._holders = grown | wanting(every, self._picture.pods)
        self._pods = {key: {} for key in self._holders}
        for one in every:
            if (one.owner, one.uuid) in self._pods:
                self._pods[one.owner, one.uuid][one.pod_uid] = ObjectRef(
                    kind="Pod", namespace=one.namespace, name=one.pod, uid=one.pod_uid
                )
        self._booked_mib = booked_mib(self._picture.entries_by_uid, self._picture.pods)
        self._used = {key: used for key, used in self._used.items() if key in self._holders}

    def _read(
        self, holders: Collection[Holder]
    ) -> tuple[dict[ContainerKey, Region], list[tuple[ContainerKey, Exception]]]:
        """Return the readable regions of these shares, and the errors of reads that raised."""
        now_s = self._site.clock.monotonic_s()
        walks = self._walked_s is None or now_s - self._walked_s >= WALK_S
        paths = {one.owner: region_of(self._site.settings, one) for one in holders}
        uuids: dict[ContainerKey, set[str]] = {}
        for one in holders:
            uuids.setdefault(one.owner, set()).add(one.uuid)
        self._dead = {key: dead for key, dead in self._dead.items() if key in paths}
        gone: frozenset[Owner] = frozenset()
        if walks:
            self._walked_s = now_s
            gone = self._gone(paths)

        def region(key: ContainerKey) -> Region | None:
            def dead_of(asked: Collection[Owner]) -> Collection[Owner]:
                known = frozenset(asked)
                dead = (self._dead.get(key, frozenset()) | gone) & known
                dead |= self._living.ended_of(known - dead)
                # One whose start is not known may have a successor of the same number.
                self._dead[key] = frozenset(one for one in dead if one.start_ticks)
                return dead

            found = read_region(paths[key], dead_of, uuids[key])
            return found if isinstance(found, Region) else None

        read, failed = sift(paths, region)
        regions = {key: found for key, found in read if found is not None}
        if walks:
            self._living.keep_only(
                [one.owner for found in regions.values() for one in found.processes]
            )
        return regions, failed

    def _gone(self, paths: Mapping[ContainerKey, Path]) -> frozenset[Owner]:
        """Return the owners of slots that ended, by one walk for all: tenants write the owners."""
        found: set[Owner] = set()
        for key, path in paths.items():
            slots = read_slots(path)
            if isinstance(slots, bytes):
                found |= owners(slots) - self._dead.get(key, frozenset())
        return frozenset(self._living.dead_of(found))

    def _grant(self) -> None:
        """Divide what the devices have left, write the pages, and report."""
        now_s = self._site.clock.monotonic_s()
        devices = self._picture.view.devices_by_uuid
        self._open_pages(now_s)
        seen_mib = self._seen_mib()
        wants = {
            key: Want(
                request_mib=one.limit_mib,
                limit_mib=one.most_mib,
                used_mib=max(-(-used.used_bytes // MIB_BYTES), seen_mib.get(key, 0)),
                leased_mib=-(-used.leased_bytes // MIB_BYTES),
            )
            for key, one in self._holders.items()
            for used in [self._used.get(key, DeviceUse())]
        }
        left = {
            uuid: left_mib(
                devices[uuid], self._booked_mib.get(uuid, 0), self._picture.foreign_mib(uuid)
            )
            for _, uuid in wants
            if uuid in devices and may_burst(devices[uuid])
        }
        bounds = self._grants.divide(left, wants, now_s)
        self._write(bounds, now_s)
        self._picture.bounds_mib = bounds
        self._note_over(bounds, wants, now_s)
        found = self._book.look(wants, bounds, now_s)
        if self._may_report(now_s) and self._picture.set_bursts(found):
            self._reported_s = now_s
            self._paid_until_s = max(self._paid_until_s, now_s) + STEADY_S
            self._report()

    def _may_report(self, now_s: float) -> bool:
        if self._reported_s is not None and now_s - self._reported_s < REPORT_S:
            return False
        paid_s = max(self._paid_until_s, now_s) + STEADY_S
        return paid_s - now_s <= REPORTS_AHEAD * STEADY_S

    def _seen_mib(self) -> dict[ShareKey, int]:
        """Return what the driver showed of each share, less the margin of breaches."""
        found: dict[ShareKey, int] = {}
        for row in self._look().rows:
            key = (row.holder.owner, row.holder.uuid)
            if key in self._holders:
                found[key] = found.get(key, 0) + row.driver_bytes // MIB_BYTES
        margin_mib = self._site.settings.usage.breach.margin_mib
        return {key: mib - margin_mib(self._holders[key].limit_mib) for key, mib in found.items()}

    def _open_pages(self, now_s: float) -> None:
        """Map the pages of all containers with such a share, and no others."""
        keys = {owner for owner, _ in self._holders}
        for key in self._pages.keys() - keys:
            page = self._pages.pop(key)
            page.write({}, lease_until_ns=0)
            page.close()
        self._failed &= keys
        for key in keys:
            if key in self._pages and not self._pages[key].is_current():
                self._pages.pop(key).close()
            if key in self._pages or not self._bells.path_of(key).is_dir():
                continue
            try:
                page = self._pages[key] = BoundPage(self._bells.path_of(key) / FILE_NAME)
            except OSError as error:
                if key not in self._failed:
                    self._failed.add(key)
                    extra = {"container": "/".join(key), "problem": error.strerror or str(error)}
                    _log.warning("no memory granted above the request", extra=extra)
                continue
            self._failed.discard(key)
            for uuid, mib in page.bounds(int(now_s * _NS_PER_S)).items():
                self._grants.adopt((key, uuid), mib, now_s)

    def _write(self, bounds: Mapping[ShareKey, int], now_s: float) -> None:
        lease_until_ns = int((now_s + self._site.settings.priority.lease_s) * _NS_PER_S)
        by_owner: dict[ContainerKey, dict[str, int]] = {}
        for (owner, uuid), mib in bounds.items():
            by_owner.setdefault(owner, {})[uuid] = mib
        for owner, page in self._pages.items():
            page.write(by_owner[owner], lease_until_ns=lease_until_ns)

    def _note_over(
        self, bounds: Mapping[ShareKey, int], wants: Mapping[ShareKey, Want], now_s: float
    ) -> None:
        """Queue an Event for each share whose bound fell below its use."""
        over = frozenset(key for key, want in wants.items() if want.used_mib > bounds[key])
        self._event_s = {key: at for key, at in self._event_s.items() if key in wants}
        for key in over - self._over:
            if now_s - self._event_s.get(key, -EVENT_S) >= EVENT_S:
                self._event_s[key] = now_s
                self._tell(key, wants[key], bounds[key], sum(one[1] == key[1] for one in wants))
        self._over = over

    def _tell(self, key: ShareKey, want: Want, bound_mib: int, sharing: int) -> None:
        container, uuid = self._holders[key].container, key[1]
        reason = reason_of(
            self._picture.view.devices_by_uuid.get(uuid),
            self._booked_mib.get(uuid, 0),
            self._picture.foreign_mib(uuid),
            sharing,
        )
        message = (
            f"container {container} uses {want.used_mib} MiB of device {uuid}, requested "
            f"{want.request_mib} MiB, and gets no more above {bound_mib} MiB: {reason}"
        )
        for pod in self._pods[key].values():
            title = f"{pod.namespace}/{pod.name}"
            _log.info("burst ended", extra={"pod": title, "text": message})
            self._events.put(pod, reason=REASON, message=message, kind="Warning")
