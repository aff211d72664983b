# SPDX-License-Identifier: Apache-2.0
"""A Multi-Process Service through its life: start, clients, end, and what makes it start again."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hami_common.runtime.clock import SystemClock
from hami_nodeagent.shell import mps
from hami_nodeagent.shell.mps import MpsService
from tests.fakes.mpscontrol import FakeMps, make_canary, make_control
from tests.unit.nodeagent.shell.support import until

pytestmark = pytest.mark.anyio
UUID = "GPU-0"
CHECK_S = 0.2
WITHIN_S = 20.0


class Machine:
    """One device with its service."""

    def __init__(self, directory: Path, control: str = "") -> None:
        self.fake = FakeMps(directory / "run", UUID)
        self.restarts: list[str] = []
        self.directory = directory / "run"
        self.service = MpsService(
            UUID,
            directory=self.directory,
            control=control or make_control(directory),
            clock=SystemClock(),
            on_restart=self._note,
            check_s=CHECK_S,
            canary=(make_canary(directory),),
        )

    async def _note(self, reason: str) -> None:
        self.restarts.append(reason)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(self.service.run)
            yield
            group.cancel_scope.cancel()

    async def ready(self) -> None:
        await until(lambda: not self.service.problem, within_s=WITHIN_S)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(mps, "_ASK_S", 10.0)
    monkeypatch.setattr(mps, "_START_S", WITHIN_S)
    monkeypatch.setattr(mps, "_AGAIN_S", 0.01)
    return Machine(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_service_is_ready_when_its_daemon_answers_and_ends_with_the_agent(
    machine: Machine,
) -> None:
    assert machine.service.problem
    async with machine.running():
        await machine.ready()
        pid = machine.fake.pid()
        assert (machine.directory / UUID / "pipe/control").is_socket()
        assert (machine.directory / "shm").stat().st_mode & 0o7777 == 0o1777
    assert machine.fake.commands("start") == ["start -f -multiuser-server"]
    assert machine.fake.commands()[-1].startswith("quit")
    assert not is_alive(pid)
    assert machine.restarts == []


async def test_release_without_multiuser_servers_is_started_without(machine: Machine) -> None:
    machine.fake.script(refuses=["-multiuser-server"])
    async with machine.running():
        await machine.ready()
    assert machine.fake.commands("start") == ["start -f -multiuser-server", "start -f"]
    assert machine.restarts == [], "no client was connected"


async def test_missing_program_is_named(tmp_path: Path) -> None:
    machine = Machine(tmp_path, control=str(tmp_path / "none"))
    async with machine.running():
        await until(lambda: "is not installed" in machine.service.problem, within_s=WITHIN_S)


async def test_daemon_that_ends_is_started_again(machine: Machine) -> None:
    async with machine.running():
        await machine.ready()
        os.kill(machine.fake.pid(), signal.SIGKILL)
        await until(lambda: len(machine.fake.commands("start")) == 2, within_s=WITHIN_S)
        await machine.ready()
    (reason,) = machine.restarts
    assert "it ended with status" in reason


@pytest.mark.parametrize("state", ["wedged", "mute"])
async def test_service_that_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(mps, "_ASK_S", 3.0)
    machine = Machine(tmp_path)
    async with machine.running():
        await machine.ready()
        first = machine.fake.pid()
        machine.fake.script(**{state: True})
        await until(lambda: bool(machine.restarts), within_s=WITHIN_S)
        machine.fake.script()
        await until(lambda: len(machine.fake.commands("start")) > 1, within_s=WITHIN_S)
        await machine.ready()
        assert not is_alive(first)
    assert "no answer within" in machine.restarts[0]


async def test_daemon_of_a_killed_agent_is_ended_first(machine: Machine) -> None:
    async with anyio.create_task_group() as group:
        stranger = Machine(machine.directory.parent)
        group.start_soon(stranger.service.run)
        await stranger.ready()
        first = machine.fake.pid()
        async with machine.running():
            await until(lambda: not is_alive(first), within_s=WITHIN_S)
            group.cancel_scope.cancel()


async def test_only_the_clients_of_a_container_are_ended(machine: Machine) -> None:
    machine.fake.script(servers={"500": [10, 11, 12], "600": [20]})
    async with machine.running():
        await machine.ready()
        assert await machine.service.clients() == {500: (10, 11, 12), 600: (20,)}
        assert await machine.service.terminate({11, 20, 99}) == (11, 20)
        assert machine.fake.clients() == {"500": [10, 12], "600": []}
    assert machine.fake.commands("terminate") == [
        "terminate_client 500 11",
        "terminate_client 600 20",
    ]
