# SPDX-License-Identifier: Apache-2.0
"""Builds usage regions byte by byte, as the library would leave them."""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hami_nodeagent.core import region

HEADER, CONTROL = region.layout_of(region.HEADER), region.layout_of(region.CONTROL)
SHARE, SLOT, DEVICE = (
    region.layout_of(fields) for fields in (region.SHARE, region.SLOT, region.DEVICE)
)
HEADER_BYTES = HEADER.size + CONTROL.size
SLACK = 3
"""Bytes of each lease that are not used."""


@dataclass
class Used:
    """Use of one device by one process."""

    used: int
    context: int = 0
    module: int = 0


@dataclass
class Process:
    pid: int
    shares: Sequence[Used] = ()
    namespace: int = 1
    start: int = 1
    last_launch_ns: int = 0
    launches: int = 0
    refusals: int = 0
    device_time_ns: int = 0
    waited_ns: int = 0
    idle_launches: int = 0
    slot: int | None = None


@dataclass
class Built:
    """A region; ``data`` creates the bytes, with some fields of the header replaced."""

    uuids: Sequence[str] = ("GPU-0",)
    processes: Sequence[Process] = ()
    slots: int = 8
    counters: tuple[int, int] = (0, 0)
    """Reclaimed, errors."""
    touched_ns: int = 0
    over_since_ns: Mapping[int, int] = field(default_factory=dict)
    starved_ns: Mapping[int, int] = field(default_factory=dict)

    def data(self, *, is_sealed: bool = True, **header: Any) -> bytes:
        devices_at = HEADER_BYTES
        slots_at = devices_at + len(self.uuids) * DEVICE.size
        shares_at = slots_at + self.slots * SLOT.size
        size = shares_at + self.slots * len(self.uuids) * SHARE.size
        fields = {
            "magic": region.MAGIC,
            "layout": region.LAYOUT,
            "header_bytes": HEADER_BYTES,
            "file_bytes": size,
            "device_count": len(self.uuids),
            "slot_count": self.slots,
            "devices_offset": devices_at,
            "slots_offset": slots_at,
            "shares_offset": shares_at,
            "checksum": 0,
            "slots_seen": self.slots,
        } | header
        data = bytearray(size)
        HEADER.pack_into(data, 0, *fields.values())
        if is_sealed and "checksum" not in header:
            seal(data)
        CONTROL.pack_into(data, HEADER.size, *self.counters, self.touched_ns)
        for n, uuid in enumerate(self.uuids):
            DEVICE.pack_into(
                data,
                devices_at + n * DEVICE.size,
                *(self.over_since_ns.get(n, 0), self.starved_ns.get(n, 0), uuid.encode()),
            )
        for n, process in enumerate(self.processes):
            slot = n if process.slot is None else process.slot
            SLOT.pack_into(
                data,
                slots_at + slot * SLOT.size,
                *(process.pid, process.namespace, process.start, process.last_launch_ns),
                *(process.launches, process.refusals, process.device_time_ns),
                *(process.waited_ns, process.idle_launches),
            )
            for device, share in enumerate(process.shares):
                at = shares_at + (device * self.slots + slot) * SHARE.size
                slack, leased = SLACK, share.used + SLACK
                SHARE.pack_into(
                    data, at, slack | 7 << 48, leased | 9 << 48, share.context, share.module
                )
        return bytes(data)


def own_region(uuid: str, used: int) -> bytes:
    """A region in which this process uses so many bytes of one device."""
    own = Path("/proc/self")
    process = Process(
        os.getpid(),
        (Used(used),),
        namespace=int((own / "ns" / "pid").readlink().name[len("pid:[") : -1]) & 0xFFFFFFFF,
        start=int((own / "stat").read_text().rpartition(")")[2].split()[19]),
    )
    return Built(uuids=(uuid,), processes=(process,)).data()


def seal(data: bytearray) -> None:
    """Write the checksum that belongs to the header."""
    at = region.offsets_of(region.HEADER)["checksum"]
    struct.pack_into("<I", data, at, region.checksum(bytes(data[:at])))
