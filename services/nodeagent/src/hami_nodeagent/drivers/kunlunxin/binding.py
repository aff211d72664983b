# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin's library XPUML: XPUs, their condition and use, and division of a card by SR-IOV.

::

    python -I -m hami_nodeagent.drivers.kunlunxin.binding FILE COMMAND

    look              all XPUs
    cut ADDRESS N     into N functions, 0: none

Calls, structures and numbers are those of ``xpuml.h`` (API version 1) as the vendor's Go binding
go-xpuml ships it. Calls that the header lists without a declaration (UUID, memory's error counters,
links) are not made.

The library counts the calling process among those on each device; this program omits it. A process
has its ``host_pid`` where the driver reports one (since 5.0), else its ``pid``. A device that
cannot be read has its ``trouble`` in the output. Never run on this vendor's hardware.
"""

import ctypes
import os
from typing import Any

from hami_nodeagent.libraries import loading
from hami_nodeagent.libraries.loading import Errors, Failed, Kind, Library, Program, Trouble

_MOST_XPUS = 256
_NAME_SIZE, _SERIAL_SIZE, _VERSION_SIZE = 96, 64, 80
_PROCESSES, _MOST_PROCESSES = 128, 4096
_SENSOR_XPU = 0
_MOST_BUS, _MOST_SLOT, _MOST_FUNCTION = 0xFF, 0x1F, 7
_TOO_SMALL = 7
_STATES = {0: "unused", 201: "running", 205: "in reset", 207: "error", 208: "in exception"}
_GOOD_STATES, _BAD_STATES = (0, 201), (207, 208)
_SRIOV_ON = 2
_SRIOV_WORDS = {1: "disabled", _SRIOV_ON: "enabled"}

_ERRORS = Errors(
    names={
        1: "UNINITIALIZED", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION",
        5: "ALREADY_INITIALIZED", 6: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", 8: "INSUFFICIENT_POWER",
        9: "DRIVER_NOT_LOADED", 10: "TIMEOUT", 11: "IRQ_ISSUE", 12: "LIBRARY_NOT_FOUND",
        13: "FUNCTION_NOT_FOUND", 14: "CORRUPTED_INFOROM", 15: "XPU_IS_LOST",
        16: "RESET_REQUIRED", 17: "OPERATING_SYSTEM", 18: "LIB_RM_VERSION_MISMATCH",
        19: "IN_USE", 20: "MEMORY", 21: "NO_DATA", 22: "VXPU_ECC_NOT_SUPPORTED",
        23: "INSUFFICIENT_RESOURCES", 24: "FREQ_NOT_SUPPORTED", 999: "UNKNOWN",
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
        22: Kind.UNSUPPORTED,
        23: Kind.REFUSED,
    },
)  # fmt: skip


class _Pci(ctypes.Structure):
    _fields_ = (
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("slot", ctypes.c_uint),
        ("function", ctypes.c_uint),
        ("ids", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
        ("reserved", ctypes.c_ulonglong * 9),
    )


class _Load(ctypes.Structure):
    _fields_ = (
        ("xpu", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("reserved", ctypes.c_ulonglong * 15),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("page", ctypes.c_ulonglong),
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
        ("l3", ctypes.c_ulonglong * 4),
        ("reserved", ctypes.c_ulonglong * 8),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("l3", ctypes.c_ulonglong),
        ("host_pid", ctypes.c_uint),
        ("reserved_word", ctypes.c_uint),
        ("reserved", ctypes.c_ulonglong * 12),
    )


class Xpuml:
    """The initialised library."""

    def __init__(self, library: Library) -> None:
        self._library = library
        library.call("xpumlInit")

    def look(self) -> dict[str, Any]:
        """All XPUs, functions of cut cards included."""
        count = self._count()
        if not count:
            raise Trouble(Kind.ABSENT, "the library lists no device")
        version = ctypes.create_string_buffer(_VERSION_SIZE)
        size = ctypes.c_uint(_VERSION_SIZE)
        told = self._library.told("xpumlSystemGetDriverVersion", version, size)
        first = loading.text(version.raw).split()[:1] if told else []
        return {
            "version": "".join(first),
            "devices": [{"index": number, **self._xpu(number)} for number in range(count)],
        }

    def cut(self, address: str, parts: str) -> None:
        """Cut a card into equal functions, or put it together."""
        for number in range(self._count()):
            try:
                device = self._device(number)
                found = self._address(device)
            except Failed:
                continue
            if found == address:
                self._library.call("xpumlDeviceSetSriovVfNum", device, ctypes.c_int(int(parts)))
                return
        raise Trouble(Kind.GONE, f"there is no XPU {address}")

    def _count(self) -> int:
        count = ctypes.c_uint(0)
        self._library.call("xpumlDeviceGetCount", ctypes.byref(count))
        if count.value > _MOST_XPUS:
            raise loading.nonsense(f"{count.value} devices")
        return count.value

    def _device(self, number: int) -> ctypes.c_void_p:
        """A handle: a structure with one pointer, which is passed as the pointer is."""
        device = ctypes.c_void_p()
        self._library.call(
            "xpumlDeviceGetHandleByIndex", ctypes.c_uint(number), ctypes.byref(device)
        )
        return device

    def _address(self, device: ctypes.c_void_p) -> str:
        pci = _Pci()
        self._library.call("xpumlDeviceGetPciInfo", device, ctypes.byref(pci))
        if pci.bus > _MOST_BUS or pci.slot > _MOST_SLOT or pci.function > _MOST_FUNCTION:
            raise loading.nonsense(f"bus {pci.bus}, slot {pci.slot}, function {pci.function}")
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.slot:02x}.{pci.function:x}"

    def _xpu(self, number: int) -> dict[str, Any]:
        library, memory, load = self._library, _Memory(), _Load()
        answer: dict[str, Any] = {}
        try:
            device = self._device(number)
            answer["bus_id"] = self._address(device)
            library.call("xpumlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        except Failed as trouble:
            return {**answer, "trouble": trouble.plain()}
        loaded = library.told("xpumlDeviceGetUtilizationRates", device, ctypes.byref(load))
        sensor = ctypes.c_uint(_SENSOR_XPU)
        power_mw = library.number("xpumlDeviceGetPowerUsage", ctypes.c_uint, device)
        mode = library.number("xpumlDeviceGetHostVxpuMode", ctypes.c_uint, device)
        attributes = {
            "sriov": _SRIOV_WORDS.get(-1 if mode is None else mode, ""),
            "serial": self._text("xpumlDeviceGetSerial", _SERIAL_SIZE, device),
        }
        return {
            **answer,
            **self._state(device),
            "name": self._text("xpumlDeviceGetName", _NAME_SIZE, device),
            "minor": library.number("xpumlDeviceGetMinorNumber", ctypes.c_uint, device),
            "mode": "sriov" if mode == _SRIOV_ON else "",
            "attributes": {key: value for key, value in attributes.items() if value},
            "memory_mib": memory.total >> 20,
            "used_mib": memory.used >> 20,
            "core_pct": load.xpu if loaded else None,
            "memory_bus_pct": load.memory if loaded else None,
            "temperature_c": library.number(
                "xpumlDeviceGetTemperature", ctypes.c_uint, device, sensor
            ),
            "power_w": None if power_mw is None else power_mw / 1000,
            "processes": self._processes(device),
        }

    def _state(self, device: ctypes.c_void_p) -> dict[str, Any]:
        state = self._library.number("xpumlDeviceGetState", ctypes.c_uint, device)
        if state is None or state in _GOOD_STATES:
            return {}
        words = f"state {state} ({_STATES.get(state, 'unknown')})"
        if state in _BAD_STATES:
            return {"broken": words}
        return {"trouble": Trouble(Kind.TRANSIENT, words).plain()}

    def _processes(self, device: ctypes.c_void_p) -> list[tuple[int, int]] | None:
        call, room = "xpumlDeviceGetComputeRunningProcesses", _PROCESSES
        while self._library.has(call):
            count, found = ctypes.c_uint(room), (_Process * room)()
            code = self._library.code(call, device, ctypes.byref(count), ctypes.byref(found))
            if count.value > _MOST_PROCESSES:
                raise loading.nonsense(f"{count.value} processes on one device")
            if not code and count.value <= room:
                own = os.getpid()
                return [
                    (one.host_pid or one.pid, one.used >> 20)
                    for one in found[: count.value]
                    if own not in (one.pid, one.host_pid)
                ]
            if code != _TOO_SMALL or room >= _MOST_PROCESSES:
                return None
            room *= 2
        return None

    def _text(self, call: str, size: int, device: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(size)
        told = self._library.told(call, device, buffer, ctypes.c_uint(size))
        return loading.text(buffer.raw) if told else ""


PROGRAM = Program(
    vendor="kunlunxin",
    word="xpuml",
    files=("libxpuml.so", "libxpuml.so.1"),
    folders=("$XRE_HOME/so", "/usr/local/xpu/lib64", "/usr/local/xpu/so", "/opt/xre/so"),
    errors=_ERRORS,
    open=Xpuml,
    commands={"look": Xpuml.look, "cut": Xpuml.cut},
    needed=(
        "xpumlInit",
        "xpumlDeviceGetCount",
        "xpumlDeviceGetHandleByIndex",
        "xpumlDeviceGetPciInfo",
        "xpumlDeviceGetMemoryInfo",
    ),
)

if __name__ == "__main__":
    loading.main(PROGRAM)
