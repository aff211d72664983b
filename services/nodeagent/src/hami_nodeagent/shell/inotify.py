# SPDX-License-Identifier: Apache-2.0
"""Reads changes of directories from the kernel (inotify), and lets tasks wait for them.

Changes made through any mount of a directory are seen, so also those that kubelet makes on the
host. A user may have few inotify instances (``fs.inotify.max_user_instances``, 128 by default, for
all programs of root): where there is none, ``DirectoryWatch`` polls. Outside document: inotify(7).
Seconds throughout.
"""

import ctypes
import errno
import logging
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from hami_common.ports import Clock

MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
CLOSE_WRITE = 0x8
"""For files that are watched by name; opening a device node for writing must not count."""
OVERFLOW, IGNORED, ONLY_DIRECTORY = 0x4000, 0x8000, 0x01000000
"""``IGNORED``: the directory was removed, and its watch with it."""
ENTRIES = MOVED_FROM | MOVED_TO | CREATE | DELETE
SAFETY_S = 5.0
"""Interval at which a watched directory is read without an event, in case one was lost."""
_RETRY_S = 1.0
_READ_BYTES = 1 << 16
_EVENT = struct.Struct("iIII")

_log = logging.getLogger(__name__)


def open_inotify(mask_by_directory: Mapping[str, int]) -> tuple[int, dict[int, str]]:
    """Return a descriptor that reports changes, and the directory of each watch number.

    ``OSError`` if one of the directories cannot be watched.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise _last_error()
    directories: dict[int, str] = {}
    for directory, mask in mask_by_directory.items():
        watch = libc.inotify_add_watch(descriptor, os.fsencode(directory), mask | ONLY_DIRECTORY)
        if watch < 0:
            error = _last_error(directory)
            os.close(descriptor)
            raise error
        directories[watch] = directory
    return int(descriptor), directories


def read_changes(descriptor: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield watch number, mask and name of each queued change."""
    with suppress(BlockingIOError):
        while data := os.read(descriptor, _READ_BYTES):
            offset = 0
            while offset + _EVENT.size <= len(data):
                watch, mask, _, name_bytes = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                yield watch, mask, data[offset : offset + name_bytes].rstrip(b"\0")
                offset += name_bytes


def _last_error(directory: str = "") -> OSError:
    number = ctypes.get_errno()
    where = f"{directory}: " if directory else ""
    return OSError(number, f"{where}{os.strerror(number)}")


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of these events is set."""

    async def wait(event: anyio.Event) -> None:
        await event.wait()
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for event in events:
            group.start_soon(wait, event)


class DirectoryWatch:
    """Wakes tasks when an entry of one of some directories is created, removed or renamed."""

    def __init__(self, directories: Iterable[Path | str], *, clock: Clock, poll_s: float) -> None:
        """Let tasks look every ``poll_s`` while the kernel does not report changes."""
        self._directories = tuple(str(directory) for directory in directories)
        self._clock = clock
        self._poll_s = poll_s
        self._changed = anyio.Event()
        self._is_watching = False
        self._problem = ""

    @property
    def changed(self) -> anyio.Event:
        """Set by the next change. Take it before reading the directory, wait after."""
        return self._changed

    @property
    def wait_s(self) -> float:
        """Longest wait before the directory should be read without an event."""
        return max(SAFETY_S, self._poll_s) if self._is_watching else self._poll_s

    async def wait(self, *events: anyio.Event, most_s: float = math.inf) -> None:
        """Wait until one of these events is set, ``most_s`` is over, or it is time to look."""
        with anyio.move_on_after(min(self.wait_s, most_s)):
            await first_of(*events)

    async def run(self) -> None:
        """Watch until cancelled; begin again when a directory appears or is replaced."""
        while True:
            try:
                descriptor, _ = open_inotify(dict.fromkeys(self._directories, ENTRIES))
            except OSError as error:
                self._report(error)
            else:
                await self._follow(descriptor)
            await self._clock.sleep(max(_RETRY_S, self._poll_s))

    async def _follow(self, descriptor: int) -> None:
        """Wake the tasks until one of the directories is removed."""
        self._is_watching = True
        try:
            self._note()  # changes before the watch began
            is_complete = True
            while is_complete:
                await anyio.wait_readable(descriptor)
                changes = list(read_changes(descriptor))
                is_complete = not any(mask & IGNORED for _, mask, _ in changes)
                self._note()
        finally:
            self._is_watching = False
            os.close(descriptor)

    def _report(self, error: OSError) -> None:
        if str(error) == self._problem or error.errno == errno.ENOENT:
            return
        self._problem = str(error)
        _log.warning(
            "directory not watched, it is polled",
            extra={"problem": self._problem, "interval_s": self._poll_s},
        )

    def _note(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
