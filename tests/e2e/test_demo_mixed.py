# SPDX-License-Identifier: Apache-2.0
"""The demo with devices of every vendor, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hami_common.vendors.catalog import Catalog

ROOT = Path(__file__).resolve().parents[2]
LIFE = ["reserved", "bound", "prepared", "running", "released"]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Pods of one run of ``./dev demo --once --profile mixed --json FILE``."""
    path = tmp_path_factory.mktemp("mixed") / "out.json"
    run = subprocess.run(
        [sys.executable, "-m", "hami_sim.demo", "--once", "--profile", "mixed", "--json", path],
        cwd=ROOT,
        env={**os.environ, "HAMI_PLANE": "sim"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads(path.read_text())
    assert document["ok"]
    return {pod["name"]: pod for pod in document["pods"]}


def shares(pod: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [
        (device["memory_mib"], device["core_pct"], device["partition"])
        for container in pod["containers"]
        for device in container["devices"]
    ]


def test_every_vendor_has_pods_that_lived_and_one_that_is_refused_with_a_reason(
    pods: dict[str, dict[str, Any]],
) -> None:
    for vendor in Catalog.from_settings().vendors:
        own = [pod for name, pod in pods.items() if name.startswith(f"{vendor.name}-")]
        waiting = [pod for pod in own if pod["phase"] == "Pending"]
        assert [pod["name"] for pod in waiting] == [f"{vendor.name}-refused"]
        assert "wanted" in waiting[0]["reason"]
        lived = [pod for pod in own if pod not in waiting]
        assert lived
        assert all(pod["states"] == LIFE for pod in lived)
        assert {
            device["vendor"] for pod in lived for c in pod["containers"] for device in c["devices"]
        } == {vendor.name}


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("ascend-share-a", (16384, 25, "vir05_1c_16g")),
        ("cambricon-share-a", (20 * 256, 30, "")),
        ("iluvatar-share-a", (8192, 30, "")),
        ("enflame-share-a", (8 * 1024, 16, "1g.8gb")),
        ("kunlunxin-share-a", (24576, 25, "1/4")),
        ("nvidia-share-a", (3000, 30, "")),
        ("nvidia-mig-memory", (16384, 12, "1g.18gb@6")),
        ("nvidia-mig-compute", (33024, 24, "2g.35gb@4")),
    ],
)
def test_shares_are_those_of_the_vendors_rules(
    pods: dict[str, dict[str, Any]], name: str, share: tuple[int, int, str]
) -> None:
    assert shares(pods[name]) == [share]
