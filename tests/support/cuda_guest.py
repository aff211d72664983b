# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver as seen by a program that loads it at run time; imported by children of tests.

Functions come from ``dlsym`` (ctypes), so hooks answer where the limiter is preloaded. ``used`` is
the limiter's figure for the current device. Standard library only: the validation on a GPU uses it.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from pathlib import Path

MIB = 1 << 20
OUT_OF_MEMORY = 2
GLOBAL = 1
PER_THREAD = 2
ALLOCATION_NODE = 10

cuda = ctypes.CDLL("libcuda.so.1")
nvml = ctypes.CDLL("libnvidia-ml.so.1")


class Failed(Exception):
    """A call of the driver answered with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Property(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("meta", c_void_p),
        ("flags", c_uint64),
    )


class PoolProperty(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("later", c_uint64 * 8),
    )


class AllocationNode(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = (
        ("pool", PoolProperty),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("bytes", c_size_t),
        ("pointer", c_ulonglong),
    )


class Node(ctypes.Structure):
    """CUgraphNodeParams with its allocation."""

    _fields_ = (
        ("type", c_int),
        ("reserved", c_int * 3),
        ("allocation", AllocationNode),
        ("rest", c_uint64 * 17),
    )


class Array(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = (
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    )


class Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (("pid", c_uint), ("bytes", c_ulonglong), ("gpu", c_uint), ("compute", c_uint))


def ask(name: str, *arguments: object) -> None:
    """Call a function of the driver; ``Failed`` unless it succeeds."""
    if code := getattr(cuda, name)(*arguments):
        raise Failed(code)


def code(name: str, *arguments: object) -> int:
    """Call a function of the driver; its CUresult."""
    return int(getattr(cuda, name)(*arguments))


def begin(device: int = 0) -> None:
    """Initialize and make the primary context of a device current."""
    ask("cuInit", 0)
    enter(device)


def enter(device: int) -> None:
    """Make the primary context of a device current."""
    context = c_void_p()
    ask("cuDevicePrimaryCtxRetain", byref(context), device)
    ask("cuCtxSetCurrent", context)


def alloc(size: int, name: str = "cuMemAlloc_v2", *more: object) -> c_ulonglong:
    """A new allocation of ``size`` bytes by the function of this name."""
    pointer = c_ulonglong()
    ask(name, byref(pointer), c_size_t(size), *more)
    return pointer


def refused(size: int, name: str = "cuMemAlloc_v2", *more: object) -> bool:
    """Return True when an allocation is refused for lack of memory; free it at once if not."""
    pointer = c_ulonglong()
    answer = code(name, byref(pointer), c_size_t(size), *more)
    if not answer:
        ask("cuMemFree_v2", pointer)
        ask("cuCtxSynchronize")  # pools release free memory now
    elif answer != OUT_OF_MEMORY:
        raise Failed(answer)
    return answer == OUT_OF_MEMORY


def info() -> tuple[int, int]:
    """Free and total bytes as cuMemGetInfo reports."""
    free, total = c_size_t(), c_size_t()
    ask("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value


def used() -> int:
    """Total less free."""
    free, total = info()
    return total - free


def uuid(device: int = 0) -> str:
    """Text UUID of a device."""
    raw = (ctypes.c_ubyte * 16)()
    ask("cuDeviceGetUuid_v2", raw, device)
    text = bytes(raw).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def nvml_device(device: int = 0) -> c_void_p:
    """NVML's handle of a CUDA device."""
    nvml.nvmlInit_v2()
    handle = c_void_p()
    if nvml.nvmlDeviceGetHandleByUUID(uuid(device).encode(), byref(handle)):
        raise AssertionError("NVML does not know the device")
    return handle


def address(name: str) -> int:
    """Return the address from dlsym for a name of the driver."""
    return int(ctypes.cast(getattr(cuda, name), c_void_p).value or 0)


def handed_out(name: str, version: int, flags: int = 0) -> int:
    """Return the address from cuGetProcAddress_v2 for a name; 0 where the driver has none."""
    function, status = c_void_p(), c_int()
    cuda.cuGetProcAddress_v2(
        name.encode(), byref(function), version, c_uint64(flags), byref(status)
    )
    return int(function.value or 0)


def library_of(pointer: int) -> str:
    """File that holds an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split()
        first, last = (int(part, 16) for part in words[0].split("-"))
        if first <= pointer < last:
            return words[-1]
    return ""
