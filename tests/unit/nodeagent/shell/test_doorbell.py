# SPDX-License-Identifier: Apache-2.0
"""The sockets at which containers ring: who rang, whose process died, and what a flood costs."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from hami_nodeagent.shell.doorbell import (
    BURST,
    NEEDLESS_TOKENS,
    RATE_HZ,
    SOCKET_NAME,
    Doorbells,
)

A, B = ("uid-a", "main"), ("uid-b", "main")


@pytest.fixture
def bells(tmp_path: Path) -> Iterator[Doorbells]:
    made = Doorbells(tmp_path)
    made.listen([A, B])
    yield made
    made.close()


def ring(bells: Doorbells, key: tuple[str, str], byte: bytes = b"a") -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        sender.sendto(byte, str(bells.directory_of(key) / SOCKET_NAME))


@pytest.mark.anyio
async def test_datagram_names_its_container(bells: Doorbells) -> None:
    ring(bells, B)
    with anyio.fail_after(2):
        await bells.wait()
    assert bells.rung(0) == ({B}, set())
    assert bells.rung(0) == (set(), set())


@pytest.mark.anyio
async def test_death_of_a_process_that_rang_is_seen(bells: Doorbells) -> None:
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
    code += "s.sendto(b'a', sys.argv[1]); sys.stdin.read()"
    path = bells.directory_of(A) / SOCKET_NAME
    with subprocess.Popen(["python3", "-c", code, path], stdin=subprocess.PIPE) as process:
        with anyio.fail_after(10):
            await bells.wait()
        assert bells.rung(0) == ({A}, set())
        process.kill()
        with anyio.fail_after(2):
            await bells.wait()
        assert bells.rung(0) == (set(), {A})
        assert bells.rung(0) == (set(), set())


def test_flood_is_answered_at_the_sustained_rate_and_mutes_its_container_only(
    bells: Doorbells,
) -> None:
    answers, duration_s, step_s = 0, 10.0, 0.001
    for step in range(round(duration_s / step_s)):
        now_s = step * step_s
        with suppress(BlockingIOError):  # its own queue is full
            ring(bells, A)
        bells.unmute(now_s)
        answers += A in bells.rung(now_s)[0]
    assert answers == pytest.approx(BURST + RATE_HZ * duration_s, rel=0.05)
    ring(bells, B)
    assert B in bells.rung(duration_s)[0]


def test_needless_datagrams_are_answered_less_often(bells: Doorbells) -> None:
    answers = 0
    for step in range(10_000):
        with suppress(BlockingIOError):
            ring(bells, A)
        bells.unmute(step * 0.001)
        if A in bells.rung(step * 0.001)[0]:
            bells.charge_needless(A)
            answers += 1
    assert answers == pytest.approx((BURST + RATE_HZ * 10) / NEEDLESS_TOKENS, rel=0.1)


def test_socket_is_bound_again_after_a_restart_and_ends_with_its_container(
    bells: Doorbells, tmp_path: Path
) -> None:
    again = Doorbells(tmp_path)
    again.listen([A])
    ring(again, A)
    assert again.rung(0) == ({A}, set())
    again.listen([])
    assert not again.is_open(A)
    with pytest.raises(ConnectionRefusedError):
        ring(again, A)
    again.tidy(lambda uid: uid == "uid-b")
    assert [path.name for path in (tmp_path / "bells").iterdir()] == ["uid-b_main"]
    again.close()


def test_container_whose_socket_cannot_be_bound_is_polled(tmp_path: Path) -> None:
    (tmp_path / "bells").touch()
    bells = Doorbells(tmp_path)
    bells.listen([A])
    assert not bells.is_open(A)
    bells.close()


@pytest.mark.anyio
async def test_report_of_a_process_names_it_and_reads_no_region(bells: Doorbells) -> None:
    heard: list[tuple[tuple[str, str], int, str, int | None]] = []
    bells.listeners.append(lambda *report: heard.append(report))
    turn = 7
    for report in (b"w", b"p" + turn.to_bytes(8, "little"), b"u"):
        ring(bells, A, report)
    with anyio.fail_after(2):
        await bells.wait()
    assert bells.rung(0) == (set(), set())
    assert heard == [
        (A, os.getpid(), "waits", None),
        (A, os.getpid(), "drained", turn),
        (A, os.getpid(), "unmovable", None),
    ]
    ring(bells, A, b"b")
    ring(bells, A, b"i")
    assert bells.rung(0) == ({A}, set())
    assert heard[-1] == (A, os.getpid(), "busy", None)


def test_reports_without_a_listener_are_dropped(bells: Doorbells) -> None:
    ring(bells, A, b"w")
    assert bells.rung(0) == (set(), set())
