# SPDX-License-Identifier: Apache-2.0
"""Reads the usage region of a tenant: the layout of ``native/libvgpu/src/region.h``.

Plain Python, because the validation runs without the agent's packages; a test compares the figures
with those of the agent's reader. Device 0 only.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<QIIQIIQQQII")
_MAGIC = 0x31494D4148204756
_OWNER = struct.Struct("<II")
_SLOT = struct.Struct("<QQQQQ")
_SLOT_FIELDS_AT = 16
_SHARE = struct.Struct("<QQ")
_PARTS = struct.Struct("<QQ")
_PARTS_AT = 48
_LINE = 64
_LOW_48 = (1 << 48) - 1


@dataclass(frozen=True, kw_only=True)
class Process:
    """Figures of one process of the tenant."""

    pid: int
    used_bytes: int
    context_bytes: int
    launches: int
    refusals: int
    device_time_ns: int


def read(path: Path) -> tuple[Process, ...]:
    """Return the processes of the region, ended ones included; none without a region."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    fields = _HEADER.unpack_from(data)
    magic, slots_at, shares_at, slots_seen = fields[0], fields[7], fields[8], fields[10]
    if magic != _MAGIC:
        return ()
    found = []
    for slot in range(slots_seen):
        at = slots_at + slot * _LINE
        pid, _ = _OWNER.unpack_from(data, at)
        if not pid:
            continue
        _, launches, refusals, device_time_ns, _ = _SLOT.unpack_from(data, at + _SLOT_FIELDS_AT)
        share = shares_at + slot * _LINE
        low, high = _SHARE.unpack_from(data, share)
        context, _ = _PARTS.unpack_from(data, share + _PARTS_AT)
        found.append(
            Process(
                pid=pid,
                used_bytes=(high & _LOW_48) - (low & _LOW_48),
                context_bytes=context,
                launches=launches,
                refusals=refusals,
                device_time_ns=device_time_ns,
            )
        )
    return tuple(found)


def used_bytes(path: Path) -> int:
    """Bytes that all processes of the tenant are charged."""
    return sum(one.used_bytes for one in read(path))
