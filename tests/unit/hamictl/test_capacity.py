# SPDX-License-Identifier: Apache-2.0
"""``hamictl get capacity`` and ``hamictl simulate --drain``: what is asked, and how it is shown."""

from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from hamictl import client
from hamictl.cli import main

MODEL = {
    "vendor": "nvidia",
    "model": "NVIDIA H200",
    "devices": 4,
    "devices_offering": 2,
    "capacity_mib": 4000,
    "free_mib": 2000,
    "foreign_mib": 70,
    "burst_mib": 30,
    "largest_mib": 700,
    "largest_core_pct": 40,
    "largest_on": "gpu-1",
    "fits": [
        {"size": "1/4", "memory_mib": 250, "core_pct": 25, "count": 3},
        {"size": "asked", "memory_mib": 300, "core_pct": 0, "count": 2},
    ],
    "stranded": [{"cause": "compute", "devices": 1, "memory_mib": 600}],
    "stranded_by": [
        {"namespace": "team-a", "memory_mib": 500},
        {"namespace": "", "memory_mib": 100},
    ],
}
DRAINED = {
    "snapshot_id": "1.1",
    "node": "n1",
    "placed": 1,
    "refused": 1,
    "pods": [
        {"namespace": "ns", "pod": "small", "node": "n2"},
        {"namespace": "ns", "pod": "large", "refusals": [{"nodes": 2, "text": "too small"}]},
    ],
    "staying": [{"namespace": "ns", "pod": "daemon", "why": "belongs to a DaemonSet"}],
    "rejected": [],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that were sent."""
    found: list[Any] = []

    def read(kind: type[Any], base: str, path: str, **query: str) -> Any:
        del base
        found.append((path, {name: value for name, value in query.items() if value}))
        return msgspec.convert({"items": [MODEL]}, kind)

    def send(kind: type[Any], base: str, path: str, body: object) -> Any:
        del base
        found.append((path, msgspec.to_builtins(body)))
        return msgspec.convert(DRAINED, kind)

    monkeypatch.setattr(client, "read", read)
    monkeypatch.setattr(client, "send", send)
    return found


def run(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_capacity_shows_largest_share_fits_and_stranded_memory(asked: list[Any]) -> None:
    text = run("get", "capacity", "--memory-mib", "300")
    assert asked == [("/v1/capacity", {"memory_mib": "300"})]
    for part in ("2/4", "2000/4000 (50%)", "700 MiB 40 %", "3 x 1/4, 2 x 300 MiB 0 %"):
        assert part in text
    assert "600 compute" in text
    assert "team-a" not in text
    wide = run("get", "capacity", "-o", "wide")
    assert "500 team-a, 100 others" in wide
    assert wide.rstrip().endswith("gpu-1")
    assert wide.split()[-3:] == ["70", "30", "gpu-1"]  # foreign use and bursts


def test_capacity_sends_namespace_and_compute(asked: list[Any]) -> None:
    run("get", "capacity", "--memory-mib", "1", "--core-pct", "0", "-n", "ns", "-o", "json")
    assert asked[0][1] == {"memory_mib": "1", "core_pct": "0", "namespace": "ns"}


def test_drain_shows_placements_refusals_and_pods_that_stay(asked: list[Any]) -> None:
    text = run("simulate", "--drain", "n1")
    assert asked == [("/v1/whatif/drain", {"node": "n1", "explain": True})]
    assert "2 nodes: too small" in text
    assert "ns/daemon is not moved: belongs to a DaemonSet" in text
    assert "1 would start elsewhere, 1 would not, 1 are not moved" in text
    strict = CliRunner().invoke(main, ["simulate", "--drain", "n1", "--strict"])
    assert strict.exit_code == 1


def test_drain_takes_no_other_input() -> None:
    result = CliRunner().invoke(main, ["simulate", "--drain", "n1", "--add-nodes", "n1"])
    assert result.exit_code == 2
    assert "--drain asks a scheduler about its present state" in result.output
