# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it: one command, one document, exit code 0."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hami_common.pods import limits
from hami_sim import demo
from hami_sim.hardware import profile
from tests.support.docs import missing_lines
from tools import docs_text

ROOT = Path(__file__).resolve().parents[2]


def run_demo(path: Path, *arguments: str) -> dict[str, Any]:
    """Run ``./dev demo --once`` and return its document."""
    run = subprocess.run(
        [sys.executable, "-m", "hami_sim.demo", "--once", "--json", str(path), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    return {**document, "printed": run.stdout}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of one run of ``./dev demo --once --json FILE``."""
    return run_demo(tmp_path_factory.mktemp("demo") / "out.json")


def pod(result: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in result["pods"] if p["name"] == name)
    return found


def test_prints_what_the_quick_start_shows(result: dict[str, Any]) -> None:
    page = docs_text.read(ROOT, "docs/quickstart.md")
    (shown,) = [one for one in page.commands if one.words == ["./dev", "demo", "--once"]]
    assert len(shown.printed) > 3
    assert missing_lines(shown, result["printed"]) == []


def test_fourteen_pods_of_which_one_stays_pending(result: dict[str, Any]) -> None:
    assert result["ok"]
    phases = {p["name"]: p["phase"] for p in result["pods"]}
    assert len(phases) == 14
    assert [name for name, phase in phases.items() if phase == "Pending"] == [demo.TOO_LARGE]
    assert [name for name, phase in phases.items() if phase == "Deleted"] == [demo.DELETED]
    assert list(phases.values()).count("Running") == 12


def test_pending_pod_has_the_exact_reason(result: dict[str, Any]) -> None:
    reason = pod(result, demo.TOO_LARGE)["reason"]
    assert reason.startswith("0/4 nodes are available: ")
    largest = profile.load("8xH200").model.memory_mib
    assert f"500000 MiB wanted, at most {largest} MiB free on a device (gpu-h200)" in reason


def test_every_container_reads_its_own_limits(result: dict[str, Any]) -> None:
    for story in result["pods"]:
        for container in story["containers"]:
            if story["phase"] == "Pending":
                continue
            seen = limits.decode(container["stdout"])
            assert seen.container == container["name"]
            assert [(d.uuid, d.memory_mib, d.core_pct) for d in seen.devices] == [
                (d["uuid"], d["memory_mib"], d["core_pct"]) for d in container["devices"]
            ]


@pytest.mark.parametrize(
    ("name", "container", "want"),
    [
        ("memory", "main", [(3000, 0)]),
        ("memory-only", "main", [(2000, 0)]),
        ("cores", "main", [(4000, 30), (4000, 30)]),
        ("multi-container", "trainer", [(6000, 50)]),
        ("multi-container", "monitor", [(500, 10)]),
        ("init-container", "prepare", [(5000, 0)]),
        ("init-container", "main", [(2000, 0)]),
    ],
)
def test_shares_are_what_the_manifests_ask(
    result: dict[str, Any], name: str, container: str, want: list[tuple[int, int]]
) -> None:
    (found,) = [c for c in pod(result, name)["containers"] if c["name"] == container]
    assert [(d["memory_mib"], d["core_pct"]) for d in found["devices"]] == want


def test_selectors_are_obeyed(result: dict[str, Any]) -> None:
    assert pod(result, "use-type")["node"] == "gpu-a100"
    assert pod(result, "nouse-type")["node"] in ("gpu-t4", "gpu-a30")
    manifest = demo.manifest("use-uuid")
    wanted = manifest["metadata"]["annotations"]["nvidia.com/use-gpuuuid"]
    assert pod(result, "use-uuid")["containers"][0]["devices"][0]["uuid"] == wanted


def test_whole_device_is_not_shared(result: dict[str, Any]) -> None:
    (whole,) = pod(result, "whole-device")["containers"][0]["devices"]
    assert whole["core_pct"] == 100
    others = [
        device["uuid"]
        for story in result["pods"]
        if story["name"] != "whole-device"
        for container in story["containers"]
        for device in container["devices"]
    ]
    assert whole["uuid"] not in others


def test_states_come_in_order_and_traces_are_distinct(result: dict[str, Any]) -> None:
    placed = [p for p in result["pods"] if p["phase"] != "Pending"]
    for story in placed:
        want = ["reserved", "bound", "prepared", "running"]
        if story["phase"] == "Deleted":
            want.append("released")
        assert story["states"] == want, story["name"]
    traces = {story["trace_id"] for story in result["pods"]}
    assert len(traces) == 14
    assert "" not in traces


def test_share_of_the_deleted_pod_was_reused(result: dict[str, Any]) -> None:
    def uuids(name: str) -> set[str]:
        return {d["uuid"] for c in pod(result, name)["containers"] for d in c["devices"]}

    assert uuids(demo.WAITING) <= uuids(demo.DELETED)
    assert "0/4 nodes are available" in pod(result, demo.WAITING)["waited_because"]


def test_every_change_became_an_event(result: dict[str, Any]) -> None:
    changes = sum(len(story["states"]) for story in result["pods"])
    assert result["events"] >= changes + len(result["pods"])


def test_each_container_is_held_to_its_memory_by_the_limiter(result: dict[str, Any]) -> None:
    for story in result["pods"]:
        for container in story["containers"] if story["phase"] != "Pending" else ():
            gpu, shares = container["gpu"], container["devices"]
            is_whole = all(share["exclusive"] for share in shares)
            assert gpu["intercepted"] is not is_whole
            limit_mib = {share["uuid"]: share["memory_mib"] for share in shares}
            for device in gpu["devices"]:
                assert device["refused"] == demo.OUT_OF_MEMORY
                assert 0 < device["allocated_mib"] <= limit_mib[device["uuid"]]
                assert is_whole or device["total_mib"] == limit_mib[device["uuid"]]


def test_compute_limits_hold(result: dict[str, Any]) -> None:
    (trainer, monitor) = pod(result, "multi-container")["containers"]
    assert trainer["gpu"]["devices"][0]["device_pct"] <= 50 + demo.CORE_NOISE_PCT
    assert monitor["gpu"]["devices"][0]["device_pct"] <= 10 + demo.CORE_NOISE_PCT


def test_report_of_the_program_is_read_back() -> None:
    text = "hami-limits/1\ngpu.0.uuid=GPU-a\ngpu.0.refused=2\ngpu.intercepted=1\ngpu.devices=1\n"
    found = demo.reported(text)
    assert (found["intercepted"], found["error"]) == (True, "")
    assert [(d["uuid"], d["refused"], d["launches"]) for d in found["devices"]] == [("GPU-a", 2, 0)]
    assert demo.reported("gpu.error=cuInit 100\n")["error"] == "cuInit 100"


def test_same_pods_get_the_same_shares_by_claims(result: dict[str, Any], tmp_path: Path) -> None:
    by_claims = run_demo(tmp_path / "out.json", "--profile", "dra")
    assert by_claims["ok"]
    assert {one["name"]: one["phase"] for one in by_claims["pods"]} == {
        one["name"]: one["phase"] for one in result["pods"]
    }
    for name in ("memory", "memory-only", "cores", "multi-container", "init-container"):
        first, second = (pod(document, name) for document in (result, by_claims))
        assert shares(second) == shares(first)


def shares(story: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """The amounts of each container that has devices."""
    return {
        container["name"]: [(d["memory_mib"], d["core_pct"]) for d in container["devices"]]
        for container in story["containers"]
        if container["devices"]
    }
