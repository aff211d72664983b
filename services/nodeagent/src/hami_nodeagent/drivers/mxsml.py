# SPDX-License-Identifier: Apache-2.0
"""MetaX's library MXSML as a small tool: the sGPUs of all GPUs in sGPU mode.

Run by path with the standard library only, so that a call into the driver that hangs is killed as a
tool's is::

    python -I mxsml.py list

Calls and structures are those of the vendor's header ``MxSml.h`` 2.3.1: quotas of memory in MiB, of
compute in percent, use in bytes, at most sixteen sGPUs of a GPU with numbers from 0. ``list``
prints JSON; on failure one line with the library's error goes to standard error and the exit status
is 1. It changes nothing. Never run on this vendor's hardware.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_LIBRARY = "libmxsml.so"
_FOLDERS = ("/opt/mxdriver/lib", "/opt/maca/lib", "/opt/mxn100/lib")
_MOST = 16
_ALIAS_SIZE = 32
_ABSENT = 3
"""What the library says of a number without sGPU, and of what a GPU cannot do."""
_NAME_BY_CODE = {
    1: "FAILURE", 2: "NO_DEVICE", 3: "OPERATION_NOT_SUPPORT", 4: "SYSFS_ERROR",
    5: "SYSFS_WRITE_ERROR", 6: "INVALID_DEVICE_ID", 8: "PERMISSION_DENIED", 9: "INVALID_INPUT",
    10: "INSUFFICIENT_SIZE", 12: "IO_CONTROL_FAILURE", 21: "OPEN_DEVICE_FILE_FAILURE",
    23: "BUSY_DEVICE", 26: "LOAD_LIBRARY_FAILURE",
}  # fmt: skip


class MxsmlError(Exception):
    """A call failed, or the library is not there."""


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

    def __init__(self, path: str = "") -> None:
        """``path``: the library's file; empty looks where the vendor installs it."""
        self._library = _opened(path)
        self._call("mxSmlInit")

    def gpus(self) -> list[dict[str, Any]]:
        """GPUs in sGPU mode, with what they are divided into."""
        count = int(self._function("mxSmlGetDeviceCount")())
        return [gpu for number in range(count) if (gpu := self._gpu(number)) is not None]

    def _gpu(self, number: int) -> dict[str, Any] | None:
        mode, scheduling, device = ctypes.c_uint(0), ctypes.c_uint(0), _Device()
        if not self._has("mxSmlGetSgpuToggle", number, ctypes.byref(mode)) or not mode.value:
            return None
        self._call("mxSmlGetDeviceInfo", number, ctypes.byref(device))
        self._call("mxSmlGetDeviceSchedClass", number, ctypes.byref(scheduling))
        return {
            "bus_id": _text(device.address),
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
            "alias": _text(alias.value),
            "memory_mib": found.vram_mib,
            "compute_pct": found.compute_pct,
            "used": max(0, memory.used) if knows else None,
        }

    # ---- calls ----------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: object) -> None:
        if not self._has(name, *arguments):
            raise _failed(name, _ABSENT)

    def _has(self, name: str, *arguments: object) -> bool:
        """Whether there is what was asked for; any other trouble raises."""
        code = int(self._function(name)(*arguments))
        if code not in {0, _ABSENT}:
            raise _failed(name, code)
        return not code

    def _function(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] | None = getattr(self._library, name, None)
        if function is None:
            message = f"{name}: OPERATION_NOT_SUPPORT (the library has no such call)"
            raise MxsmlError(message)
        return function


def _failed(name: str, code: int) -> MxsmlError:
    return MxsmlError(f"{name}: {_NAME_BY_CODE.get(code, 'UNKNOWN')} (error {code})")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _opened(path: str) -> ctypes.CDLL:
    known = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    candidates = (
        [path] if path else [_LIBRARY, *(f"{folder}/{_LIBRARY}" for folder in (*known, *_FOLDERS))]
    )
    trouble = ""
    for candidate in candidates:
        if "/" in candidate and not Path(candidate).exists():
            continue
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            trouble = str(error)
    message = f"error while loading shared libraries: {trouble or _LIBRARY}"
    raise MxsmlError(message)


def main(arguments: Sequence[str], *, library: str = "") -> int:
    """Run one command; returns the exit status."""
    if list(arguments) != ["list"]:
        sys.stderr.write("usage: list\n")
        return 2
    try:
        sys.stdout.write(json.dumps({"gpus": Mxsml(library).gpus()}) + "\n")
    except MxsmlError as error:
        sys.stderr.write(f"mxsml: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
