# SPDX-License-Identifier: Apache-2.0
"""The agent's side of a container's gate: writes its file, and receives the reports."""

import ctypes
import mmap
import platform
import random
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

from tests.fakes.gpucontainers import GpuContainer
from tests.support.closing import Closing
from tests.support.drive import Drive

MAGIC = b"VHAMIRC1"
LAYOUT = 1
BYTES = 64
STATE_AT = 12
TURN_AT = 16
LEASE_AT = 24
FILE = "residency-1"
QUANTUM_FILE = "quantum-1"
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_FUTEX_WAKE = 1
_EVERYBODY = 2**31 - 1
_CREDENTIALS = struct.Struct("3i")
_TURN = struct.Struct("<Q")


class Report(NamedTuple):
    """One datagram: the process that sent it, its byte and turn (0: none), when it was read."""

    pid: int
    byte: str
    turn: int
    time_s: float


class Gate(Closing):
    """A gate, closed when it is made. The container must have no other doorbell."""

    def __init__(self, container: GpuContainer, file: str = FILE) -> None:
        """Write the file and bind the doorbell."""
        path = container.bell_directory / file
        path.write_bytes(struct.pack("<8sIIQ", MAGIC, LAYOUT, 1, 1).ljust(BYTES, b"\0"))
        with path.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), BYTES)
        self._libc = ctypes.CDLL(None)
        self.bell = bind_bell(container.bell_directory / "bell-1")

    def close(self) -> None:
        self._map.close()
        self.bell.close()

    def open(self) -> None:
        """Open it and wake all that wait."""
        self._write(0)

    def shut(self, lease_s: float = 0.0) -> None:
        """Close it, for at most ``lease_s`` unless that is 0."""
        until_ns = time.monotonic_ns() + int(lease_s * 1e9) if lease_s else 0
        struct.pack_into("<Q", self._map, LEASE_AT, until_ns)
        self._write(1)

    @property
    def turn(self) -> int:
        """Number of the present closure or opening."""
        return int(struct.unpack_from("<Q", self._map, TURN_AT)[0])

    def _write(self, state: int) -> None:
        struct.pack_into("<Q", self._map, TURN_AT, self.turn + 1)
        struct.pack_into("<I", self._map, STATE_AT, state)
        word = ctypes.c_uint32.from_buffer(self._map, STATE_AT)
        address = ctypes.c_void_p(ctypes.addressof(word))
        self._libc.syscall(_FUTEX_CALL, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
        del address, word

    def report(self, byte: str, pid: int, patience_s: float = 10.0) -> Report:
        """Return the next report of this kind and turn by this process; others are passed over."""
        deadline = time.monotonic() + patience_s
        wanted = (byte, pid, 0 if byte in "wai" else self.turn)
        while True:
            found = self.next_report(deadline - time.monotonic())
            if found is None:
                msg = f"no report {byte!r} of process {pid} within {patience_s} s"
                raise TimeoutError(msg)
            if (found.byte, found.pid, found.turn) == wanted:
                return found

    def next_report(self, patience_s: float) -> Report | None:
        """Return the next report of any kind, ``None`` if none comes in time."""
        return next_report(self.bell, patience_s)

    def drain(self, for_s: float) -> list[Report]:
        """Return all reports of so many seconds, after dropping those that are waiting."""
        while self.next_report(0) is not None:
            pass
        deadline = time.monotonic() + for_s
        found = []
        while (one := self.next_report(max(0.0, deadline - time.monotonic()))) is not None:
            found.append(one)
        return found


def bind_bell(path: Path) -> socket.socket:
    """A doorbell as the agent binds it."""
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    bell.bind(str(path))
    return bell


def next_report(bell: socket.socket, patience_s: float) -> Report | None:
    """Return the next report at this doorbell, ``None`` if none comes in time."""
    bell.settimeout(max(patience_s, 1e-6))
    try:
        text, ancillary, _, _ = bell.recvmsg(16, socket.CMSG_SPACE(_CREDENTIALS.size))
    except (TimeoutError, BlockingIOError):
        return None
    ((_, _, credentials),) = ancillary
    pid, _, _ = _CREDENTIALS.unpack(credentials[: _CREDENTIALS.size])
    turn = _TURN.unpack(text[1:])[0] if len(text) > 1 else 0
    return Report(pid, text[:1].decode(), turn, time.monotonic())


def park_at_random(
    gate: Gate, controller: Drive, pid: int, choose: random.Random, for_s: float
) -> int:
    """Park the process and bring it back for so many seconds; how often.

    The gate is open before and afterwards. ``controller`` is a process outside the container.
    """
    cycles = 0
    ends = time.monotonic() + for_s
    while time.monotonic() < ends:
        time.sleep(choose.uniform(0, 0.02))
        gate.shut()
        gate.report("p", pid)
        controller.ask(f"lock {pid} 1000")
        controller.ask(f"checkpoint {pid}")
        time.sleep(choose.uniform(0, 0.02))
        controller.ask(f"restore {pid}")
        controller.ask(f"unlock {pid}")
        gate.open()
        cycles += 1
    return cycles
