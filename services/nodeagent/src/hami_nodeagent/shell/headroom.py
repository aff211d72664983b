# SPDX-License-Identifier: Apache-2.0
"""Reads from the host's cgroups how much more memory a container may use, and whether it is frozen.

The limits of all groups above a process count (memory.max of cgroups(7), version 2, or
memory.limit_in_bytes of version 1). File pages that the kernel can drop at once
(``inactive_file``) count as free, as kubelet counts them. In a cgroup namespace of its own the
agent sees paths that begin with ``..``; the group is then found by its name. Memory in MiB.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from hami_common.units import MIB_BYTES
from hami_nodeagent.core.recall import UNKNOWN_MIB

_CGROUPS = Path("sys/fs/cgroup")
_DEPTH_MOST = 8
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes the largest number of pages for no limit."""


class HostMemory(Struct, frozen=True, kw_only=True):
    """Memory that a container may still use."""

    headroom_mib: int | None
    """``None``: no limit; ``UNKNOWN_MIB``: the limit cannot be read."""
    is_frozen: bool = False


class Version(Struct, frozen=True, kw_only=True):
    """Names of the files of one version of cgroups."""

    subsystem: str
    limit: str
    usage: str
    inactive: str


V1 = Version(
    subsystem="memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    inactive="total_inactive_file",
)
V2 = Version(subsystem="", limit="memory.max", usage="memory.current", inactive="inactive_file")


class Headroom:
    """Reader of the host's cgroups; not thread-safe."""

    def __init__(self, proc: Path, root: Path) -> None:
        """Read ``proc`` and the root file system of the host."""
        self._proc = proc
        self._root = root / _CGROUPS
        self._found: dict[str, Path] = {}

    def of(self, pid: int) -> HostMemory:
        """Return what the container of the process may still use; blocks for a few reads."""
        try:
            text = (self._proc / str(pid) / "cgroup").read_text(errors="replace")
            version, path = _group_in(text)
            top = self._root / version.subsystem
            group = self._locate(top, path)
            left = [self._left_mib(one, version) for one in _up(group, top)]
            limits = [one for one in left if one is not None]
            frozen = _frozen(group)
        except (OSError, ValueError):
            return HostMemory(headroom_mib=UNKNOWN_MIB)
        return HostMemory(headroom_mib=max(0, min(limits)) if limits else None, is_frozen=frozen)

    def _locate(self, top: Path, path: str) -> Path:
        if ".." not in path.split("/"):
            return _existing(top / path.lstrip("/"))
        name = path.rpartition("/")[2]
        known = self._found.get(path)
        if known is None or not known.is_dir():
            known = self._found[path] = _search(top, name)
        return known

    @staticmethod
    def _left_mib(group: Path, version: Version) -> int | None:
        """Return what the group's own limit leaves; ``None`` without one."""
        try:
            limit = (group / version.limit).read_text().strip()
        except FileNotFoundError:
            return None  # the root
        if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
            return None
        used = int((group / version.usage).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == version.inactive:
                used -= int(value)
        return (int(limit) - used) // MIB_BYTES


def _group_in(text: str) -> tuple[Version, str]:
    """Return the version of the memory controller, and the path of the process's group."""
    unified = ""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if "memory" in names.split(","):
            return V1, path
        if not names:
            unified = path
    if not unified:
        raise ValueError("no cgroup")
    return V2, unified


def _existing(group: Path) -> Path:
    """Return the directory; ``FileNotFoundError`` if it is none: without it no limit is known."""
    if not group.is_dir():
        raise FileNotFoundError(group)
    return group


def _up(group: Path, top: Path) -> Iterator[Path]:
    """Yield the group and all above it."""
    yield group
    while group != top and top in group.parents:
        group = group.parent
        yield group


def _search(top: Path, name: str) -> Path:
    """Return the directory of this name; ``FileNotFoundError`` without one."""
    for directory, below, _ in os.walk(top):
        if name in below:
            return Path(directory) / name
        if len(Path(directory).relative_to(top).parts) >= _DEPTH_MOST:
            below.clear()
    raise FileNotFoundError(name)


def _frozen(group: Path) -> bool:
    try:
        return "frozen 1" in (group / "cgroup.events").read_text().splitlines()
    except FileNotFoundError:
        return False
