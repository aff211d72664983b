# SPDX-License-Identifier: Apache-2.0
"""The fake driver keeps the guarantees that its users need: true counts, shared time, death."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import Mig
from tests.fakes.gpucontainers import GpuNode
from tests.support.drive import NOT_INITIALIZED, OUT_OF_MEMORY, Drive, DriverError

pytestmark = pytest.mark.alone

MIB = 1 << 20
CONTEXT = 64 * MIB

BareDrive = Callable[..., Drive]


@pytest.fixture
def machine(make_node: Callable[..., GpuNode]) -> GpuNode:
    return make_node("8xH100", is_limited=False)


@pytest.mark.parametrize("way", ["link", "dlsym", "proc"])
def test_memory_is_counted_whichever_way_the_driver_is_reached(
    machine: GpuNode, bare_drive: BareDrive, way: str
) -> None:
    drive = bare_drive(machine, way=way).begin()
    drive.ask("alloc 100M")
    drive.ask("managed 10M")
    drive.ask("pitch 1000 100")
    drive.ask("vmm 4M")
    drive.ask("array 256 128 0")
    drive.ask("mip 64 64 3")
    drive.ask("image 12345")
    expected = CONTEXT + 114 * MIB + 1024 * 100 + 256 * 128 * 4
    expected += (64 * 64 + 32 * 32 + 16 * 16) * 4 + 12345
    assert machine.card.used_bytes(machine.uuids[0]) == expected
    assert drive.used_bytes == expected
    for number in range(6):
        drive.ask(f"free {number}")
    drive.ask("unimage")
    assert machine.card.used_bytes(machine.uuids[0]) == CONTEXT
    drive.ask("release 0")
    assert machine.card.used_bytes(machine.uuids[0]) == 0


def test_pools_keep_memory_above_use_until_a_synchronization(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    drive = bare_drive(machine).begin()
    drive.ask("threshold 8M")
    drive.ask("async 20M")
    assert drive.used_bytes == CONTEXT + 20 * MIB
    drive.ask("free 0")
    assert drive.used_bytes == CONTEXT + 20 * MIB
    drive.ask("sync")
    assert drive.used_bytes == CONTEXT + 8 * MIB
    drive.ask("trim")
    assert drive.used_bytes == CONTEXT


def test_killed_process_frees_its_memory_at_once(machine: GpuNode, bare_drive: BareDrive) -> None:
    survivor = bare_drive(machine).begin()
    with ExitStack() as stack:
        for _ in range(3):
            drive = bare_drive(machine).begin()
            drive.ask("alloc 20G")
            stack.callback(drive.kill)
        assert survivor.code("alloc 70G") == OUT_OF_MEMORY
    assert [use.pid for use in machine.card.uses(machine.uuids[0])] == [survivor.process.pid]
    assert survivor.code("alloc 70G") == 0


def test_device_allocates_exactly_its_memory(machine: GpuNode, bare_drive: BareDrive) -> None:
    a = bare_drive(machine).begin()
    b = bare_drive(machine).begin()
    while a.free_bytes > 1 << 30:
        a.ask("alloc 1G")
        if b.free_bytes > 1 << 30:
            b.ask("alloc 512M")
    left = a.free_bytes
    assert b.code(f"alloc {left + 1}") == OUT_OF_MEMORY
    assert b.code(f"alloc {left}") == 0
    assert a.code("alloc 1") == OUT_OF_MEMORY


def test_visible_devices_are_chosen_by_number_uuid_prefix_and_order(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    chosen = f"3,{machine.uuids[1][:12]},0"
    drive = bare_drive(machine, env={"CUDA_VISIBLE_DEVICES": chosen})
    drive.ask("init")
    assert drive.ask("count") == [3]
    for ordinal in range(3):
        drive.ask(f"device {ordinal}")
        drive.ask(f"alloc {ordinal + 1}M")
    for ordinal, index in enumerate((3, 1, 0)):
        used = machine.card.used_bytes(machine.uuids[index])
        assert used == CONTEXT + (ordinal + 1) * MIB


def test_list_of_devices_ends_at_the_first_wrong_entry(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    drive = bare_drive(machine, env={"CUDA_VISIBLE_DEVICES": "2,99,1"})
    drive.ask("init")
    assert drive.ask("count") == [1]
    assert bare_drive(machine, env={"CUDA_VISIBLE_DEVICES": ""}).code("init") == 100


def test_devices_without_a_node_are_not_there(
    machine: GpuNode, bare_drive: BareDrive, tmp_path: Path
) -> None:
    (tmp_path / "nvidia2").touch()
    nodes = {"FAKE_NVML_NODES": f"{tmp_path}/nvidia"}
    drive = bare_drive(machine, env=nodes).begin()
    assert drive.ask("count") == [1]
    drive.ask("alloc 1M")
    assert machine.card.used_bytes(machine.uuids[2]) == CONTEXT + MIB
    assert bare_drive(machine, env={**nodes, "CUDA_VISIBLE_DEVICES": "1"}).code("init") == 100


def test_mig_instance_is_a_device_of_its_own(machine: GpuNode, bare_drive: BareDrive) -> None:
    instance = "MIG-11111111-2222-3333-4444-555555555555"
    machine.nvml.set_migs(0, [Mig(uuid=instance, memory_mib=10_000, compute_units=16)])
    drive = bare_drive(machine, env={"CUDA_VISIBLE_DEVICES": instance}).begin()
    assert drive.ask("total 0") == [10_000 * MIB]
    assert drive.code("alloc 11G") == OUT_OF_MEMORY
    drive.ask("alloc 1G")
    assert machine.card.used_bytes(instance) == CONTEXT + 1024 * MIB


def test_child_of_a_process_that_used_the_driver_cannot_use_it(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    fresh = bare_drive(machine)
    assert fresh.ask("spawn")
    fresh.ask("reap")
    used = bare_drive(machine).begin()
    assert used.code("spawn") == NOT_INITIALIZED
    used.ask("alloc 1M")
    used.ask("reap")


def test_nvml_shows_the_memory_of_processes(machine: GpuNode, bare_drive: BareDrive) -> None:
    drives = [bare_drive(machine).begin() for _ in range(2)]
    drives[0].ask("alloc 100M")
    drives[1].ask("alloc 200M")
    drives[0].send("processes")
    shown = dict(word.split(":") for word in drives[0].answer())
    assert {int(pid): int(used) for pid, used in shown.items()} == {
        drives[0].process.pid: CONTEXT + 100 * MIB,
        drives[1].process.pid: CONTEXT + 200 * MIB,
    }
    total, used, free, _, used_v2, _ = drives[0].ask("nvml")
    assert used_v2 == 2 * CONTEXT + 300 * MIB
    assert used + free == total


def test_fault_reaches_a_running_process(machine: GpuNode, bare_drive: BareDrive) -> None:
    drive = bare_drive(machine).begin()
    drive.ask("alloc 1M")
    machine.nvml.fault("cuMemAlloc_v2", None, 719)
    assert drive.code("alloc 1M") == 719
    machine.nvml.clear_faults()
    assert drive.code("alloc 1M") == 0


def served_ns(machine: GpuNode, drive: Drive) -> int:
    uses = machine.card.uses(machine.uuids[0])
    return next(use.served_ns for use in uses if use.pid == drive.process.pid)


def test_lone_process_has_all_the_time(machine: GpuNode, bare_drive: BareDrive) -> None:
    drive = bare_drive(machine).begin()
    launches, elapsed, _ = drive.ask("work fixed_1ms 1 300")
    assert served_ns(machine, drive) == launches * 1_000_000
    assert elapsed >= launches * 1_000_000


def test_two_processes_take_turns(machine: GpuNode, bare_drive: BareDrive) -> None:
    drives = [bare_drive(machine).begin() for _ in range(2)]
    for drive in drives:
        drive.send("work fixed_500us 1 1000 plain 64")
    for drive in drives:
        drive.answer()
    a, b = (served_ns(machine, drive) for drive in drives)
    assert 0.8 < a / b < 1.25


def test_kernels_overlap_only_while_processors_are_left(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    drive = bare_drive(machine).begin()
    drive.ask("launch block_1ms 132 1")
    assert served_ns(machine, drive) == 1_000_000
    drive.ask("launch block_1ms 133 1")
    assert served_ns(machine, drive) == 3_000_000
    drive.ask("launch fixed_2ms 1 4 graph")
    assert served_ns(machine, drive) == 11_000_000


def test_work_of_a_killed_process_is_dropped(machine: GpuNode, bare_drive: BareDrive) -> None:
    killed = bare_drive(machine).begin()
    killed.send("launch fixed_100ms 1 1000")
    deadline = time.monotonic() + 20
    while machine.card.served_ns(machine.uuids[0]) == 0:
        assert time.monotonic() < deadline
        queued = machine.card.uses(machine.uuids[0])
        if queued and queued[0].wanted_ns > 0:
            break
        time.sleep(0.01)
    killed.kill()
    drive = bare_drive(machine).begin()
    before = time.monotonic()
    drive.ask("launch fixed_20ms 1 5")
    assert time.monotonic() - before < 10  # 100 s of the dead are not waited for
    assert [use.pid for use in machine.card.uses(machine.uuids[0])] == [drive.process.pid]


@pytest.mark.parametrize("seed", range(3))
def test_counts_survive_kills_at_any_moment(
    machine: GpuNode, bare_drive: BareDrive, seed: int
) -> None:
    observer = bare_drive(machine).begin()
    for round_number in range(8):
        drives = [bare_drive(machine).begin() for _ in range(3)]
        for drive in drives:
            drive.send("fill 1M 20000")
        time.sleep((seed * 7 + round_number * 3) % 20 / 1000)  # where the kill lands is the point
        for drive in drives:
            drive.process.kill()
        for drive in drives:
            drive.close()
        assert machine.card.used_bytes(machine.uuids[0]) == CONTEXT
        assert observer.used_bytes <= 8 * CONTEXT + 60_000 * MIB
    deadline = time.monotonic() + 5
    while observer.used_bytes != CONTEXT:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert observer.code("alloc 70G") == 0


def test_every_call_fails_before_initialization(machine: GpuNode, bare_drive: BareDrive) -> None:
    drive = bare_drive(machine)
    with pytest.raises(DriverError) as failed:
        drive.ask("alloc 1M")
    assert failed.value.code == NOT_INITIALIZED


GIB = 1 << 30


def migrating(machine: GpuNode, bytes_per_s: int) -> None:
    machine.nvml.set_key(0, "memory_total", str(2 * GIB))
    machine.nvml.set_key(0, "memory_reserved", "0")
    machine.nvml.set_key(0, "migration_bytes_per_s", str(bytes_per_s))


def launch(drive: Drive) -> None:
    drive.ask("launch fixed_10us 1 1")
    drive.ask("sync")


def test_managed_memory_exceeds_the_device_and_is_moved_by_launches(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    migrating(machine, 10 * GIB)
    first, second = bare_drive(machine).begin(), bare_drive(machine).begin()
    for drive in (first, second):
        drive.ask("managed 1536M")
    assert first.used_bytes == 2 * CONTEXT
    launch(first)
    assert first.used_bytes == 2 * CONTEXT + 1536 * MIB
    launch(second)
    assert first.used_bytes == 2 * GIB
    second.ask("free 0")
    assert first.used_bytes == 2 * GIB - 1536 * MIB
    launch(first)
    first.ask("free 0")
    assert first.used_bytes == 2 * CONTEXT
    second.close()
    with pytest.raises(DriverError) as refused:
        first.ask("alloc 2G")
    assert refused.value.code == OUT_OF_MEMORY


def test_processes_that_move_each_others_pages_get_little_done(
    machine: GpuNode, bare_drive: BareDrive
) -> None:
    """Alone, memory stays on the device; together, moving it takes most of the time."""
    migrating(machine, 10 * GIB)
    drives = [bare_drive(machine).begin() for _ in range(2)]
    for drive in drives:
        drive.ask("managed 1536M")
    launch(drives[0])
    alone = drives[0].ask("work fixed_1ms 1 500 plain 1")[0]
    for drive in drives:
        drive.send("work fixed_1ms 1 1500 plain 1")
    together = [int(drive.answer()[0]) for drive in drives]
    assert sum(together) < alone, (alone, together)
