# SPDX-License-Identifier: Apache-2.0
"""``hami-recall`` makes one checkpoint call at a time per process, each with a deadline."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.gpucontainers import GpuNode
from tests.native.conftest import MakeNode
from tests.support.drive import Drive
from tests.support.recall_helper import RecallHelper, is_running
from tools import build_native

BareDrive = Callable[..., Drive]
StartHelper = Callable[[], RecallHelper]

pytestmark = pytest.mark.alone

GIB = 1 << 30
PATIENCE_S = 10.0
MOMENT_S = 0.3


@pytest.fixture(scope="session")
def program() -> Path:
    return build_native.build_helper()


@pytest.fixture
def machine(make_node: MakeNode) -> GpuNode:
    return make_node("8xH100", is_limited=False)


@pytest.fixture
def start_helper(machine: GpuNode, program: Path) -> Iterator[StartHelper]:
    with ExitStack() as stack:

        def start() -> RecallHelper:
            return stack.enter_context(RecallHelper(program, machine.environment))

        yield start


@pytest.fixture
def helper(start_helper: StartHelper) -> RecallHelper:
    return start_helper()


@pytest.fixture
def target(machine: GpuNode, bare_drive: BareDrive) -> Drive:
    drive = bare_drive(machine).begin()
    drive.ask("alloc 3M")
    drive.ask("write 0 26")
    return drive


def await_state(helper: RecallHelper, target: Drive, state: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := helper.ask(f"state {target.process.pid}")) != f"ok {state}":
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_a_process_is_moved_to_the_host_and_back(
    machine: GpuNode, helper: RecallHelper, target: Drive
) -> None:
    pid = target.process.pid
    used = machine.card.used_bytes(machine.uuids[0])
    assert helper.ask(f"state {pid}") == "ok running"
    assert helper.ask(f"lock {pid} 1000") == "ok"
    assert helper.ask(f"state {pid}") == "ok locked"
    assert helper.ask(f"checkpoint {pid}") == "ok"
    assert helper.ask(f"state {pid}") == "ok checkpointed"
    assert machine.card.used_bytes(machine.uuids[0]) == 0
    assert helper.ask(f"restore {pid}") == "ok"
    assert helper.ask(f"state {pid}") == "ok locked"
    assert helper.ask(f"unlock {pid}") == "ok"
    assert machine.card.used_bytes(machine.uuids[0]) == used
    assert target.ask("check 0 26") == [0]


def test_errors_are_those_of_the_driver(
    machine: GpuNode, bare_drive: BareDrive, helper: RecallHelper, target: Drive
) -> None:
    idle = bare_drive(machine)
    pid = target.process.pid
    assert helper.ask(f"state {idle.process.pid}") == "error 3 CUDA_ERROR_NOT_INITIALIZED"
    idle.kill()
    assert helper.ask(f"lock {idle.process.pid} 5") == "error 304 CUDA_ERROR_OPERATING_SYSTEM"
    assert helper.ask(f"unlock {pid}") == "error 401 CUDA_ERROR_ILLEGAL_STATE"
    target.send("launch fixed_900ms 1 1")
    time.sleep(MOMENT_S)
    assert helper.ask(f"lock {pid} 20") == "error 600 CUDA_ERROR_NOT_READY"
    target.answer("launch")
    target.ask("managed 1M")
    assert helper.ask(f"lock {pid} 1000") == "ok"
    assert helper.ask(f"checkpoint {pid}") == "error 801 CUDA_ERROR_NOT_SUPPORTED"
    assert helper.ask(f"state {pid}") == "ok failed"


def test_restore_without_room_is_out_of_memory(
    machine: GpuNode, bare_drive: BareDrive, helper: RecallHelper
) -> None:
    target = bare_drive(machine).begin()
    target.ask("alloc 40G")
    pid = target.process.pid
    assert [helper.ask(one) for one in (f"lock {pid} 1000", f"checkpoint {pid}")] == ["ok", "ok"]
    bare_drive(machine).begin().ask("alloc 60G")
    assert helper.ask(f"restore {pid}") == "error 2 CUDA_ERROR_OUT_OF_MEMORY"
    assert helper.ask(f"state {pid}") == "ok failed"


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        (b"7", "7"),
        (b"7 lock", "7"),
        (b"7 lock 12", "7"),
        (b"7 lock 12 0", "7"),
        (b"7 lock -1 5", "7"),
        (b"7 lock 12 5x", "7"),
        (b"7 lock 99999999999 5", "7"),
        (b"7 state", "7"),
        (b"7 state 0", "7"),
        (b"7 state 12 5 6", "7"),
        (b"7 kill 12", "7"),
        (b" ", "?"),
        (b"x" * 60 + b" state 1", "?"),
        (b"7 state 12 " + b"1" * 200, "7"),
        (b"7 state 12" + b" " * 150 + b"34", "7"),
    ],
)
def test_malformed_requests_are_refused_and_change_nothing(
    helper: RecallHelper, text: bytes, id_: str
) -> None:
    helper.raw_send(text)
    assert helper.raw_answer() == f"{id_} error 1 CUDA_ERROR_INVALID_VALUE"
    assert helper.ask("state 2147483647") == "error 304 CUDA_ERROR_OPERATING_SYSTEM"


def test_without_a_driver_every_request_is_answered(program: Path) -> None:
    with RecallHelper(program, {"PATH": "/usr/bin:/bin"}) as helper:
        for _ in range(3):
            text = helper.ask("state 1")
            assert text == "error 303 CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"


@pytest.mark.parametrize(
    ("result", "answer"), [(0, "error 801 CUDA_ERROR"), (100, "error 100 CUDA_ERROR")]
)
def test_a_driver_without_checkpoints_or_devices_is_reported(
    program: Path, tmp_path: Path, result: int, answer: str
) -> None:
    source, driver = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text(f"int cuInit(unsigned flags) {{ return flags ? 1 : {result}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, source], check=True)
    with RecallHelper(program, {"PATH": "/usr/bin:/bin"}, driver) as helper:
        assert [helper.ask("lock 1 5"), helper.ask("state 1")] == [answer] * 2


def test_a_stopped_process_blocks_only_its_own_requests_until_their_deadline(
    machine: GpuNode, bare_drive: BareDrive, helper: RecallHelper, target: Drive
) -> None:
    other = bare_drive(machine).begin()
    target.stop()
    began = time.monotonic()
    first = helper.send(f"state {target.process.pid} 700")
    second = helper.send(f"state {target.process.pid} 300")
    assert helper.ask(f"state {other.process.pid}") == "ok running"
    assert time.monotonic() - began < 0.6
    assert helper.answer(first) == "error deadline"
    assert 0.6 < time.monotonic() - began < 2
    assert helper.answer(second) == "error deadline"
    assert time.monotonic() - began > 0.9
    target.resume()
    assert helper.ask(f"state {target.process.pid}") == "ok running"
    assert helper.arrived == [3, 1, 2, 4]


def test_requests_of_one_process_keep_their_order_and_several_processes_run_at_once(
    machine: GpuNode, bare_drive: BareDrive, helper: RecallHelper
) -> None:
    for key in ("checkpoint_bytes_per_s", "restore_bytes_per_s"):
        machine.nvml.set_key(0, key, str(GIB))
    targets = [bare_drive(machine).begin() for _ in range(3)]
    for target in targets:
        target.ask("alloc 448M")
    operations = ("lock {} 1000", "checkpoint {}", "state {}", "restore {}", "unlock {}")
    began = time.monotonic()
    sent = [[helper.send(one.format(each.process.pid)) for one in operations] for each in targets]
    answers = [[helper.answer(number) for number in numbers] for numbers in sent]
    assert answers == [["ok", "ok", "ok checkpointed", "ok", "ok"]] * 3
    assert 0.9 < time.monotonic() - began < 2.5
    for numbers in sent:
        assert [one for one in helper.arrived if one in numbers] == numbers


@pytest.mark.parametrize(
    ("before", "operation", "after"),
    [
        ((), "lock {} 5000", "locked"),
        (("lock {} 5000",), "checkpoint {}", "checkpointed"),
        (("lock {} 5000", "checkpoint {}"), "restore {}", "locked"),
    ],
)
def test_operations_are_finished_when_the_helper_is_killed(
    machine: GpuNode,
    bare_drive: BareDrive,
    start_helper: StartHelper,
    before: tuple[str, ...],
    operation: str,
    after: str,
) -> None:
    target = bare_drive(machine).begin()
    target.ask("alloc 448M")
    target.ask("alloc 3M")
    target.ask("write 1 26")
    pid = target.process.pid
    first, second = start_helper(), start_helper()
    assert [first.ask(one.format(pid)) for one in before] == ["ok"] * len(before)
    for key in ("checkpoint_bytes_per_s", "restore_bytes_per_s"):
        machine.nvml.set_key(0, key, str(GIB))
    if not before:
        target.send("launch fixed_900ms 1 1")
        time.sleep(MOMENT_S)
    workers = first.workers
    first.send(operation.format(pid))
    time.sleep(0.1)
    first.kill()
    await_state(second, target, after)
    if after == "checkpointed":
        assert second.ask(f"restore {pid}") == "ok"
    assert second.ask(f"unlock {pid}") == "ok"
    if not before:
        target.answer("launch")
    assert target.ask("check 1 26") == [0]
    _await_end(workers)


def test_it_ends_with_its_socket(helper: RecallHelper, target: Drive) -> None:
    assert helper.ask(f"state {target.process.pid}") == "ok running"
    workers = helper.workers
    assert len(workers) >= 1
    assert helper.close() == 0
    _await_end(workers)


def test_a_worker_that_dies_is_replaced(helper: RecallHelper, target: Drive) -> None:
    request = f"state {target.process.pid}"
    assert helper.ask(request) == "ok running"
    for signal_number in (signal.SIGKILL, signal.SIGSEGV):
        target.stop()
        number = helper.send(request)
        time.sleep(MOMENT_S)
        workers = helper.workers
        for worker in workers:
            os.kill(worker, signal_number)
        assert helper.answer(number) == "error 999 CUDA_ERROR_UNKNOWN"
        _await_end(workers)
        target.resume()
        assert helper.ask(request) == "ok running"


def test_it_refuses_to_run_without_the_socket(program: Path) -> None:
    """It is started by the agent only."""
    done = subprocess.run([program], capture_output=True, text=True, check=False, close_fds=True)
    assert done.returncode == 2
    assert "descriptor 3" in done.stderr


class Fleet:
    """Processes of 30 GiB on a card of 80, of which two at most are resident."""

    def __init__(self, helper: RecallHelper, drives: Sequence[Drive]) -> None:
        self._helper = helper
        self._resident: list[int] = []
        self._seeds = [0] * len(drives)
        self._drives = drives
        for index, drive in enumerate(drives):
            self._make_room(index)
            drive.begin()
            for size in ("30G", "1M", "1M"):
                drive.ask(f"alloc {size}")
            self._resident.append(index)
            self.write(index)

    def is_resident(self, index: int) -> bool:
        return index in self._resident

    def park(self, index: int) -> None:
        self._operate(index, "lock {} 1000", "checkpoint {}")
        self._resident.remove(index)

    def bring_back(self, index: int) -> None:
        self._make_room(index)
        self._operate(index, "restore {}", "unlock {}")
        self._resident.append(index)

    def write(self, index: int) -> None:
        self._seeds[index] += 1
        for number in (1, 2):
            self._drives[index].ask(f"write {number} {self._seeds[index]}")

    def check(self, index: int) -> None:
        for number in (1, 2):
            assert self._drives[index].ask(f"check {number} {self._seeds[index]}") == [0]

    def _make_room(self, index: int) -> None:
        if len(self._resident) == 2 and index not in self._resident:
            self.park(self._resident[0])

    def _operate(self, index: int, *operations: str) -> None:
        pid = self._drives[index].process.pid
        assert [self._helper.ask(one.format(pid)) for one in operations] == ["ok"] * len(operations)


def test_random_operations_keep_all_contents_and_never_exceed_the_card(
    machine: GpuNode, bare_drive: BareDrive, helper: RecallHelper
) -> None:
    choose = random.Random(26)
    fleet = Fleet(helper, [bare_drive(machine) for _ in range(3)])
    for _ in range(200):
        index = choose.randrange(3)
        if not fleet.is_resident(index):
            fleet.bring_back(index)
        operation = choose.choice((fleet.park, fleet.check, fleet.write))
        operation(index)
        assert machine.card.used_bytes(machine.uuids[0]) <= 80 * GIB
    for index in range(3):
        if not fleet.is_resident(index):
            fleet.bring_back(index)
        fleet.check(index)


def _await_end(pids: tuple[int, ...]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
