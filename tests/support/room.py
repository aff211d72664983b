# SPDX-License-Identifier: Apache-2.0
"""The page of granted memory, ``room-1``, written from the layout of native/libvgpu/src/room.h.

For tests of the limiter; independent of the agent's own writer.
"""

import os
import struct
import time
from pathlib import Path

from msgspec.structs import replace

from tests.fakes.gpucontainers import GpuContainer

FILE_NAME = "room-1"
LEASE_S = 120.0
_HEADER = struct.Struct("<8sIII44x")
_DEVICE_BYTES = 128
_DEVICES = 64
_SEQUENCE = struct.Struct("<I")
_SEQUENCE_AT = 64
_GRANT = struct.Struct("<QQ")
_GRANT_AT = 72


class RoomPage:
    """The page of one container; each new object of a path replaces the file."""

    def __init__(
        self,
        path: Path,
        *,
        magic: bytes = b"VHAMIRM1",
        layout: int = 1,
        device_bytes: int = _DEVICE_BYTES,
        devices: int = _DEVICES,
    ) -> None:
        """Make the file complete under another name, then give it its name."""
        fresh = path.with_name(".fresh")
        page = _HEADER.pack(magic, layout, device_bytes, devices)
        fresh.write_bytes(page + bytes(_DEVICES * _DEVICE_BYTES))
        fresh.replace(path)
        self._file = path.open("r+b", buffering=0)
        self._places: dict[str, int] = {}
        self._sequences: dict[str, int] = {}

    def grant(self, uuid: str, memory_bytes: int, *, lease_s: float = LEASE_S) -> None:
        """Grant the bytes, the request included, for so long."""
        self.tear(uuid)
        until_ns = time.monotonic_ns() + int(lease_s * 1e9)
        self._put(uuid, _GRANT_AT, _GRANT.pack(until_ns, memory_bytes))
        self._step(uuid)

    def tear(self, uuid: str) -> None:
        """Begin to write the device, as a writer that does not come to its end."""
        if uuid not in self._places:
            self._places[uuid] = _HEADER.size + len(self._places) * _DEVICE_BYTES
            self._put(uuid, 0, uuid.encode())
        if not self._sequences.get(uuid, 0) & 1:
            self._step(uuid)

    def close(self) -> None:
        """Close the file; the page stays."""
        self._file.close()

    def _step(self, uuid: str) -> None:
        self._sequences[uuid] = self._sequences.get(uuid, 0) + 1
        self._put(uuid, _SEQUENCE_AT, _SEQUENCE.pack(self._sequences[uuid]))

    def _put(self, uuid: str, at: int, content: bytes) -> None:
        os.pwrite(self._file.fileno(), content, self._places[uuid] + at)


def set_limits_above(
    container: GpuContainer, *, memory_limit_mib: int = 0, core_limit_pct: int = 0
) -> None:
    """Give every device of the container these limits above its requests."""
    assert container.limits is not None
    devices = tuple(
        replace(one, memory_limit_mib=memory_limit_mib, core_limit_pct=core_limit_pct)
        for one in container.limits.devices
    )
    container.set_limits(replace(container.limits, devices=devices))
