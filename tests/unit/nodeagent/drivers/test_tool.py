# SPDX-License-Identifier: Apache-2.0
"""Running a tool: limits of time and size, nothing left behind, one run at a time."""

from pathlib import Path

import anyio
import pytest

from hami_nodeagent.drivers import tool as module
from hami_nodeagent.drivers.errors import AnswerUnknown, DeviceHung, DriverMissing
from hami_nodeagent.drivers.tool import Tool

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0


def script(folder: Path, body: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def is_alive(pid: int) -> bool:
    """Report if a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_output_errors_and_status_are_kept_apart(tmp_path: Path) -> None:
    tool = Tool("t", path=script(tmp_path, 'echo "out $1"; echo bad >&2; exit 3'))
    answer = await tool.run("x y")
    assert (answer.text, answer.complaint, answer.status) == ("out x y\n", "bad\n", 3)
    assert answer.words == "bad\n\nout x y"


async def test_tool_runs_in_the_c_locale_without_input(tmp_path: Path) -> None:
    body = 'read -r line || echo "no input"; echo "$LANG $LC_ALL $EXTRA"'
    tool = Tool("t", path=script(tmp_path, body), environment={"EXTRA": "more", "LANG": "xx"})
    assert (await tool.run()).text == "no input\nC C more\n"


async def test_time_limit_ends_the_tool_and_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"sleep 600 & echo $! > {pids}.new; echo $$ >> {pids}.new; mv {pids}.new {pids}; wait"
    tool = Tool("t", path=script(tmp_path, body))
    with anyio.fail_after(PATIENCE_S):
        with pytest.raises(DeviceHung, match=r"t now: no answer within 1 s"):
            await tool.run("now", limit_s=1.0)
        for pid in map(int, pids.read_text(encoding="ascii").split()):
            while is_alive(pid):
                await anyio.sleep(0.01)
    assert not tool.is_stuck


async def test_child_that_keeps_the_output_open_does_not_outlive_the_limit(tmp_path: Path) -> None:
    tool = Tool("t", path=script(tmp_path, "echo early; sleep 600 &"))
    with anyio.fail_after(PATIENCE_S), pytest.raises(DeviceHung):
        await tool.run(limit_s=0.5)


async def test_cancelled_run_leaves_nothing_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 600"
    tool = Tool("t", path=script(tmp_path, body))
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(tool.run)
            while not pid_file.exists():
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        pid = int(pid_file.read_text(encoding="ascii"))
        while is_alive(pid):
            await anyio.sleep(0.01)


async def test_answer_without_end_is_cut_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_LIMIT", 4096)
    tool = Tool("t", path=script(tmp_path, "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaa; done"))
    with anyio.fail_after(PATIENCE_S), pytest.raises(AnswerUnknown, match="exceeds 4096 bytes"):
        await tool.run()


async def test_first_line_of_a_stream_is_an_answer(tmp_path: Path) -> None:
    tool = Tool("t", path=script(tmp_path, "echo first; sleep 600"))
    with anyio.fail_after(PATIENCE_S):
        answer = await tool.run(one_line=True)
    assert (answer.text.splitlines()[0], answer.status) == ("first", 0)


async def test_bytes_that_are_no_text_are_kept_as_marks(tmp_path: Path) -> None:
    tool = Tool("t", path=script(tmp_path, "printf '\\377\\376x'"))
    assert (await tool.run()).text.endswith("x")


async def test_missing_or_broken_tool_raises_driver_missing(tmp_path: Path) -> None:
    with pytest.raises(DriverMissing, match="nowhere is not installed"):
        await Tool("t", path="/nowhere").run()
    path = tmp_path / "tool"
    path.write_text("#!/bin/nowhere\n", encoding="ascii")
    path.chmod(0o755)
    with pytest.raises(DriverMissing, match="No such file"):
        await Tool("t", path=str(path)).run()


async def test_runs_of_one_tool_never_overlap(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    body = f"mkdir {mark} || {{ echo overlap; exit 1; }}; sleep 0.02; rmdir {mark}"
    tool = Tool("t", path=script(tmp_path, body))
    said: list[str] = []

    async def run() -> None:
        said.append((await tool.run()).text)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(run)
    assert said == [""] * 5


@pytest.mark.parametrize(("lines", "is_read"), [(20_000, True), (20_001, False)])
async def test_answer_of_too_many_lines_is_rejected(
    tmp_path: Path, *, lines: int, is_read: bool
) -> None:
    tool = Tool("t", path=script(tmp_path, f"yes '' | head -n {lines}"))
    if is_read:
        assert len((await tool.run()).text) == lines
        return
    with pytest.raises(AnswerUnknown, match="the answer exceeds 20000 lines"):
        await tool.run()
