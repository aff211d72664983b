# SPDX-License-Identifier: Apache-2.0
"""Writes the page from which all containers of this node read the active priorities (design D31).

The layout is that of ``native/libvgpu/src/priority.h`` (checked against it by a test), in the form
of ``shell.page``. On a change of a device, the processes that wait on its ``sequence`` are woken
(futex). Values are valid until the lease ends, so containers stop waiting after the agent dies.
Times in the page are nanoseconds of CLOCK_MONOTONIC, which all containers of a host share.

Containers ring when they begin to launch and when they are idle (``shell.doorbell``); the page is
then written at once. Regions of containers that are not known to be idle are also polled, because
a process may run an older library, hang or lose its socket.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import anyio
import anyio.to_thread

from hami_common.runtime.quarantine import sift
from hami_common.vendors.protocol import BindMount
from hami_nodeagent.core.holders import LIMITED_VENDORS, Holder, holders_of
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.priorities import (
    NO_LEVEL,
    Activity,
    ContainerKey,
    Standing,
    has_neighbours,
    key_of,
    rivals_of,
)
from hami_nodeagent.core.region import Work, owners
from hami_nodeagent.shell.doorbell import DIRECTORY_NAME, Doorbells
from hami_nodeagent.shell.futex import wake_all
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.page import LEASE_AT, SEQUENCE_AT, WORD, DevicePage, ensure
from hami_nodeagent.shell.regions import read_activity, read_slots, region_of
from hami_nodeagent.shell.site import Site

MAGIC = 0x315052494D414856
FILE_NAME = "page-1"
CONTAINER_DIRECTORY = "/run/hami-priority"
HIGHEST_AT, TENANTS_AT = 68, 80
HIGHEST_PRESENT_AT, LOWEST_PRESENT_AT = 84, 88
MIN_SHARE_AT = 20
_NS_PER_S = 1e9
_PPM_PER_PCT = 10_000
_RENEWALS_PER_LEASE = 3

_log = logging.getLogger(__name__)


class PriorityPage(DevicePage):
    """The page, mapped writable. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Map the page at ``path``, which is created if needed."""
        ensure_page(path)
        super().__init__(path, magic=MAGIC)

    def set_min_share(self, pct: float) -> None:
        """Set the part of a device's time that blocked containers get."""
        self._words[MIN_SHARE_AT // WORD] = round(pct * _PPM_PER_PCT)

    def write(self, standings: Mapping[str, Standing], *, lease_until_ns: int) -> None:
        """Write the values of these devices; devices beyond the page's capacity are left out."""
        for uuid, standing in standings.items():
            at = self._place_of(uuid)
            if at is not None:
                self._write_device(at, standing, lease_until_ns)

    def _write_device(self, at: int, standing: Standing, lease_until_ns: int) -> None:
        changed = (
            self._words[(at + HIGHEST_AT) // WORD] != standing.highest_active
            or self._words[(at + TENANTS_AT) // WORD] != standing.active_tenants
        )
        self._put(
            at,
            words={
                HIGHEST_AT: standing.highest_active,
                TENANTS_AT: standing.active_tenants,
                HIGHEST_PRESENT_AT: standing.highest_present,
                LOWEST_PRESENT_AT: standing.lowest_present,
            },
            longs={LEASE_AT: lease_until_ns},
        )
        if changed:
            wake_all(self._base + at + SEQUENCE_AT)

    def _prepare(self, at: int) -> None:
        self._words[(at + HIGHEST_AT) // WORD] = NO_LEVEL


class PriorityKeeper:
    """Keeps the page of one node up to date."""

    def __init__(self, site: Site) -> None:
        settings = site.settings
        self._site = site
        self._picture = site.picture
        self._path = Path(settings.priority.directory) / FILE_NAME
        self._activity = Activity(
            hold_s=settings.priority.hold_s, rung_hold_s=settings.priority.lease_s
        )
        self.bells = Doorbells(self._path.parent)
        self._living = Living(Path(settings.host_proc))
        self._holders: tuple[Holder, ...] = ()
        self._rivals: frozenset[ContainerKey] = frozenset()
        self._regions: dict[ContainerKey, Path] = {}
        """Path of each of these containers' region."""
        self._dead: dict[ContainerKey, frozenset[Owner]] = {}
        """Owners of slots that were found dead."""
        self._recognized: dict[ContainerKey, frozenset[int]] = {}
        """Host's pids of the processes whose slots are known."""
        self._holders_of: anyio.Event | None = None
        """The picture's change event when ``_holders`` was read: another one means a change."""
        self._read_all_s = -math.inf
        """Time at which all regions were read."""

    def mounts(self, pod_uid: str, container: str) -> tuple[BindMount, ...]:
        """Return the mounts of the page and of the container's doorbell; ``OSError`` on failure."""
        bell = self.bells.directory_of((pod_uid, container))
        inside = f"{CONTAINER_DIRECTORY}/{DIRECTORY_NAME}"
        return (
            BindMount(host_path=str(self._path.parent), container_path=CONTAINER_DIRECTORY),
            BindMount(host_path=str(bell), container_path=inside),
        )

    def ensure(self) -> None:
        """Create the page for containers if needed; ``OSError`` if that is not possible."""
        ensure_page(self._path)

    def tidy(self, is_kept: Callable[[str], bool]) -> None:
        """Remove the doorbells of pods (by uid) that are not kept."""
        self.bells.tidy(is_kept)

    async def run(self) -> None:
        """Write until cancelled; without a page no container waits for another, which is logged."""
        try:
            while True:
                await self._keep_page()
                await self._site.clock.sleep(self._site.settings.priority.lease_s)
        finally:
            self.bells.close()
            self._holders_of = None

    async def _keep_page(self) -> None:
        """Update the page until its path names another file, which new containers would map."""
        try:
            page = await anyio.to_thread.run_sync(PriorityPage, self._path)
        except OSError as error:
            extra = {"problem": str(error), "file": str(self._path)}
            _log.error("priorities not applied", extra=extra)
            return
        try:
            while page.is_current():
                changed = self._picture.changed
                await self._look(page)
                await self._rest(page, changed)
        finally:
            page.close()

    async def _look(self, page: PriorityPage) -> None:
        """Read the regions of containers that may be active, and write the page."""
        settings = self._site.settings.priority
        page.set_min_share(settings.min_share_pct)
        now_s = self._site.clock.monotonic_s()
        is_new = self._follow_holders()
        if is_new or now_s - self._read_all_s >= settings.idle_s:
            self._read_all_s = now_s
            keys = list(self._regions)
        else:
            keys = [key for key in self._regions if not self._is_quiet(key)]
        found, failed = await anyio.to_thread.run_sync(self._read, keys)
        for key, error in failed:
            self._site.quarantine.failed("region", f"{'/'.join(key)} activity", error)
        devices = self._picture.view.devices_by_uuid.values()
        uuids = [one.uuid for one in devices if one.vendor in LIMITED_VENDORS]
        self._note(page, keys, found, uuids, has_rung=False)

    async def _rest(self, page: PriorityPage, changed: anyio.Event) -> None:
        """Answer doorbells until the next look is due or the picture changes."""
        wait_s = self._interval_s()

        async def sleep() -> None:
            await self._site.clock.sleep(wait_s)
            group.cancel_scope.cancel()

        async def follow() -> None:
            await changed.wait()
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(sleep)
            group.start_soon(follow)
            while self._interval_s() >= wait_s:
                await self._answer(page)
            group.cancel_scope.cancel()

    async def _answer(self, page: PriorityPage) -> None:
        """Wait for a doorbell and write the page for the containers that rang."""
        muted_s = self.bells.unmute(self._site.clock.monotonic_s())
        with anyio.move_on_after(math.inf if muted_s is None else muted_s):
            await self.bells.wait()
        rang, bereft = self.bells.rung(self._site.clock.monotonic_s())
        unknown = {key for key in bereft if not self._note_ended(key)}
        quiet = {key for key in rang if self._activity.is_quiet(key)}
        self._write_for(page, rang | bereft)
        for key in rang:
            if (key in quiet) == self._activity.is_quiet(key):
                self.bells.charge_needless(key)
        for key in rang | bereft:
            self._recognize(key)
        if unknown:
            await anyio.to_thread.run_sync(self._find_dead, unknown)
            self._write_for(page, unknown)

    def _write_for(self, page: PriorityPage, keys: Collection[ContainerKey]) -> None:
        """Read the regions of these containers and write the page for their devices."""
        if keys:
            found, _ = self._read(keys)
            uuids = {one.uuid for one in self._holders if key_of(one) in keys}
            self._note(page, keys, found, uuids, has_rung=True)

    def _interval_s(self) -> float:
        """Return the seconds until containers that may be active are read again."""
        settings = self._site.settings.priority
        polled = [key for key in self._regions if self._is_polled(key)]
        if not self._rivals.isdisjoint(polled):
            return settings.rivals_s
        if all(map(self._is_quiet, self._regions)):
            return settings.idle_s
        renewal_s = settings.lease_s / _RENEWALS_PER_LEASE
        if polled and has_neighbours(self._holders) and self._activity.is_any_active:
            return min(settings.neighbours_s, renewal_s)
        return renewal_s

    def _is_polled(self, key: ContainerKey) -> bool:
        """Return whether only polls show that the container begins to launch or is idle."""
        rings = self.bells.is_open(key) and self._activity.rings(key)
        return not rings and not self._is_quiet(key)

    def _is_quiet(self, key: ContainerKey) -> bool:
        return self.bells.is_open(key) and self._activity.is_quiet(key)

    def _follow_holders(self) -> bool:
        """Collect the containers with a region after a change of the picture; true if it did."""
        changed = self._picture.changed
        if self._holders_of is changed:
            return False
        self._holders_of = changed
        self._holders = tuple(
            holder
            for holder in holders_of(
                self._picture.entries_by_uid,
                self._picture.pods,
                self._picture.grants,
                self._picture.view.devices_by_uuid,
            )
            if not holder.is_whole and holder.has_region
        )
        self._regions = {key_of(one): region_of(self._site.settings, one) for one in self._holders}
        self._rivals = rivals_of(self._holders)
        self.bells.listen(self._regions)
        self._activity.keep_only(self._regions)
        self._dead = {key: dead for key, dead in self._dead.items() if key in self._regions}
        self._recognized = {
            key: pids for key, pids in self._recognized.items() if key in self._regions
        }
        return True

    def _read(
        self, keys: Collection[ContainerKey]
    ) -> tuple[dict[ContainerKey, Work], list[tuple[ContainerKey, Exception]]]:
        """Return the work of these containers, and the errors of reads that raised.

        A container whose region cannot be read counts as making no launches.
        """
        wanted = [key for key in keys if key in self._regions]
        read, failed = sift(
            wanted, lambda key: read_activity(self._regions[key], self._dead.get(key, ()))
        )
        return {key: work for key, work in read if isinstance(work, Work)}, failed

    def _recognize(self, key: ContainerKey) -> None:
        """Find the slots of processes that ring for the first time, so that their end is known."""
        pids = self.bells.pids_of(key)
        fresh = pids - self._recognized.get(key, frozenset())
        self._recognized[key] = pids
        slots = read_slots(self._regions[key]) if fresh and key in self._regions else b""
        if isinstance(slots, bytes):
            for pid in fresh:
                self._living.recognize(pid, owners(slots))

    def _note_ended(self, key: ContainerKey) -> bool:
        """Note the ended owners of the container's slots; false if other owners may have ended."""
        slots = read_slots(self._regions[key]) if key in self._regions else b""
        if not isinstance(slots, bytes):
            return False
        known = owners(slots)
        self._dead[key] = (self._dead.get(key, frozenset()) & known) | self._living.ended_of(known)
        return all(map(self._living.recognizes, known - self._dead[key]))

    def _find_dead(self, keys: Collection[ContainerKey]) -> None:
        """Find the dead owners of these containers' slots among all processes of the host."""
        for key in keys:
            slots = read_slots(self._regions[key]) if key in self._regions else b""
            if isinstance(slots, bytes):
                known = owners(slots)
                noted = self._dead.get(key, frozenset()) & known
                self._dead[key] = noted.union(self._living.dead_of(known))

    def _note(
        self,
        page: PriorityPage,
        keys: Collection[ContainerKey],
        found: Mapping[ContainerKey, Work],
        uuids: Collection[str],
        *,
        has_rung: bool,
    ) -> None:
        """Write the page for these devices after the regions of these containers were read."""
        now_s = self._site.clock.monotonic_s()
        self._activity.note(keys, found, now_s=now_s, has_rung=has_rung)
        lease_until_s = now_s + self._site.settings.priority.lease_s
        page.write(
            self._activity.standings(self._holders, uuids),
            lease_until_ns=int(lease_until_s * _NS_PER_S),
        )


def ensure_page(path: Path) -> None:
    """Create the page at ``path``, and its directory, unless a valid one exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o755)
    ensure(path, magic=MAGIC)
