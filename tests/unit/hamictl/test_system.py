# SPDX-License-Identifier: Apache-2.0
"""``hamictl get system``: concerns, replicas and Leases."""

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from hami_common.runtime.clock import SystemClock
from hamictl import client, output
from hamictl.cli import main
from hamictl.commands.system import System


def run(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> Result:
    def read(kind: type[System], base: str, path: str) -> System:
        assert (base, path) == ("http://r", "/v1/system")
        return msgspec.convert({"concerns": [], "replicas": [], **answer}, kind)

    monkeypatch.setattr(client, "read", read)
    return CliRunner().invoke(main, ["get", "system", "--registry", "http://r"])


def test_leases_are_printed_with_holder_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = SystemClock().now_s()
    lease = {"lease_s": 15.0, "transitions": 2, "holder": "s-1", "since_s": now_s - 7300}
    printed = run(
        monkeypatch,
        concerns=[{"code": "agents-silent", "name": "gpu-1", "count": 1}],
        replicas=[{"service": "scheduler", "replica": "s-1", "last_s": now_s, "last": "record"}],
        leases=[
            {**lease, "name": "hami-idle", "renewed_s": now_s - 3, "is_expired": False},
            {**lease, "name": "hami-claims", "renewed_s": None, "is_expired": True},
        ],
    )
    assert printed.exit_code == 0, printed.output
    lines = [line.split() for line in printed.output.splitlines()]
    assert ["agents-silent", "gpu-1", "1"] in lines
    (idle,) = [line for line in lines if line[:1] == ["hami-idle"]]
    assert idle[1:4] == ["s-1", "Held", output.age(7300)]
    (claims,) = [line for line in lines if line[:1] == ["hami-claims"]]
    assert claims[2] == "Expired"
    assert claims[4:] == ["-", "2"]


def test_reason_without_leases_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run(monkeypatch, leases_problem="no right to list leases")
    assert "Nothing observable is behind." in printed.output
    assert "The Leases cannot be listed: no right to list leases" in printed.output
