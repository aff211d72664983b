# SPDX-License-Identifier: Apache-2.0
"""A snapshot decides pods again, the same way each time."""

import json
from pathlib import Path
from typing import Any

import pytest

from hami_common.events import codec
from hami_core.ledger.ledger import Ledger
from hami_core.replay.snapshot import Snapshot, take
from hami_core.table.table import DeviceTable
from hami_scheduler.tools import replay
from tests.unit.scheduler.shell import builders


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Two nodes, nothing booked."""
    inventory = [
        builders.devices("big", count=2, memory_mib=16000),
        builders.devices("small", memory_mib=4000),
    ]
    found: Snapshot = take(
        Ledger(DeviceTable()),
        devices=inventory,
        silent=[],
        faults=[],
        policy=Snapshot(snapshot_id="x", time_s=0.0).policy,
        writer="s1",
        now_s=5.0,
    )
    path = tmp_path / "snapshot.json"
    path.write_bytes(codec.encode(found))
    return path


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = replay.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_verdict_names_every_node_and_the_devices_of_the_best(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = write(tmp_path / "pod.json", builders.pod("a", mem_mib=5000))
    code, out, _ = run(capsys, "--snapshot", snapshot, pod)
    verdict = json.loads(out)
    assert code == 0
    assert [entry["node"] for entry in verdict["nodes"]] == ["big", "small"]
    assert "CardInsufficientMemory" in verdict["nodes"][1]["refusal"]
    assert verdict["node"] == "big"
    assert verdict["containers"][0]["shares"][0]["memory_mib"] == 5000


def test_bound_pods_fill_the_nodes_for_those_that_follow(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [builders.pod(f"p{i}", mem_mib=15000) for i in range(3)]
    pods = write(tmp_path / "pods.json", {"kind": "List", "items": items})
    _, out, _ = run(capsys, "--snapshot", snapshot, "--bind", pods)
    verdicts = [json.loads(line) for line in out.splitlines()]
    assert [verdict.get("node", "") for verdict in verdicts] == ["big", "big", ""]
    uuids = {verdict["containers"][0]["shares"][0]["uuid"] for verdict in verdicts[:2]}
    assert uuids == {"GPU-big-0", "GPU-big-1"}
    assert out == run(capsys, "--snapshot", snapshot, "--bind", pods)[1]


def test_node_is_explained_device_by_device(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = write(tmp_path / "pod.json", builders.pod("a", mem_mib=5000))
    _, out, _ = run(capsys, "--snapshot", snapshot, "--node", "small", pod)
    (device,) = json.loads(out)["explanation"]["steps"][0]["devices"]
    assert (device["code"], device["wanted"], device["free"]) == (
        "CardInsufficientMemory",
        5000,
        4000,
    )


def test_pods_that_cannot_be_placed_say_why(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = builders.pod("broken")
    broken["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = "3Gi"
    first = write(tmp_path / "broken.json", broken)
    second = write(tmp_path / "plain.json", builders.pod("plain", gpu=None))
    _, out, _ = run(capsys, "--snapshot", snapshot, first, second)
    problems = [json.loads(line)["problem"] for line in out.splitlines()]
    assert "write 3072" in problems[0]
    assert problems[1] == "asks for no device"


def test_input_that_cannot_be_read_is_named(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--snapshot", snapshot, tmp_path / "none.json")
    assert code == 2
    assert "none.json" in err
    code, _, err = run(capsys, "--snapshot", write(tmp_path / "x.json", []), tmp_path / "x.json")
    assert code == 2
    assert "x.json" in err
