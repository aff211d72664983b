# SPDX-License-Identifier: Apache-2.0
"""Writes the page from which all containers of this node read the active priorities (design D31).

The layout is that of ``native/libvgpu/src/priority.h`` (checked against it by a test). The page is
one file, written in place because containers map it; its directory is mounted into them read-only.
A device is written in this order: ``sequence`` odd, fields, ``sequence`` even, and on a change a
futex wake of the processes that wait on ``sequence``. Values are valid until the lease ends, so
containers stop waiting after the agent dies. Times in the page are nanoseconds of CLOCK_MONOTONIC,
which all containers of a host share.
"""

import ctypes
import logging
import mmap
import os
import platform
import secrets
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from hami_common.runtime.quarantine import sift
from hami_common.vendors.protocol import BindMount
from hami_nodeagent.core.holders import LIMITED_VENDORS, Holder, holders_of
from hami_nodeagent.core.priorities import (
    NOBODY,
    Activity,
    ContainerKey,
    Standing,
    has_neighbours,
    has_rivals,
)
from hami_nodeagent.shell.regions import read_activity, region_path
from hami_nodeagent.shell.site import Site

MAGIC = 0x315052494D414856
LAYOUT = 1
FILE_NAME = "page-1"
CONTAINER_DIRECTORY = "/run/hami-priority"
DEVICES_MAX = 64
DEVICE_BYTES = 128
HEADER_BYTES = 64
UUID_BYTES = 64
SEQUENCE_AT, HIGHEST_AT, LEASE_AT, TENANTS_AT = 64, 68, 72, 80
SIZE = HEADER_BYTES + DEVICES_MAX * DEVICE_BYTES
_HEADER = struct.Struct("<QIII")
_WORD, _LONG = 4, 8
_NS_PER_S = 1e9
_FUTEX_WAKE = 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_EVERYBODY = (1 << 31) - 1

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None)


class PriorityPage:
    """The page, mapped writable. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Map the page at ``path``; a valid page is kept, because containers have it mapped."""
        ensure_page(path)
        self._path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
            self._inode = os.fstat(file.fileno()).st_ino
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("I")
        self._longs = self._bytes.cast("Q")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._order = threading.Lock()
        self._number_by_uuid = self._read_numbers()

    def write(self, standings: Mapping[str, Standing], *, lease_until_ns: int) -> None:
        """Write the values of these devices; devices beyond the page's capacity are left out."""
        for uuid, standing in standings.items():
            number = self._number_of(uuid)
            if number is not None:
                self._write_device(number, standing, lease_until_ns)

    def is_current(self) -> bool:
        """Return true if the path still names this page, so that new containers map it, too."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Unmap the page; the written values stay valid until their lease ends."""
        for view in (self._longs, self._words, self._bytes):
            view.release()
        # ctypes keeps its view of the mapping until it is collected; then the mapping is released.

    def _write_device(self, number: int, standing: Standing, lease_until_ns: int) -> None:
        at = HEADER_BYTES + number * DEVICE_BYTES
        words, longs = self._words, self._longs
        sequence = (words[(at + SEQUENCE_AT) // _WORD] | 1) & 0xFFFFFFFF
        changed = (
            words[(at + HIGHEST_AT) // _WORD] != standing.highest_active
            or words[(at + TENANTS_AT) // _WORD] != standing.active_tenants
        )
        words[(at + SEQUENCE_AT) // _WORD] = sequence
        self._fence()
        words[(at + HIGHEST_AT) // _WORD] = standing.highest_active
        longs[(at + LEASE_AT) // _LONG] = lease_until_ns
        words[(at + TENANTS_AT) // _WORD] = standing.active_tenants
        self._fence()
        words[(at + SEQUENCE_AT) // _WORD] = (sequence + 1) & 0xFFFFFFFF
        if changed and _FUTEX_CALL is not None:
            address = ctypes.c_void_p(self._base + at + SEQUENCE_AT)
            _libc.syscall(_FUTEX_CALL, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def _fence(self) -> None:
        """Order stores before the call ahead of stores after it: taking a lock orders memory."""
        with self._order:
            pass

    def _number_of(self, uuid: str) -> int | None:
        number = self._number_by_uuid.get(uuid)
        name = uuid.encode()
        if number is not None or not 0 < len(name) < UUID_BYTES:
            return number
        if len(self._number_by_uuid) == DEVICES_MAX:
            return None
        number = len(self._number_by_uuid)
        at = HEADER_BYTES + number * DEVICE_BYTES
        self._words[(at + HIGHEST_AT) // _WORD] = NOBODY
        self._fence()
        self._bytes[at : at + UUID_BYTES] = name.ljust(UUID_BYTES, b"\0")
        self._number_by_uuid[uuid] = number
        return number

    def _read_numbers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number in range(DEVICES_MAX):
            at = HEADER_BYTES + number * DEVICE_BYTES
            name = bytes(self._bytes[at : at + UUID_BYTES]).partition(b"\0")[0]
            if not name:
                break
            found[name.decode(errors="replace")] = number
        return found


class PriorityKeeper:
    """Keeps the page of one node up to date."""

    def __init__(self, site: Site) -> None:
        settings = site.settings
        self._site = site
        self._picture = site.picture
        self._pods_dir = Path(settings.pods_dir)
        self._path = Path(settings.priority.directory) / FILE_NAME
        self._activity = Activity(hold_s=settings.priority.hold_s)
        self._holders: tuple[Holder, ...] = ()
        self._regions: dict[ContainerKey, Path] = {}
        """Path of each of these containers' region."""
        self._holders_of: anyio.Event | None = None
        """The picture's change event when ``_holders`` was read: another one means a change."""

    @property
    def mounts(self) -> tuple[BindMount, ...]:
        """Return the mounts through which a container sees the page."""
        directory = str(self._path.parent)
        return (BindMount(host_path=directory, container_path=CONTAINER_DIRECTORY),)

    def ensure(self) -> None:
        """Create the page for containers if needed; ``OSError`` if that is not possible."""
        ensure_page(self._path)

    async def run(self) -> None:
        """Write until cancelled; without a page no container waits for another, which is logged."""
        while True:
            await self._keep_page()
            await self._site.clock.sleep(self._site.settings.priority.idle_s)

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
                await self._site.clock.sleep(await self._look(page))
        finally:
            page.close()

    async def _look(self, page: PriorityPage) -> float:
        """Update the page once; return the seconds until the next update."""
        settings = self._site.settings.priority
        devices = self._picture.view.devices_by_uuid.values()
        uuids = [one.uuid for one in devices if one.vendor in LIMITED_VENDORS]
        holders = self._limited_holders()
        for key, error in await anyio.to_thread.run_sync(self._write, page, holders, uuids):
            self._site.quarantine.failed("region", f"{'/'.join(key)} activity", error)
        if has_rivals(holders):
            return settings.rivals_s
        if has_neighbours(holders) and self._activity.is_any_active:
            return settings.neighbours_s
        return settings.idle_s

    def _limited_holders(self) -> tuple[Holder, ...]:
        """Return the containers with a region; read again only after a change of the picture."""
        changed = self._picture.changed
        if self._holders_of is not changed:
            self._holders_of = changed
            self._holders = tuple(
                holder
                for holder in holders_of(
                    self._picture.entries_by_uid,
                    self._picture.pods,
                    self._picture.grants,
                    self._picture.view.devices_by_uuid,
                )
                if not holder.is_whole and holder.volume
            )
            self._regions = {
                (one.pod_uid, one.container): region_path(self._pods_dir, one.pod_uid, one.volume)
                for one in self._holders
            }
        return self._holders

    def _write(
        self, page: PriorityPage, holders: Sequence[Holder], uuids: Sequence[str]
    ) -> list[tuple[ContainerKey, Exception]]:
        """Write the page once; return the containers whose region read raised, with the error.

        A container whose activity cannot be read counts as making no launches.
        """
        regions = self._regions
        read, failed = sift(regions, lambda key: read_activity(regions[key]))
        seen = {key: found for key, found in read if isinstance(found, int)}
        now_s = self._site.clock.monotonic_s()
        self._activity.note(seen, now_s=now_s)
        lease_s = self._site.settings.priority.lease_s
        page.write(
            self._activity.standings(holders, uuids),
            lease_until_ns=int((now_s + lease_s) * _NS_PER_S),
        )
        return failed


def ensure_page(path: Path) -> None:
    """Create the page at ``path`` unless a valid one exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o755)
    if not _is_page(path):
        _make_page(path)


def _is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        return (
            path.stat().st_size == SIZE
            and len(head) == _HEADER.size
            and _HEADER.unpack(head) == (MAGIC, LAYOUT, DEVICE_BYTES, DEVICES_MAX)
        )
    except FileNotFoundError:
        return False


def _make_page(path: Path) -> None:
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with fresh.open("xb") as file:
            file.truncate(SIZE)
            file.write(_HEADER.pack(MAGIC, LAYOUT, DEVICE_BYTES, DEVICES_MAX))
            os.fchmod(file.fileno(), 0o644)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
