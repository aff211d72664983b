# SPDX-License-Identifier: Apache-2.0
"""Ports for programs are none that the kernel gives to connections, and none is picked twice."""

import socket
from pathlib import Path

import pytest

from hami_sim import ports


def test_ports_lie_below_those_of_connections_and_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "range"
    given.write_text("20000\t60999\n")
    monkeypatch.setattr(ports, "_RANGE", given)
    picked = [ports.free_port() for _ in range(200)]
    assert len(set(picked)) == len(picked)
    assert all(ports.FIRST <= port < 20_000 for port in picked)


def test_port_of_a_listener_is_not_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((ports.HOST, 0)) as listener:
        taken = listener.getsockname()[1]
        assert not ports.is_free(taken)
    monkeypatch.setattr(ports, "is_free", lambda _port: False)
    assert ports.free_port() >= ports.FIRST  # then the kernel's choice is better than none


@pytest.mark.parametrize("text", ["", "much\tmore\n", "1024\t60999\n"])
def test_kernel_chooses_where_nothing_lies_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    given = tmp_path / "range"
    given.write_text(text)
    monkeypatch.setattr(ports, "_RANGE", given)
    assert ports.free_port() > 1024
