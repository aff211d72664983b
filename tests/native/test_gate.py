# SPDX-License-Identifier: Apache-2.0
"""A closed gate keeps every thread out of the driver, and the processes report what they do."""

import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import StartDrive
from tests.support.accounting import ADDRESS, PLAIN, THREAD, build, run
from tests.support.drive import NOT_INITIALIZED, Drive
from tests.support.gate import (
    BYTES,
    FILE,
    LAYOUT,
    MAGIC,
    QUANTUM_FILE,
    Gate,
    bind_bell,
    next_report,
    park_at_random,
)

pytestmark = pytest.mark.alone

MOMENT_S = 0.4
TOUCHED_AT = 64 + 24
"""Of the region: behind the header, in the control line."""


@pytest.fixture
def container(node: GpuNode) -> GpuContainer:
    return node.container(0, memory_mib=4000)


@pytest.fixture
def gate(container: GpuContainer) -> Iterator[Gate]:
    with Gate(container) as made:
        yield made


@pytest.fixture
def controller(node: GpuNode, bare_drive: Callable[..., Drive]) -> Drive:
    drive = bare_drive(node)
    drive.ask("init")
    return drive


def begin(gate: Gate, drive: Drive) -> Drive:
    """Initialize a process, and let it have a megabyte."""
    gate.open()
    drive.begin()
    drive.ask("alloc 1M")
    return drive


def touched_ns(container: GpuContainer) -> int:
    text = (container.region_directory / "region-1").read_bytes()
    return int(struct.unpack_from("<Q", text, TOUCHED_AT)[0])


def test_a_new_process_waits_until_its_gate_opens(
    gate: Gate, container: GpuContainer, start_drive: StartDrive
) -> None:
    drive = start_drive(container)
    drive.send("init")
    assert not drive.has_answer(MOMENT_S)
    gate.report("w", drive.process.pid)
    gate.open()
    assert drive.has_answer(MOMENT_S)
    assert drive.answer() == []


@pytest.mark.parametrize(
    "call",
    ["write 0 1", "check 0 1", "sync", "alloc 1M", "info", "free 0", "total 0", "launch nop 1 1"],
)
def test_every_kind_of_call_waits_and_is_reported_until_the_gate_opens(
    gate: Gate, container: GpuContainer, start_drive: StartDrive, call: str
) -> None:
    drive = begin(gate, start_drive(container))
    gate.shut()
    gate.report("p", drive.process.pid)
    drive.send(call)
    first = gate.report("w", drive.process.pid)
    reports = [one for one in gate.drain(MOMENT_S) if one.byte == "w"]
    assert 3 <= len(reports) <= MOMENT_S / 0.05 + 1
    assert first.time_s < reports[0].time_s
    assert not drive.has_answer(0)
    gate.open()
    drive.answer(call)
    assert not [one for one in gate.drain(MOMENT_S) if one.byte in "wpub"]


def test_a_process_is_parked_only_when_no_thread_is_inside(
    gate: Gate, container: GpuContainer, start_drive: StartDrive
) -> None:
    drive = begin(gate, start_drive(container))
    drive.send("launch fixed_1000ms 1 1")
    time.sleep(MOMENT_S / 2)
    gate.shut()
    shut_s = time.monotonic()
    gate.report("b", drive.process.pid)
    parked = gate.report("p", drive.process.pid)
    assert parked.time_s - shut_s > MOMENT_S
    reports = [one for one in gate.drain(MOMENT_S) if one.pid == drive.process.pid]
    assert {one.byte for one in reports} <= {"p", "w", "i"}
    assert 3 <= len([one for one in reports if one.byte == "p"]) <= MOMENT_S / 0.1 + 1


@pytest.mark.parametrize("file", [FILE, QUANTUM_FILE])
def test_a_closure_with_a_lease_ends_without_the_agent(
    container: GpuContainer, start_drive: StartDrive, file: str
) -> None:
    with Gate(container, file) as gate:
        drive = begin(gate, start_drive(container))
        gate.shut(lease_s=2 * MOMENT_S)
        shut_s = time.monotonic()
        drive.send("launch nop 1 1")
        gate.report("w", drive.process.pid)
        assert drive.has_answer(10.0)
        assert time.monotonic() - shut_s >= 2 * MOMENT_S
        drive.answer()
        assert drive.ask("launch nop 1 1") == [], "calls pass a closed gate after its lease"
        gate.shut(lease_s=60.0)
        drive.send("launch nop 1 1")
        assert not drive.has_answer(MOMENT_S)
        gate.open()
        assert drive.has_answer(10.0)


def test_recall_wins_over_quanta(container: GpuContainer, start_drive: StartDrive) -> None:
    opened = struct.pack("<8sIIQ", MAGIC, LAYOUT, 0, 1).ljust(BYTES, b"\0")
    (container.bell_directory / QUANTUM_FILE).write_bytes(opened)
    with Gate(container) as gate:
        drive = begin(gate, start_drive(container))
        gate.shut()
        drive.send("launch nop 1 1")
        assert not drive.has_answer(MOMENT_S)
        gate.open()
        drive.answer()


@pytest.mark.parametrize("way", ["link", "dlsym", "proc"])
def test_a_copy_waits_whichever_way_the_driver_is_reached(
    gate: Gate, container: GpuContainer, start_drive: StartDrive, way: str
) -> None:
    drive = begin(gate, start_drive(container, way=way))
    gate.shut()
    gate.report("p", drive.process.pid)
    drive.send("write 0 1")
    gate.report("w", drive.process.pid)
    assert not drive.has_answer(MOMENT_S)
    gate.open()
    drive.answer("write")
    assert drive.ask("held") == [0]


@pytest.mark.parametrize("made", ["managed 1M", "share 0"])
def test_processes_that_cannot_be_moved_report_it(
    gate: Gate, container: GpuContainer, start_drive: StartDrive, made: str
) -> None:
    drive = begin(gate, start_drive(container))
    drive.ask(made)
    gate.shut()
    gate.report("u", drive.process.pid)
    assert {one.byte for one in gate.drain(MOMENT_S)} == {"u"}


def test_use_is_noted_in_the_region_and_idleness_is_not(
    gate: Gate, container: GpuContainer, start_drive: StartDrive
) -> None:
    drive = begin(gate, start_drive(container))
    time.sleep(MOMENT_S)
    before = touched_ns(container)
    time.sleep(MOMENT_S)
    assert 0 < before == touched_ns(container)
    drive.ask("write 0 1")
    asked_ns = time.monotonic_ns()
    time.sleep(MOMENT_S)
    assert before < touched_ns(container) < asked_ns + MOMENT_S * 1e9


def test_without_the_file_nothing_waits_and_nothing_is_reported(
    container: GpuContainer, start_drive: StartDrive
) -> None:
    with bind_bell(container.bell_directory / "bell-1") as bell:
        drive = start_drive(container).begin()
        drive.ask("alloc 1M")
        (container.bell_directory / FILE).write_bytes(
            struct.pack("<8sIIQ", b"VHAMIRC1", 1, 1, 1).ljust(64, b"\0")
        )
        drive.ask("write 0 1")
        drive.ask("launch nop 1 1")
        reports = []
        while (one := next_report(bell, MOMENT_S)) is not None:
            reports.append(one.byte)
    assert set(reports) <= {"a", "i"}
    assert touched_ns(container) == 0


@pytest.mark.parametrize(
    "text", [b"", b"VHAMIRC1", b"VHAMIRC2" + bytes(56), b"VHAMIRC1" + bytes(56)]
)
def test_a_file_that_is_no_gate_is_none(
    container: GpuContainer, start_drive: StartDrive, text: bytes
) -> None:
    (container.bell_directory / FILE).write_bytes(text)
    start_drive(container).begin().ask("alloc 1M")


def test_children_count_and_report_for_themselves(
    gate: Gate, container: GpuContainer, start_drive: StartDrive
) -> None:
    gate.open()
    parent = start_drive(container)
    assert parent.code("total 0") == NOT_INITIALIZED
    (child,) = parent.ask("spawn")
    gate.shut()
    gate.report("p", child)
    assert {one.pid for one in gate.drain(MOMENT_S)} == {child}


def test_processes_of_a_container_are_parked_one_by_one(
    gate: Gate, container: GpuContainer, start_drive: StartDrive
) -> None:
    first = begin(gate, start_drive(container))
    second = begin(gate, start_drive(container))
    first.send("launch fixed_1000ms 1 1")
    time.sleep(MOMENT_S / 2)
    gate.shut()
    gate.report("b", first.process.pid)
    gate.report("p", second.process.pid)
    gate.report("p", first.process.pid)


def test_no_thread_enters_the_driver_of_a_parked_process(
    gate: Gate, container: GpuContainer, controller: Drive, drivers: Path
) -> None:
    """The fake driver crashes a process that synchronizes while checkpointed, and counts others."""
    choose = random.Random(26)
    gate.open()
    storm = container.start([drivers / "threads", "6", "6000", "26"])
    try:
        assert storm.stdout is not None
        assert storm.stdout.readline() == "ready\n"
        cycles = park_at_random(gate, controller, storm.pid, choose, 5.0)
        good, failed, wrong, held = map(int, storm.stdout.readline().split())
        assert storm.wait(10) == 0
    finally:
        storm.kill()
        storm.communicate()
    assert cycles >= 20
    assert good > 1000
    assert (failed, wrong, held) == (0, 0, 0)


@pytest.mark.parametrize("flags", [PLAIN, THREAD, ADDRESS], ids=["plain", "tsan", "asan"])
def test_parked_processes_have_no_thread_inside_at_any_step(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    flags = (*flags, "-DVGPU_STEPS", '-DGATE_PATH="residency-1"', "-Wno-tsan")
    program = build("unit/race_gate", flags, ("gate", "fork", "platform"))
    assert int(run(program, str(tmp_path), "6", "1500")) > 1500
