# SPDX-License-Identifier: Apache-2.0
"""Life of a service process: start, readiness, signals, grace, exit codes."""

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import os, sys, time
import anyio
from hami_common.errors import InvariantBroken, SettingsInvalid, Unavailable
from hami_common.runtime import service
from hami_common.runtime.settings import ServiceSettings

class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: str = ""

def say(text):
    print(text, flush=True)
"""
POSTLUDE = """
sys.exit(service.run(main, service="tester", settings_type=Settings))
"""

ORDERLY = """
async def child(*, task_status):
    say("child up")
    task_status.started()
    try:
        await anyio.sleep_forever()
    finally:
        say("child down")

async def main(context):
    async with anyio.create_task_group() as group:
        await group.start(child)
        context.ready.set()
        say("ready")
        await context.stopping.wait()
        say(f"stopping ready={context.ready.is_set}")
        group.cancel_scope.cancel()
    say("closed")
"""


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def read_until(self, wanted: str) -> list[str]:
        lines: list[str] = []
        while not lines or lines[-1] != wanted:
            line = self.line()
            if not line and self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} after {lines}")
            lines.append(line)
        return lines

    def end(self) -> tuple[int, list[str], list[dict[str, Any]]]:
        """Exit code, further output, log lines."""
        out, err = self.process.communicate(timeout=60)
        logs = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
        return self.process.returncode, out.splitlines(), logs


@contextmanager
def running(tmp_path: Path, body: str, *argv: str) -> Iterator[Process]:
    script = tmp_path / "tester.py"
    script.write_text(PRELUDE + textwrap.dedent(body) + POSTLUDE, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Process(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_turns_readiness_off_and_ends_children_in_order_with_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(tmp_path, ORDERLY) as service:
        assert service.read_until("ready") == ["child up", "ready"]
        service.process.send_signal(number)
        code, out, logs = service.end()
    assert code == 0
    assert out == ["stopping ready=False", "child down", "closed"]
    messages = [line["message"] for line in logs]
    assert messages == ["effective settings", "asked to stop", "stopped"]
    assert logs[1]["signal"] == number.name


def test_work_that_exceeds_the_grace_period_is_canceled(tmp_path: Path) -> None:
    body = """
    async def main(context):
        context.ready.set()
        say("ready")
        try:
            await anyio.sleep_forever()
        finally:
            say("cancelled")
    """
    with running(tmp_path, body, "--set", "grace_s=0.2") as service:
        service.read_until("ready")
        service.process.send_signal(signal.SIGTERM)
        code, out, logs = service.end()
    assert (code, out) == (0, ["cancelled"])
    assert "cancelled after grace" in [line["message"] for line in logs]


@pytest.mark.parametrize("how", ["await anyio.sleep(60)", "time.sleep(60)"])
def test_a_second_signal_ends_the_process_at_once_even_when_its_loop_is_stuck(
    tmp_path: Path, how: str
) -> None:
    body = f"""
    async def main(context):
        context.ready.set()  # else the first signal cancels the work
        say("ready")
        await context.stopping.wait()
        say("stopping")
        {how}
    """
    with running(tmp_path, body, "--set", "grace_s=60") as service:
        service.read_until("ready")
        service.process.send_signal(signal.SIGTERM)
        service.read_until("stopping")
        service.process.send_signal(signal.SIGTERM)
        code, _, _ = service.end()
    assert code == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("InvariantBroken(what='impossible', history=['a', 'b'])", 1, "unexpected error"),
        ("ZeroDivisionError()", 1, "unexpected error"),
        ("SettingsInvalid(field='f', problem='p', fix='x')", 2, "settings are not valid"),
        ("Unavailable(peer='NATS', detail='away')", 3, "a dependency is missing at start"),
        (
            "ExceptionGroup('', [ExceptionGroup('', [Unavailable(peer='NATS', detail='away')])])",
            3,
            "a dependency is missing at start",
        ),
        (
            "ExceptionGroup('', [Unavailable(peer='NATS', detail='away'), ZeroDivisionError()])",
            1,
            "unexpected error",
        ),
    ],
)
def test_errors_become_exit_codes(tmp_path: Path, error: str, code: int, message: str) -> None:
    body = f"""
    async def main(context):
        raise {error}
    """
    with running(tmp_path, body) as service:
        got, _, logs = service.end()
    assert got == code
    assert logs[-1]["message"] == message
    assert logs[-1]["level"] == "CRITICAL"


def test_losing_a_dependency_after_being_ready_is_a_bug_not_a_missing_dependency(
    tmp_path: Path,
) -> None:
    body = """
    async def main(context):
        context.ready.set()
        raise Unavailable(peer="NATS", detail="away")
    """
    with running(tmp_path, body) as service:
        assert service.end()[0] == 1


def test_bad_settings_end_with_2_before_anything_runs(tmp_path: Path) -> None:
    with running(tmp_path, ORDERLY, "--set", "modde=x") as service:
        out, err = service.process.communicate(timeout=60)
    assert service.process.returncode == 2
    assert out == ""
    assert "did you mean mode?" in err


def test_check_prints_the_masked_settings_and_leaves(tmp_path: Path) -> None:
    argv = ("--check", "--set", "mode=x", "--set", "nats_urls=nats://u:secret@h")
    with running(tmp_path, ORDERLY, *argv) as service:
        out, _ = service.process.communicate(timeout=60)
    assert service.process.returncode == 0
    shown = json.loads(out)
    assert shown["mode"] == "x"
    assert "secret" not in out


def test_a_service_that_finishes_by_itself_ends_with_0(tmp_path: Path) -> None:
    with running(tmp_path, "async def main(context):\n    say('done')\n") as service:
        code, out, logs = service.end()
    assert (code, out) == (0, ["done"])
    assert logs[-1] | {"asked": False} == logs[-1]


def test_swapped_configmap_is_taken_over_while_the_service_runs(tmp_path: Path) -> None:
    body = """
    class Hot(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
        HOT = Settings.HOT | {"mode"}

    Settings = Hot

    async def main(context):
        context.settings_file.use = lambda settings: say(f"mode {settings.mode}")
        context.ready.set()
        say("ready")
        await context.stopping.wait()
    """
    mounted = tmp_path / "mounted"
    for number, text in enumerate(('mode = "a"', 'mode = "b"', 'mod = "c"'), start=1):
        version = mounted / f"..{number}"
        version.mkdir(parents=True)
        (version / "tester.toml").write_text(f"config_poll_s = 0.05\n{text}\n")
    (mounted / "..data").symlink_to("..1")
    (mounted / "tester.toml").symlink_to("..data/tester.toml")

    def swap(number: int) -> None:
        fresh = mounted / "..data_tmp"
        fresh.symlink_to(f"..{number}")
        fresh.replace(mounted / "..data")

    with running(tmp_path, body, "--config", str(mounted / "tester.toml")) as service:
        service.read_until("ready")
        swap(2)
        assert service.line() == "mode b"
        swap(3)
        problem = ""
        assert service.process.stderr is not None
        while not problem:
            line = json.loads(service.process.stderr.readline())
            problem = line["problem"] if line["level"] == "ERROR" else ""
        service.process.send_signal(signal.SIGTERM)
        code, _, _ = service.end()
    assert code == 0
    assert problem == "setting mod: is not a known key; did you mean mode?"
