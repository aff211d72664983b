# SPDX-License-Identifier: Apache-2.0
"""Moore Threads' library MTML: devices, their condition and use, and links.

::

    python -I -m hami_nodeagent.drivers.mthreads.binding FILE glance     condition and use
    python -I -m hami_nodeagent.drivers.mthreads.binding FILE survey     besides: links

Both print a list of devices (``drivers.parse.library``). Calls, structures and numbers are those of
``mtml.h`` 2.2 and of the vendor's Python binding mthreads-ml-py 2.4.3: sizes in bytes, power in
milliwatts. The list contains a divided card and its instances (MPC), as the header states; ``kind``
is written as mthreads-gmi writes it. No call reports processes. The program changes nothing. Never
run on this vendor's hardware.
"""

import ctypes
import re
from itertools import combinations
from typing import Any

from hami_nodeagent.libraries import loading
from hami_nodeagent.libraries.loading import Errors, Failed, Kind, Library, Program, Trouble

_MOST_DEVICES = 256
_MOST_LINKS = 64
_NAME_SIZE, _UUID_SIZE, _PATH_SIZE, _VERSION_SIZE = 32, 48, 64, 80
_PATH = re.compile(r"/dev/mtgpu\.(\d{1,5})")
_MILLI = 1000
_LEAST_BYTES = 64 << 20
"""No device has less: a smaller number is no number of bytes."""
_LEVELS = {
    0: "internal", 1: "single", 2: "multiple", 3: "hostbridge", 4: "node", 5: "system",
}  # fmt: skip
_KIND_BY_MPC = {1: "MPC Parent", 2: "MPC Instance"}
_UNCORRECTED, _SINCE_START, _DRAM = 1, 0, 1

_ERRORS = Errors(
    names={
        1: "DRIVER_NOT_LOADED", 2: "DRIVER_FAILURE", 3: "INVALID_ARGUMENT", 4: "NOT_SUPPORTED",
        5: "NO_PERMISSION", 6: "INSUFFICIENT_SIZE", 7: "NOT_FOUND", 8: "INSUFFICIENT_MEMORY",
        9: "DRIVER_TOO_OLD", 10: "DRIVER_TOO_NEW", 11: "TIMEOUT", 12: "RESOURCE_IS_BUSY",
        669: "GPU_IS_LOST",
    },
    kinds={
        1: Kind.MISSING,
        4: Kind.UNSUPPORTED,
        5: Kind.DENIED,
        9: Kind.MISMATCH,
        10: Kind.MISMATCH,
        12: Kind.BUSY,
        669: Kind.GONE,
    },
)  # fmt: skip
"""The last number is in the vendor's Python binding only."""


class _Pci(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_char * 32),
        ("segment", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("width", ctypes.c_uint),
        ("speeds", ctypes.c_float * 2),
        ("links", ctypes.c_uint * 4),
        ("reserved", ctypes.c_int * 6),
    )


class _Property(ctypes.Structure):
    _fields_ = (
        ("virtual", ctypes.c_uint, 1),
        ("virtual_role", ctypes.c_uint, 3),
        ("mpc", ctypes.c_uint, 1),
        ("mpc_role", ctypes.c_uint, 3),
        ("link", ctypes.c_uint, 1),
        ("rest", ctypes.c_uint, 23),
        ("reserved", ctypes.c_uint),
    )


class Mtml:
    """The initialised library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._opened = ctypes.c_void_p()
        library.call("mtmlLibraryInit", ctypes.byref(self._opened))

    def glance(self) -> dict[str, Any]:
        """All devices."""
        return self._told()[0]

    def survey(self) -> dict[str, Any]:
        """Return all devices and their links."""
        answer, handles = self._told()
        links = [(a, b, self._link(handles[a], handles[b])) for a, b in combinations(handles, 2)]
        answer["links"] = [(a, b, *link) for a, b, link in links if link is not None]
        return answer

    def _told(self) -> tuple[dict[str, Any], dict[int, ctypes.c_void_p]]:
        count = ctypes.c_uint(0)
        self._library.call("mtmlLibraryCountDevice", self._opened, ctypes.byref(count))
        if not count.value:
            raise Trouble(Kind.ABSENT, "the library lists no device")
        if count.value > _MOST_DEVICES:
            raise loading.nonsense(f"{count.value} devices")
        devices: list[dict[str, Any]] = []
        handles: dict[int, ctypes.c_void_p] = {}
        for number in range(count.value):
            try:
                handle = self._part(
                    "mtmlLibraryInitDeviceByIndex", self._opened, ctypes.c_uint(number)
                )
            except Failed as failed:
                devices.append({"index": number, "trouble": _of_one(failed)})
                continue
            handles[number] = handle
            devices.append({"index": number, **self._device(handle)})
        return {"version": self._version(), "devices": devices}, handles

    def _device(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        pci = _Pci()
        has_place = self._library.told("mtmlDeviceGetPciInfo", handle, ctypes.byref(pci))
        path = _PATH.fullmatch(self._text("mtmlDeviceGetGpuPath", _PATH_SIZE, handle))
        power = self._library.number("mtmlDeviceGetPowerUsage", ctypes.c_uint, handle)
        told = {
            "name": self._text("mtmlDeviceGetName", _NAME_SIZE, handle),
            "bus_id": loading.text(pci.address) if has_place else "",
            "minor": int(path[1]) if path else None,
            "power_w": None if power is None else power / _MILLI,
            "attributes": self._attributes(handle),
            **self._gpu(handle),
        }
        try:
            memory = self._part("mtmlDeviceInitMemory", handle)
            total = self._size("mtmlMemoryGetTotal", memory)
            used = self._size("mtmlMemoryGetUsed", memory)
        except Failed as failed:
            return {**told, "trouble": _of_one(failed)}
        if not total:
            trouble = Trouble(Kind.TRANSIENT, "the library does not report its memory")
            return {**told, "trouble": trouble.plain()}
        if not _LEAST_BYTES <= total >= used:
            raise loading.nonsense(f"{used} of {total} bytes")
        told["memory_mib"], told["used_mib"] = loading.mib(total), loading.mib(used)
        return {**told, **self._faults(memory, told["attributes"])}

    def _attributes(self, handle: ctypes.c_void_p) -> dict[str, str]:
        role = _Property()
        uuid = self._text("mtmlDeviceGetUUID", _UUID_SIZE, handle)
        told = {"uuid": uuid} if uuid else {}
        if self._library.told("mtmlDeviceGetProperty", handle, ctypes.byref(role)):
            whole = "Virtual" if role.virtual_role else "Physical"
            told["kind"] = _KIND_BY_MPC.get(role.mpc_role, whole)
            if role.mpc:
                told["mpc_capable"] = "true"
        return told

    def _faults(self, memory: ctypes.c_void_p, attributes: dict[str, str]) -> dict[str, Any]:
        """Errors of memory since the driver started; pages that wait for the next start."""
        which = (ctypes.c_int(_UNCORRECTED), ctypes.c_int(_SINCE_START), ctypes.c_int(_DRAM))
        name = "mtmlMemoryGetEccErrorCounter"
        errors = self._library.number(name, ctypes.c_ulonglong, memory, *which)
        name = "mtmlMemoryGetRetiredPagesPendingStatus"
        if self._library.number(name, ctypes.c_uint, memory):
            attributes["retired_pages_pending"] = "true"
        return {"broken": f"{errors} uncorrectable ECC errors"} if errors else {}

    def _gpu(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        try:
            gpu = self._part("mtmlDeviceInitGpu", handle)
        except Failed:
            return {}
        return {
            "core_pct": self._library.number("mtmlGpuGetUtilization", ctypes.c_uint, gpu),
            "temperature_c": self._library.number("mtmlGpuGetTemperature", ctypes.c_uint, gpu),
        }

    def _size(self, name: str, memory: ctypes.c_void_p) -> int:
        found = ctypes.c_ulonglong(0)
        self._library.call(name, memory, ctypes.byref(found))
        return found.value

    def _version(self) -> str:
        try:
            system = self._part("mtmlLibraryInitSystem", self._opened)
        except Failed:
            return ""
        return self._text("mtmlSystemGetDriverVersion", _VERSION_SIZE, system)

    def _link(self, a: ctypes.c_void_p, b: ctypes.c_void_p) -> tuple[str, int] | None:
        """Return the closest common bridge, and the number of the vendor's own links."""
        library = self._library
        links = library.number("mtmlDeviceCountMtLinkLayouts", ctypes.c_uint, a, b) or 0
        number = library.number("mtmlDeviceGetTopologyLevel", ctypes.c_uint, a, b)
        level = _LEVELS.get(-1 if number is None else number, "node" if links else "")
        return (level, links) if level and links <= _MOST_LINKS else None

    def _part(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """A part of the device or library; it goes with the process."""
        found = ctypes.c_void_p()
        self._library.call(name, *arguments, ctypes.byref(found))
        return found

    def _text(self, name: str, size: int, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(size)
        told = self._library.told(name, handle, buffer, ctypes.c_uint(size))
        return loading.text(buffer.raw) if told else ""


def _of_one(failed: Failed) -> dict[str, object]:
    """Return the trouble of one device; raise errors that affect all devices."""
    if failed.kind in (Kind.MISSING, Kind.MISMATCH):
        raise failed
    return failed.plain()


PROGRAM = Program(
    vendor="mthreads",
    word="mtml",
    files=("libmtml.so.2", "libmtml.so"),
    folders=(),
    errors=_ERRORS,
    open=Mtml,
    commands={"glance": Mtml.glance, "survey": Mtml.survey},
    needed=(
        "mtmlLibraryInit",
        "mtmlLibraryCountDevice",
        "mtmlLibraryInitDeviceByIndex",
        "mtmlDeviceGetPciInfo",
        "mtmlDeviceInitMemory",
        "mtmlMemoryGetTotal",
        "mtmlMemoryGetUsed",
    ),
)

if __name__ == "__main__":
    loading.main(PROGRAM)
