# SPDX-License-Identifier: Apache-2.0
"""Agent, helper and limiter together on a fake driver: memory moves, and no byte of it is lost."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import MakeNode, StartDrive
from tests.support.drive import Drive
from tests.support.recall_agent import RecallAgent, wait_for
from tools import build_native

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1800)]

GIB_MIB = 1024
LIMIT_MIB = 60 * GIB_MIB
LOW, HIGH = 5, 0
RUNNING, LOCKED, CHECKPOINTED = range(3)
PATIENCE_S = 20.0
LOCKED_S = 5.0
ROUNDS = int(os.environ.get("HAMI_RECALL_ROUNDS", "0"))
"""Rounds of kills; 0: as many as fit in ``SECONDS``."""
SECONDS = 45.0
REPORTED = 50
ROUND_MOST_S = 10
"""Of a busy machine, on average."""
SEED = int(os.environ.get("HAMI_RECALL_SEED", "1"))


@pytest.fixture(scope="session")
def helper() -> Path:
    return build_native.build_helper()


@pytest.fixture
def machine(make_node: MakeNode, containers_work: None) -> GpuNode:
    return make_node("8xH100")


@pytest.fixture
def controller(machine: GpuNode, bare_drive: Callable[..., Drive]) -> Drive:
    """Asks for driver states of other processes."""
    drive = bare_drive(machine)
    drive.ask("init")
    return drive


def state_of(controller: Drive, target: Drive) -> int:
    return controller.ask(f"state {target.process.pid}")[0]


def test_idle_memory_is_given_to_a_higher_level_and_returns_intact(
    machine: GpuNode, helper: Path, start_drive: StartDrive, controller: Drive
) -> None:
    low_box = machine.container(0, memory_mib=LIMIT_MIB, priority=LOW)
    high_box = machine.container(0, memory_mib=LIMIT_MIB, priority=HIGH)
    levels = {low_box: LOW, high_box: HIGH}
    with RecallAgent(machine, levels, helper=helper, limit_mib=LIMIT_MIB, idle_s=0.5) as agent:
        low = start_drive(low_box).begin()
        low.ask("alloc 59G")
        low.ask("alloc 20M")
        low.ask("write 1 7")
        high = start_drive(high_box).begin()
        high.ask("alloc 59G")
        assert state_of(controller, low) == CHECKPOINTED
        low.send("check 1 7")
        time.sleep(0.3)
        assert not low.has_answer(0.2), "a lower level waits while the higher one is resident"
        high.close()
        agent.end_pod(1)
        assert low.answer() == ["0"]
        assert state_of(controller, low) == RUNNING


def test_stopped_container_keeps_its_memory_and_others_get_theirs(
    machine: GpuNode, helper: Path, start_drive: StartDrive
) -> None:
    boxes = [machine.container(0, memory_mib=30 * GIB_MIB, priority=LOW) for _ in range(3)]
    levels = dict.fromkeys(boxes, LOW)
    with RecallAgent(machine, levels, helper=helper, limit_mib=30 * GIB_MIB, idle_s=0.5):
        stopped, other, third = (start_drive(box) for box in boxes)
        for drive in (stopped, other):
            drive.begin()
            drive.ask("alloc 10M")
        stopped.process.send_signal(19)
        try:
            third.send("init")
            assert third.has_answer(PATIENCE_S)
        finally:
            stopped.process.send_signal(18)
        third.answer()
        assert stopped.ask("sync") == []


class Tenant:
    """A container and its process, which holds bytes that follow from a number.

    Any call may wait at the gate, so commands are sent one after the other, and awaited later.
    """

    def __init__(self, box: GpuContainer, start: StartDrive, number: int) -> None:
        self._box = box
        self._start = start
        self._number = number
        self._life = 0
        self._begin()

    @property
    def seed(self) -> int:
        return self._number * 1000 + self._life

    def _begin(self) -> None:
        self.drive = self._start(self._box)
        self._commands = ["init", "device 0", "alloc 4M", f"write 0 {self.seed}"]
        self.drive.send(self._commands[0])

    def ask(self) -> None:
        """Read the bytes back, once the memory is on the device."""
        self._commands.append(f"check 0 {self.seed}")
        if len(self._commands) == 1:
            self.drive.send(self._commands[0])

    def wait(self, within_s: float) -> None:
        """Wait for all answers."""
        deadline = time.monotonic() + within_s
        while self._commands:
            command = self._commands[0]
            assert self.drive.has_answer(max(0.0, deadline - time.monotonic())), command
            answer = self.drive.answer(command)
            assert not command.startswith("check") or answer == ["0"], "bytes were lost"
            del self._commands[0]
            if self._commands:
                self.drive.send(self._commands[0])

    def kill(self) -> None:
        """SIGKILL the process, and start another one in the container."""
        self.drive.kill()
        self._life += 1
        self._begin()


@pytest.fixture
def boxes(machine: GpuNode) -> list[GpuContainer]:
    for key in ("checkpoint_bytes_per_s", "restore_bytes_per_s"):
        machine.nvml.set_key(0, key, str(400 << 20))  # a context and the bytes: about 0.2 s
    return [machine.container(0, memory_mib=LIMIT_MIB, priority=LOW) for _ in range(3)]


@pytest.mark.timeout(600 + ROUND_MOST_S * ROUNDS)
def test_kills_at_random_moments_lose_no_byte_and_leave_nothing_locked(
    machine: GpuNode,
    boxes: list[GpuContainer],
    helper: Path,
    start_drive: StartDrive,
    controller: Drive,
) -> None:
    """Three containers, of which one fits the device at a time, and kills of everything."""
    chance = random.Random(SEED)
    levels = dict.fromkeys(boxes, LOW)
    rounds, ends_s = 0, time.monotonic() + SECONDS
    with RecallAgent(
        machine, levels, helper=helper, limit_mib=LIMIT_MIB, idle_s=0.05, retry_s=0.5
    ) as agent:
        tenants = [Tenant(box, start_drive, number) for number, box in enumerate(boxes)]

        def kill_agent() -> None:
            agent.kill()
            time.sleep(chance.random() * 0.2)
            agent.start()

        def check() -> None:
            assert agent.open_mib(LIMIT_MIB) <= agent.card_mib
            used = machine.card.used_bytes(machine.uuids[0]) >> 20
            assert used <= agent.card_mib

        def locked() -> list[int]:
            return [
                one.drive.process.pid for one in tenants if state_is(controller, one.drive, LOCKED)
            ]

        while rounds < ROUNDS or (not ROUNDS and time.monotonic() < ends_s):
            rounds += 1
            for tenant in chance.sample(tenants, chance.randint(1, 3)):
                tenant.ask()
            for _ in range(chance.randint(0, 2)):
                time.sleep(chance.random() * 0.8)
                check()
                victim = chance.choice([kill_agent, agent.kill_helper, *[t.kill for t in tenants]])
                victim()
            for tenant in tenants:
                tenant.wait(PATIENCE_S)
                check()
            wait_for(lambda: not locked(), LOCKED_S, f"left locked: {locked()}")
            if rounds % REPORTED == 0:
                print(f"{rounds} rounds of kills", flush=True)
    assert rounds >= (ROUNDS or 10), f"only {rounds} rounds"


def state_is(controller: Drive, target: Drive, state: int) -> bool:
    """Return whether the driver reports this state; a process without CUDA has none."""
    controller.send(f"state {target.process.pid}")
    try:
        return controller.answer() == [str(state)]
    except Exception:  # noqa: BLE001 - the process may just end
        return False
