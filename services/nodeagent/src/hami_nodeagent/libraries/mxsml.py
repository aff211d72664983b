# SPDX-License-Identifier: Apache-2.0
"""MetaX's library MXSML: the sGPUs of all GPUs in sGPU mode (``list``).

Calls and structures are those of the vendor's header ``MxSml.h`` 2.3.1: quotas of memory in MiB, of
compute in percent, use in bytes, at most sixteen sGPUs of a GPU with numbers from 0. It
changes nothing. Never run on this vendor's hardware.
"""

import ctypes
from typing import Any

from hami_nodeagent.libraries.loading import Errors, Kind, Library, Program, main, text

_MOST = 16
_ALIAS_SIZE = 32
_ABSENT = 3
"""What the library says of a number without sGPU, and of what a GPU cannot do."""
_NAMES = {
    1: "FAILURE", 2: "NO_DEVICE", 3: "OPERATION_NOT_SUPPORT", 4: "SYSFS_ERROR",
    5: "SYSFS_WRITE_ERROR", 6: "INVALID_DEVICE_ID", 8: "PERMISSION_DENIED", 9: "INVALID_INPUT",
    10: "INSUFFICIENT_SIZE", 12: "IO_CONTROL_FAILURE", 21: "OPEN_DEVICE_FILE_FAILURE",
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
        library.call("mxSmlInit")

    def gpus(self) -> list[dict[str, Any]]:
        """GPUs in sGPU mode, with what they are divided into."""
        count = int(self._library.function("mxSmlGetDeviceCount")())
        return [gpu for number in range(count) if (gpu := self._gpu(number)) is not None]

    def _gpu(self, number: int) -> dict[str, Any] | None:
        mode, scheduling, device = ctypes.c_uint(0), ctypes.c_uint(0), _Device()
        if not self._has("mxSmlGetSgpuToggle", number, ctypes.byref(mode)) or not mode.value:
            return None
        self._library.call("mxSmlGetDeviceInfo", number, ctypes.byref(device))
        self._library.call("mxSmlGetDeviceSchedClass", number, ctypes.byref(scheduling))
        return {
            "bus_id": text(device.address),
            "scheduling": scheduling.value,
            "sgpus": [sgpu for at in range(_MOST) if (sgpu := self._sgpu(number, at)) is not None],
        }

    def _sgpu(self, gpu: int, number: int) -> dict[str, Any] | None:
        found, memory = _Sgpu(), _Memory()
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
        """Whether there is what was asked for; any other trouble raises."""
        code = self._library.code(name, *arguments)
        if code not in {0, _ABSENT}:
            raise self._library.errors.failed(name, code)
        return not code


PROGRAM = Program(
    word="mxsml",
    files=("libmxsml.so",),
    folders=("/opt/mxdriver/lib", "/opt/maca/lib", "/opt/mxn100/lib"),
    errors=Errors(names=_NAMES, kinds=_KINDS),
    open=Mxsml,
    commands={"list": lambda mxsml: {"gpus": mxsml.gpus()}},
)

if __name__ == "__main__":
    main(PROGRAM)
