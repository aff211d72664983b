# SPDX-License-Identifier: Apache-2.0
"""The library holds real processes to their share of the fake device's time.

Real time, so few runs and wide margins; exactness is shown in test_compute_simulation.py. The
truth is the fake driver's own count of served time. A program that has to wait for a processor
cannot use its share, so a run in which it had to is made again.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.support.drive import Drive

pytestmark = pytest.mark.alone

WARM_S = 0.7
RUN_S = 3.0
ERROR = 5.0
"""Three in virtual time; two more for a machine that runs other work as well."""

DISTURBED = 0.04
"""Part of the time in which a program waited for a processor."""
RUNS_MOST = 3

StartDrive = Callable[..., Drive]


def work_on(drive: Drive, device: int = 0) -> Drive:
    """Prepare the program to work on a device of its container."""
    for command in ("init", f"device {device}"):
        drive.send(command)
        drive.answer(command)
    return drive


def waited_ns(drive: Drive) -> int:
    """Time for which the program's threads were runnable and had no processor."""
    tasks = Path(f"/proc/{drive.process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks)


def shares(
    node: GpuNode, drives: list[Drive], command: str, device: int = 0, run_s: float = RUN_S
) -> list[float]:
    """Percent of the device that each program was served while all of them ran ``command``.

    Of the least disturbed of a few runs.
    """
    runs: list[tuple[float, list[float]]] = []
    while len(runs) < RUNS_MOST and (not runs or runs[-1][0] > DISTURBED):
        runs.append(one_run(node, drives, command, device, run_s))
    return min(runs)[1]


def one_run(
    node: GpuNode, drives: list[Drive], command: str, device: int, run_s: float
) -> tuple[float, list[float]]:
    """The longest wait of a program for a processor, as a fraction of the run, and the shares."""

    def served() -> dict[int, int]:
        return {use.pid: use.served_ns for use in node.card.uses(node.uuids[device])}

    for drive in drives:
        drive.send(command)
    time.sleep(WARM_S)  # the share is counted from when the estimates are there
    before = [waited_ns(drive) for drive in drives]
    began, first = time.monotonic_ns(), served()
    time.sleep(run_s)
    ended, last = time.monotonic_ns(), served()
    waited = [waited_ns(drive) - start for drive, start in zip(drives, before, strict=True)]
    for drive in drives:
        drive.answer(command)
    pids = [drive.process.pid for drive in drives]
    span_ns = ended - began
    parts = [100 * (last[pid] - first.get(pid, 0)) / span_ns for pid in pids]
    return max(waited) / span_ns, parts


def work(kernel: str, kind: str = "plain", run_s: float = RUN_S) -> str:
    """The command that keeps the device busy for a little longer than the measurement."""
    return f"work {kernel} 1000 {int((WARM_S + run_s) * 1000) + 500} {kind} 64"


@pytest.mark.parametrize("kind", ["plain", "ex", "cooperative", "graph"])
def test_cap_holds_for_every_kind_of_launch(
    node: GpuNode, start_drive: StartDrive, kind: str
) -> None:
    drive = work_on(start_drive(node.container(0, core_pct=30)))
    (share,) = shares(node, [drive], work("fixed_1ms", kind))
    assert share == pytest.approx(30, abs=ERROR)


def test_cap_holds_for_long_kernels(node: GpuNode, start_drive: StartDrive) -> None:
    drive = work_on(start_drive(node.container(0, core_pct=60)))
    (share,) = shares(node, [drive], work("fixed_20ms"))
    assert share == pytest.approx(60, abs=ERROR)


def test_every_device_has_a_limit_of_its_own(node: GpuNode, start_drive: StartDrive) -> None:
    drive = work_on(start_drive(node.container(2, 5, core_pct=20)), device=1)
    (share,) = shares(node, [drive], work("fixed_1ms"), device=5)
    assert share == pytest.approx(20, abs=ERROR)


def test_two_tenants_get_their_shares(node: GpuNode, start_drive: StartDrive) -> None:
    drives = [work_on(start_drive(node.container(0, core_pct=pct))) for pct in (30, 70)]
    small, large = shares(node, drives, work("fixed_500us"))
    assert small == pytest.approx(30, abs=ERROR)
    assert large == pytest.approx(70, abs=ERROR + 2)  # together they need every moment


def test_cap_holds_beside_a_neighbor_that_never_pauses(
    node: GpuNode, start_drive: StartDrive
) -> None:
    """Kernels longer than a time slice are never seen undisturbed there.

    Who infers contention from durations gets 23 to 26 here.
    """
    drives = [work_on(start_drive(node.container(0, core_pct=pct))) for pct in (40, 100)]
    share, rest = shares(node, drives, work("fixed_5ms"))
    assert share == pytest.approx(40, abs=ERROR)
    assert rest > 100 - 40 - 2 * ERROR  # the device is not idle


def test_equal_processes_get_equal_parts(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, core_pct=50)
    drives = [work_on(start_drive(container)) for _ in range(3)]
    parts = shares(node, drives, work("fixed_500us"))
    assert max(parts) <= 1.2 * min(parts)
    assert sum(parts) == pytest.approx(50, abs=ERROR)


def test_a_killed_process_blocks_no_other(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, core_pct=40)
    doomed, other = (work_on(start_drive(container)) for _ in range(2))
    doomed.send(work("fixed_2ms"))
    other.send("work fixed_2ms 1000 500 plain 64")
    other.answer("work")
    doomed.process.kill()
    doomed.process.wait()
    (share,) = shares(node, [other], work("fixed_2ms"))
    assert share == pytest.approx(40, abs=ERROR)


def raise_limit(container: GpuContainer, core_pct: int) -> None:
    """Give every device of the container this share."""
    assert container.limits is not None
    devices = tuple(structs.replace(d, core_pct=core_pct) for d in container.limits.devices)
    container.set_limits(structs.replace(container.limits, devices=devices))


def test_a_new_limit_holds_for_running_processes(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, core_pct=10)
    drive = work_on(start_drive(container))
    (share,) = shares(node, [drive], work("fixed_1ms", run_s=1.5), run_s=1.5)
    assert share == pytest.approx(10, abs=ERROR)
    raise_limit(container, 50)
    time.sleep(1.2)  # a second is the promise
    (share,) = shares(node, [drive], work("fixed_1ms"))
    assert share == pytest.approx(50, abs=ERROR)
