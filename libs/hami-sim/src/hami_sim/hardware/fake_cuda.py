# SPDX-License-Identifier: Apache-2.0
"""Reads what the fake CUDA driver has given out: the oracle of every test of memory and time.

The layout is that of native/libvgpu/tests/fakedrv/card.h, asserted there; the file is the state
file's name plus ``.card``. A process counts while it holds the record lock on its byte of the
``.live`` file, so the dead count for nothing from the moment the kernel has ended them. Bytes and
nanoseconds. Reading takes no lock: a figure may be one operation old.
"""

import fcntl
import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

_MAGIC = 0x3144524143454B41
_LAYOUT = 4
_DEVICES = 64
_SLOTS = 2048
_HEADER = struct.Struct("<QIIII")
_SERIAL_AT = 12
_DEVICES_AT = 64
_DEVICE_BYTES = 1024
_UUID_BYTES = 96
_DEVICE_SERVED_AT = 112
_SLOTS_AT = _DEVICES_AT + _DEVICES * _DEVICE_BYTES
_SLOT = struct.Struct("<IIQQ")
_SLOT_BYTES = 64
_SHARES_AT = _SLOTS_AT + _SLOTS * _SLOT_BYTES
_SHARE = struct.Struct("<8Q")
_STRETCHES = 256
_STRETCH = struct.Struct("<3Q")
_LOGS_AT = _SHARES_AT + _SLOTS * _DEVICES * _SHARE.size
_LAUNCHES = 255
_LAUNCHES_OF = struct.Struct(f"<{1 + _LAUNCHES}Q")
_LAUNCHES_AT = _LOGS_AT + _SLOTS * _DEVICES * _STRETCHES * _STRETCH.size
_FLOCK = struct.Struct("<hh4xqqi4x")
"""``struct flock`` of Linux on 64-bit machines: type, whence, start, length, pid."""


class Use(Struct, frozen=True, kw_only=True):
    """Usage of one device by one live process."""

    pid: int
    used_bytes: int
    served_ns: int
    """Device time that the process has had."""
    wanted_ns: int
    """Device time that its work needs in all; more than served while work is queued."""
    launches: int
    peak_bytes: int


class FakeCard:
    """The shared memory of the fake driver for one machine. Close it, or use it in ``with``."""

    def __init__(self, state_path: Path) -> None:
        """Open the card of a state file; FileNotFoundError until a process has used the driver."""
        self._live = -1
        card = os.open(f"{state_path}.card", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(card, 0)
            self._live = os.open(f"{state_path}.live", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        finally:
            os.close(card)
        magic, layout, *_ = _HEADER.unpack_from(self._map)
        if (magic, layout) != (_MAGIC, _LAYOUT):
            self.close()
            msg = f"{state_path}.card: not a card of layout {_LAYOUT}"
            raise ValueError(msg)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        self._map.close()
        if self._live >= 0:
            os.close(self._live)
            self._live = -1

    def uses(self, uuid: str) -> tuple[Use, ...]:
        """Return the usage of the device by each live process; empty if no process has used it."""
        device = self._device_of(uuid)
        if device is None:
            return ()
        found = []
        for slot in range(self._header()[4]):
            used, _, served, wanted, launches, _, _, peak = _SHARE.unpack_from(
                self._map, _SHARES_AT + (slot * _DEVICES + device) * _SHARE.size
            )
            pid = self._live_pid(slot)
            if pid:
                found.append(
                    Use(
                        pid=pid,
                        used_bytes=used,
                        served_ns=served,
                        wanted_ns=wanted,
                        launches=launches,
                        peak_bytes=peak,
                    )
                )
        return tuple(found)

    def launched_ns(self, uuid: str, pid: int) -> tuple[int, ...]:
        """Return when the live process launched its last kernels, oldest first, at most 255.

        Nanoseconds of CLOCK_MONOTONIC.
        """
        line = self._line_of(uuid, pid)
        if line is None:
            return ()
        count, *ring = _LAUNCHES_OF.unpack_from(self._map, _LAUNCHES_AT + line * _LAUNCHES_OF.size)
        oldest = count % _LAUNCHES
        return tuple(ring[:count] if count < _LAUNCHES else ring[oldest:] + ring[:oldest])

    def served_until_ns(self, uuid: str, pid: int) -> int:
        """Return until when the device last worked for the live process; 0 if it never did.

        Nanoseconds of CLOCK_MONOTONIC.
        """
        line = self._line_of(uuid, pid)
        if line is None:
            return 0
        count = _SHARE.unpack_from(self._map, _SHARES_AT + line * _SHARE.size)[5]
        last = line * _STRETCHES + (count - 1) % _STRETCHES
        begin, _, length = _STRETCH.unpack_from(self._map, _LOGS_AT + last * _STRETCH.size)
        return int(begin + length) if count else 0

    def used_bytes(self, uuid: str) -> int:
        """Bytes of the device that all live processes have."""
        return sum(use.used_bytes for use in self.uses(uuid))

    def served_ns(self, uuid: str) -> int:
        """Time in which the device worked for anybody, the dead included."""
        device = self._device_of(uuid)
        if device is None:
            return 0
        at = _DEVICES_AT + device * _DEVICE_BYTES + _DEVICE_SERVED_AT
        return int(struct.unpack_from("<Q", self._map, at)[0])

    def _header(self) -> tuple[int, ...]:
        return _HEADER.unpack_from(self._map)

    def _device_of(self, uuid: str) -> int | None:
        wanted = uuid.encode()
        for index in range(self._header()[3]):
            at = _DEVICES_AT + index * _DEVICE_BYTES
            if self._map[at : at + _UUID_BYTES].split(b"\0", 1)[0] == wanted:
                return index
        return None

    def _line_of(self, uuid: str, pid: int) -> int | None:
        device = self._device_of(uuid)
        for slot in range(self._header()[4]):
            if device is not None and self._live_pid(slot) == pid:
                return slot * _DEVICES + device
        return None

    def _live_pid(self, slot: int) -> int:
        """Pid of the owner as this process knows it; 0 when the slot is free or its owner dead."""
        pid: int = _SLOT.unpack_from(self._map, _SLOTS_AT + slot * _SLOT_BYTES)[0]
        if pid == 0:
            return 0
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
        kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(self._live, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return 0
        return int(holder) if holder > 0 else pid


def announce(state_path: Path) -> None:
    """Let running processes read the state file again; no effect until one has used the driver."""
    try:
        card = os.open(f"{state_path}.card", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        serial = struct.unpack("<I", os.pread(card, 4, _SERIAL_AT))[0]
        os.pwrite(card, struct.pack("<I", (serial + 1) & 0xFFFFFFFF), _SERIAL_AT)
    finally:
        os.close(card)
