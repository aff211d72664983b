# SPDX-License-Identifier: Apache-2.0
"""Agent and limiter on a fake driver that moves managed pages: thrashing, and exclusive quanta."""

import time
from collections.abc import Callable, Iterator

import pytest

from hami_nodeagent.core.thrash import LEASE_S
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import MakeNode, StartDrive
from tests.support.drive import OUT_OF_MEMORY, Drive
from tests.support.overcommit_agent import OvercommitAgent
from tests.support.recall_agent import wait_for

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

GIB, MIB = 1 << 30, 1 << 20
MEMORY_MIB = 2048
LIMIT_MIB = 2048
LEVEL = 1
RULES = {"traffic_mib_s": 1000.0, "after_s": 1.0, "quantum_s": 1.0, "calm_s": 5.0}
PATIENCE_S = 60.0
MEASURED_S = 4.0
WORK_S = 300.0
StartWorker = Callable[[GpuContainer, int], Drive]


@pytest.fixture
def machine(make_node: MakeNode, containers_work: None) -> GpuNode:
    """A device of 2 GiB; its pages move at 20 GiB/s."""
    made = make_node("8xH100")
    made.nvml.set_key(0, "memory_total", str(MEMORY_MIB * MIB))
    made.nvml.set_key(0, "memory_reserved", "0")
    made.nvml.set_key(0, "migration_bytes_per_s", str(20 * GIB))
    return made


@pytest.fixture
def boxes(machine: GpuNode) -> list[GpuContainer]:
    return [machine.container(0, memory_mib=LIMIT_MIB, priority=LEVEL) for _ in range(2)]


@pytest.fixture
def agent(machine: GpuNode, boxes: list[GpuContainer]) -> Iterator[OvercommitAgent]:
    levels = dict.fromkeys(boxes, LEVEL)
    with OvercommitAgent(machine, levels, memory_mib=MEMORY_MIB, limit_mib=LIMIT_MIB) as made:
        yield made


def working(drive: Drive, used_mib: int) -> Drive:
    """Let a process use managed memory in one kernel of a millisecond after the other."""
    drive.begin()
    drive.ask(f"managed {used_mib}M")
    drive.send(f"work fixed_1ms 1 {int(WORK_S * 1000)} plain 1")
    return drive


@pytest.fixture
def start_worker(start_drive: StartDrive) -> Iterator[StartWorker]:
    """Starts processes that work until the test ends."""
    drives: list[Drive] = []

    def start(box: GpuContainer, used_mib: int) -> Drive:
        drives.append(working(start_drive(box), used_mib))
        return drives[-1]

    yield start
    for drive in drives:
        drive.process.kill()


def launches(machine: GpuNode, drives: list[Drive], for_s: float) -> list[float]:
    """Return the launches per second of each process."""
    before, began_s = counted(machine), time.monotonic()
    time.sleep(for_s)
    after, elapsed_s = counted(machine), time.monotonic() - began_s
    return [(after[one.process.pid] - before[one.process.pid]) / elapsed_s for one in drives]


def counted(machine: GpuNode) -> dict[int, int]:
    return {use.pid: use.launches for use in machine.card.uses(machine.uuids[0])}


def test_quanta_give_a_thrashing_device_its_throughput_back_and_free_all_when_the_agent_dies(
    machine: GpuNode, boxes: list[GpuContainer], agent: OvercommitAgent, start_worker: StartWorker
) -> None:
    drives = [start_worker(boxes[0], 1536)]
    time.sleep(1.0)
    alone = launches(machine, drives, MEASURED_S)
    drives.append(start_worker(boxes[1], 1536))
    agent.start_with(**RULES)
    time.sleep(MEASURED_S)
    assert all(map(agent.is_open, range(2))), "without quanta no container is held back"
    thrashing = launches(machine, drives, MEASURED_S)
    agent.kill()
    agent.start_with(**RULES, quanta=True)
    wait_for(lambda: not all(map(agent.is_open, range(2))), PATIENCE_S, "no container is held back")
    quanta = launches(machine, drives, 4 * MEASURED_S)
    print(f"launches per second: alone {alone}, thrashing {thrashing}, quanta {quanta}")
    assert sum(quanta) > 5 * sum(thrashing), (quanta, thrashing)
    assert min(quanta) > 0.5 * max(quanta), quanta
    wait_for(lambda: sum(map(agent.is_open, range(2))) == 1, PATIENCE_S, "no one is held back")
    agent.kill()
    before = counted(machine)
    time.sleep(LEASE_S + 1.0)
    wait_for(
        lambda: all(counted(machine)[one.process.pid] > before[one.process.pid] for one in drives),
        PATIENCE_S,
        "a container still waits for the agent that died",
    )
    agent.start_with(**RULES)
    wait_for(lambda: all(map(agent.is_open, range(2))), PATIENCE_S, "a gate is left closed")


def test_containers_that_fit_the_device_are_not_held_back(
    machine: GpuNode, boxes: list[GpuContainer], agent: OvercommitAgent, start_worker: StartWorker
) -> None:
    drives = [start_worker(box, 900) for box in boxes]
    agent.start_with(**RULES, quanta=True)
    ends_s = time.monotonic() + 2 * MEASURED_S
    while time.monotonic() < ends_s:
        assert all(map(agent.is_open, range(2)))
        time.sleep(0.05)
    assert min(launches(machine, drives, MEASURED_S)) > 0


def test_containers_that_together_exceed_the_device_keep_their_bytes(
    machine: GpuNode, start_drive: StartDrive
) -> None:
    """Blocks that the device has no memory for become managed memory, which is moved."""
    machine.nvml.set_key(0, "memory_total", str(400 * MIB))
    drives = [
        start_drive(
            machine.container(0, memory_mib=320, priority=LEVEL), env={"CUDA_OVERSUBSCRIBE": "true"}
        )
        for _ in range(2)
    ]
    blocks = range(6)
    for number, drive in enumerate(drives):
        drive.begin()
        for block in blocks:
            drive.ask("alloc 40M")
            drive.ask(f"write {block} {100 * number + block}")
    for _ in range(3):
        for number, drive in enumerate(drives):
            drive.ask("launch fixed_10us 1 1")
            assert [drive.ask(f"check {block} {100 * number + block}") for block in blocks] == [
                [0]
            ] * len(blocks)
    promised = sum(drive.used_bytes for drive in drives)
    assert promised > 600 * MIB
    assert machine.card.used_bytes(machine.uuids[0]) <= 400 * MIB
    for drive in drives:
        assert drive.code("alloc 40M") == OUT_OF_MEMORY, "the limit holds all the same"
