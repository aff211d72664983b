# SPDX-License-Identifier: Apache-2.0
"""Guests that report what the driver and NVML show inside a tenant."""

import ctypes
import os
import time
from ctypes import POINTER, byref, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from tests.gpu.guest import Answer, Steps
from tests.gpu.guests.device import Kernels, Probe, Work, stream
from tests.support import cuda_guest as cu

VERSIONS = (11000, 11080, 12000, 12050, 13000)
FLAGS = (0, 1, 2)
_LIST_MOST = 64
_PER_THREAD = ("_ptsz", "_ptds")


class _Small(ctypes.Structure):
    """nvmlProcessInfo_v1_t."""

    _fields_ = (("pid", c_uint), ("bytes", c_ulonglong))


class _Detail(ctypes.Structure):
    """nvmlProcessDetail_v1_t."""

    _fields_ = (
        ("pid", c_uint),
        ("bytes", c_ulonglong),
        ("gpu", c_uint),
        ("compute", c_uint),
        ("protected", c_ulonglong),
    )


class _DetailList(ctypes.Structure):
    """nvmlProcessDetailList_t."""

    _fields_ = (
        ("version", c_uint),
        ("mode", c_uint),
        ("count", c_uint),
        ("entries", POINTER(_Detail)),
    )


class _Memory2(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


def nvml(*, mib: float) -> Steps:
    """Hold memory; on request, what each form of NVML's queries shows."""
    cu.begin()
    cu.alloc(int(mib * cu.MIB))
    yield {"pid": os.getpid()}
    handle = cu.nvml_device()
    first, second = (c_ulonglong * 3)(), _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
    codes = {
        "memory": cu.nvml.nvmlDeviceGetMemoryInfo(handle, first),
        "memory_v2": cu.nvml.nvmlDeviceGetMemoryInfo_v2(handle, byref(second)),
    }
    pids: dict[str, list[int]] = {}
    for form, entry in (("", _Small), ("_v2", cu.Process), ("_v3", cu.Process)):
        count, entries = c_uint(_LIST_MOST), (entry * _LIST_MOST)()
        name = f"nvmlDeviceGetComputeRunningProcesses{form}"
        codes[name] = getattr(cu.nvml, name)(handle, byref(count), entries)
        pids[name] = [one.pid for one in entries[: count.value]]
    details = (_Detail * _LIST_MOST)()
    listed = _DetailList(
        version=ctypes.sizeof(_DetailList) | 1 << 24, count=_LIST_MOST, entries=details
    )
    name = "nvmlDeviceGetRunningProcessDetailList"
    codes[name] = getattr(cu.nvml, name)(handle, byref(listed))
    pids[name] = [one.pid for one in details[: listed.count]]
    yield {
        "codes": codes,
        "pids": pids,
        "own": os.getpid(),
        "totals_mib": [first[0] / cu.MIB, second.total / cu.MIB, cu.info()[1] / cu.MIB],
    }


def addresses(*, hooks: list[str], others: list[str]) -> Steps:
    """Addresses of hooked functions by dlsym and cuGetProcAddress, and aliases of them."""
    cu.ask("cuInit", 0)
    there = {name: found for name in hooks if (found := _address(name))}
    limiter = _ranges("libvgpu")

    def is_hook(address: int) -> bool:
        return any(first <= address < last for first, last in limiter)

    not_hooked = [name for name, found in there.items() if not is_hook(found)]
    by_address: dict[int, str] = {}
    aliases = []
    for name in [*there, *others]:
        found = _address(name)
        if by_address.get(found) in there:
            aliases.append(f"{name} = {by_address[found]}")
        if found:
            by_address.setdefault(found, name)
    bypassed, asked = set(), 0
    for name in hooks:
        base = _base(name)
        for version in VERSIONS:
            for flags in FLAGS:
                found = cu.handed_out(base, version, flags)
                asked += bool(found)
                if found and not is_hook(found):
                    bypassed.add(f"{base} {version} {flags}")
    yield {
        "hooks": len(there),
        "absent": len(hooks) - len(there),
        "not_hooked": not_hooked[:20],
        "aliases": aliases[:20],
        "asked": asked,
        "bypassed": sorted(bypassed)[:20],
        "bypasses": len(bypassed),
    }


def _ranges(library: str) -> list[tuple[int, int]]:
    """Addresses at which a library is mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if library in words[-1]:
            first, last = (int(part, 16) for part in words[0].split("-"))
            found.append((first, last))
    return found


def _address(name: str) -> int:
    try:
        return cu.address(name)
    except AttributeError:
        return 0


def _base(name: str) -> str:
    for suffix in _PER_THREAD:
        name = name.removesuffix(suffix)
    head, _, version = name.rpartition("_v")
    return head if head and version.isdecimal() else name


def by_dlsym() -> Steps:
    """Allocate and launch with functions from dlsym."""
    cu.begin()
    cu.alloc(cu.MIB)
    yield _launch(cu.address)


def by_proc_address() -> Steps:
    """Launch with functions from cuGetProcAddress, as the runtime does."""
    version = ctypes.c_int()
    cu.ask("cuDriverGetVersion", byref(version))
    begin = [cu.handed_out(name, version.value) for name in ("cuInit", "cuDevicePrimaryCtxRetain")]
    function = ctypes.CFUNCTYPE(ctypes.c_int, c_uint)
    code = function(begin[0])(0)
    context = c_void_p()
    retain = ctypes.CFUNCTYPE(ctypes.c_int, POINTER(c_void_p), ctypes.c_int)
    code = code or retain(begin[1])(byref(context), 0)
    cu.ask("cuCtxSetCurrent", context)
    allocate = ctypes.CFUNCTYPE(ctypes.c_int, POINTER(c_ulonglong), ctypes.c_size_t)
    pointer = c_ulonglong()
    code = code or allocate(cu.handed_out("cuMemAlloc", version.value))(byref(pointer), cu.MIB)
    if code:
        raise cu.Failed(code)
    yield _launch(lambda name: cu.handed_out(_base(name), version.value))


def _launch(find: Any) -> Answer:
    work = Work(function=Kernels()["nop"], stream=stream(), grid=1, ahead=2)
    Probe(find).steps(work, 60.0, 3)
    return {"pid": os.getpid()}


def start_cost(*, loads: int) -> Steps:
    """Seconds for the context, and per load of a module with its first launch."""
    began = time.monotonic()
    cu.begin()
    started = time.monotonic() - began
    began = time.monotonic()
    for _ in range(loads):
        Kernels()
    loading = (time.monotonic() - began) / max(loads, 1)
    work = Work(function=Kernels()["nop"], stream=stream(), grid=1, ahead=1)
    Probe().steps(work, 60.0, 1)
    yield {"pid": os.getpid(), "start_s": started, "load_s": loading}
