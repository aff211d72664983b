# SPDX-License-Identifier: Apache-2.0
"""The child that makes checkpoint calls: requests, answers, its end, and its next start."""

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from hami_common.runtime.clock import SystemClock
from hami_common.runtime.tasks import background
from hami_nodeagent.core.recall import LOST, Answer, Call
from hami_nodeagent.shell.recallhelper import RecallHelper, parse_answer

KEY = ("uid-a", "main")
# Answers by pid: 1 with success, 2 with an error, 3 never; 4 ends it, 5 gets two answers at once.
PROGRAM = f"""#!{sys.executable}
import os, socket
with socket.socket(fileno=3) as end:
    assert end.type == socket.SOCK_SEQPACKET
    while packet := end.recv(4096):
        number, verb, pid, *rest = packet.decode().split()
        if pid == "1":
            end.send(f"{{number}} ok".encode())
        elif pid == "2":
            end.send(f"{{number}} error 600 CUDA_ERROR_NOT_READY".encode())
        elif pid == "4":
            os._exit(1)
        elif pid == "5":
            end.send(f"{{number}} ok {{' '.join([verb, *rest]).replace(' ', '-')}}".encode())
        elif pid == "6":
            end.send(b"nonsense")
            end.send(f"{{number}} perhaps".encode())
"""


class Answers:
    """Collects answers by pid."""

    def __init__(self) -> None:
        self.by_pid: dict[int, Answer] = {}

    def __call__(self, call: Call, answer: Answer) -> None:
        assert call.pid not in self.by_pid, "one answer per call"
        self.by_pid[call.pid] = answer


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.01)


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
async def helper(tmp_path: Path, answers: Answers) -> AsyncIterator[RecallHelper]:
    program = tmp_path / "hami-recall"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    made = RecallHelper(str(program), clock=SystemClock(), answered=answers)
    async with background() as group:
        group.start_soon(made.run)
        await until(lambda: made.is_ready)
        yield made


def call(pid: int) -> Call:
    return Call(key=KEY, pid=pid, verb="checkpoint")


@pytest.mark.anyio
async def test_each_call_gets_its_answer(helper: RecallHelper, answers: Answers) -> None:
    for pid in (3, 2, 1):
        helper.send(call(pid))
    await until(lambda: {1, 2} <= answers.by_pid.keys())
    assert answers.by_pid == {
        1: Answer(is_ok=True),
        2: Answer(code=600, name="CUDA_ERROR_NOT_READY"),
    }


@pytest.mark.anyio
async def test_lock_has_its_timeout_in_milliseconds(helper: RecallHelper, answers: Answers) -> None:
    helper.send(Call(key=KEY, pid=5, verb="lock", timeout_s=2.5))
    await until(lambda: 5 in answers.by_pid)
    assert answers.by_pid[5].state == "lock-2500"


@pytest.mark.anyio
async def test_answer_that_is_none_counts_as_lost(helper: RecallHelper, answers: Answers) -> None:
    helper.send(call(6))
    await until(lambda: 6 in answers.by_pid)
    assert answers.by_pid[6] == LOST


@pytest.mark.anyio
async def test_end_of_the_helper_loses_its_calls_and_starts_another(
    helper: RecallHelper, answers: Answers
) -> None:
    helper.send(call(3))
    helper.send(call(4))
    await until(lambda: {3, 4} <= answers.by_pid.keys())
    assert answers.by_pid == {3: LOST, 4: LOST}
    await until(lambda: helper.is_ready)
    helper.send(call(1))
    await until(lambda: 1 in answers.by_pid)
    assert answers.by_pid[1].is_ok
    assert helper.restarts == 1


@pytest.mark.anyio
async def test_call_without_a_helper_is_lost(tmp_path: Path, answers: Answers) -> None:
    missing = RecallHelper(str(tmp_path / "none"), clock=SystemClock(), answered=answers)
    async with background() as group:
        group.start_soon(missing.run)
        await until(lambda: missing.restarts == 1)
        assert not missing.is_ready
        missing.send(call(1))
    assert answers.by_pid == {1: LOST}


@pytest.mark.anyio
async def test_helper_ends_with_its_agent(tmp_path: Path, answers: Answers) -> None:
    program = tmp_path / "hami-recall"
    program.write_text(
        PROGRAM.replace(
            "import os, socket",
            f"import os, socket\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))",
        )
    )
    program.chmod(0o755)
    made = RecallHelper(str(program), clock=SystemClock(), answered=answers)
    async with background() as group:
        group.start_soon(made.run)
        await until(lambda: (tmp_path / "pid").exists() and made.is_ready)
        await until(lambda: bool((tmp_path / "pid").read_text()))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIG_DFL)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("ok", Answer(is_ok=True)),
        ("ok locked", Answer(is_ok=True, state="locked")),
        ("error deadline", LOST),
        ("error 2 CUDA_ERROR_OUT_OF_MEMORY", Answer(code=2, name="CUDA_ERROR_OUT_OF_MEMORY")),
        ("error 2", Answer(code=2, name="2")),
        ("error 0 CUDA_SUCCESS", None),
        ("error -1 x", None),
        ("error", None),
        ("ok a b", None),
        ("", None),
    ],
)
def test_answers_are_those_of_the_protocol(text: str, answer: Answer | None) -> None:
    assert parse_answer(text.split()) == answer
