# SPDX-License-Identifier: Apache-2.0
"""Gates at which the threads of containers wait, for recall or for exclusive quanta.

The layout is that of ``native/libvgpu/src/gate.h`` (checked against it by a test). A gate is a file
in the directory of the container's doorbell, which the container sees read-only. It is written in
place, because processes have it mapped. A new gate of recall is closed (docs/adr/0026-recall.md);
one for quanta is open, and each closure has a lease (docs/adr/0030-exclusive-quanta.md).
"""

import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Collection
from pathlib import Path

from hami_nodeagent.core.priorities import ContainerKey
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.futex import wake_all

MAGIC = 0x314352494D414856
LAYOUT = 1
FILE_NAME = "residency-1"
QUANTUM_NAME = "quantum-1"
SIZE = 64
OPEN, CLOSED = 0, 1
STATE_AT, TURN_AT, LEASE_AT = 12, 16, 24
_PAGE = struct.Struct("<QIIQ")
_WORD, _LONG = 4, 8


class Gates:
    """Gates of one kind of the containers on this node. Calls block for a write to memory."""

    def __init__(self, bells: Doorbells, name: str = FILE_NAME) -> None:
        """``name``: file of the gates, ``FILE_NAME`` for recall, or ``QUANTUM_NAME``."""
        self._bells = bells
        self._name = name
        self.new: set[ContainerKey] = set()
        """Containers whose gate was created by this process."""
        self._turn: dict[ContainerKey, int] = {}

    def create(self, key: ContainerKey) -> None:
        """Create a gate unless a valid one exists; ``OSError`` if that is impossible."""
        if self.is_open(key) is not None:
            return
        path = self._bells.directory_of(key) / self._name
        state = CLOSED if self._name == FILE_NAME else OPEN
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        try:
            with fresh.open("xb") as file:
                file.truncate(SIZE)
                file.write(_PAGE.pack(MAGIC, LAYOUT, state, 1))
                os.fchmod(file.fileno(), 0o644)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
        self.new.add(key)
        self._turn[key] = 1

    def is_open(self, key: ContainerKey) -> bool | None:
        """Return whether the gate is open; ``None`` without a valid gate."""
        try:
            with self._path(key).open("rb") as file:
                page = file.read(SIZE + 1)
        except OSError:
            return None
        if len(page) != SIZE:
            return None
        magic, layout, state, _ = _PAGE.unpack_from(page)
        return state == OPEN if (magic, layout) == (MAGIC, LAYOUT) else None

    def set(self, key: ContainerKey, *, is_open: bool, lease_until_ns: int = 0) -> None:
        """Open or close the gate and wake the threads at it; ``OSError`` without a gate.

        A closed gate counts as open from ``lease_until_ns`` of CLOCK_MONOTONIC on; 0: it does not.
        If the gate is closed already, only the lease is renewed.
        """
        with self._path(key).open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as page:
            with memoryview(page) as data, data.cast("Q") as longs, data.cast("I") as words:
                longs[LEASE_AT // _LONG] = lease_until_ns
                if lease_until_ns and not is_open and words[STATE_AT // _WORD] == CLOSED:
                    return
                longs[TURN_AT // _LONG] += 1
                self._turn[key] = longs[TURN_AT // _LONG]
                words[STATE_AT // _WORD] = OPEN if is_open else CLOSED
            start = ctypes.c_char.from_buffer(page)
            wake_all(ctypes.addressof(start) + STATE_AT)
            del start

    def turn_of(self, key: ContainerKey) -> int | None:
        """Return the number of the gate's last change; ``None`` without a valid gate."""
        if key not in self._turn and self.is_open(key) is not None:
            self._turn[key] = _PAGE.unpack_from(self._path(key).read_bytes())[3]
        return self._turn.get(key)

    def keep_only(self, keys: Collection[ContainerKey]) -> None:
        """Forget the gates of all other containers."""
        self.new &= set(keys)
        self._turn = {key: turn for key, turn in self._turn.items() if key in keys}

    def _path(self, key: ContainerKey) -> Path:
        return self._bells.path_of(key) / self._name
