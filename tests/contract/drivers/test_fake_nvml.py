# SPDX-License-Identifier: Apache-2.0
"""The fake NVML library through plain ctypes: the behavior that callers of the real one rely on."""

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import EVENT_XID, STATE_VARIABLE, FakeNvml
from hami_sim.hardware.profile import load
from tests.contract.drivers.benches import FakeNvmlBench

SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 0, 1, 2, 3, 6
INSUFFICIENT_SIZE, DRIVER_NOT_LOADED, TIMEOUT, GPU_IS_LOST, UNKNOWN = 7, 9, 10, 15, 999


class Library:
    """Calls by name; arguments as ctypes values."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        name = "nvmlDeviceGetHandleByIndex_v2"
        assert self(name, ctypes.c_uint(index), ctypes.byref(handle)) == SUCCESS
        return handle

    def count(self) -> int:
        count = ctypes.c_uint()
        assert self("nvmlDeviceGetCount_v2", ctypes.byref(count)) == SUCCESS
        return count.value


class Machine:
    """The library, opened, on a machine of four T4."""

    def __init__(self, state: FakeNvml, library: Library) -> None:
        self.state = state
        self.nvml = library


@pytest.fixture
def machine(nvidia_bench: Callable[[str], FakeNvmlBench], nvml_library: Path) -> Iterator[Machine]:
    bench = nvidia_bench("4xT4")
    library = Library(nvml_library)
    assert library("nvmlInit_v2") == SUCCESS
    yield Machine(bench.nvml, library)
    bench.nvml.load_driver()
    while library("nvmlShutdown") == SUCCESS:
        pass


def test_library_exports_nvml_and_nothing_else(nvml_library: Path) -> None:
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(nvml_library)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = [line.split()[-1] for line in table.splitlines()]
    assert names
    assert all(re.fullmatch(r"nvml[A-Z]\w+", name) for name in names)


def test_function_that_is_not_implemented_is_absent(machine: Machine) -> None:
    with pytest.raises(AttributeError):
        machine.nvml("nvmlDeviceGetVbiosVersion")


def test_calls_before_init_are_refused(nvml_library: Path, machine: Machine) -> None:
    assert machine.nvml("nvmlShutdown") == SUCCESS
    count = ctypes.c_uint()
    assert machine.nvml("nvmlDeviceGetCount_v2", ctypes.byref(count)) == UNINITIALIZED
    assert machine.nvml("nvmlShutdown") == UNINITIALIZED


def test_init_nests(machine: Machine) -> None:
    assert machine.nvml("nvmlInitWithFlags", 0) == SUCCESS
    assert machine.nvml("nvmlShutdown") == SUCCESS
    assert machine.nvml.count() == 4


def test_device_list_is_fixed_until_the_library_is_reopened(machine: Machine) -> None:
    machine.state.unplug(3)
    assert machine.nvml.count() == 4
    handle = ctypes.c_void_p()
    by_index = "nvmlDeviceGetHandleByIndex_v2"
    assert machine.nvml(by_index, ctypes.c_uint(3), ctypes.byref(handle)) == GPU_IS_LOST
    assert machine.nvml("nvmlShutdown") == SUCCESS
    assert machine.nvml("nvmlInit_v2") == SUCCESS
    assert machine.nvml.count() == 3
    assert machine.nvml(by_index, ctypes.c_uint(3), ctypes.byref(handle)) == INVALID_ARGUMENT


def test_handle_answers_lost_and_recovers(machine: Machine) -> None:
    handle, index = machine.nvml.handle(1), ctypes.c_uint()
    machine.state.lose(1)
    assert machine.nvml("nvmlDeviceGetIndex", handle, ctypes.byref(index)) == GPU_IS_LOST
    machine.state.restore(1)
    assert machine.nvml("nvmlDeviceGetIndex", handle, ctypes.byref(index)) == SUCCESS
    assert index.value == 1


def test_handles_by_uuid_and_bus_id_are_those_by_index(machine: Machine) -> None:
    handle = ctypes.c_void_p()
    uuid = machine.state.uuids[2].encode()
    assert machine.nvml("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(handle)) == SUCCESS
    assert handle.value == machine.nvml.handle(2).value
    by_bus_id = "nvmlDeviceGetHandleByPciBusId_v2"
    for bus_id in (b"00000000:AF:00.0", b"0000:af:00.0"):
        assert machine.nvml(by_bus_id, bus_id, ctypes.byref(handle)) == SUCCESS
        assert handle.value == machine.nvml.handle(2).value
    assert machine.nvml(by_bus_id, b"0000:01:00.0", ctypes.byref(handle)) == NOT_FOUND
    assert machine.nvml(by_bus_id, b"nonsense", ctypes.byref(handle)) == INVALID_ARGUMENT
    assert machine.nvml("nvmlDeviceGetHandleByUUID", b"GPU-0", ctypes.byref(handle)) == NOT_FOUND


def test_foreign_pointer_is_no_handle(machine: Machine) -> None:
    index = ctypes.c_uint()
    foreign = ctypes.c_void_p(ctypes.addressof(index))
    assert machine.nvml("nvmlDeviceGetIndex", foreign, ctypes.byref(index)) == INVALID_ARGUMENT


def test_text_that_does_not_fit_is_refused(machine: Machine) -> None:
    buffer = ctypes.create_string_buffer(8)
    handle = machine.nvml.handle(0)
    assert machine.nvml("nvmlDeviceGetUUID", handle, buffer, 8) == INSUFFICIENT_SIZE
    assert machine.nvml("nvmlDeviceGetUUID", handle, None, 8) == INVALID_ARGUMENT


def test_mig_is_refused_on_devices_without_it(machine: Machine) -> None:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    asked = (machine.nvml.handle(0), ctypes.byref(current), ctypes.byref(pending))
    assert machine.nvml("nvmlDeviceGetMigMode", *asked) == NOT_SUPPORTED
    machine.state.set_key(0, "mig_capable", "1")
    machine.state.set_key(0, "mig_pending", "1")
    assert machine.nvml("nvmlDeviceGetMigMode", *asked) == SUCCESS
    assert (current.value, pending.value) == (0, 1)


@pytest.mark.parametrize("line", ["gpus = 4", "fault = nvmlInit * soon 0", "[gpu 9]", "no equals"])
def test_malformed_state_is_refused_with_its_line(
    machine: Machine, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    text = machine.state.path.read_text(encoding="ascii")
    machine.state.path.write_text(f"{line}\n{text}", encoding="ascii")
    count = ctypes.c_uint()
    assert machine.nvml("nvmlDeviceGetCount_v2", ctypes.byref(count)) == UNKNOWN
    assert f":1: not understood: {line}" in capfd.readouterr().err


def test_state_that_is_not_there_means_no_driver(machine: Machine) -> None:
    count = ctypes.c_uint()
    machine.state.unload_driver()
    assert machine.nvml("nvmlDeviceGetCount_v2", ctypes.byref(count)) == DRIVER_NOT_LOADED


class EventData(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@pytest.fixture
def event_set(machine: Machine) -> ctypes.c_void_p:
    events = ctypes.c_void_p()
    assert machine.nvml("nvmlEventSetCreate", ctypes.byref(events)) == SUCCESS
    for index in (0, 1):
        register = "nvmlDeviceRegisterEvents"
        handle = machine.nvml.handle(index)
        assert machine.nvml(register, handle, ctypes.c_ulonglong(EVENT_XID), events) == SUCCESS
    return events


def wait(machine: Machine, events: ctypes.c_void_p, timeout_ms: int) -> tuple[int, EventData]:
    data = EventData()
    status = machine.nvml("nvmlEventSetWait_v2", events, ctypes.byref(data), timeout_ms)
    return status, data


def test_events_come_in_order_and_only_for_watched_devices_and_types(
    machine: Machine, event_set: ctypes.c_void_p
) -> None:
    machine.state.xid(2, 11)
    machine.state.event(0, 1, 12)
    machine.state.xid(1, 13)
    machine.state.xid(0, 14)
    seen = []
    for _ in range(2):
        status, data = wait(machine, event_set, 1000)
        assert status == SUCCESS
        assert (data.type, data.gpu_instance) == (EVENT_XID, 0xFFFFFFFF)
        seen.append((data.device, data.data))
    assert seen == [(machine.nvml.handle(1).value, 13), (machine.nvml.handle(0).value, 14)]
    assert wait(machine, event_set, 20)[0] == TIMEOUT


def test_event_before_the_set_was_made_is_not_delivered(machine: Machine) -> None:
    machine.state.xid(0, 79)
    events = ctypes.c_void_p()
    assert machine.nvml("nvmlEventSetCreate", ctypes.byref(events)) == SUCCESS
    register = "nvmlDeviceRegisterEvents"
    handle = machine.nvml.handle(0)
    assert machine.nvml(register, handle, ctypes.c_ulonglong(EVENT_XID), events) == SUCCESS
    assert wait(machine, events, 20)[0] == TIMEOUT


def test_wait_fails_while_a_watched_device_is_lost(
    machine: Machine, event_set: ctypes.c_void_p
) -> None:
    machine.state.lose(2)
    assert wait(machine, event_set, 20)[0] == TIMEOUT
    machine.state.lose(1)
    assert wait(machine, event_set, 60_000)[0] == GPU_IS_LOST


def test_freed_set_is_refused(machine: Machine, event_set: ctypes.c_void_p) -> None:
    assert machine.nvml("nvmlEventSetFree", event_set) == SUCCESS
    assert machine.nvml("nvmlEventSetFree", event_set) == INVALID_ARGUMENT
    assert wait(machine, event_set, 60_000)[0] == INVALID_ARGUMENT


def test_types_that_a_device_does_not_send_are_refused(
    machine: Machine, event_set: ctypes.c_void_p
) -> None:
    handle = machine.nvml.handle(3)
    unknown = ctypes.c_ulonglong(1 << 40)
    assert machine.nvml("nvmlDeviceRegisterEvents", handle, unknown, event_set) == NOT_SUPPORTED


def test_two_processes_follow_the_same_file(tmp_path: Path, nvml_library: Path) -> None:
    state = FakeNvml(tmp_path / "nvml.state", load("2xL40S"), "node-b")
    program = (
        "import ctypes,sys; n=ctypes.CDLL(sys.argv[1]); c=ctypes.c_uint();"
        "print(n.nvmlInit_v2(), n.nvmlDeviceGetCount_v2(ctypes.byref(c)), c.value)"
    )
    environment = {**os.environ, STATE_VARIABLE: str(state.path)}
    done = subprocess.run(
        ["python3", "-c", program, str(nvml_library)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.split() == ["0", "0", "2"]
