# SPDX-License-Identifier: Apache-2.0
"""The operator's command line against a running cluster."""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import CompletedProcess

import anyio
import pytest
import yaml

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(nodes=(NodeSpec(name="gpu-t4", profile="4xT4"),))
    async with run_cluster(spec, tmp_path_factory.mktemp("hamictl")) as running:
        yield running


async def hamictl(cluster: Cluster, *words: str) -> CompletedProcess[bytes]:
    environment = {
        **os.environ,
        "HAMICTL_REGISTRY": cluster.url("registry"),
        "HAMICTL_SCHEDULER": cluster.url("scheduler"),
    }
    return await anyio.run_process(
        [sys.executable, "-m", "hamictl", *words], env=environment, check=False
    )


async def test_operator_sees_explains_and_tries(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.create_pod(small_pod("web", memory_mib=3000))
    await cluster.create_pod(small_pod("huge", memory_mib=90000))

    async def settled() -> bool:
        known = await cluster.explain("huge")
        return await cluster.pod_is("web", "Running") and bool(known.get("decisions"))

    await cluster.until("one pod runs and one is refused", settled)

    nodes = await hamictl(cluster, "get", "nodes")
    assert nodes.returncode == 0, nodes.stderr
    assert b"gpu-t4" in nodes.stdout
    assert b"3000/" in nodes.stdout
    devices = json.loads((await hamictl(cluster, "get", "devices", "-o", "json")).stdout)
    assert sum(one["booked_mib"] for one in devices["items"]) == 3000
    held = await hamictl(cluster, "get", "allocations", "-n", "default", "-o", "wide")
    assert b"main: 1 x 3000 MiB" in held.stdout
    why = await hamictl(cluster, "explain", "pod", "huge")
    assert b"refused, 0 of 1 nodes fit" in why.stdout
    assert b"90000" in why.stdout
    assert b"closest fit: container main: memory_mib 1" in why.stdout, why.stdout

    snapshot, pods = tmp_path / "snapshot.json", tmp_path / "pods.yaml"
    saved = await hamictl(cluster, "snapshot", str(snapshot))
    assert saved.returncode == 0, saved.stderr
    pods.write_text(yaml.safe_dump({"kind": "Pod", **small_pod("again", memory_mib=90000)}))
    tried = await hamictl(cluster, "simulate", "--snapshot", str(snapshot), "--pods", str(pods))
    assert b"closest fit: container main: memory_mib 1" in tried.stdout, tried.stdout

    absent = await hamictl(cluster, "explain", "pod", "nobody")
    assert absent.returncode == 1
    assert b"nobody" in absent.stderr
    away = await hamictl(cluster, "get", "nodes", "--registry", "http://127.0.0.1:1")
    assert away.returncode == 3
    assert b"http://127.0.0.1:1 does not answer" in away.stderr
    wrong = await hamictl(cluster, "get", "gadgets")
    assert wrong.returncode == 2
