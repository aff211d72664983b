# SPDX-License-Identifier: Apache-2.0
"""Iluvatar's library IXML: chips, their health and use, and links.

::

    python -I -m hami_nodeagent.drivers.iluvatar.binding FILE glance     health and use
    python -I -m hami_nodeagent.drivers.iluvatar.binding FILE survey     besides: links

Both print a list of devices (``drivers.parse.library``). Calls, structures and numbers are those of
``api.h`` in the vendor's Go binding go-ixml (CoreX 4.2 and later). Most have NVML's names and
meanings; those that begin with ``ixml`` are the vendor's own. For processes the program uses only
the call without a version: its records contain a pid and a size.

The header defines power in milliwatts, but observed values were watts: values below a thousand are
read as watts, because no chip uses less than one watt. The program changes nothing. Never run on
this vendor's hardware.
"""

import ctypes
from itertools import combinations
from typing import Any

from hami_nodeagent.libraries import loading
from hami_nodeagent.libraries.loading import Errors, Failed, Kind, Library, Program, Trouble

_MOST_CHIPS = 64
_MOST_LINKS = 64
"""The vendor's header defines six; the buffer allows for more."""
_FEWEST_ROWS, _MOST_ROWS = 256, 16384
_ROOM = 3
"""Factor for the length of a row, so that a library with longer rows writes into the buffer."""
_MOST_PID = 1 << 22
_NOT_AVAILABLE = (1 << 64) - 1
_INSUFFICIENT_SIZE = 7
_OF_ALL = frozenset({Kind.MISSING, Kind.MISMATCH})
"""Errors that affect all chips, regardless of the call that reports them."""
_DIE_SENSOR = 0
_MILLI = 1000
_LEAST_BYTES = 64 << 20
"""No chip has less: a smaller number is no number of bytes."""
_LEVELS = {
    0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system",
}  # fmt: skip
_FAULTS = {
    0x1: "system hub", 0x2: "memory controller", 0x4: "temperature", 0x8: "voltage", 0x10: "ECC",
    0x20: "memory", 0x40: "PCIe",
}  # fmt: skip
_UUID_SIZE, _NAME_SIZE, _VERSION_SIZE = 96, 96, 80

_ERRORS = Errors(
    names={
        1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION",
        6: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", 8: "INSUFFICIENT_POWER", 9: "DRIVER_NOT_LOADED",
        10: "TIMEOUT", 11: "IRQ_ISSUE", 12: "LIBRARY_NOT_FOUND", 13: "FUNCTION_NOT_FOUND",
        14: "CORRUPTED_INFOROM", 15: "GPU_IS_LOST", 16: "RESET_REQUIRED", 17: "OPERATING_SYSTEM",
        18: "LIB_RM_VERSION_MISMATCH", 19: "IN_USE", 20: "MEMORY", 21: "NO_DATA",
        25: "ARGUMENT_VERSION_MISMATCH", 26: "DEPRECATED",
    },
    kinds={
        3: Kind.UNSUPPORTED,
        4: Kind.DENIED,
        9: Kind.MISSING,
        12: Kind.UNUSABLE,
        13: Kind.UNSUPPORTED,
        15: Kind.GONE,
        16: Kind.GONE,
        17: Kind.DENIED,
        18: Kind.MISMATCH,
        19: Kind.BUSY,
        25: Kind.UNSUPPORTED,
        26: Kind.UNSUPPORTED,
    },
)  # fmt: skip


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Row(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    )


class Ixml:
    """The initialised library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        library.call(self._versioned("nvmlInit", "_v2"))
        self._get_count = self._versioned("nvmlDeviceGetCount", "_v2")
        self._get_handle = self._versioned("nvmlDeviceGetHandleByIndex", "_v2")
        self._get_pci = self._versioned("nvmlDeviceGetPciInfo", "_v3", "_v2")

    def glance(self) -> dict[str, Any]:
        """All chips."""
        return self._told()[0]

    def survey(self) -> dict[str, Any]:
        """Return all chips and their links."""
        answer, handles = self._told()
        links = [(a, b, self._link(handles[a], handles[b])) for a, b in combinations(handles, 2)]
        answer["links"] = [(a, b, *link) for a, b, link in links if link is not None]
        return answer

    def _told(self) -> tuple[dict[str, Any], dict[int, ctypes.c_void_p]]:
        count = ctypes.c_uint(0)
        self._library.call(self._get_count, ctypes.byref(count))
        if not count.value:
            raise Trouble(Kind.ABSENT, "the library lists no chip")
        if count.value > _MOST_CHIPS:
            raise loading.nonsense(f"{count.value} chips")
        devices: list[dict[str, Any]] = []
        handles: dict[int, ctypes.c_void_p] = {}
        for number in range(count.value):
            handle = ctypes.c_void_p()
            trouble = self._asked(self._get_handle, ctypes.c_uint(number), ctypes.byref(handle))
            if trouble is not None:
                devices.append({"index": number, "trouble": trouble.plain()})
                continue
            handles[number] = handle
            devices.append({"index": number, **self._chip(handle)})
        version = self._text("nvmlSystemGetDriverVersion", _VERSION_SIZE)
        return {"version": version, "devices": devices}, handles

    def _chip(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        library, rates, memory = self._library, _Rates(), _Memory()
        trouble = self._asked("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        if trouble is None and not memory.total:
            trouble = Trouble(Kind.TRANSIENT, "the library does not report its memory")
        has_memory = trouble is None
        if has_memory and not _LEAST_BYTES <= memory.total >= memory.used:
            raise loading.nonsense(f"{memory.used} of {memory.total} bytes")
        mask = ctypes.c_ulonglong(0)
        other = self._asked("ixmlDeviceGetHealth", handle, ctypes.byref(mask))
        if trouble is None and other is not None and other.kind is not Kind.UNSUPPORTED:
            trouble = other
        busy = library.told("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        power = library.number("nvmlDeviceGetPowerUsage", ctypes.c_uint, handle)
        return {
            "uuid": self._text("nvmlDeviceGetUUID", _UUID_SIZE, handle),
            "name": self._text("nvmlDeviceGetName", _NAME_SIZE, handle),
            "bus_id": self._address(handle),
            "minor": library.number("nvmlDeviceGetMinorNumber", ctypes.c_uint, handle),
            "memory_mib": loading.mib(memory.total) if has_memory else None,
            "used_mib": loading.mib(memory.used) if has_memory else None,
            "core_pct": rates.gpu if busy else None,
            "memory_bus_pct": rates.memory if busy else None,
            "temperature_c": library.number(
                "nvmlDeviceGetTemperature", ctypes.c_uint, handle, ctypes.c_int(_DIE_SENSOR)
            ),
            "power_w": power / _MILLI if power is not None and power >= _MILLI else power,
            "processes": self._processes(handle),
            "broken": "" if other is not None else _broken(mask.value),
            "trouble": None if trouble is None else trouble.plain(),
        }

    def _asked(self, name: str, *arguments: object) -> Trouble | None:
        """Run a call and return the trouble of the one chip, if any."""
        try:
            self._library.call(name, *arguments)
        except Failed as failed:
            if failed.kind in _OF_ALL:
                raise
            return failed
        return None

    def _address(self, handle: ctypes.c_void_p) -> str:
        """Read the address, whose offset is the same in every version of the structure."""
        pci = _Pci()
        if not self._library.told(self._get_pci, handle, ctypes.byref(pci)):
            return ""
        written = loading.text(pci.legacy) or loading.text(pci.address)
        function = written.rpartition(".")[2][:1] or "0"
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{function}"

    def _processes(self, handle: ctypes.c_void_p) -> list[tuple[int, int | None]] | None:
        name, most = "nvmlDeviceGetComputeRunningProcesses", _FEWEST_ROWS
        while self._library.has(name) and most <= _MOST_ROWS:
            count, rows = ctypes.c_uint(most), (_Row * (_ROOM * most))()
            code = self._library.code(name, handle, ctypes.byref(count), ctypes.byref(rows))
            if code == _INSUFFICIENT_SIZE:
                most *= 8
                continue
            found = rows[: min(count.value, most)]
            if code or count.value > most or any(not 0 < row.pid <= _MOST_PID for row in found):
                return None
            return [
                (row.pid, None if row.used == _NOT_AVAILABLE else loading.mib(row.used))
                for row in found
            ]
        return None

    def _link(self, a: ctypes.c_void_p, b: ctypes.c_void_p) -> tuple[str, int] | None:
        """Return the vendor's own links, else the closest common bridge, as ixsmi prints them."""
        library, links = self._library, ctypes.c_uint(0)
        ports, remote = (ctypes.c_uint * _MOST_LINKS)(), (ctypes.c_uint * _MOST_LINKS)()
        linked = library.told(
            "ixmlDeviceGetIxLinkInfo",
            *(a, b, ctypes.byref(links), ctypes.byref(ports), ctypes.byref(remote)),
        )
        if linked and 0 < links.value <= _MOST_LINKS:
            return "node", links.value
        number = library.number("nvmlDeviceGetTopologyCommonAncestor", ctypes.c_uint, a, b)
        level = _LEVELS.get(-1 if number is None else number)
        return None if level is None else (level, 0)

    def _text(self, name: str, size: int, *handles: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(size)
        told = self._library.told(name, *handles, buffer, ctypes.c_uint(size))
        return loading.text(buffer.raw) if told else ""

    def _versioned(self, name: str, *versions: str) -> str:
        """The newest form of a call that the library has."""
        for version in versions:
            if self._library.has(name + version):
                return name + version
        return name


def _broken(mask: int) -> str:
    """Return why the chip is broken; every bit counts, as in the vendor's device plugin."""
    named = [name for bit, name in _FAULTS.items() if mask & bit]
    return f"health: {', '.join(named) or 'unknown fault'} ({mask:#x})" if mask else ""


PROGRAM = Program(
    vendor="iluvatar",
    word="ixml",
    files=("libixml.so",),
    folders=("/usr/local/corex/lib64", "/usr/local/corex/lib", "/usr/local/iluvatar/lib64"),
    errors=_ERRORS,
    open=Ixml,
    commands={"glance": Ixml.glance, "survey": Ixml.survey},
    needed=("nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"),
    needed_folders=("/usr/local/corex/lib64", "/usr/local/corex/lib"),
)

if __name__ == "__main__":
    loading.main(PROGRAM)
