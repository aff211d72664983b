# SPDX-License-Identifier: Apache-2.0
"""The fake driver's checkpoint functions have the conditions of the real ones, fatal ones too."""

import signal
import time
from collections.abc import Callable

import pytest

from hami_sim.hardware.fake_nvml import Mig
from tests.fakes.gpucontainers import GpuNode
from tests.native.conftest import MakeNode
from tests.support.drive import NOT_INITIALIZED, OUT_OF_MEMORY, Drive

BareDrive = Callable[..., Drive]

pytestmark = pytest.mark.alone

MIB = 1 << 20
CONTEXT = 64 * MIB
OPERATING_SYSTEM = 304
ILLEGAL_STATE = 401
NOT_READY = 600
CONTEXT_DESTROYED = 709
NOT_SUPPORTED = 801
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
MOMENT_S = 0.3
PATIENCE_S = 10.0


@pytest.fixture
def machine(make_node: MakeNode) -> GpuNode:
    return make_node("8xH100", is_limited=False)


@pytest.fixture
def target(machine: GpuNode, bare_drive: BareDrive) -> Drive:
    return bare_drive(machine).begin()


@pytest.fixture
def controller(machine: GpuNode, bare_drive: BareDrive) -> Drive:
    drive = bare_drive(machine)
    drive.ask("init")
    return drive


def park(controller: Drive, target: Drive) -> None:
    controller.ask(f"lock {target.process.pid} 5000")
    controller.ask(f"checkpoint {target.process.pid}")


def bring_back(controller: Drive, target: Drive) -> None:
    controller.ask(f"restore {target.process.pid}")
    controller.ask(f"unlock {target.process.pid}")


def state_of(controller: Drive, target: Drive) -> int:
    return controller.ask(f"state {target.process.pid}")[0]


def await_state(controller: Drive, target: Drive, state: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while state_of(controller, target) != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_contents_return_to_their_addresses_after_others_used_the_memory(
    machine: GpuNode, bare_drive: BareDrive, target: Drive, controller: Drive
) -> None:
    for made in ("alloc 100M", "alloc 1000", "async 3M", "vmm 4M", "pool 2M", "alloc 70M"):
        (number,) = target.ask(made)
        target.ask(f"write {number} {number}")
    used = machine.card.used_bytes(machine.uuids[0])
    park(controller, target)
    assert machine.card.used_bytes(machine.uuids[0]) == 0
    assert state_of(controller, target) == CHECKPOINTED
    rival = bare_drive(machine).begin()
    rival.send("processes")
    assert [word.split(":")[0] for word in rival.answer()] == [str(rival.process.pid)]
    rival.ask("alloc 79G")
    rival.ask("alloc 1M")
    rival.ask("write 1 7")
    rival.kill()
    bring_back(controller, target)
    assert state_of(controller, target) == RUNNING
    assert machine.card.used_bytes(machine.uuids[0]) == used
    assert [target.ask(f"check {number} {number}") for number in range(6)] == [[0]] * 6
    assert target.ask("held") == [0]


def test_calls_wait_in_a_locked_process_and_go_on_after_it(
    target: Drive, controller: Drive
) -> None:
    target.ask("alloc 1M")
    target.ask("write 0 1")
    park(controller, target)
    target.send("check 0 1")
    assert not target.has_answer(MOMENT_S)
    controller.ask(f"restore {target.process.pid}")
    assert not target.has_answer(MOMENT_S)
    controller.ask(f"unlock {target.process.pid}")
    assert target.answer() == ["0"]
    assert target.ask("held") == [1]


def test_synchronization_returns_at_once_in_a_locked_and_crashes_a_checkpointed_process(
    target: Drive, controller: Drive
) -> None:
    controller.ask(f"lock {target.process.pid} 0")
    assert target.code("sync") == 0
    controller.ask(f"checkpoint {target.process.pid}")
    target.send("sync")
    assert target.process.wait(PATIENCE_S) == -signal.SIGSEGV


def test_lock_waits_for_submitted_work_until_its_timeout(target: Drive, controller: Drive) -> None:
    target.send("work fixed_100ms 1000 1500 plain 8")
    time.sleep(MOMENT_S)
    assert controller.code(f"lock {target.process.pid} 20") == NOT_READY
    assert state_of(controller, target) == RUNNING
    target.answer("work")
    target.send("work fixed_100ms 1000 300 plain 2")
    time.sleep(MOMENT_S / 2)
    controller.ask(f"lock {target.process.pid} 5000")
    assert state_of(controller, target) == LOCKED
    controller.ask(f"unlock {target.process.pid}")
    target.answer("work")


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ((), ("checkpoint", "restore", "unlock")),
        (("lock",), ("lock", "restore")),
        (("lock", "checkpoint"), ("lock", "checkpoint", "unlock")),
        (("lock", "checkpoint", "restore"), ("lock", "restore")),
    ],
)
def test_operations_in_the_wrong_state_change_nothing(
    target: Drive, controller: Drive, before: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    for operation in before:
        controller.ask(f"{operation} {target.process.pid}")
    state = state_of(controller, target)
    for operation in wrong:
        assert controller.code(f"{operation} {target.process.pid}") == ILLEGAL_STATE
    assert state_of(controller, target) == state


def test_restore_without_room_fails_for_good_and_keeps_a_part(
    machine: GpuNode, bare_drive: BareDrive, target: Drive, controller: Drive
) -> None:
    target.ask("alloc 40G")
    park(controller, target)
    rival = bare_drive(machine).begin()
    rival.ask("alloc 60G")
    assert controller.code(f"restore {target.process.pid}") == OUT_OF_MEMORY
    assert state_of(controller, target) == FAILED
    (kept,) = (
        use.used_bytes
        for use in machine.card.uses(machine.uuids[0])
        if use.pid == target.process.pid
    )
    assert 0 < kept < 40 << 30
    rival.kill()
    assert controller.code(f"restore {target.process.pid}") == ILLEGAL_STATE


@pytest.mark.parametrize("made", ["managed 1M", "alloc 1M"])
def test_managed_and_shared_memory_cannot_be_moved_and_destroys_the_contexts(
    target: Drive, controller: Drive, made: str
) -> None:
    target.ask(made)
    if made.startswith("alloc"):
        target.ask("share 0")
    controller.ask(f"lock {target.process.pid} 0")
    assert controller.code(f"checkpoint {target.process.pid}") == NOT_SUPPORTED
    assert state_of(controller, target) == FAILED
    assert target.code("alloc 1M") == CONTEXT_DESTROYED


def test_mig_instances_cannot_be_moved(
    machine: GpuNode, bare_drive: BareDrive, controller: Drive
) -> None:
    instance = "MIG-11111111-2222-3333-4444-555555555555"
    machine.nvml.set_migs(0, [Mig(uuid=instance, memory_mib=10_000, compute_units=16)])
    target = bare_drive(machine, env={"CUDA_VISIBLE_DEVICES": instance}).begin()
    controller.ask(f"lock {target.process.pid} 0")
    assert controller.code(f"checkpoint {target.process.pid}") == OUT_OF_MEMORY
    controller.ask(f"unlock {target.process.pid}")
    assert target.code("alloc 1M") == 0


def test_a_stopped_process_blocks_its_own_requests_only(
    machine: GpuNode, bare_drive: BareDrive, target: Drive, controller: Drive
) -> None:
    other = bare_drive(machine).begin()
    second = bare_drive(machine)
    target.stop()
    controller.send(f"lock {target.process.pid} 10")
    assert not controller.has_answer(MOMENT_S)
    second.ask(f"lock {other.process.pid} 10")
    second.ask(f"unlock {other.process.pid}")
    target.resume()
    controller.answer("lock")


def test_processes_without_cuda_and_pids_without_process_have_different_errors(
    machine: GpuNode, bare_drive: BareDrive, controller: Drive
) -> None:
    idle = bare_drive(machine)
    assert controller.code(f"state {idle.process.pid}") == NOT_INITIALIZED
    idle.kill()
    assert controller.code(f"state {idle.process.pid}") == OPERATING_SYSTEM


def test_restore_needs_a_caller_that_has_initialized_the_driver(
    machine: GpuNode, bare_drive: BareDrive, target: Drive
) -> None:
    caller = bare_drive(machine)
    park(caller, target)
    assert caller.code(f"restore {target.process.pid}") == NOT_INITIALIZED
    caller.ask("init")
    bring_back(caller, target)


@pytest.mark.parametrize(
    ("operation", "key", "after"),
    [
        ("checkpoint", "checkpoint_bytes_per_s", CHECKPOINTED),
        ("restore", "restore_bytes_per_s", LOCKED),
    ],
)
def test_an_operation_outlives_its_caller_and_takes_its_time(
    machine: GpuNode, bare_drive: BareDrive, controller: Drive, operation: str, key: str, after: int
) -> None:
    machine.nvml.set_key(0, key, str(1 << 30))
    target = bare_drive(machine).begin()
    target.ask("alloc 960M")
    controller.ask(f"lock {target.process.pid} 0")
    if operation == "restore":
        controller.ask(f"checkpoint {target.process.pid}")
    caller = bare_drive(machine)
    caller.ask("init")
    began = time.monotonic()
    caller.send(f"{operation} {target.process.pid}")
    assert not caller.has_answer(MOMENT_S)
    caller.kill()
    await_state(controller, target, after)
    assert time.monotonic() - began > 0.9


def test_failures_are_injected_like_those_of_other_functions(
    machine: GpuNode, target: Drive, controller: Drive
) -> None:
    machine.nvml.fault("cuCheckpointProcessLock", None, OPERATING_SYSTEM)
    assert controller.code(f"lock {target.process.pid} 0") == OPERATING_SYSTEM
    assert state_of(controller, target) == RUNNING
