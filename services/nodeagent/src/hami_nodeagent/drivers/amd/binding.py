# SPDX-License-Identifier: Apache-2.0
"""AMD's library AMD SMI (libamd_smi): GPUs, their use, health, processes and links.

Commands: ``glance`` (identity, use, health, processes) and ``survey`` (besides: model, NUMA,
compute units, partition, driver, links). Calls and structures are those of ``amdsmi.h`` of the
library's versions 24 (ROCm 6.2 and 6.3), 25 (6.4) and 26 (7.0 and 7.1). The program reads the
version first and rejects any other, because a new major version changes the structures. Sizes in
bytes, power in watts. Never run on this vendor's hardware.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from hami_nodeagent.libraries.loading import (
    Errors,
    Failed,
    Kind,
    Library,
    Program,
    Trouble,
    main,
    mib,
    nonsense,
    text,
)

_NAMES = {
    1: "INVAL", 2: "NOT_SUPPORTED", 3: "NOT_YET_IMPLEMENTED", 4: "FAIL_LOAD_MODULE",
    5: "FAIL_LOAD_SYMBOL", 6: "DRM_ERROR", 7: "API_FAILED", 8: "TIMEOUT", 9: "RETRY",
    10: "NO_PERM", 11: "INTERRUPT", 12: "IO", 13: "ADDRESS_FAULT", 14: "FILE_ERROR",
    15: "OUT_OF_RESOURCES", 16: "INTERNAL_EXCEPTION", 17: "INPUT_OUT_OF_BOUNDS", 18: "INIT_ERROR",
    19: "REFCOUNT_OVERFLOW", 20: "DIRECTORY_NOT_FOUND", 30: "BUSY", 31: "NOT_FOUND",
    32: "NOT_INIT", 33: "NO_SLOT", 34: "DRIVER_NOT_LOADED", 39: "MORE_DATA", 40: "NO_DATA",
    41: "INSUFFICIENT_SIZE", 42: "UNEXPECTED_SIZE", 43: "UNEXPECTED_DATA", 51: "NO_DRV",
    52: "FILE_NOT_FOUND", 54: "AMDGPU_RESTART_ERR", 55: "SETTING_UNAVAILABLE",
    56: "CORRUPTED_EEPROM", -2: "MAP_ERROR", -1: "UNKNOWN_ERROR",
}  # fmt: skip
_KINDS = {
    2: Kind.UNSUPPORTED,
    3: Kind.UNSUPPORTED,
    4: Kind.MISSING,
    5: Kind.MISMATCH,
    10: Kind.DENIED,
    30: Kind.BUSY,
    34: Kind.MISSING,
    51: Kind.MISSING,
}
_NOT_INITIALISED = {("amdsmi_init", 18): Kind.MISSING, ("amdsmi_init", 31): Kind.ABSENT}
_GPUS = 1 << 1
_GPU = 1
_MOST_SOCKETS, _MOST_GPUS, _MOST_PROCESSES = 256, 1024, 1024
_UUID_SIZE, _MODE_SIZE, _ROOM = 38, 64, 4096
_VRAM = 0
_HOTSPOT, _EDGE, _CURRENT = 1, 0, 0
_HOT = 1000
"""No GPU has as many degrees: such a number is in thousandths."""
_FABRIC = 2
_SAME_SOCKET = 2
_NOT_TOLD_16, _NOT_TOLD_32 = 0xFFFF, 0xFFFFFFFF


class Layout(NamedTuple):
    """Differences between the library's versions."""

    power: Sequence[int]
    """Offsets of the power fields in watts, 32 bits each, in order of preference."""
    asic: type[ctypes.Structure]
    process: type[ctypes.Structure]


def _layout(*, size: int, vendor: int, spare: int, power: Sequence[int]) -> Layout:
    class Asic(ctypes.Structure):
        _fields_ = (
            ("market_name", ctypes.c_char * 256),
            ("vendor", ctypes.c_uint32),
            ("vendor_name", ctypes.c_char * vendor),
            ("subvendor", ctypes.c_uint32),
            ("device", ctypes.c_uint64),
            ("revision", ctypes.c_uint32),
            ("serial", ctypes.c_char * size),
            ("oam", ctypes.c_uint32),
            ("compute_units", ctypes.c_uint32),
            ("room", ctypes.c_uint64 * 32),
        )

    class Process(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char * size),
            ("pid", ctypes.c_uint32),
            ("memory", ctypes.c_uint64),
            ("engines", ctypes.c_uint64 * 8),
            ("gtt", ctypes.c_uint64),
            ("cpu", ctypes.c_uint64),
            ("vram", ctypes.c_uint64),
            ("more", ctypes.c_uint32 * 10),
            ("container", ctypes.c_char * size),
            ("spare", ctypes.c_uint32 * spare),
        )

    return Layout(power=power, asic=Asic, process=Process)


LAYOUTS = {
    24: _layout(size=32, vendor=64, spare=4, power=(0, 4)),
    25: _layout(size=256, vendor=256, spare=12, power=(8, 12)),
    26: _layout(size=256, vendor=256, spare=12, power=(8, 12)),
}
"""By the first number of the library's version, which was a year's until 25."""


class Amdsmi:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialize the library; any unsupported version is unusable."""
        self._library = library
        version = (ctypes.c_uint32 * 8)()
        library.call("amdsmi_get_lib_version", ctypes.byref(version))
        layout = LAYOUTS.get(version[0])
        if layout is None:
            known = ", ".join(map(str, LAYOUTS))
            words = f"{library.path} is of version {version[0]}, and only {known} are known"
            raise Trouble(Kind.UNUSABLE, words)
        self._layout = layout
        library.call("amdsmi_init", ctypes.c_uint64(_GPUS))

    def glance(self) -> dict[str, Any]:
        """Identity, use, health and processes of every GPU."""
        return {"devices": [self._gpu(at, gpu) for at, gpu in enumerate(self._gpus())]}

    def survey(self) -> dict[str, Any]:
        """Return the data of ``glance`` and the values that do not change."""
        gpus = self._gpus()
        devices = []
        for at, gpu in enumerate(gpus):
            device, (name, numa, attributes) = self._gpu(at, gpu), self._fixed(gpu)
            more = {"attributes": {**device["attributes"], **attributes}}
            devices.append({**device, "name": name, "numa": numa, **more})
        links = [self._link(a, b, gpus) for a in range(len(gpus)) for b in range(a + 1, len(gpus))]
        version = ctypes.create_string_buffer(_ROOM)
        told = bool(gpus) and self._library.told(
            "amdsmi_get_gpu_driver_info", ctypes.c_void_p(gpus[0]), version
        )
        return {
            "version": text(version.raw) if told else "",
            "devices": devices,
            "links": [link for link in links if link is not None],
        }

    def _gpus(self) -> list[int]:
        """Handles in the order in which amd-smi numbers them."""
        found = [
            gpu
            for socket in self._handles("amdsmi_get_socket_handles", _MOST_SOCKETS)
            for gpu in self._handles(
                "amdsmi_get_processor_handles", _MOST_GPUS, ctypes.c_void_p(socket)
            )
            if self._is_gpu(gpu)
        ]
        if not found:
            raise Trouble(Kind.ABSENT, "the library lists no GPU")
        return found

    def _handles(self, name: str, most: int, *of: object) -> list[int]:
        count = ctypes.c_uint32(0)
        self._library.call(name, *of, ctypes.byref(count), None)
        if count.value > most:
            raise nonsense(f"{name} reports {count.value}")
        if not count.value:
            return []
        handles = (ctypes.c_void_p * count.value)()
        self._library.call(name, *of, ctypes.byref(count), ctypes.byref(handles))
        return [handle for handle in handles[: min(count.value, len(handles))] if handle]

    def _is_gpu(self, gpu: int) -> bool:
        kind = self._library.number("amdsmi_get_processor_type", ctypes.c_int, ctypes.c_void_p(gpu))
        return kind in (None, _GPU)

    def _gpu(self, index: int, gpu: int) -> dict[str, Any]:
        handle = ctypes.c_void_p(gpu)
        device: dict[str, Any] = {"index": index, "attributes": {}, "trouble": None}
        try:
            device["uuid"] = self._uuid(handle)
            device["bus_id"] = self._bus_id(handle)
            device["memory_mib"] = mib(self._size("amdsmi_get_gpu_memory_total", handle))
            device["used_mib"] = mib(self._size("amdsmi_get_gpu_memory_usage", handle))
        except Failed as error:
            device["trouble"] = error.plain()
        use = (ctypes.c_uint32 * 32)()
        if self._library.told("amdsmi_get_gpu_activity", handle, ctypes.byref(use)):
            device["core_pct"] = _told(use[0])
            device["memory_bus_pct"] = _told(use[1])
        partition = (ctypes.c_uint32 * 32)()
        if self._library.told("amdsmi_get_gpu_kfd_info", handle, ctypes.byref(partition)):
            number = _told(partition[3])
            if number:
                device["attributes"]["partition_id"] = str(number)
        return {
            **device,
            "temperature_c": self._temperature_c(handle),
            "power_w": self._power_w(handle),
            "processes": self._processes(handle),
            "broken": self._broken(handle),
        }

    def _fixed(self, gpu: int) -> tuple[str, int | None, dict[str, str]]:
        """Model, NUMA node and attributes."""
        handle, asic = ctypes.c_void_p(gpu), self._layout.asic()
        numa = self._library.number("amdsmi_topo_get_numa_node_number", ctypes.c_uint32, handle)
        mode = ctypes.create_string_buffer(_MODE_SIZE)
        attributes: dict[str, str] = {}
        name = ""
        if self._library.told("amdsmi_get_gpu_asic_info", handle, ctypes.byref(asic)):
            name = text(asic.market_name)
            units = _told(asic.compute_units)
            if units:
                attributes["compute_units"] = str(units)
            serial = _hexadecimal(text(asic.serial))
            if serial:
                attributes["serial"] = f"0x{serial:016X}"
        told = self._library.told(
            "amdsmi_get_gpu_compute_partition", handle, mode, ctypes.c_uint32(_MODE_SIZE)
        )
        if told and text(mode.raw):
            attributes["compute_partition"] = text(mode.raw)
        return name, _told(numa), attributes

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        size, found = ctypes.c_uint32(_UUID_SIZE), ctypes.create_string_buffer(_ROOM)
        self._library.call("amdsmi_get_gpu_device_uuid", handle, ctypes.byref(size), found)
        return text(found.raw)

    def _bus_id(self, handle: ctypes.c_void_p) -> str:
        found = ctypes.c_uint64(0)
        self._library.call("amdsmi_get_gpu_device_bdf", handle, ctypes.byref(found))
        place = found.value
        bus, device, function = place >> 8 & 0xFF, place >> 3 & 0x1F, place & 7
        return f"{place >> 16 & 0xFFFFFFFF:04x}:{bus:02x}:{device:02x}.{function}"

    def _size(self, name: str, handle: ctypes.c_void_p) -> int:
        found = ctypes.c_uint64(0)
        self._library.call(name, handle, _VRAM, ctypes.byref(found))
        return found.value

    def _temperature_c(self, handle: ctypes.c_void_p) -> float | None:
        for sensor in (_HOTSPOT, _EDGE):
            found = self._library.number(
                "amdsmi_get_temp_metric", ctypes.c_int64, handle, sensor, _CURRENT
            )
            if found is not None:
                return found / 1000 if found >= _HOT else found
        return None

    def _power_w(self, handle: ctypes.c_void_p) -> int | None:
        found = ctypes.create_string_buffer(_ROOM)
        if not self._library.told("amdsmi_get_power_info", handle, found):
            return None
        for offset in self._layout.power:
            watts = _told(int.from_bytes(found.raw[offset : offset + 4], "little"))
            if watts:
                return watts
        return None

    def _broken(self, handle: ctypes.c_void_p) -> str:
        counts = (ctypes.c_uint64 * 16)()
        told = self._library.told("amdsmi_get_gpu_total_ecc_count", handle, ctypes.byref(counts))
        return f"{counts[1]} uncorrectable ECC errors" if told and counts[1] else ""

    def _processes(self, handle: ctypes.c_void_p) -> list[list[int]] | None:
        count = ctypes.c_uint32(_MOST_PROCESSES)
        found = (self._layout.process * _MOST_PROCESSES)()
        arguments = (handle, ctypes.byref(count), ctypes.byref(found))
        if not self._library.told("amdsmi_get_gpu_process_list", *arguments):
            return None
        if count.value > _MOST_PROCESSES:
            raise nonsense(f"there are {count.value} processes")
        return [[one.pid, mib(one.vram)] for one in found[: count.value] if one.pid]

    def _link(self, a: int, b: int, gpus: Sequence[int]) -> tuple[int, int, str, int] | None:
        hops, kind = ctypes.c_uint64(0), ctypes.c_int(0)
        ends = (ctypes.c_void_p(gpus[a]), ctypes.c_void_p(gpus[b]))
        arguments = (*ends, ctypes.byref(hops), ctypes.byref(kind))
        if not self._library.told("amdsmi_topo_get_link_type", *arguments):
            return None
        if kind.value == _FABRIC:
            return a, b, "node", 1
        return a, b, "node" if hops.value <= _SAME_SOCKET else "system", 0


def _told(number: int | None) -> int | None:
    """Return the number, or ``None`` if it is the library's mark for "not reported"."""
    return None if number in (None, _NOT_TOLD_16, _NOT_TOLD_32) else number


def _hexadecimal(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0


PROGRAM = Program(
    vendor="amd",
    word="amdsmi",
    files=("libamd_smi.so",),
    folders=("$ROCM_PATH/lib", "/opt/rocm/lib", "/opt/rocm/lib64"),
    errors=Errors(names=_NAMES, kinds=_KINDS, of_call=_NOT_INITIALISED),
    open=Amdsmi,
    commands={"glance": Amdsmi.glance, "survey": Amdsmi.survey},
    needed=(
        "amdsmi_init",
        "amdsmi_get_lib_version",
        "amdsmi_get_socket_handles",
        "amdsmi_get_processor_handles",
        "amdsmi_get_gpu_device_uuid",
        "amdsmi_get_gpu_device_bdf",
        "amdsmi_get_gpu_memory_total",
        "amdsmi_get_gpu_memory_usage",
    ),
)

if __name__ == "__main__":
    main(PROGRAM)
