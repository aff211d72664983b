# SPDX-License-Identifier: Apache-2.0
"""Accounts on drivers that differ from a plain one: rounding, own growth, no NVML, folded code.

Each behavior is one that drivers have or may have; the fake driver shows it by a key of its state
(tests/fakedrv/state.h), a fault, or the name of a kernel. Takes about 25 s.
"""

import time

import pytest

from hami_sim.hardware.fake_nvml import FakeNvml
from tests.native.conftest import MIB
from tests.support.cuda_child import LIMIT_MIB, CudaChild
from tests.support.drive import OUT_OF_MEMORY

LIBRARY_NOT_FOUND = 12
"""NVML_ERROR_LIBRARY_NOT_FOUND."""
OTHER = """
        import subprocess, sys, time

        def process(body, **environment):
            program = "from tests.support.cuda_guest import *\\n" + body
            return subprocess.Popen(
                [sys.executable, "-c", program], text=True, env={**os.environ, **environment},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        """


def test_killed_process_is_gone_from_the_next_answer(guest: CudaChild) -> None:
    """Asked at once after the kill, without an allocation that would not fit."""
    told = guest(f"""
        {OTHER}
        begin()
        told = []
        for ask_nvml in (False, True, False, True):
            other = process("begin(); alloc(100 * MIB); print(flush=True); input()")
            other.stdout.readline()
            told.append(used() // MIB)
            time.sleep(0.15)
            other.kill()
            other.wait()
            first = (c_uint64 * 3)()
            if ask_nvml:
                nvml.nvmlDeviceGetMemoryInfo(nvml_device(), first)
            told.append((first[2] if ask_nvml else used()) // MIB)
        """)
    assert told == [116, 8] * 4


def test_physical_memory_is_not_charged_again_with_the_first_context(guest: CudaChild) -> None:
    told = guest("""
        ask("cuInit", 0)
        handle = c_ulonglong()
        property = Property(type=1, location=Location(type=1, id=0))
        ask("cuMemCreate", byref(handle), c_size_t(64 * MIB), byref(property), c_uint64(0))
        enter(0)
        told = [agree() // MIB]
        ask("cuMemRelease", handle)
        told.append(agree() // MIB)
        """)
    assert told == [72, 8]


@pytest.mark.parametrize("location", ["type=0", "type=2", "type=1"], ids=["none", "host", "device"])
@pytest.mark.parametrize("context_first", [True, False])
def test_managed_pools_are_charged_wherever_they_prefer_to_be(
    guest: CudaChild, location: str, *, context_first: bool
) -> None:
    told = guest(f"""
        ask("cuInit", 0)
        pool = c_void_p()
        property = PoolProperty(type=2, location=Location({location}, id=0))
        if {context_first}: enter(0)
        ask("cuMemPoolCreate", byref(pool), byref(property))
        if not {context_first}: enter(0)
        pointer = alloc(20 * MIB, "cuMemAllocFromPoolAsync", pool, None)
        told = [agree() // MIB, refused({LIMIT_MIB} * MIB, "cuMemAllocFromPoolAsync", pool, None)]
        ask("cuMemFreeAsync", pointer, None)
        ask("cuCtxSynchronize")
        told.append(agree() // MIB)
        """)
    assert told == [28, True, 8]


def test_pools_of_the_host_are_free(guest: CudaChild, machine: FakeNvml) -> None:
    machine.cuda_version(13000)
    told = guest("""
        begin()
        pool, default = c_void_p(), c_void_p()
        host = Location(type=2, id=0)
        ask("cuMemPoolCreate", byref(pool), byref(PoolProperty(type=1, location=host)))
        ask("cuMemGetDefaultMemPool", byref(default), byref(host), 1)
        for one in (pool, default):
            alloc(20 * MIB, "cuMemAllocFromPoolAsync", one, None)
        told = agree() // MIB
        """)
    assert told == 8


@pytest.mark.parametrize(
    ("concurrent", "mib", "spills"), [("1", 128, True), ("0", 128, False), ("1", 129, False)]
)
@pytest.mark.parametrize("way", ["cuMemAlloc_v2", "cuMemAllocAsync", "cuMemAllocPitch_v2"])
def test_spilling_needs_concurrent_access_and_a_block_of_half_the_limit_at_most(
    guest: CudaChild, machine: FakeNvml, way: str, concurrent: str, mib: int, *, spills: bool
) -> None:
    machine.set_key(0, "concurrent_managed", concurrent)
    machine.fault(way, None, OUT_OF_MEMORY)
    told = guest(
        f"""
        begin()
        pointer, pitch, size = c_ulonglong(), c_size_t(), c_size_t({mib} * MIB)
        if "{way}" == "cuMemAllocPitch_v2":
            answer = code("{way}", byref(pointer), byref(pitch), c_size_t(MIB), c_size_t({mib}), 4)
        elif "{way}" == "cuMemAllocAsync":
            answer = code("{way}", byref(pointer), size, None)
        else:
            answer = code("{way}", byref(pointer), size)
        told = [answer, agree() // MIB]
        """,
        CUDA_OVERSUBSCRIBE="true",
    )
    assert told == ([0, 8 + mib] if spills else [OUT_OF_MEMORY, 8])


@pytest.mark.parametrize(
    ("promised", "concurrent", "shown_mib"),
    [("true", "1", 65536), ("", "1", 45469), ("true", "0", 45469)],
)
def test_limit_beyond_the_card_is_the_total_where_managed_memory_can_hold_the_rest(
    guest: CudaChild, machine: FakeNvml, promised: str, concurrent: str, shown_mib: int
) -> None:
    """A tenant of 64 GiB on an L40S of 45 GiB."""
    machine.set_key(0, "concurrent_managed", concurrent)
    told = guest(
        """
        begin()
        free, total = info()
        told = [total // MIB, total - free == used()]
        """,
        CUDA_DEVICE_MEMORY_LIMIT="64g",
        CUDA_OVERSUBSCRIBE=promised,
    )
    assert told == [shown_mib, True]


def test_context_without_nvml_is_charged_an_estimate_up_to_the_free_capacity(
    guest: CudaChild, machine: FakeNvml
) -> None:
    """L40S: 142 multiprocessors of 2,048 threads with 1 KiB of stack each, and 256 MiB."""
    machine.init_error(LIBRARY_NOT_FOUND)
    body = """
        begin()
        told = [used() // MIB]
        ask("cuDevicePrimaryCtxReset_v2", 0)
        enter(0)
        told.append(used() // MIB)
        """
    assert guest(body, CUDA_DEVICE_MEMORY_LIMIT="4g") == [540, 540]
    assert guest(body, CUDA_DEVICE_MEMORY_LIMIT="100m") == [100, 100]


def test_context_without_nvml_costs_what_another_process_has_measured(
    guest: CudaChild, machine: FakeNvml
) -> None:
    assert guest("begin()\ntold = used() // MIB") == 8
    machine.init_error(LIBRARY_NOT_FOUND)
    assert guest("begin()\ntold = used() // MIB") == 8


@pytest.mark.parametrize("known", [True, False])
def test_context_that_no_hook_saw_is_charged_once(guest: CudaChild, *, known: bool) -> None:
    if known:
        guest("begin()")
    told = guest(
        """
        ask("cuInit", 0)
        ask("fake_cuda_unseen", 0)
        alloc(MIB)
        told = [used() // MIB]
        enter(0)
        told.append(used() // MIB)
        ask("cuDevicePrimaryCtxReset_v2", 0)
        explicit = c_void_p()
        ask("cuCtxCreate_v2", byref(explicit), 0, 0)
        told.append(agree() // MIB)
        """,
        CUDA_DEVICE_MEMORY_LIMIT="4g",
    )
    cost = 8 if known else 540
    assert told == [cost + 1, cost + 1, 8]


@pytest.mark.parametrize("granularity", [1, 2 * MIB, 65536])
def test_large_blocks_are_charged_in_the_pieces_that_the_driver_takes(
    guest: CudaChild, machine: FakeNvml, granularity: int
) -> None:
    """Learned from the first block that shows it; small blocks share pieces."""
    machine.set_key(0, "block_granularity", str(granularity))
    told = guest("""
        begin()
        first = alloc(MIB + 1)
        ask("cuMemFree_v2", first)
        before = agree()
        pointers = [alloc(size) for size in (MIB + 1, 5 * MIB, 4096, MIB)]
        pitched, pitch = c_ulonglong(), c_size_t()
        ask("cuMemAllocPitch_v2", byref(pitched), byref(pitch), c_size_t(500), c_size_t(4097), 4)
        told = [agree() - before]
        for pointer in (*pointers, pitched):
            ask("cuMemFree_v2", pointer)
        told.append(agree() - before)
        """)
    large = (MIB + 1, 5 * MIB, 512 * 4097)
    taken = sum((size + granularity - 1) // granularity * granularity for size in large)
    assert told == [taken + MIB + 4096, 0]


def test_rounding_that_a_process_has_learned_holds_for_the_next(
    guest: CudaChild, machine: FakeNvml
) -> None:
    machine.set_key(0, "block_granularity", str(2 * MIB))
    guest("begin()\nalloc(MIB + 1)")
    told = guest("""
        begin()
        alloc(info()[0] - 3 * MIB)
        told = [refused(2 * MIB + 1), refused(2 * MIB)]
        """)
    assert told == [True, False]


def test_small_images_are_charged_by_their_header_without_nvml(guest: CudaChild) -> None:
    """The fake driver takes less for one with zeros than its header allows."""
    told = guest("""
        import struct
        def elf(zeros):
            section = struct.pack("<IIQQQQIIQQ", 0, 8, 3, 0, 0, zeros, 0, 0, 0, 0)
            head = bytes([0x7F]) + b"ELF" + bytes([2, 1, 1]) + bytes(9)
            head += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64, 0, 64, 56, 0, 64, 1, 0)
            return head + section
        begin()
        before, module = used(), c_void_p()
        told = []
        for mib in (3, 5):
            ask("cuModuleLoadData", byref(module), elf(mib * MIB))
            told.append(used() - before)
            ask("cuModuleUnload", module)
        told.append(agree() - before)
        """)
    assert told == [3 * MIB + 128, 128, 0]


def test_code_that_several_names_share_is_not_mistaken_for_a_hooked_function(
    guest: CudaChild,
) -> None:
    told = guest(
        """
        ask("cuInit", 0)
        libraries = (library_of(handed_out(name, 12000)) for name in ("cuFolded", "cuMemFree"))
        told = [os.path.basename(library) for library in libraries]
        """,
        FAKE_CUDA_ALIAS="cuFolded=cuMemFree_v2",
    )
    assert told == ["libcuda.so.1", "libvgpu.so"]


def test_name_that_leads_to_the_function_of_another_one_has_its_hook(guest: CudaChild) -> None:
    """As cuGraphInstantiate leads to cuGraphInstantiateWithFlags since CUDA 12."""
    told = guest(
        """
        ask("cuInit", 0)
        told = handed_out("cuMemAdvise", 12000) == address("cuMemFree_v2")
        """,
        FAKE_CUDA_ALIAS="cuMemAdvise=cuMemFree_v2",
    )
    assert told is True


def test_old_version_that_the_driver_answers_with_a_newer_function_has_its_hook(
    guest: CudaChild,
) -> None:
    told = guest(
        """
        ask("cuInit", 0)
        told = [
            handed_out("cuMemAlloc", version) == address("cuMemAlloc_v2")
            for version in (2000, 3020, 12000)
        ]
        """,
        FAKE_CUDA_ALIAS="cuMemAlloc=cuMemAlloc_v2",
    )
    assert told == [True, True, True]


LAUNCH = """
        import time

        def launch(name):
            module, function = c_void_p(), c_void_p()
            ask("cuModuleLoadData", byref(module), b"fake-bytes: 0")
            ask("cuModuleGetFunction", byref(function), module, name)
            ask("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None)
            ask("cuCtxSynchronize")

        def wait_until(condition, limit_s=15):
            end_s = time.monotonic() + limit_s
            while not condition() and time.monotonic() < end_s:
                time.sleep(0.05)
            return condition()
        """


def test_local_memory_is_charged_within_seconds_and_ends_with_the_context(
    guest: CudaChild,
) -> None:
    """256 bytes for each of 2,048 threads of 142 multiprocessors: 71 MiB."""
    told = guest(f"""
        {LAUNCH}
        begin()
        alloc(100 * MIB)
        launch(b"local_256")
        told = [card() // MIB, used() // MIB, wait_until(lambda: used() == card())]
        told.append(refused(100 * MIB))
        ask("cuDevicePrimaryCtxReset_v2", 0)
        enter(0)
        told.append(agree() // MIB)
        time.sleep(5)
        told.append(agree() // MIB)
        """)
    assert told == [179, 108, True, True, 8, 8]


def test_process_ends_at_once_while_nvml_does_not_answer(
    guest: CudaChild, machine: FakeNvml
) -> None:
    """The thread that compares is in NVML then, whose destructors run after it has been waited
    for: 0.1 s.
    """
    child = guest.start("""
        import time
        begin()
        alloc(MIB)
        print(flush=True)
        input()
        alloc(MIB)
        time.sleep(4)
        print(time.monotonic(), flush=True)
        """)
    assert child.stdout is not None
    child.stdout.readline()
    machine.fault("nvmlDeviceGetComputeRunningProcesses_v3", None, 0, hang_ms=30_000)
    out, _ = child.communicate("\n", timeout=25)
    assert child.returncode == 0
    assert time.monotonic() - float(out) < 2


def test_nothing_is_compared_while_memory_of_another_process_is_mapped(guest: CudaChild) -> None:
    """NVML's figure may contain it, and the exporter pays for it already."""
    told = guest(f"""
        {LAUNCH}
        begin()
        handle, again, file = c_ulonglong(), c_ulonglong(), c_int()
        property = Property(type=1, handles=1, location=Location(type=1, id=0))
        ask("cuMemCreate", byref(handle), c_size_t(2 * MIB), byref(property), c_uint64(0))
        ask("cuMemExportToShareableHandle", byref(file), handle, 1, c_uint64(0))
        ask("cuMemImportFromShareableHandle", byref(again), c_void_p(file.value), 1)
        launch(b"local_256")
        told = [wait_until(lambda: used() > 10 * MIB, 6), card() // MIB]
        """)
    assert told == [False, 81]


def test_requests_without_a_pool_are_charged_to_the_pool_that_is_set(guest: CudaChild) -> None:
    told = guest("""
        begin()
        pool, default = c_void_p(), c_void_p()
        property = PoolProperty(type=1, location=Location(type=1, id=0))
        ask("cuMemPoolCreate", byref(pool), byref(property))
        ask("cuMemPoolSetAttribute", pool, 4, byref(c_uint64(2**63)))
        ask("cuDeviceGetMemPool", byref(default), 0)
        told = []
        for one in (default, pool, default):
            ask("cuDeviceSetMemPool", 0, one)
            pointer = alloc(20 * MIB, "cuMemAllocAsync", None)
            ask("cuMemFreeAsync", alloc(MIB, "cuMemAllocAsync", None), None)
            ask("cuCtxSynchronize")
            told.append(agree() // MIB)
            ask("cuMemFreeAsync", pointer, None)
            ask("cuCtxSynchronize")
        ask("cuDeviceSetMemPool", 0, pool)
        ask("cuMemFreeAsync", alloc(20 * MIB, "cuMemAllocAsync", None), None)
        ask("cuMemPoolDestroy", pool)
        pointer = alloc(20 * MIB, "cuMemAllocAsync", None)
        ask("cuCtxSynchronize")
        told.append(agree() // MIB)
        """)
    assert told == [28, 30, 50, 28]


SHARE = """
begin()
pointer = c_ulonglong()
handle = (ctypes.c_ubyte * 64).from_buffer_copy(bytes.fromhex(input()))
class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)
ask("cuIpcOpenMemHandle_v2", byref(pointer), Handle(handle), 1)
print(used() // MIB, flush=True)
input()
ask("cuIpcCloseMemHandle", pointer)
print(used() // MIB, flush=True)
"""


@pytest.mark.parametrize("same", [True, False], ids=["one share", "two shares"])
def test_memory_of_another_process_is_charged_once_and_to_the_exporter(
    guest: CudaChild, *, same: bool
) -> None:
    """The driver does not name the exporter, so the import succeeds in another share, too."""
    region = guest.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"] + ("" if same else "-other")
    told = guest(f"""
        {OTHER}
        begin()
        pointer, handle = alloc(50 * MIB), (ctypes.c_ubyte * 64)()
        ask("cuIpcGetMemHandle", handle, pointer)
        importer = process({SHARE!r}, CUDA_DEVICE_MEMORY_SHARED_CACHE={region!r})
        importer.stdin.write(bytes(handle).hex() + "\\n")
        importer.stdin.flush()
        told = [int(importer.stdout.readline()), used() // MIB]
        importer.stdin.write("\\n")
        importer.stdin.flush()
        told.append(int(importer.stdout.readline()))
        importer.wait()
        time.sleep(0.15)
        ask("cuMemFree_v2", pointer)
        told.append(agree() // MIB)
        """)
    assert told == ([66, 66, 66, 8] if same else [8, 58, 8, 8])
