# SPDX-License-Identifier: Apache-2.0
"""Writes pages that containers map: one entry per device, each under a seqlock.

Layout: a header of 64 bytes (magic, layout, bytes per device, number of devices), then the devices
of 128 bytes. Each begins with its UUID as text, zero-terminated; an empty one is unused. The
meaning of the other fields depends on the page. A page is written in place, because containers have
it mapped, and they see its directory read-only. A device is written in this order: ``sequence``
odd, fields, ``sequence`` even. A valid page is kept when the agent restarts.
"""

import ctypes
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

LAYOUT = 1
DEVICES_MAX = 64
DEVICE_BYTES = 128
HEADER_BYTES = 64
UUID_BYTES = 64
SEQUENCE_AT, LEASE_AT = 64, 72
SIZE = HEADER_BYTES + DEVICES_MAX * DEVICE_BYTES
WORD, LONG = 4, 8
_HEADER = struct.Struct("<QIII")


class DevicePage:
    """A page, mapped writable. Used by one thread at a time."""

    def __init__(self, path: Path, *, magic: int) -> None:
        """Map the page at ``path``; a valid page is kept, because containers have it mapped."""
        ensure(path, magic=magic)
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

    def _put(
        self, at: int, *, words: Mapping[int, int] | None = None, longs: Mapping[int, int]
    ) -> None:
        """Write fields of the device at ``at``, by their offset in the device."""
        sequence_at = (at + SEQUENCE_AT) // WORD
        sequence = (self._words[sequence_at] | 1) & 0xFFFFFFFF
        self._words[sequence_at] = sequence
        self._fence()
        for offset, value in (words or {}).items():
            self._words[(at + offset) // WORD] = value
        for offset, value in longs.items():
            self._longs[(at + offset) // LONG] = value
        self._fence()
        self._words[sequence_at] = (sequence + 1) & 0xFFFFFFFF

    def _fence(self) -> None:
        """Order stores before the call ahead of stores after it: taking a lock orders memory."""
        with self._order:
            pass

    def _prepare(self, at: int) -> None:
        """Write what an entry must hold before it gets a UUID."""

    def _place_of(self, uuid: str) -> int | None:
        """Return the offset of the device, which gets an entry; ``None`` in a page that is full."""
        number = self._number_by_uuid.get(uuid)
        name = uuid.encode()
        if number is None:
            if not 0 < len(name) < UUID_BYTES or len(self._number_by_uuid) == DEVICES_MAX:
                return None
            number = len(self._number_by_uuid)
            at = HEADER_BYTES + number * DEVICE_BYTES
            self._prepare(at)
            self._fence()
            self._bytes[at : at + UUID_BYTES] = name.ljust(UUID_BYTES, b"\0")
            self._number_by_uuid[uuid] = number
        return HEADER_BYTES + number * DEVICE_BYTES

    def _read_numbers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number in range(DEVICES_MAX):
            at = HEADER_BYTES + number * DEVICE_BYTES
            name = bytes(self._bytes[at : at + UUID_BYTES]).partition(b"\0")[0]
            if not name:
                break
            found[name.decode(errors="replace")] = number
        return found


def ensure(path: Path, *, magic: int) -> None:
    """Create the page at ``path`` unless a valid one exists."""
    if not _is_page(path, magic):
        _make_page(path, magic)


def _is_page(path: Path, magic: int) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        return (
            path.stat().st_size == SIZE
            and len(head) == _HEADER.size
            and _HEADER.unpack(head) == (magic, LAYOUT, DEVICE_BYTES, DEVICES_MAX)
        )
    except FileNotFoundError:
        return False


def _make_page(path: Path, magic: int) -> None:
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with fresh.open("xb") as file:
            file.truncate(SIZE)
            file.write(_HEADER.pack(magic, LAYOUT, DEVICE_BYTES, DEVICES_MAX))
            os.fchmod(file.fileno(), 0o644)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
