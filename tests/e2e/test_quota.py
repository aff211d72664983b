# SPDX-License-Identifier: Apache-2.0
"""A namespace's quota and a queue's, from manifest to the pod's condition and the command line."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from click.testing import CliRunner

from hami_common.errors import Denied
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hamictl.cli import main
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

QUEUES = """
[[queue]]
name = "team"
limit = { memory_mib = 3000 }
namespaces = ["team"]
"""


@pytest.fixture
def queues_file(tmp_path: Path) -> Path:
    file = tmp_path / "queues.toml"
    file.write_text(QUEUES)
    return file


@pytest.fixture
async def cluster(
    queues_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name="gpu-t4", profile="4xT4"),),
        backoff_s=0.2,
        settings={
            "scheduler": {
                "queues_file": str(queues_file),
                "config_poll_s": "0.2",
            }
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("quota")) as running:
        yield running


async def hamictl(cluster: Cluster, *words: str) -> str:
    environment = {"HAMICTL_SCHEDULER": cluster.url("scheduler")}

    def run() -> str:
        done = CliRunner().invoke(main, words, env=environment, prog_name="hamictl")
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    return await anyio.to_thread.run_sync(run)


async def until_told(cluster: Cluster, name: str, text: str, *, namespace: str = "default") -> None:
    async def told() -> bool:
        pod = await cluster.pod(name, namespace=namespace)
        return any(text in condition.message for condition in pod.status.conditions or [])

    await cluster.until(f"{name} is told: {text}", told)


async def until_runs(cluster: Cluster, name: str, *, namespace: str = "default") -> None:
    async def runs() -> bool:
        return await cluster.pod_is(name, "Running", namespace=namespace)

    await cluster.until(f"{name} runs", runs)


async def test_pods_wait_for_quota_and_for_their_queue(
    cluster: Cluster, queues_file: Path, tmp_path: Path
) -> None:
    hard = {"limits.nvidia.com/gpumem": "10k", "requests.nvidia.com/gpu": "3"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpu"}}
    await cluster.create(
        "/api/v1/namespaces/default/resourcequotas", {**quota, "spec": {"hard": hard}}
    )
    await cluster.create(
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}},
    )

    async def quota_is_known() -> bool:
        return "limits.nvidia.com/gpumem 0 10000" in await hamictl(cluster, "get", "quotas")

    await cluster.until("the scheduler knows the quota", quota_is_known)
    first = small_pod("first", memory_mib=4000)
    first["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
    await cluster.create_pod(first)
    await until_runs(cluster, "first")
    await cluster.create_pod(small_pod("second", memory_mib=4000))
    text = 'ResourceQuotaNotFit: quota "gpu" limits.nvidia.com/gpumem'
    await until_told(cluster, "second", f"1 {text}: 4000 MiB wanted, 8000 used, limit 10000")
    with pytest.raises(Denied, match="exceeded quota: gpu"):
        await cluster.create_pod(small_pod("third"))  # requests. is Kubernetes' own
    await cluster.delete_pod("first")
    await until_runs(cluster, "second")

    await cluster.create_pod(small_pod("train", memory_mib=4000), namespace="team")
    await until_told(
        cluster,
        "train",
        "QueueOverLimit: queue team memory_mib: 4000 MiB wanted, 0 used, limit 3000",
        namespace="team",
    )
    snapshot, manifest = tmp_path / "cluster.json", tmp_path / "pods.json"
    await hamictl(cluster, "snapshot", str(snapshot))
    pods = [
        {**small_pod(name, memory_mib=mib), "kind": "Pod"}
        for name, mib in (("over", 7000), ("within", 6000))
    ]
    pods.append({**small_pod("train-2", memory_mib=3001), "kind": "Pod"})
    pods[-1]["metadata"]["namespace"] = "team"
    manifest.write_text(json.dumps({"kind": "List", "items": pods}))
    tried = await hamictl(cluster, "simulate", "--snapshot", str(snapshot), "--pods", str(manifest))
    assert "1 placed, 2 refused" in tried
    assert f"{text}: 7000 MiB wanted, 4000 used, limit 10000" in tried
    assert "QueueOverLimit: queue team memory_mib: 3001 MiB wanted, 0 used, limit 3000" in tried
    assert "default gpu limits.nvidia.com/gpumem 10000 10000" in tried
    queues_file.write_text(QUEUES.replace("3000", "5000"))
    await until_runs(cluster, "train", namespace="team")
    assert "team memory_mib 4000 0 0 5000" in await hamictl(cluster, "get", "queues")
    assert "gpu limits.nvidia.com/gpumem 4000 10000" in await hamictl(cluster, "get", "quotas")
