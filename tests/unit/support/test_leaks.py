# SPDX-License-Identifier: Apache-2.0
"""The leak check names what a test left behind, and ignores what ended in time."""

import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.leaks import leaks_since, snapshot


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.2)


def test_clean_test_has_no_leak(tmp_path: Path) -> None:
    before = snapshot()
    (tmp_path / "x").write_text("written and closed")
    assert leaks_since(before) == []


def test_open_file_is_named_by_its_path(tmp_path: Path) -> None:
    before = snapshot()
    with (tmp_path / "held").open("w"):
        (leak,) = leaks_since(before)
    assert leak.startswith(f"descriptor: {tmp_path}/held")


def test_open_socket_is_named_by_its_port() -> None:
    before = snapshot()
    with socket.create_server(("127.0.0.1", 0)) as server:
        (leak,) = leaks_since(before)
        port = server.getsockname()[1]
    assert leak.startswith(f"descriptor: tcp socket, port {port} to port 0")


def test_running_thread_is_named() -> None:
    before = snapshot()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    try:
        assert leaks_since(before) == ["thread: forgotten"]
    finally:
        done.set()
        thread.join()


def test_child_process_is_named_by_its_command() -> None:
    before = snapshot()
    with subprocess.Popen(["sleep", "60"]) as child:
        (leak,) = leaks_since(before)
        child.kill()
    assert leak == f"child: sleep 60, pid {child.pid}"


def test_thread_that_ends_within_the_grace_time_is_no_leak() -> None:
    before = snapshot()
    timer = threading.Timer(0.05, lambda: None)
    timer.start()
    assert leaks_since(before) == []
    timer.join()
