# SPDX-License-Identifier: Apache-2.0
"""Each way to make device memory, under a limit, against the fake driver's own books.

Children are Python programs that load the driver at run time; what they import is
tests/support/cuda_guest.py. ``agree()`` in them fails unless limiter and driver say the same number
of bytes. Limits come from the environment here. Takes about 15 s.
"""

from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import FakeNvml, Mig
from tests.fakes.gpucontainers import GpuNode
from tests.native.conftest import StartDrive
from tests.support.cuda_child import LIMIT_MIB, CudaChild
from tests.support.drive import OUT_OF_MEMORY

MIB = 1 << 20


def test_context_is_charged_as_measured_and_refunded_with_its_memory(guest: CudaChild) -> None:
    told = guest("""
        begin()
        told = [agree()]
        alloc(16 * MIB)
        told.append(agree())
        explicit = c_void_p()
        ask("cuCtxCreate_v2", byref(explicit), 0, 0)
        alloc(32 * MIB)
        told.append(agree())
        ask("cuCtxDestroy_v2", explicit)
        enter(0)
        told.append(agree())
        ask("cuDevicePrimaryCtxReset_v2", 0)
        enter(0)
        told.append(agree())
        """)
    assert told == [8 * MIB, 24 * MIB, 64 * MIB, 24 * MIB, 8 * MIB]


def test_primary_context_lives_until_its_last_release(guest: CudaChild) -> None:
    told = guest("""
        begin()
        enter(0)
        alloc(MIB)
        ask("cuDevicePrimaryCtxRelease_v2", 0)
        told = [agree()]
        ask("cuDevicePrimaryCtxRelease_v2", 0)
        told.append(card())
        enter(0)
        told.append(agree())
        """)
    assert told == [9 * MIB, 0, 8 * MIB]


@pytest.mark.parametrize(
    "way", ['"cuMemAlloc_v2"', '"cuMemAllocManaged", GLOBAL', '"cuMemAllocAsync", None']
)
def test_limit_holds_to_the_byte_and_refuses_with_out_of_memory(guest: CudaChild, way: str) -> None:
    told = guest(f"""
        begin()
        left = info()[0]
        told = [refused(left + 1, {way})]
        pointer = alloc(left, {way})
        told += [info()[0], refused(1, {way}), agree() == info()[1]]
        ask("cuMemFree_v2", pointer)
        ask("cuCtxSynchronize")
        told.append(agree())
        """)
    assert told == [True, 0, True, True, 8 * MIB]


def test_pitch_is_the_drivers(guest: CudaChild) -> None:
    told = guest("""
        begin()
        pointer, pitch = c_ulonglong(), c_size_t()
        ask("cuMemAllocPitch_v2", byref(pointer), byref(pitch), c_size_t(100), c_size_t(1000), 4)
        told = [pitch.value, agree() - 8 * MIB]
        rows = (info()[0] // 512) + 1
        size = c_size_t(1), c_size_t(rows)
        answer = code("cuMemAllocPitch_v2", byref(pointer), byref(pitch), *size, 4)
        told += [answer, agree() - 8 * MIB]
        """)
    assert told == [512, 512_000, OUT_OF_MEMORY, 512_000]


def test_pool_is_charged_for_the_memory_it_keeps(guest: CudaChild) -> None:
    told = guest("""
        begin()
        first = alloc(3 * MIB, "cuMemAllocAsync", None)
        told = [agree()]
        ask("cuMemFreeAsync", first, None)
        told.append(agree())
        ask("cuCtxSynchronize")
        told.append(agree())
        pool = c_void_p()
        ask("cuDeviceGetDefaultMemPool", byref(pool), 0)
        ask("cuMemPoolSetAttribute", pool, 4, byref(c_uint64(2**64 - 1)))
        ask("cuMemFreeAsync", alloc(5 * MIB, "cuMemAllocAsync_ptsz", None), None)
        ask("cuCtxSynchronize")
        told.append(agree())
        ask("cuMemPoolTrimTo", pool, c_size_t(0))
        told.append(agree())
        """)
    assert told == [12 * MIB, 12 * MIB, 8 * MIB, 14 * MIB, 8 * MIB]


@pytest.mark.parametrize("way", ['"cuMemAlloc_v2"', '"cuMemAllocFromPoolAsync", other, None'])
def test_memory_kept_by_a_pool_is_released_before_a_request_is_refused(
    guest: CudaChild, way: str
) -> None:
    told = guest(f"""
        begin()
        pool, other = c_void_p(), c_void_p()
        ask("cuDeviceGetDefaultMemPool", byref(pool), 0)
        property = PoolProperty(type=1, location=Location(type=1, id=0))
        ask("cuMemPoolCreate", byref(other), byref(property))
        ask("cuMemPoolSetAttribute", pool, 4, byref(c_uint64(2**63)))
        held = alloc(20 * MIB, "cuMemAllocAsync", None)
        ask("cuMemFreeAsync", alloc(180 * MIB, "cuMemAllocAsync", None), None)
        ask("cuCtxSynchronize")
        told = [agree() // MIB]
        pointer = alloc(100 * MIB, {way})
        told += [agree() // MIB, refused(200 * MIB, {way})]
        ask("cuMemFree_v2", pointer)
        told += [agree() // MIB >= 28]
        """)
    assert told == [208, 128, True, True]


def test_explicit_pool_belongs_to_the_device_it_was_made_for(guest: CudaChild) -> None:
    told = guest("""
        begin(0)
        enter(1)
        enter(0)
        property = PoolProperty(type=1, location=Location(type=1, id=1))
        pool = c_void_p()
        ask("cuMemPoolCreate", byref(pool), byref(property))
        pointer = alloc(4 * MIB, "cuMemAllocFromPoolAsync", pool, None)
        enter(1)
        told = [agree(1)]
        enter(0)
        told.append(agree(0))
        ask("cuMemPoolDestroy", pool)
        ask("cuMemFreeAsync", pointer, None)
        ask("cuCtxSynchronize")
        enter(1)
        ask("cuCtxSynchronize")
        told.append(agree(1))
        """)
    assert told == [12 * MIB, 8 * MIB, 8 * MIB]


def test_physical_memory_stays_charged_while_a_handle_or_mapping_lives(guest: CudaChild) -> None:
    told = guest(
        """
        begin(1)
        enter(0)
        size = 4 * MIB
        property = Property(type=1, location=Location(type=1, id=1))
        handle, again, address_ = c_ulonglong(), c_ulonglong(), c_ulonglong()
        ask("cuMemCreate", byref(handle), c_size_t(size), byref(property), c_uint64(0))
        anywhere = c_size_t(0), c_ulonglong(0), c_uint64(0)
        ask("cuMemAddressReserve", byref(address_), c_size_t(size), *anywhere)
        enter(1)
        told = [agree(1)]
        ask("cuMemMap", address_, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        ask("cuMemRelease", handle)
        told.append(agree(1))
        ask("cuMemRetainAllocationHandle", byref(again), c_void_p(address_.value))
        ask("cuMemUnmap", address_, c_size_t(size))
        told.append(agree(1))
        ask("cuMemRelease", again)
        told.append(agree(1))
        answer = code("cuMemCreate", byref(handle), c_size_t(LIMIT), byref(property), c_uint64(0))
        told += [answer, agree(1)]
        """.replace("LIMIT", str(LIMIT_MIB * MIB))
    )
    assert told == [12 * MIB, 12 * MIB, 12 * MIB, 8 * MIB, OUT_OF_MEMORY, 8 * MIB]


def test_host_memory_made_by_handles_is_nobodys(guest: CudaChild) -> None:
    told = guest("""
        begin()
        property = Property(type=1, location=Location(type=2, id=0))
        handle = c_ulonglong()
        size = c_size_t(512 * MIB)
        answer = code("cuMemCreate", byref(handle), size, byref(property), c_uint64(0))
        told = [answer != 2, agree()]
        """)
    assert told == [True, 8 * MIB]


@pytest.mark.parametrize(
    ("descriptor", "size"),
    [
        ("width=256, height=256, depth=0, format=0x20, channels=4", 256 * 256 * 16),
        ("width=64, height=0, depth=0, format=0x10, channels=2", 256),
        ("width=64, height=64, depth=6, format=0x01, channels=1, flags=4", 64 * 64 * 6),
        ("width=64, height=64, depth=0, format=0xc2, channels=4", 64 * 64 * 4),
    ],
)
def test_arrays_are_charged_by_format_and_extent(
    guest: CudaChild, descriptor: str, size: int
) -> None:
    told = guest(f"""
        begin()
        before = used()
        array = c_void_p()
        ask("cuArray3DCreate_v2", byref(array), byref(Array({descriptor})))
        told = [used() - before]
        ask("cuArrayDestroy", array)
        told.append(agree() - before)
        """)
    assert told == [size, 0]


def test_mipmaps_are_charged_with_all_levels_and_limited(guest: CudaChild) -> None:
    told = guest("""
        begin()
        array = c_void_p()
        flat = Array(width=64, height=64, depth=0, format=0x20, channels=1)
        ask("cuMipmappedArrayCreate", byref(array), byref(flat), 3)
        told = [agree() - 8 * MIB]
        ask("cuMipmappedArrayDestroy", array)
        big = Array(width=16384, height=16384, depth=0, format=0x20, channels=4)
        told += [code("cuMipmappedArrayCreate", byref(array), byref(big), 1), agree() - 8 * MIB]
        """)
    assert told == [(64 * 64 + 32 * 32 + 16 * 16) * 4, OUT_OF_MEMORY, 0]


@pytest.mark.parametrize("way", ["node", "generic", "capture"])
def test_graph_memory_is_charged_when_the_graph_goes_to_the_device(
    guest: CudaChild, way: str
) -> None:
    told = guest(f"""
        begin()
        graph, node, run, stream = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        ask("cuStreamCreate", byref(stream), 0)

        def make(size, way={way!r}):
            if way == "capture":
                ask("cuStreamBeginCapture_v2", stream, 2)
                ask("cuMemFreeAsync", alloc(size, "cuMemAllocAsync", stream), stream)
                ask("cuStreamEndCapture", stream, byref(graph))
                return
            place = PoolProperty(type=1, location=Location(type=1, id=0))
            allocation = AllocationNode(pool=place, bytes=size)
            ask("cuGraphCreate", byref(graph), 0)
            if way == "node":
                first = graph, None, c_size_t(0)
                ask("cuGraphAddMemAllocNode", byref(node), *first, byref(allocation))
                pointer = allocation.pointer
            else:
                params = Node(type=ALLOCATION_NODE, allocation=allocation)
                ask("cuGraphAddNode", byref(node), graph, None, c_size_t(0), byref(params))
                pointer = params.allocation.pointer
            free = c_void_p()
            after = (c_void_p * 1)(node)
            last = graph, after, c_size_t(1)
            ask("cuGraphAddMemFreeNode", byref(free), *last, c_ulonglong(pointer))

        make(6 * MIB)
        ask("cuGraphInstantiateWithFlags", byref(run), graph, c_uint64(0))
        told = [agree() - 8 * MIB]
        for _ in range(3):
            ask("cuGraphLaunch", run, stream)
            ask("cuStreamSynchronize", stream)
        told.append(agree() - 8 * MIB)
        ask("cuGraphExecDestroy", run)
        ask("cuDeviceGraphMemTrim", 0)
        told.append(agree() - 8 * MIB)
        make(300 * MIB)
        ask("cuGraphInstantiateWithFlags", byref(run), graph, c_uint64(0))
        told += [code("cuGraphLaunch", run, stream), code("cuGraphUpload", run, stream)]
        told.append(agree() - 8 * MIB)
        """)
    assert told == [0, 6 * MIB, 0, OUT_OF_MEMORY, OUT_OF_MEMORY, 0]


def test_image_of_a_module_is_charged_while_it_is_loaded(guest: CudaChild) -> None:
    told = guest("""
        begin()
        module = c_void_p()
        ask("cuModuleLoadData", byref(module), b"fake-bytes: 3145728")
        told = [agree() - 8 * MIB]
        ask("cuModuleUnload", module)
        told.append(agree() - 8 * MIB)
        """)
    assert told == [3 * MIB, 0]


def test_contexts_and_modules_beyond_the_limit_are_refused_and_leave_nothing(
    guest: CudaChild,
) -> None:
    told = guest("""
        begin()
        pointer = alloc(info()[0] - 6 * MIB)
        before = agree()
        explicit, module = c_void_p(), c_void_p()
        told = [
            code("cuCtxCreate_v2", byref(explicit), 0, 0),
            agree() - before,
            code("cuModuleLoadData", byref(module), b"fake-bytes: 7340032"),
            agree() - before,
            code("cuModuleLoadData", byref(module), b"fake-bytes: 6291456"),
            info()[0],
        ]
        """)
    assert told == [OUT_OF_MEMORY, 0, OUT_OF_MEMORY, 0, 0, 0]


ELF = """
        import struct
        from ctypes import addressof, create_string_buffer
        def elf(length, sections=b"", count=0):
            head = bytes([0x7F]) + b"ELF" + bytes([2, 1, 1]) + bytes(9)
            sizes = (64, 56, 0, 64, count, 0)
            head += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, length, 0, *sizes)
            return head + sections
        """


@pytest.mark.parametrize("way", ["image", "file", "wrapper"])
def test_image_with_a_known_size_is_refused_before_the_driver_takes_it(
    guest: CudaChild, tmp_path: Path, way: str
) -> None:
    told = guest(f"""
        {ELF}
        way, path = "{way}", b"{tmp_path}/image"
        def load(mib):
            image = elf(mib * MIB)
            module = c_void_p()
            if way == "file":
                open(path, "wb").write(image)
                return code("cuModuleLoad", byref(module), path), module
            if way == "wrapper":
                entry = struct.pack("<HHIQ", 2, 1, 64, mib * MIB) + bytes(48) + image
                head = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64 + mib * MIB)
                inner = create_string_buffer(head + entry)
                image = struct.pack("<IIQ", 0x466243B1, 1, addressof(inner))
                return code("cuModuleLoadFatBinary", byref(module), image), module
            return code("cuModuleLoadData", byref(module), image), module
        begin()
        alloc(info()[0] - 6 * MIB)
        before = agree()
        told = [load(7)[0], agree() - before]
        result, module = load(5)
        told += [result, (agree() - before) // MIB]
        ask("cuModuleUnload", module)
        told += [agree() - before]
        """)
    assert told == [OUT_OF_MEMORY, 0, 0, 5, 0]


def test_zeros_of_an_image_count_though_they_are_not_in_it(guest: CudaChild) -> None:
    """A section of zeros (a device array) exceeds the capacity; code and notes do not count."""
    told = guest(f"""
        {ELF}
        def section(kind, flags, size):
            return struct.pack("<IIQQQQIIQQ", 0, kind, flags, 0, 0, size, 0, 0, 16, 0)
        begin()
        alloc(info()[0] - 6 * MIB)
        module = c_void_p()
        told = []
        for kind, flags, size in ((8, 3, 7 * MIB), (8, 0, 7 * MIB), (1, 6, 4096)):
            image = elf(64, section(kind, flags, size), 1)
            told.append(code("cuModuleLoadData", byref(module), image))
        """)
    assert told == [OUT_OF_MEMORY, 0, 0]


@pytest.mark.parametrize("way", ["image", "file"])
def test_packed_images_none_of_which_fits_are_refused_before_the_driver_unpacks_them(
    guest: CudaChild, tmp_path: Path, way: str
) -> None:
    """And of images of which one fits the driver takes which it will; text is its to compile."""
    told = guest(f"""
        import struct
        path = b"{tmp_path}/image"
        ELF, TEXT = 2, 1
        def packed(*images):
            entries = b""
            for kind, mib in images:
                head = struct.pack("<HHIQI", kind, 1, 64, 128, 128)
                entries += head + bytes(36) + struct.pack("<Q", mib * MIB) + bytes(128)
            return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
        def load(*images):
            module = c_void_p()
            if "{way}" == "file":
                open(path, "wb").write(packed(*images))
                return code("cuModuleLoad", byref(module), path), module
            return code("cuModuleLoadData", byref(module), packed(*images)), module
        begin()
        alloc(info()[0] - 6 * MIB)
        before = agree()
        told = [load((ELF, 9), (ELF, 7))[0], peak() - before, agree() - before]
        for images in (((ELF, 5), (ELF, 9)), ((ELF, 5), (TEXT, 9)), ((TEXT, 6), (ELF, 9))):
            result, module = load(*images)
            told += [result, (agree() - before) // MIB]
            ask("cuModuleUnload", module)
        told += [(peak() - before) // MIB, agree() - before]
        """)
    assert told == [OUT_OF_MEMORY, 0, 0, 0, 5, 0, 5, 0, 6, 6, 0]


PTX = """
        HEAD = b"//\\n// made by hand\\n//\\n.version 7.8\\n.target sm_80\\n.address_size 64\\n"
        def ptx(declarations):
            return HEAD + declarations + b"\\n.visible .entry work()\\n{\\n\\tret;\\n}\\n\\0"
        def array(mib, words=b".visible"):
            return words + b" .global .align 8 .b8 a[%d];" % (mib * MIB)
        """


@pytest.mark.parametrize("way", ["image", "file"])
def test_ptx_whose_variables_do_not_fit_is_refused_before_the_driver_compiles_it(
    guest: CudaChild, tmp_path: Path, way: str
) -> None:
    told = guest(f"""
        {PTX}
        path = b"{tmp_path}/image"
        def load(image):
            module = c_void_p()
            if "{way}" == "file":
                open(path, "wb").write(image)
                return code("cuModuleLoad", byref(module), path), module
            return code("cuModuleLoadData", byref(module), image), module
        begin()
        alloc(info()[0] - 6 * MIB)
        before = agree()
        told = [load(ptx(array(7)))[0], agree() - before]
        result, module = load(ptx(array(5)))
        told += [result, (agree() - before) // MIB]
        ask("cuModuleUnload", module)
        told += [agree() - before]
        """)
    assert told == [OUT_OF_MEMORY, 0, 0, 5, 0]


def test_ptx_that_only_mentions_variables_is_loaded(guest: CudaChild) -> None:
    """External variables, and names in instructions, take no memory; an estimate never refuses."""
    told = guest(f"""
        {PTX}
        begin()
        alloc(info()[0] - 1 * MIB)
        before = agree()
        module = c_void_p()
        told = []
        for words in (
            b".extern .global .u32 a[%d];" % (7 * MIB),
            b".visible .func f() {{ ld.global.u32 %r1, [a]; ret; }}",
            b"//" + b"x" * (2 * MIB),
        ):
            told.append(code("cuModuleLoadData", byref(module), ptx(words)))
            if told[-1] == 0:
                ask("cuModuleUnload", module)
            told.append(agree() - before)
        """)
    assert told == [0, 0, 0, 0, OUT_OF_MEMORY, 0]


def test_code_of_unknown_size_is_measured_and_affects_no_other_process(
    node: GpuNode, start_drive: StartDrive
) -> None:
    """Beyond the limit for as long as one load takes; another process loses nothing by it."""
    container = node.container(0, memory_mib=2048)
    loader, other = (start_drive(container).begin(0) for _ in range(2))
    uuid, limit = node.uuids[0], 2048 * MIB

    def used() -> int:
        return sum(use.used_bytes for use in node.card.uses(uuid))

    before = used()
    assert loader.code(f"image {limit}") == OUT_OF_MEMORY
    assert used() == before
    peak = max(use.peak_bytes for use in node.card.uses(uuid) if use.pid == loader.process.pid)
    assert peak >= limit
    assert other.code(f"alloc {limit - before}") == 0
    assert loader.code("image 1") == OUT_OF_MEMORY
    assert used() == limit


def test_device_without_a_share_takes_no_context(node: GpuNode, start_drive: StartDrive) -> None:
    """As a privileged container sees it, or one that was given too many devices."""
    container = node.container(0, memory_mib=2048)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(node.uuids[:2])}
    drive = start_drive(container, env=visible)
    assert drive.code("init") == 0
    assert drive.code("device 1") == OUT_OF_MEMORY
    assert drive.code("device 0") == 0
    assert drive.ask("info")[1] == 2048 * MIB


def test_instance_beside_a_share_has_the_limit_of_the_hardware(
    node: GpuNode, start_drive: StartDrive
) -> None:
    """The file names the shared device only: the instance is made after it was written."""
    instance = "MIG-11111111-2222-3333-4444-555555555555"
    node.nvml.set_migs(1, [Mig(uuid=instance, memory_mib=10_000, compute_units=16)])
    container = node.container(0, memory_mib=2048)
    drive = start_drive(container, env={"CUDA_VISIBLE_DEVICES": instance})
    assert drive.code("init") == 0
    assert drive.code("device 0") == 0
    assert drive.ask("info")[1] > 9000 * MIB


def test_images_that_are_none_are_the_drivers_to_refuse(guest: CudaChild) -> None:
    """A header's offsets are followed only inside the image."""
    told = guest(f"""
        {ELF}
        begin()
        before = agree()
        module = c_void_p()
        nowhere = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 39)
        told = [
            code("cuModuleLoad", byref(module), b"/nowhere/image") != 0,
            code("cuModuleLoadData", byref(module), elf(1 << 62)) != 0,
            code("cuModuleLoadData", byref(module), elf(1 << 39, count=9)) != 0,
            code("cuModuleLoadFatBinary", byref(module), nowhere) != 0,
            agree() - before,
        ]
        """)
    assert told == [True, True, True, True, 0]


def test_memory_kept_by_one_device_is_released_after_a_wait_for_another(guest: CudaChild) -> None:
    told = guest("""
        begin(1)
        enter(0)
        pointer = alloc(4 * MIB, "cuMemAllocAsync", None)
        ask("cuMemFreeAsync", pointer, None)
        enter(1)
        ask("cuCtxSynchronize")
        enter(0)
        ask("cuCtxSynchronize")
        told = [agree(0), agree(1)]
        """)
    assert told == [8 * MIB, 8 * MIB]


def test_unknown_pointers_and_missing_arguments_are_the_drivers_business(
    guest: CudaChild, limiter: Path
) -> None:
    body = """
        ask("cuInit", 0)
        free, total = c_size_t(), c_size_t()
        told = [
            code("cuMemAlloc_v2", byref(c_ulonglong()), c_size_t(1)),
            code("cuMemGetInfo_v2", byref(free), byref(total)),
            code("cuMemAllocAsync", byref(c_ulonglong()), c_size_t(1), None),
            code("cuCtxDestroy_v2", None),
        ]
        begin()
        told += [
            code("cuMemFree_v2", c_ulonglong(0)),
            code("cuMemFree_v2", c_ulonglong(0xdead0000)),
            code("cuMemFreeAsync", c_ulonglong(0xdead0000), None),
            code("cuMemAlloc_v2", None, c_size_t(1)),
            code("cuMemAlloc_v2", byref(c_ulonglong()), c_size_t(0)),
            code("cuMemAllocPitch_v2", None, None, c_size_t(1), c_size_t(1), 4),
            code("cuMemGetInfo_v2", None, None),
            code("cuDeviceTotalMem_v2", None, 0),
            code("cuDeviceTotalMem_v2", byref(total), 99),
            code("cuMemCreate", None, c_size_t(1), None, c_uint64(0)),
            code("cuArrayDestroy", c_void_p(0)),
            code("cuDevicePrimaryCtxRetain", None, 0),
            code("cuDevicePrimaryCtxRelease_v2", 99),
            code("cuMemPoolDestroy", None),
            code("cuGraphExecDestroy", None),
            code("cuModuleUnload", None),
        ]
        """
    assert guest(body) == guest(body, LD_PRELOAD="")


def test_all_questions_for_memory_get_the_same_answer(guest: CudaChild) -> None:
    told = guest("""
        begin()
        alloc(100 * MIB)
        free, total = info()
        whole, handle = c_size_t(), nvml_device()
        ask("cuDeviceTotalMem_v2", byref(whole), 0)
        first = (c_uint64 * 3)()
        nvml.nvmlDeviceGetMemoryInfo(handle, first)
        second = (c_uint64 * 5)()
        second[0] = 40 | 2 << 24
        nvml.nvmlDeviceGetMemoryInfo_v2(handle, second)
        told = [[free, total], whole.value, list(first), list(second)[1:]]
        """)
    free, total, used = (LIMIT_MIB - 108) * MIB, LIMIT_MIB * MIB, 108 * MIB
    assert told == [[free, total], total, [total, free, used], [total, 0, free, used]]


def test_device_without_a_limit_shows_its_own_memory(guest: CudaChild) -> None:
    body = """
        begin()
        alloc(100 * MIB)
        first = (c_uint64 * 3)()
        nvml.nvmlDeviceGetMemoryInfo(nvml_device(), first)
        told = [info(), list(first)]
        """
    assert guest(body, CUDA_DEVICE_MEMORY_LIMIT="0") == guest(body, LD_PRELOAD="")


def test_nvml_lists_the_containers_own_processes(guest: CudaChild, machine: FakeNvml) -> None:
    told = guest("""
        import subprocess, sys
        begin()
        alloc(10 * MIB)
        imports = "from tests.support.cuda_guest import *"
        code_ = imports + "; begin(); alloc(MIB); print(1, flush=True); input()"
        other = subprocess.Popen(
            [sys.executable, "-c", code_], env={**os.environ, "LD_PRELOAD": ""},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        other.stdout.readline()
        handle = nvml_device()
        found = (Process * 8)()
        told = []
        for name in ("Compute", "MPSCompute", "Graphics"):
            count = c_uint(8)
            list_ = getattr(nvml, f"nvmlDeviceGet{name}RunningProcesses_v3")
            answer = list_(handle, byref(count), found)
            told.append([answer, [[p.pid == os.getpid(), p.bytes] for p in found[: count.value]]])
        count = c_uint(0)
        answer = nvml.nvmlDeviceGetComputeRunningProcesses(handle, byref(count), None)
        told.append([answer, count.value])
        other.communicate(b"\\n")
        """)
    assert told[0] == [0, [[True, 18 * MIB]]]
    assert told[1] == [0, []]
    assert told[2] == [0, []]
    assert told[3] == [7, 1]


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
@pytest.mark.parametrize("spills", [False, True], ids=["strict", "oversubscribed"])
@pytest.mark.parametrize("way", ["cuMemAlloc_v2", "cuMemAllocAsync"])
def test_outcome_when_the_card_is_full(
    guest: CudaChild, machine: FakeNvml, way: str, *, spills: bool, full: bool
) -> None:
    """The truth table of docs/limiter-memory-modes.md."""
    if full:
        machine.fault(way, None, OUT_OF_MEMORY)
    more = ', "cuMemAllocAsync", None' if way == "cuMemAllocAsync" else ""
    free = '"cuMemFreeAsync", pointer, None' if more else '"cuMemFree_v2", pointer'
    told = guest(
        f"""
        begin()
        told = [refused(64 * MIB{more}), used() - 8 * MIB]
        if not told[0]:
            pointer = alloc(64 * MIB{more})
            told.append(used() - 8 * MIB)
            ask({free})
            ask("cuCtxSynchronize")
            told.append(used() - 8 * MIB)
        told.append(refused(300 * MIB{more}))
        """,
        CUDA_OVERSUBSCRIBE="true" if spills else "",
    )
    if full and not spills:
        assert told == [True, 0, True]
    else:
        assert told == [False, 0, 64 * MIB, 0, True]


@pytest.mark.parametrize("order", ["1,0", "uuid", "1"])
def test_limits_follow_the_device_in_any_order(
    guest: CudaChild, machine: FakeNvml, order: str
) -> None:
    visible = f"{machine.uuids[1]},{machine.uuids[0]}" if order == "uuid" else order
    told = guest(
        """
        begin(0)
        told = [info()[1]]
        """,
        CUDA_VISIBLE_DEVICES=visible,
        CUDA_DEVICE_MEMORY_LIMIT_0="100m",
        CUDA_DEVICE_MEMORY_LIMIT_1="200m",
    )
    assert told == [200 * MIB]


def test_mig_instance_has_the_limit_of_its_own_place(guest: CudaChild, machine: FakeNvml) -> None:
    machine.set_migs(
        0,
        [Mig(uuid="MIG-11111111-2222-3333-4444-555555555555", memory_mib=10240, compute_units=14)],
    )
    told = guest("""
        begin()
        told = [info()[1], refused(300 * MIB), refused(100 * MIB)]
        """)
    assert told == [LIMIT_MIB * MIB, True, False]


def test_forked_child_is_not_charged_for_its_parent(guest: CudaChild) -> None:
    told = guest("""
        begin()
        pointer = alloc(50 * MIB)
        child = os.fork()
        if child == 0:
            # The driver refuses everything in a child; that must not free what the parent has.
            freed = code("cuMemFree_v2", pointer)
            answer = code("cuMemAlloc_v2", byref(pointer), c_size_t(1))
            os._exit(1 if freed and answer else 0)
        told = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), agree() - 8 * MIB]
        ask("cuMemFree_v2", pointer)
        told.append(agree() - 8 * MIB)
        """)
    assert told == [1, 50 * MIB, 0]


def test_child_of_a_process_that_has_not_used_the_driver_has_accounts_of_its_own(
    guest: CudaChild,
) -> None:
    told = guest("""
        import signal
        children = []
        for _ in range(3):
            ready, tell = os.pipe()
            child = os.fork()
            if child == 0:
                begin()
                alloc(20 * MIB)
                os.write(tell, b"x")
                signal.pause()
            os.read(ready, 1)
            children.append(child)
        begin()
        told = [used() // MIB]
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
        told.append(refused(230 * MIB))
        """)
    assert told == [3 * 28 + 8, False]


def test_function_pointers_are_replaced_in_the_requested_form(guest: CudaChild) -> None:
    told = guest("""
        ask("cuInit", 0)
        forms = {
            "cuMemAlloc_v2": ("cuMemAlloc", 12000, 0),
            "cuMemAlloc": ("cuMemAlloc", 3010, 0),
            "cuLaunchKernel": ("cuLaunchKernel", 12000, GLOBAL),
            "cuLaunchKernel_ptsz": ("cuLaunchKernel", 12000, PER_THREAD),
            "cuMemAllocAsync_ptsz": ("cuMemAllocAsync", 11020, PER_THREAD),
            "cuCtxCreate_v3": ("cuCtxCreate", 11040, 0),
            "cuCtxCreate_v4": ("cuCtxCreate", 13000, 0),
            "cuGraphAddNode_v2": ("cuGraphAddNode", 12030, 0),
            "cuGetProcAddress_v2": ("cuGetProcAddress", 12000, 0),
        }
        told = [[form for form, (name, version, flags) in forms.items()
                 if handed_out(name, version, flags) != address(form)]]
        told.append(sorted({os.path.basename(library_of(address(form))) for form in forms}))
        told.append(os.path.basename(library_of(handed_out("cuMemAdvise", 12000))))
        told.append(handed_out("cuMemAlloc", 2000) == address("cuMemAlloc"))
        told.append(handed_out("cuMadeUpName", 12000))
        """)
    assert told == [[], ["libvgpu.so"], "libcuda.so.1", True, 0]


def test_threads_share_the_tables(guest: CudaChild) -> None:
    """The table of pointers belongs to its first thread until another one comes."""
    told = guest("""
        import threading
        begin()
        context = c_void_p()
        ask("cuCtxGetCurrent", byref(context))
        kept = [alloc(4096) for _ in range(100)]

        def work(number):
            ask("cuCtxSetCurrent", context)
            for turn in range(300):
                pointers = [alloc(4096 * (number + 1)) for _ in range(3)]
                for pointer in pointers:
                    ask("cuMemFree_v2", pointer)
                if turn < 25:
                    ask("cuMemFree_v2", kept[number * 25 + turn])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            ask("cuMemFree_v2", alloc(8192))
        for thread in threads:
            thread.join()
        told = agree() - 8 * MIB
        """)
    assert told == 0
