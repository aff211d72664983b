# SPDX-License-Identifier: Apache-2.0
"""One agent at a time serves a node, also after one died without a word."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hami_common.errors import SettingsInvalid
from hami_nodeagent.shell.turn import FILE_NAME, Turn

pytestmark = pytest.mark.anyio

HOLDER = """
import anyio, sys
from pathlib import Path
from hami_nodeagent.shell.turn import Turn
async def main():
    path = Path(sys.argv[1])
    assert await Turn(path, plugins=path).take(anyio.Event())
    print("taken", flush=True)
    await anyio.sleep_forever()
anyio.run(main)
"""


async def test_free_node_is_served_at_once(tmp_path: Path) -> None:
    turn = Turn(tmp_path / "state", plugins=tmp_path)
    assert await turn.take(anyio.Event())
    assert not turn.is_awaited


async def test_second_agent_waits_until_the_first_gives_up(tmp_path: Path) -> None:
    first, second = (Turn(tmp_path, plugins=tmp_path) for _ in range(2))
    assert await first.take(anyio.Event())
    taken = anyio.Event()

    async def wait() -> None:
        assert await second.take(anyio.Event())
        taken.set()

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.sleep(0.3)
        assert second.is_awaited
        assert not taken.is_set()
        first.end()
        with anyio.fail_after(2):
            await taken.wait()
    assert not second.is_awaited


async def test_waiting_agent_that_is_stopped_never_serves(tmp_path: Path) -> None:
    first, second = (Turn(tmp_path, plugins=tmp_path) for _ in range(2))
    assert await first.take(anyio.Event())
    stopping = anyio.Event()
    stopping.set()
    assert not await second.take(stopping)


async def test_killed_agent_keeps_no_successor_waiting(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        holder.send_signal(signal.SIGKILL)
    with anyio.fail_after(2):
        assert await Turn(tmp_path, plugins=tmp_path).take(anyio.Event())


async def test_unusable_state_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(SettingsInvalid, match="state_dir"):
        await Turn(tmp_path, plugins=tmp_path).take(anyio.Event())


@pytest.fixture
def plugins() -> Iterator[Path]:
    """A directory with a short path, as paths of sockets have to be."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def test_new_pod_waits_for_the_proxy_of_an_agent_without_the_lock(
    plugins: Path, tmp_path: Path
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    taken = anyio.Event()
    turn = Turn(tmp_path, plugins=plugins, agent_sockets=sockets)

    async def wait() -> None:
        assert await turn.take(anyio.Event())
        taken.set()

    listener = await anyio.create_unix_listener(plugins / "hami-nvidia.sock")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.sleep(0.3)
        assert turn.is_awaited
        assert not taken.is_set()
        await listener.aclose()
        with anyio.fail_after(2):
            await taken.wait()
    assert not turn.is_awaited


@pytest.mark.parametrize("name", ["hami-nvidia.sock", "hami-agent-devices.sock", "other.sock"])
async def test_restarted_agent_and_sockets_of_others_do_not_wait(
    plugins: Path, tmp_path: Path, name: str
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    if name == "hami-nvidia.sock":
        first = Turn(tmp_path, plugins=plugins, agent_sockets=sockets)
        assert await first.take(anyio.Event())
        first.end()
    async with await anyio.create_unix_listener(plugins / name):
        with anyio.fail_after(2):
            turn = Turn(tmp_path, plugins=plugins, agent_sockets=sockets)
            assert await turn.take(anyio.Event())
