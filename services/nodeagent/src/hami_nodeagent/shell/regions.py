# SPDX-License-Identifier: Apache-2.0
"""Reads usage regions from pods' volumes: open, read once, close (design D8).

A region is never mapped here, because an open mapping keeps kubelet from unmounting the volume. The
volume belongs to the tenant, who may put anything under the name: a link, a pipe, a device, a file
of any size. So the type and size of the file are checked with ``O_PATH`` before it is opened for
reading, and at most one region's bytes are read. Calls block for as long as a read from memory
takes.
"""

import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from hami_nodeagent.core.holders import Holder
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.region import (
    FILE_NAME,
    HEADER_BYTES,
    SIZE_MAX,
    FindDead,
    Refused,
    Region,
    Work,
    activity,
    parse,
    parse_header,
)
from hami_nodeagent.settings import Settings

T = TypeVar("T")

_EMPTY_DIR = "kubernetes.io~empty-dir"


def region_path(pods_dir: Path, pod_uid: str, volume: str) -> Path:
    """Return the path of the region in the volume, below kubelet's directory of pods."""
    return pods_dir / pod_uid / "volumes" / _EMPTY_DIR / volume / FILE_NAME


def region_of(settings: Settings, holder: Holder) -> Path:
    """Return the path of the region of a holder that may have one."""
    if holder.claimed is not None:
        uid, request = holder.claimed
        return Path(settings.dra.region_dir) / uid / request / FILE_NAME
    return region_path(Path(settings.pods_dir), holder.pod_uid, holder.volume)


def read_region(
    path: Path, find_dead: FindDead | None = None, uuids: Collection[str] | None = None
) -> Region | Refused:
    """Return the region at ``path``; never raises. Without ``find_dead`` no owner is dead.

    ``uuids``: the devices to read; ``None``: all.
    """
    return _with_file(path, lambda file, size: parse(os.pread(file, size + 1, 0), find_dead, uuids))


def read_slots(path: Path) -> bytes | Refused:
    """Return the slots of the region's processes; cheaper than ``read_region``; never raises."""
    return _with_file(path, _read_slots)


def read_activity(path: Path, dead: Collection[Owner] = ()) -> Work | Refused:
    """Return what the region's processes launch; ``dead`` owners launch nothing; never raises."""
    slots = read_slots(path)
    return slots if isinstance(slots, Refused) else activity(slots, dead)


def _read_slots(file: int, size: int) -> bytes | Refused:
    layout = parse_header(os.pread(file, HEADER_BYTES, 0), size)
    if isinstance(layout, Refused):
        return layout
    slots = os.pread(file, layout.slots_bytes, layout.slots_at)
    return slots if len(slots) == layout.slots_bytes else Refused(reason="size")


def _with_file(path: Path, read: Callable[[int, int], T | Refused]) -> T | Refused:
    """Open ``path`` safely and return the result of ``read`` with its descriptor and size."""
    try:
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Refused(reason="missing")
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return Refused(reason="unreadable")
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return Refused(reason="not-a-file")
        if found.st_size > SIZE_MAX:
            return Refused(reason="size")
        # Opens the checked file itself: the name may refer to another file by now.
        reading = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return read(reading, found.st_size)
        finally:
            os.close(reading)
    except OSError:
        return Refused(reason="unreadable")
    finally:
        os.close(handle)
