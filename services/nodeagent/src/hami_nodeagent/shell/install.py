# SPDX-License-Identifier: Apache-2.0
"""Puts the in-container library on the host and keeps it there (design D26).

Every file on the host is named by its content, ``libvgpu-<digest>.so`` and
``ld.so.preload-<digest>``, and is never written to again: a new version is a new file under a new
name, written beside its place and renamed. The files that a running container maps therefore do not
change through restarts, upgrades and downgrades of the agent. The mounts in the answer to
``Allocate`` name one version; no link points to the newest one. A version is removed when no grant
names it, no process maps it, and it was unused for a period; preload files, a line each, stay.
Calls block; the caller runs them in a thread. Durations in seconds.
"""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from hami_common.bounds import INT64_MAX
from hami_common.errors import HamiError
from hami_common.units import whole
from hami_common.vendors.protocol import BindMount

PRELOAD_PATH = "/etc/ld.so.preload"
CONTAINER_LIBRARY = "/usr/local/vgpu/libvgpu.so"
"""Path of the library in containers; existing tools expect it there."""
_DIGITS = 16
_ELF_SHARED_OBJECT = b"\x7fELF"
_LIBRARY = re.compile(rf"libvgpu-[0-9a-f]{{{_DIGITS}}}\.so")
_LEFTOVER = re.compile(r"\.install-[0-9a-f]+")
_LIBRARY_MODE = 0o755
_TEXT_MODE = 0o644
_INODE_FIELD = 4
"""In a line of ``/proc/<pid>/maps``."""

_log = logging.getLogger(__name__)


class InstallFailed(HamiError):
    """The library cannot be put on the host. The catcher refuses shares with this text."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class Installed(Struct, frozen=True, kw_only=True):
    """One version on the host."""

    library: Path
    preload: Path

    @property
    def mounts(self) -> tuple[BindMount, ...]:
        """Mounts that give a container this version."""
        return (
            BindMount(host_path=str(self.library), container_path=CONTAINER_LIBRARY),
            BindMount(host_path=str(self.preload), container_path=PRELOAD_PATH),
        )


class Installer:
    """Installs one version into a directory of the host that the agent sees under the same path."""

    def __init__(self, source: Path, directory: Path, *, proc: Path) -> None:
        """``source`` is the library that came with the agent; ``proc`` the host's ``/proc``."""
        self._source = source
        self._directory = directory
        self._proc = proc

    def install(self) -> Installed:
        """Make sure this version is on the host; ``InstallFailed`` says why it cannot be."""
        library = self._read_source()
        preload = f"{CONTAINER_LIBRARY}\n".encode()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(_LIBRARY_MODE)  # containers run as any user
            if os.statvfs(self._directory).f_flag & os.ST_NOEXEC:
                raise InstallFailed(
                    problem=f"{self._directory} lies on a file system mounted noexec, from which "
                    "no library can be loaded; set library_dir to another one"
                )
            return Installed(
                library=self._put(f"libvgpu-{_digest(library)}.so", library, _LIBRARY_MODE),
                preload=self._put(f"ld.so.preload-{_digest(preload)}", preload, _TEXT_MODE),
            )
        except OSError as error:
            raise InstallFailed(
                problem=f"{self._directory} is not writable on this node: "
                f"{error.strerror or error}; mount it into the agent, or set library_dir"
            ) from error

    def is_there(self, installed: Installed) -> bool:
        """Return true if the installed files still exist."""
        return installed.library.is_file() and installed.preload.is_file()

    def collect(self, *, keep: Collection[str], unused_for_s: float, now_s: float) -> list[str]:
        """Remove versions that are unused and were not touched for ``unused_for_s``.

        ``keep`` are file names still wanted: the present version and those that grants name. A file
        that a process of the host maps is touched and stays. Returns the names removed.
        """
        removed: list[str] = []
        try:
            found = [path for path in self._directory.iterdir() if path.name not in keep]
            inode_by_path = {
                path: path.stat().st_ino for path in found if _LIBRARY.fullmatch(path.name)
            }
            mapped = mapped_inodes(self._proc, frozenset(inode_by_path.values()))
            for path, inode in inode_by_path.items():
                if mapped is None or inode in mapped:
                    os.utime(path, (now_s, now_s))
                elif now_s - path.stat().st_mtime > unused_for_s:
                    path.unlink()
                    removed.append(path.name)
            for path in found:
                if _LEFTOVER.fullmatch(path.name) and now_s - path.stat().st_mtime > unused_for_s:
                    path.unlink()
        except OSError as error:
            _log.warning("old versions not collected", extra={"problem": str(error)})
        return removed

    def _read_source(self) -> bytes:
        try:
            library = self._source.read_bytes()
        except OSError as error:
            raise InstallFailed(
                problem=f"the limiter library {self._source} cannot be read: "
                f"{error.strerror or error}; set library to libvgpu.so, or enforcement to none"
            ) from error
        if not library.startswith(_ELF_SHARED_OBJECT):
            raise InstallFailed(
                problem=f"the limiter library {self._source} is no shared library; "
                "set library to libvgpu.so, or enforcement to none"
            )
        return library

    def _put(self, name: str, content: bytes, mode: int) -> Path:
        """Return the file of this name and content; write it if needed."""
        place = self._directory / name
        if _holds(place, content):
            os.utime(place)
            return place
        fresh = self._directory / f".install-{secrets.token_hex(8)}"
        try:
            with fresh.open("xb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
        _sync_directory(self._directory)
        _log.info("limiter installed", extra={"file": str(place)})
        return place


def mapped_inodes(proc: Path, inodes: frozenset[int]) -> frozenset[int] | None:
    """Return those of ``inodes`` that a readable process maps; ``None``: ``proc`` is unreadable.

    A mapped file stays usable after its name is removed: this only keeps versions with which a
    container whose grant was lost could be restarted. Files are compared by inode, because a
    process shows the path inside its container. A file of another file system with the same inode
    number counts as ours, which is the safe direction.
    """
    if not inodes:
        return frozenset()
    mapped: set[int] = set()
    try:
        processes = [entry for entry in proc.iterdir() if entry.name.isdigit()]
    except OSError:
        return None
    for process in processes:
        try:
            maps = (process / "maps").read_text(errors="replace")
        except OSError:
            continue  # it has ended, or may not be looked at
        for line in maps.splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) > _INODE_FIELD:
                mapped.add(whole(fields[_INODE_FIELD], most=INT64_MAX) or 0)
    return frozenset(mapped & inodes)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
