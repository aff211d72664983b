# SPDX-License-Identifier: Apache-2.0
"""Guests that take device memory in every way of the driver, and report what they got."""

import ctypes
import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from ctypes import (
    addressof,
    byref,
    c_size_t,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_void_p,
    create_string_buffer,
)

from tests.gpu.guest import Steps
from tests.gpu.guests.device import Kernels
from tests.support import cuda_guest as cu

_RELEASE_THRESHOLD = 4
_MANAGED = 3
_HEAP_SIZE = 2
"""CU_LIMIT_MALLOC_HEAP_SIZE."""


class Ways:
    """Allocate by the way's name; the CUresult is the answer."""

    def __init__(self) -> None:
        self._pool: c_void_p | None = None
        self.pointers: list[tuple[str, int, int]] = []
        """(way, pointer, bytes) of what can be freed."""

    def take(self, way: str, size: int) -> int:
        """One allocation."""
        make: Callable[[int], int] = getattr(self, f"take_{way}")
        return make(size)

    def give_back(self) -> None:
        """Free all plain, stream-ordered and mapped memory."""
        for way, pointer, size in self.pointers:
            if way == "vmm":
                cu.ask("cuMemUnmap", c_ulonglong(pointer), c_size_t(size))
                cu.ask("cuMemAddressFree", c_ulonglong(pointer), c_size_t(size))
            elif way in {"async", "pool"}:
                cu.ask("cuMemFreeAsync", c_ulonglong(pointer), None)
            else:
                cu.ask("cuMemFree_v2", c_ulonglong(pointer))
        self.pointers.clear()
        cu.ask("cuCtxSynchronize")

    def _keep(self, way: str, code: int, pointer: c_ulonglong, size: int) -> int:
        if not code:
            self.pointers.append((way, pointer.value, size))
        return code

    def take_alloc(self, size: int) -> int:
        pointer = c_ulonglong()
        return self._keep(
            "alloc", cu.code("cuMemAlloc_v2", byref(pointer), c_size_t(size)), pointer, size
        )

    def take_managed(self, size: int) -> int:
        pointer = c_ulonglong()
        code = cu.code("cuMemAllocManaged", byref(pointer), c_size_t(size), c_uint(1))
        return self._keep("managed", code, pointer, size)

    def take_pitch(self, size: int) -> int:
        pointer, pitch = c_ulonglong(), c_size_t()
        shape = c_size_t(4096), c_size_t(size // 4096), c_uint(4)
        code = cu.code("cuMemAllocPitch_v2", byref(pointer), byref(pitch), *shape)
        return self._keep("pitch", code, pointer, size)

    def take_array(self, size: int) -> int:
        array = c_void_p()
        width = 16384
        shape = cu.Array(width=width, height=size // width, format=1, channels=1)
        return cu.code("cuArray3DCreate_v2", byref(array), byref(shape))

    def take_vmm(self, size: int) -> int:
        handle, pointer = c_ulonglong(), c_ulonglong()
        properties = cu.Property(type=1, location=cu.Location(type=1, id=0))
        code = cu.code("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
        if code:
            return code
        nowhere = c_size_t(0), c_ulonglong(0), c_uint64(0)
        cu.ask("cuMemAddressReserve", byref(pointer), c_size_t(size), *nowhere)
        cu.ask("cuMemMap", pointer, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        cu.ask("cuMemRelease", handle)
        return self._keep("vmm", 0, pointer, size)

    def take_async(self, size: int) -> int:
        pointer = c_ulonglong()
        code = cu.code("cuMemAllocAsync", byref(pointer), c_size_t(size), None)
        return self._keep("async", code, pointer, size)

    def take_pool(self, size: int) -> int:
        if self._pool is None:
            self._pool = c_void_p()
            properties = cu.PoolProperty(type=1, location=cu.Location(type=1, id=0))
            cu.ask("cuMemPoolCreate", byref(self._pool), byref(properties))
        pointer = c_ulonglong()
        code = cu.code("cuMemAllocFromPoolAsync", byref(pointer), c_size_t(size), self._pool, None)
        return self._keep("pool", code, pointer, size)

    def take_graph(self, size: int) -> int:
        graph, node, run = c_void_p(), c_void_p(), c_void_p()
        place = cu.PoolProperty(type=1, location=cu.Location(type=1, id=0))
        allocation = cu.AllocationNode(pool=place, bytes=size)
        cu.ask("cuGraphCreate", byref(graph), 0)
        first = graph, None, c_size_t(0)
        cu.ask("cuGraphAddMemAllocNode", byref(node), *first, byref(allocation))
        cu.ask("cuGraphInstantiateWithFlags", byref(run), graph, c_uint64(0))
        return cu.code("cuGraphLaunch", run, None)


def fill(*, way: str, block_mib: float, most: int = 1_000_000) -> Steps:
    """Allocate blocks until one is refused; then free, and allocate one again."""
    cu.begin()
    total = cu.info()[1]
    ways, count, code = Ways(), 0, 0
    size = int(block_mib * cu.MIB)
    while not code and count < most:
        code = ways.take(way, size)
        count += not code
    cu.code("cuCtxSynchronize")
    free = cu.info()[0]
    yield {
        "pid": os.getpid(),
        "count": count,
        "code": code,
        "total_mib": total / cu.MIB,
        "free_mib": free / cu.MIB,
    }
    ways.give_back()
    again = ways.take(way, size)
    yield {"again": again, "free_mib": cu.info()[0] / cu.MIB}


def hold(*, mib: float = 0) -> Steps:
    """A context and memory, changed by requests: ``alloc`` and ``free``."""
    cu.begin()
    ways = Ways()
    code = ways.take("alloc", int(mib * cu.MIB)) if mib else 0
    request = yield {"pid": os.getpid(), "code": code}
    while True:
        if request.get("free"):
            ways.give_back()
        code = ways.take("alloc", int(request["alloc"] * cu.MIB)) if "alloc" in request else 0
        free, total = cu.info()
        request = yield {"code": code, "free_mib": free / cu.MIB, "total_mib": total / cu.MIB}


def sizes(*, bytes_each: int, count: int) -> Steps:
    """Many allocations of one size; asked before and after them."""
    cu.begin()
    ways = Ways()
    ways.take("alloc", cu.MIB)  # the first one may load code
    yield {"pid": os.getpid()}
    granted = sum(not ways.take("alloc", bytes_each) for _ in range(count))
    yield {"granted": granted}


def pool_slack(*, mib: float) -> Steps:
    """Fill a pool that keeps its memory, free that, and ask for as much plain memory."""
    cu.begin()
    pool, keep = c_void_p(), c_uint64(1 << 62)
    cu.ask("cuDeviceGetDefaultMemPool", byref(pool), 0)
    cu.ask("cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, byref(keep))
    ways = Ways()
    first = ways.take("async", int(mib * cu.MIB))
    ways.give_back()
    yield {"pid": os.getpid(), "first": first, "second": ways.take("alloc", int(mib * cu.MIB))}


def local_memory() -> Steps:
    """A kernel with 16 KiB of stack per thread, then a heap of 512 MiB."""
    cu.begin()
    kernels = Kernels()
    yield {"pid": os.getpid()}
    _launch(kernels["nop"])
    yield {}
    _launch(kernels["stack"])
    yield {}
    cu.ask("cuCtxSetLimit", _HEAP_SIZE, c_size_t(512 * cu.MIB))
    _launch(kernels["nop"])
    yield {}


def _launch(function: c_void_p) -> None:
    parameter = c_uint64(64)
    parameters = (c_void_p * 1)(addressof(parameter))
    shape = [c_uint(one) for one in (1, 1, 1, 32, 1, 1, 0)]
    cu.ask("cuLaunchKernel", function, *shape, None, parameters, None)
    cu.ask("cuCtxSynchronize")


def ipc_export(*, mib: int) -> Steps:
    """Allocate memory and export it to other processes."""
    cu.begin()
    pointer = cu.alloc(mib * cu.MIB)
    handle = create_string_buffer(64)
    cu.ask("cuIpcGetMemHandle", handle, pointer)
    yield {"pid": os.getpid(), "handle": handle.raw.hex()}


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("raw", ctypes.c_char * 64),)


def ipc_open(*, handle: str) -> Steps:
    """Open memory of another process of the tenant."""
    cu.begin()
    before = cu.used()
    pointer = c_ulonglong()
    value = _Handle.from_buffer_copy(bytes.fromhex(handle))
    code = cu.code("cuIpcOpenMemHandle_v2", byref(pointer), value, c_uint(1))
    yield {"pid": os.getpid(), "code": code, "grown_mib": (cu.used() - before) / cu.MIB}


def managed(*, mib: int) -> Steps:
    """Managed memory with advice and prefetch; on request, as much of a managed pool instead."""
    cu.begin()
    yield {"pid": os.getpid()}
    pointer, size = c_ulonglong(), c_size_t(mib * cu.MIB)
    code = cu.code("cuMemAllocManaged", byref(pointer), size, c_uint(1))
    host = cu.Location(type=2, id=0)
    advice = cu.code("cuMemAdvise_v2", pointer, size, 3, host)
    prefetch = cu.code("cuMemPrefetchAsync_v2", pointer, size, host, c_uint(0), None)
    yield {"code": code, "advice": advice, "prefetch": prefetch}
    cu.ask("cuMemFree_v2", pointer)
    pool = c_void_p()
    properties = cu.PoolProperty(type=_MANAGED, location=cu.Location(type=0, id=0))
    made = cu.code("cuMemPoolCreate", byref(pool), byref(properties))
    code = made or cu.code("cuMemAllocFromPoolAsync", byref(pointer), size, pool, None)
    yield {"made": made, "code": code}


def content(*, mib: int) -> Steps:
    """Copy a pattern through the device and return its digest."""
    cu.begin()
    pattern = bytes(range(256)) * (mib * cu.MIB // 256)
    back = create_string_buffer(len(pattern))
    first, second = cu.alloc(len(pattern)), cu.alloc(len(pattern))
    cu.ask("cuMemcpyHtoD_v2", first, pattern, c_size_t(len(pattern)))
    cu.ask("cuMemcpyDtoD_v2", second, first, c_size_t(len(pattern)))
    cu.ask("cuMemcpyDtoH_v2", back, second, c_size_t(len(pattern)))
    yield {"digest": hashlib.sha256(back.raw[: len(pattern)]).hexdigest()}


def program(*, argv: list[str], limit_s: float) -> Steps:
    """Run a program in the tenant; its code and output."""
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit_s)
    yield {
        "code": done.returncode,
        "seconds": time.monotonic() - began,
        "out": done.stdout[-4000:],
        "err": done.stderr[-1000:],
    }


def preallocate() -> Steps:
    """Take 75 % of the visible memory at once, as JAX does."""
    cu.begin()
    ways = Ways()
    code = ways.take("alloc", cu.info()[1] * 3 // 4)
    yield {"pid": os.getpid(), "code": code}


def pools() -> Steps:
    """Memory of the default pool and of an own one, in use together."""
    cu.begin()
    ways = Ways()
    codes = [ways.take(way, 4 * cu.MIB) for way in ("async", "pool")]
    yield {"pid": os.getpid(), "correct": not any(codes)}


def background(*, argv: list[str]) -> Steps:
    """Start a program that keeps what it takes; answer once it printed its last line."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            lines = [running.stdout.readline() for _ in range(3)]
            yield {"pid": running.pid, "lines": lines}
        finally:
            running.kill()
