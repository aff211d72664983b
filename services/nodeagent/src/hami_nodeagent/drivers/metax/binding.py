# SPDX-License-Identifier: Apache-2.0
"""MetaX's library MXSML: GPUs, their use and links, and sGPUs.

Commands::

    glance    GPUs: identity, availability, use
    survey    besides: links
    list      GPUs in sGPU mode and their sGPUs
    create GPU MEMORY_MIB COMPUTE_PERCENT ALIAS [CLASS]
    remove GPU SGPU

Calls and structures are those of the vendor's header ``MxSml.h`` 2.3.1: memory of GPUs in KiB,
quotas of memory in MiB, of compute in percent, use of sGPUs and of processes in bytes, power in
milliwatts, temperatures in hundredths of a degree; at most sixteen sGPUs per GPU with numbers from
0.

``glance`` and ``survey`` print devices in the format of ``drivers.parse.library``. ``create`` first
sets the scheduling class if one is given, prints the new number, and rolls back if the alias cannot
be set. Never run on this vendor's hardware.
"""

import ctypes
from itertools import combinations
from typing import Any

from hami_nodeagent.libraries.loading import (
    Errors,
    Failed,
    Kind,
    Library,
    Program,
    main,
    nonsense,
    roomy,
    text,
)

_GPUS, _MOST, _WAYS, _PROCESSES = 256, 16, 8, 1024
_SPARE = 5
"""Room for processes that begin between two calls."""
_ALIAS_SIZE, _VERSION_SIZE = 32, 64
_DRIVER_VERSION, _XCORE, _HOTSPOT = 1, 4, 0
_METAXLINK = 5
_LEVELS = {
    0: "internal", 1: "single", 2: "multiple", 3: "hostbridge", 4: "node", 6: "system",
}  # fmt: skip
_KIB, _MIB, _HUNDRED, _MILLI = 1024, 1 << 20, 100, 1000
_ABSENT = 3
"""Code that the library returns for a number without sGPU, and for an unsupported operation."""
_NAMES = {
    1: "FAILURE", 2: "NO_DEVICE", 3: "OPERATION_NOT_SUPPORT", 4: "SYSFS_ERROR",
    5: "SYSFS_WRITE_ERROR", 6: "INVALID_DEVICE_ID", 7: "INVALID_DIE_ID", 8: "PERMISSION_DENIED",
    9: "INVALID_INPUT", 10: "INSUFFICIENT_SIZE", 12: "IO_CONTROL_FAILURE", 13: "MMAP_FAILURE",
    18: "TARGET_VF_NOT_FOUND", 20: "FLR_NOT_READY", 21: "OPEN_DEVICE_FILE_FAILURE",
    23: "BUSY_DEVICE", 26: "LOAD_LIBRARY_FAILURE",
}  # fmt: skip
_KINDS = {
    2: Kind.ABSENT,
    _ABSENT: Kind.UNSUPPORTED,
    6: Kind.GONE,
    8: Kind.DENIED,
    21: Kind.MISSING,
    23: Kind.BUSY,
    26: Kind.MISSING,
}
_KINDS_OF_CALL = {
    ("mxSmlCreateSgpu", 9): Kind.REFUSED,
    ("mxSmlRemoveSgpu", _ABSENT): Kind.GONE,
    ("mxSmlRemoveSgpu", 23): Kind.IN_USE,
}


class _Device(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint),
        ("type", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
        ("gpu", ctypes.c_uint),
        ("node", ctypes.c_uint),
        ("uuid", ctypes.c_char * 96),
        ("brand", ctypes.c_uint),
        ("virtualization", ctypes.c_uint),
        ("name", ctypes.c_char * 32),
    )


class _Reason(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("words", ctypes.c_char * 64))


class _Vram(ctypes.Structure):
    _fields_ = (
        ("visible", ctypes.c_long * 2),
        ("total", ctypes.c_long),
        ("used", ctypes.c_long),
        ("xtt", ctypes.c_long * 2),
    )


class _PowerWay(ctypes.Structure):
    _fields_ = (("voltage", ctypes.c_uint), ("current", ctypes.c_uint), ("power", ctypes.c_uint))


class _ProcessGpu(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_char * 32),
        ("gpu", ctypes.c_uint),
        ("used", ctypes.c_ulong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("name", ctypes.c_char * 64),
        ("count", ctypes.c_uint),
        ("gpus", _ProcessGpu * 64),
    )


class _Sgpu(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint),
        ("number", ctypes.c_uint),
        ("vram_mib", ctypes.c_uint),
        ("queue_priority", ctypes.c_uint),
        ("compute_pct", ctypes.c_uint),
        ("minor", ctypes.c_uint),
        ("device_priority", ctypes.c_uint),
        ("uuid", ctypes.c_char * 96),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_long), ("used", ctypes.c_long), ("free", ctypes.c_long))


class Mxsml:
    """The opened library."""

    def __init__(self, library: Library) -> None:
        """Initialise it."""
        self._library = library
        self._call, self._told, self._number = library.call, library.told, library.number
        self._call("mxSmlInit")
        self._count = int(library.function("mxSmlGetDeviceCount")())
        if not 0 <= self._count <= _GPUS:
            raise nonsense(f"there are {self._count} GPUs")

    # ---- reading GPUs ---------------------------------------------------------------------------

    def glance(self) -> dict[str, Any]:
        """Identity, availability and use of every GPU."""
        devices = [self._shown(number) for number in range(self._count)]
        return {"version": self._driver(), "devices": devices}

    def survey(self) -> dict[str, Any]:
        """Return the data of ``glance`` and the links between GPUs."""
        return {**self.glance(), "links": self._links()}

    def _shown(self, number: int) -> dict[str, Any]:
        device = roomy(_Device)
        try:
            self._call("mxSmlGetDeviceInfo", number, ctypes.byref(device))
            if not self._state(number):
                return {
                    "index": number,
                    "bus_id": text(device.address),
                    "broken": self._reason(number),
                }
        except Failed as error:
            return {"index": number, "trouble": error.plain()}
        memory = roomy(_Vram)
        has_memory = self._told("mxSmlGetMemoryInfo", number, ctypes.byref(memory))
        usage, heat = "mxSmlGetDeviceIpUsage", "mxSmlGetTemperatureInfo"
        cc = self._number(heat, ctypes.c_int, number, ctypes.c_uint(_HOTSPOT))
        is_divided = self._number("mxSmlGetSgpuToggle", ctypes.c_uint, number)
        return {
            "index": number,
            "uuid": text(device.uuid),
            "name": text(device.name),
            "bus_id": text(device.address),
            "mode": "sgpu" if is_divided else "whole",
            "memory_mib": memory.total // _KIB if has_memory else None,
            "used_mib": memory.used // _KIB if has_memory else None,
            "core_pct": self._number(usage, ctypes.c_int, number, ctypes.c_uint(_XCORE)),
            "temperature_c": None if cc is None else cc / _HUNDRED,
            "power_w": self._power(number),
            "processes": self._processes(number),
        }

    def _state(self, number: int) -> int:
        """0: the GPU is not available."""
        state = ctypes.c_int(1)
        if self._library.has("mxSmlGetDeviceState"):
            self._call("mxSmlGetDeviceState", number, ctypes.byref(state))
        return state.value

    def _reason(self, number: int) -> str:
        """Return why the GPU is unavailable, in the library's words."""
        reason = roomy(_Reason)
        told = self._told("mxSmlGetDeviceUnavailableReason", number, ctypes.byref(reason))
        return f"Not Available({text(reason.words)})" if told else "Not Available"

    def _driver(self) -> str:
        """Version of the kernel's driver."""
        for number in range(self._count):
            version = ctypes.create_string_buffer(_VERSION_SIZE + 1)
            size = ctypes.c_uint(_VERSION_SIZE)
            arguments = (ctypes.c_uint(_DRIVER_VERSION), version, ctypes.byref(size))
            if self._told("mxSmlGetDeviceVersion", number, *arguments):
                return text(version.raw)
        return ""

    def _power(self, number: int) -> float | None:
        """Sum of the ways that feed the board."""
        size, ways = ctypes.c_uint(_WAYS), (_PowerWay * _WAYS)()
        arguments = (ctypes.byref(size), ctypes.byref(ways))
        if not self._told("mxSmlGetBoardPowerInfo", number, *arguments) or size.value > _WAYS:
            return None
        return sum(int(way.power) for way in ways[: size.value]) / _MILLI

    def _processes(self, number: int) -> list[list[int]] | None:
        """Return process ids and MiB on this GPU; ``None``: not reported."""
        count = ctypes.c_uint(0)
        if not self._told("mxSmlGetNumberOfProcess", ctypes.byref(count)):
            return None
        if count.value > _PROCESSES:
            raise nonsense(f"{count.value} processes")
        room = count.value + _SPARE
        count, found = ctypes.c_uint(room), (_Process * room)()
        arguments = (ctypes.byref(count), ctypes.byref(found))
        if not self._told("mxSmlGetSingleGpuProcess", number, *arguments):
            return None
        if count.value > room:
            raise nonsense(f"{count.value} processes on GPU {number}")
        return [
            [one.pid, sum(gpu.used for gpu in one.gpus[: min(one.count, len(one.gpus))]) // _MIB]
            for one in found[: count.value]
        ]

    def _links(self) -> list[list[int | str]]:
        """Return number, number, level and MetaXLinks; the library reports only if links exist."""
        links: list[list[int | str]] = []
        for a, b in combinations(range(self._count), 2):
            kind = self._number("mxSmlGetDeviceTopology", ctypes.c_uint, a, b)
            if kind == _METAXLINK:
                links.append([a, b, "node", 1])
            elif kind in _LEVELS:
                links.append([a, b, _LEVELS[kind], 0])
        return links

    # ---- dividing GPUs --------------------------------------------------------------------------

    def gpus(self) -> list[dict[str, Any]]:
        """Return GPUs in sGPU mode, with their sGPUs."""
        return [gpu for number in range(self._count) if (gpu := self._gpu(number)) is not None]

    def create(
        self, gpu: int, sizes: tuple[int, int], alias: str, scheduling: int | None
    ) -> dict[str, int]:
        """One sGPU of so many MiB and percent; ``scheduling``: the GPU gets that class first."""
        if scheduling is not None:
            self._call("mxSmlSetDeviceSchedClass", gpu, ctypes.c_uint(scheduling))
        number = ctypes.c_uint(0)
        self._call("mxSmlCreateSgpu", gpu, *map(ctypes.c_uint, sizes), ctypes.byref(number))
        try:
            self._call("mxSmlSetSgpuAlias", gpu, number, alias.encode())
        except Failed:
            self._library.code("mxSmlRemoveSgpu", gpu, number)
            raise
        return {"number": number.value}

    def remove(self, gpu: int, sgpu: int) -> None:
        """One sGPU."""
        self._call("mxSmlRemoveSgpu", gpu, ctypes.c_uint(sgpu))

    def _gpu(self, number: int) -> dict[str, Any] | None:
        if not self._number("mxSmlGetSgpuToggle", ctypes.c_uint, number):
            return None
        scheduling, device, memory = ctypes.c_uint(0), roomy(_Device), roomy(_Vram)
        self._call("mxSmlGetDeviceInfo", number, ctypes.byref(device))
        self._call("mxSmlGetDeviceSchedClass", number, ctypes.byref(scheduling))
        has_memory = self._told("mxSmlGetMemoryInfo", number, ctypes.byref(memory))
        return {
            "index": number,
            "uuid": text(device.uuid) if self._state(number) else "",
            "bus_id": text(device.address),
            "memory_mib": memory.total // _KIB if has_memory else 0,
            "scheduling": scheduling.value,
            "sgpus": [sgpu for at in range(_MOST) if (sgpu := self._sgpu(number, at)) is not None],
        }

    def _sgpu(self, gpu: int, number: int) -> dict[str, Any] | None:
        found, memory = roomy(_Sgpu), roomy(_Memory)
        if not self._has("mxSmlGetSgpuInfo", gpu, number, ctypes.byref(found)):
            return None
        alias = ctypes.create_string_buffer(_ALIAS_SIZE + 1)
        size = ctypes.c_uint(_ALIAS_SIZE)
        self._has("mxSmlGetSgpuAlias", gpu, number, alias, ctypes.byref(size))
        knows = self._has("mxSmlGetSgpuMemory", gpu, number, ctypes.byref(memory))
        return {
            "number": number,
            "alias": text(alias.value),
            "memory_mib": found.vram_mib,
            "compute_pct": found.compute_pct,
            "used": max(0, memory.used) if knows else None,
        }

    # ---- calls ----------------------------------------------------------------------------------

    def _has(self, name: str, *arguments: object) -> bool:
        """Return false if the requested object does not exist; raise any other error."""
        code = self._library.code(name, *arguments)
        if code not in {0, _ABSENT}:
            raise self._library.errors.failed(name, code)
        return not code


def _create(mxsml: Mxsml, gpu: str, *wanted: str) -> dict[str, int]:
    memory_mib, compute_pct, alias, *scheduling = wanted
    sizes = (int(memory_mib), int(compute_pct))
    return mxsml.create(int(gpu), sizes, alias, int(scheduling[0]) if scheduling else None)


PROGRAM = Program(
    vendor="metax",
    word="mxsml",
    files=("libmxsml.so",),
    folders=("/opt/mxdriver/lib", "/opt/maca/lib", "/opt/mxn100/lib"),
    errors=Errors(names=_NAMES, kinds=_KINDS, of_call=_KINDS_OF_CALL),
    open=Mxsml,
    commands={
        "glance": Mxsml.glance,
        "survey": Mxsml.survey,
        "list": lambda mxsml: {"gpus": mxsml.gpus()},
        "create": _create,
        "remove": lambda mxsml, gpu, sgpu: mxsml.remove(int(gpu), int(sgpu)),
    },
    needed=("mxSmlInit", "mxSmlGetDeviceCount", "mxSmlGetDeviceInfo"),
)

if __name__ == "__main__":
    main(PROGRAM)
