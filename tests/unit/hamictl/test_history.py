# SPDX-License-Identifier: Apache-2.0
"""``hamictl get pressure`` and ``get workload``: what is asked, and how it is shown."""

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hamictl import client
from hamictl.cli import main

NEIGHBOR = {"namespace": "", "pod": "", "container": "", "device_time_s": 40.0, "core_pct": 60.0}
PRESSURE = {
    "namespace": "team-a",
    "pod": "p",
    "container": "main",
    "node": "gpu-1",
    "waited_s": 8.04,
    "refusals": 2,
    "device_time_s": 10.0,
    "cause": "limit",
    "devices": [
        {
            "uuid": "GPU-a",
            "limit_core_pct": 40,
            "core_pct": 20.0,
            "starved_s": 0.0,
            "neighbors": [
                {**NEIGHBOR, "device_time_s": 3.0},
                {**NEIGHBOR, "namespace": "team-b", "pod": "q"},
            ],
        }
    ],
}
DEVICE = {
    "uuid": "GPU-a",
    "limit_mib": 300,
    "limit_core_pct": 0,
    "used_mib": 100,
    "core_pct": 20,
    "peak_mib": 200,
    "peak_s": 1.0,
    "p95_core_pct": 21,
}
SIZE = {"memory_mib": 230, "core_pct": 40, "profile": "1g", "margin_pct": 15, "hours": 2.0}
WORKLOAD = {
    "namespace": "team-a",
    "pod": "p",
    "allocation": {
        "namespace": "team-a",
        "pod": "p",
        "node": "gpu-1",
        "state": "running",
        "allocation_id": "x",
        "ledger_seq": 1,
        "reserved_s": 1.0,
        "containers": [],
    },
    "containers": [
        {"name": "main", "devices": [DEVICE], "pressure": PRESSURE, "right_size": [SIZE]},
        {"name": "side", "devices": [{**DEVICE, "peak_s": 0.0}]},
    ],
    "cut": "too much",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that were sent."""
    found: list[Any] = []

    def read(kind: type[Any], base: str, path: str, **query: str) -> Any:
        del base
        found.append((path, {name: value for name, value in query.items() if value}))
        answer = {"items": [PRESSURE]} if path == "/v1/pressure" else WORKLOAD
        return msgspec.convert(answer, kind)

    monkeypatch.setattr(client, "read", read)
    return found


def run(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_pressure_shows_cause_and_busiest_neighbor(asked: list[Any]) -> None:
    text = run("get", "pressure", "-n", "team-a", "--hours", "6")
    assert asked == [("/v1/pressure", {"namespace": "team-a", "hours": "6"})]
    row = text.splitlines()[1]
    for part in ("team-a", "8.0", "2", "own compute limit", "team-b/q (40 s)"):
        assert part in row
    assert '"waited_s": 8.04' in run("get", "pressure", "-o", "json")


def test_workload_shows_peak_waiting_and_recommendation(asked: list[Any]) -> None:
    text = run("get", "workload", "p", "-n", "team-a")
    assert asked == [("/v1/workloads/team-a/p", {})]
    for part in (
        "Pod team-a/p on gpu-1: running",
        "100/300 (33%)",
        "20/100",
        "waited 8.0 s (own compute limit), 2 memory refusals, busiest neighbor team-b/q (40 s)",
        "recommended request 1g, 230 MiB, 40 % (use of 2 h plus 15 %)",
        "The answer is incomplete: too much",
    ):
        assert part in text
