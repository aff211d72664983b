# SPDX-License-Identifier: Apache-2.0
"""Parses the bytes of a usage region as untrusted input.

The layout is that of ``native/libvgpu/src/region.h`` (checked against it by a test); the file is
written by the processes of one container, so by a tenant. Offsets and counts are used only where
they agree with the size of the file and with the layout's own limits; texts from the file are only
compared, never shown. The result is a ``Region`` or a ``Refused`` for any input; no function
raises. Sizes in bytes, times in nanoseconds of CLOCK_MONOTONIC.
"""

import struct
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from hami_nodeagent.core.living import Owner

MAGIC = 0x31494D4148204756
LAYOUT = 1
FILE_NAME = "region-1"
SLOTS_MAX = 2048
DEVICES_MAX = 64
LINE = 64
UUID_BYTES = 64

# The C structures in order: (name, format of the struct module) of each field that is read here,
# ``x`` for what lies between. Words of 16 bytes are two of 8.
HEADER = (
    ("magic", "Q"),
    ("layout", "I"),
    ("header_bytes", "I"),
    ("file_bytes", "Q"),
    ("device_count", "I"),
    ("slot_count", "I"),
    ("devices_offset", "Q"),
    ("slots_offset", "Q"),
    ("shares_offset", "Q"),
    ("checksum", "I"),
    ("slots_seen", "I"),
)
CONTROL = (("", "8x"), ("reclaimed", "Q"), ("errors", "Q"), ("touched_ns", "Q"), ("", "32x"))
SHARE = (
    ("share", "Q"),
    ("share_high", "Q"),
    ("", "32x"),
    ("context_bytes", "Q"),
    ("module_bytes", "Q"),
)
SLOT = (
    ("owner", "I"),
    ("owner_namespace", "I"),
    ("owner_high", "Q"),
    ("last_launch_ns", "Q"),
    ("launches", "Q"),
    ("refusals", "Q"),
    ("device_time_ns", "Q"),
    ("waited_ns", "Q"),
    ("idle_launches", "Q"),
)
DEVICE = (
    ("", "16x"),
    ("over_since_ns", "Q"),
    ("", "72x"),
    ("starved_ns", "Q"),
    ("", "24x"),
    ("uuid", "64s"),
)

Reason = Literal[
    "missing", "unreadable", "not-a-file", "size", "magic", "layout", "header", "checksum"
]


def layout_of(fields: tuple[tuple[str, str], ...]) -> struct.Struct:
    """Return the packed, little-endian form of a C structure."""
    return struct.Struct("<" + "".join(code for _, code in fields))


def offsets_of(fields: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Return the offset of each named field."""
    offsets, at = {}, 0
    for name, code in fields:
        if name:
            offsets[name] = at
        at += struct.calcsize("<" + code)
    return offsets


_HEADER, _CONTROL = layout_of(HEADER), layout_of(CONTROL)
_SHARE, _SLOT, _DEVICE = layout_of(SHARE), layout_of(SLOT), layout_of(DEVICE)
HEADER_BYTES = _HEADER.size + _CONTROL.size
_CHECKED_BYTES = offsets_of(HEADER)["checksum"]
_LOW_48 = (1 << 48) - 1
_FNV_BASIS, _FNV_PRIME, _U32 = 2166136261, 16777619, (1 << 32) - 1
SIZE_MAX = HEADER_BYTES + DEVICES_MAX * _DEVICE.size + SLOTS_MAX * LINE * (1 + DEVICES_MAX)
"""No region of this layout is larger."""


class Refused(Struct, frozen=True, kw_only=True):
    """The bytes are not a valid region."""

    reason: Reason


FindDead = Callable[[Collection[Owner]], Collection[Owner]]
"""Return those of the owners that have ended."""


class ProcessUse(Struct, frozen=True, kw_only=True):
    """Usage that one process recorded."""

    owner: Owner
    last_launch_ns: int
    launches: int
    refusals: int
    device_time_ns: int
    waited_ns: int


class Work(Struct, frozen=True, kw_only=True):
    """Launches of a container's processes."""

    number: int
    """Changes with every launch."""
    is_idle: bool = False
    """Every process has declared itself idle; its next launch rings (``shell.doorbell``)."""


class DeviceUse(Struct, frozen=True, kw_only=True):
    """Usage of one device, summed over the records of all living processes."""

    used_bytes: int = 0
    leased_bytes: int = 0
    """Memory that processes may use without a further check of the limit, with all of the used."""
    context_bytes: int = 0
    module_bytes: int = 0
    over_since_ns: int = 0
    """Time since when usage exceeds a lowered limit; 0: it does not."""
    starved_ns: int = 0
    """Time for which processes waited for higher priorities beyond the first second."""


class Region(Struct, frozen=True, kw_only=True):
    """Content of a region."""

    devices: Mapping[str, DeviceUse]
    """Usage by UUID, as the file contains it."""
    processes: tuple[ProcessUse, ...]
    ended: tuple[ProcessUse, ...] = ()
    """Processes that ended and whose slots were not reclaimed yet: they use nothing."""
    reclaimed: int = 0
    """Processes that ended without releasing their usage, cleaned up by other processes."""
    errors: int = 0
    """Releases of more than was used: a bug of the library, or a write by the tenant."""
    touched_ns: int = 0
    """Time at which calls into the driver were last seen, of containers with a gate; 0: never."""

    @property
    def last_launch_ns(self) -> int:
        """Return the newest launch of any process; 0 before the first."""
        everybody = (*self.processes, *self.ended)
        return max((process.last_launch_ns for process in everybody), default=0)


def checksum(header: bytes) -> int:
    """Return the FNV-1a hash of the part of the header that never changes."""
    value = _FNV_BASIS
    for byte in header[:_CHECKED_BYTES]:
        value = (value ^ byte) * _FNV_PRIME & _U32
    return value


class Layout(Struct, frozen=True, kw_only=True):
    """Offsets of the parts of one region, checked against its size."""

    device_count: int
    slot_count: int
    slots_seen: int
    devices_at: int
    slots_at: int
    shares_at: int

    @property
    def slots_bytes(self) -> int:
        """Return the length of the slots that were ever claimed."""
        return min(self.slots_seen, self.slot_count) * _SLOT.size


@lru_cache(maxsize=256)  # a region keeps its header; each is read several times a second
def parse_header(head: bytes, file_bytes: int) -> Layout | Refused:
    """Return the layout in the first ``HEADER_BYTES`` of a file of this size."""
    if len(head) < HEADER_BYTES or not HEADER_BYTES <= file_bytes <= SIZE_MAX:
        return Refused(reason="size")
    (
        magic,
        layout,
        header_bytes,
        told_bytes,
        device_count,
        slot_count,
        devices_at,
        slots_at,
        shares_at,
        told_checksum,
        slots_seen,
    ) = _HEADER.unpack_from(head)
    if magic != MAGIC:
        return Refused(reason="magic")
    if layout != LAYOUT:
        return Refused(reason="layout")
    parts = (
        (devices_at, device_count * _DEVICE.size),
        (slots_at, slot_count * _SLOT.size),
        (shares_at, slot_count * device_count * _SHARE.size),
    )
    if (
        header_bytes != HEADER_BYTES
        or told_bytes != file_bytes
        or not 1 <= device_count <= DEVICES_MAX
        or not 1 <= slot_count <= SLOTS_MAX
        or any(at % LINE or at < HEADER_BYTES or at + size > file_bytes for at, size in parts)
    ):
        return Refused(reason="header")
    if told_checksum != checksum(head):
        return Refused(reason="checksum")
    return Layout(
        device_count=device_count,
        slot_count=slot_count,
        slots_seen=slots_seen,
        devices_at=devices_at,
        slots_at=slots_at,
        shares_at=shares_at,
    )


def parse(
    data: bytes, find_dead: FindDead | None = None, uuids: Collection[str] | None = None
) -> Region | Refused:
    """Parse ``data`` (the whole file); without ``find_dead`` all owners count as living.

    ``uuids``: the devices to read; ``None``: all. A tenant decides how many its region names.
    """
    layout = parse_header(data[:HEADER_BYTES], len(data))
    if isinstance(layout, Refused):
        return layout
    reclaimed, errors, touched_ns = _CONTROL.unpack_from(data, _HEADER.size)
    slots = data[layout.slots_at : layout.slots_at + layout.slots_bytes]
    owned = {
        number: _process(slot) for number, slot in enumerate(_SLOT.iter_unpack(slots)) if slot[0]
    }
    owners = frozenset(process.owner for process in owned.values())
    dead = frozenset(find_dead(owners)) if find_dead and owners else frozenset[Owner]()
    living = [number for number, process in owned.items() if process.owner not in dead]
    return Region(
        devices=_devices(data, layout, living, uuids),
        processes=tuple(owned[number] for number in living),
        ended=tuple(process for process in owned.values() if process.owner in dead),
        reclaimed=reclaimed,
        errors=errors,
        touched_ns=touched_ns,
    )


def activity(slots: bytes, dead: Collection[Owner] = ()) -> Work:
    """Return the launches in ``slots``, which are as ``Layout`` has them; ``dead`` make none."""
    living = [
        slot for slot in _SLOT.iter_unpack(slots) if slot[0] and not (dead and _owner(slot) in dead)
    ]
    return Work(
        number=hash(tuple((slot[0], slot[3], slot[4]) for slot in living)),
        is_idle=all(slot[4] == slot[8] for slot in living),
    )


def owners(slots: bytes) -> frozenset[Owner]:
    """Return the owners of ``slots``."""
    return frozenset(_owner(slot) for slot in _SLOT.iter_unpack(slots) if slot[0])


def _owner(slot: tuple[int, ...]) -> Owner:
    return Owner(pid=slot[0], namespace=slot[1], start_ticks=slot[2] & _LOW_48)


def _process(slot: tuple[int, ...]) -> ProcessUse:
    return ProcessUse(
        owner=_owner(slot),
        last_launch_ns=slot[3],
        launches=slot[4],
        refusals=slot[5],
        device_time_ns=slot[6],
        waited_ns=slot[7],
    )


def _devices(
    data: bytes, layout: Layout, owned: list[int], uuids: Collection[str] | None
) -> dict[str, DeviceUse]:
    devices: dict[str, DeviceUse] = {}
    for device in range(layout.device_count):
        over_since_ns, starved_ns, name = _DEVICE.unpack_from(
            data, layout.devices_at + device * _DEVICE.size
        )
        uuid = name.partition(b"\0")[0].decode("ascii", errors="replace")
        if uuid in devices or (uuids is not None and uuid not in uuids):
            continue
        used = leases = context = module = 0
        for slot in owned:
            line = device * layout.slot_count + slot
            share = _SHARE.unpack_from(data, layout.shares_at + line * _SHARE.size)
            slack, leased = share[0] & _LOW_48, share[1] & _LOW_48
            used += max(leased - slack, 0)
            leases += leased
            context += share[2]
            module += share[3]
        devices[uuid] = DeviceUse(
            used_bytes=used,
            leased_bytes=leases,
            context_bytes=context,
            module_bytes=module,
            over_since_ns=over_since_ns,
            starved_ns=starved_ns,
        )
    return devices
