# SPDX-License-Identifier: Apache-2.0
"""Child processes: start, freeze, kill, stop, and the contents of their logs."""

import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from hami_common.errors import Unavailable
from hami_sim.process import Process

pytestmark = pytest.mark.anyio


def program(text: str, tmp_path: Path) -> Process:
    return Process("program", [sys.executable, "-c", text], log=tmp_path / "program.log")


async def started(process: Process, word: str = "ready") -> None:
    process.start()
    with anyio.fail_after(30):
        while word not in process.tail():
            await anyio.sleep(0.01)


LOOP = "import time; print('ready', flush=True)\nwhile True: time.sleep(1)"


async def test_stop_is_polite_and_returns_the_exit_code(tmp_path: Path) -> None:
    polite = program(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)",
        tmp_path,
    )
    await started(polite)
    assert await polite.stop() == 7
    assert not polite.is_running()


async def test_killed_program_can_be_started_again_under_another_pid(tmp_path: Path) -> None:
    process = program(LOOP, tmp_path)
    await started(process)
    first = process.pid
    await process.kill()
    assert not process.is_running()
    process.start()
    assert process.pid not in (None, first)
    assert process.starts == 2
    await process.kill()


async def test_frozen_program_stands_still_and_can_be_stopped(tmp_path: Path) -> None:
    process = program(LOOP, tmp_path)
    await started(process)
    process.freeze()
    assert process.pid is not None
    with anyio.fail_after(30):
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            await anyio.sleep(0.01)
    process.thaw()
    assert await process.stop() == -signal.SIGTERM


async def test_signal_to_an_ended_program_raises_its_log(tmp_path: Path) -> None:
    process = program("print('last words')", tmp_path)
    process.start()
    with anyio.fail_after(30):
        while process.is_running():
            await anyio.sleep(0.01)
    with pytest.raises(Unavailable, match="last words"):
        process.freeze()
