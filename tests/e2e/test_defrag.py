# SPDX-License-Identifier: Apache-2.0
"""``hamictl defrag --execute`` on a cluster: pods are moved, budgets hold, a killed scheduler."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.support.checker import lasting_problems, ledger_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180), pytest.mark.shares_cluster]

NODES = ("gpu-a", "gpu-b")
SPEC = ClusterSpec(
    nodes=tuple(NodeSpec(name=node, profile="2xA30") for node in NODES),
    node_cpu="100",
    backoff_s=0.2,
    settings={
        "nodeagent": {"discovery_s": "1", "probe_s": "0.3"},
        "scheduler": {"capacity_touch_s": "0.3", "tick_s": "0.5"},
    },
)
FILL_MIB, WEB_MIB, BIG_MIB = 14_000, 8_000, 20_000
"""On a device of 24 GiB: one of the first, beside it one of the second; the third alone."""
WEB = 4


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with run_cluster(SPEC, tmp_path_factory.mktemp("defrag")) as cluster:
        yield cluster


@pytest.fixture
async def cluster(running: Cluster) -> AsyncIterator[Cluster]:
    """Four devices, each with one pod of a ReplicaSet under a budget; empty afterwards."""
    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
    budget = {"minAvailable": WEB - 1, "selector": {"matchLabels": {"app": "web"}}}
    await running.create(
        path,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "web"},
            "spec": budget,
        },
    )
    for number in range(WEB):
        await running.create_pod(small_pod(f"fill-{number}", memory_mib=FILL_MIB))
    await all_run(running, WEB)
    await running.create("/apis/apps/v1/namespaces/default/replicasets", replica_set())
    await all_run(running, 2 * WEB)
    for number in range(WEB):
        await running.delete_pod(f"fill-{number}")
    await all_run(running, WEB)

    async def settled() -> bool:
        live = [one for one in (await ledger_of(running)).values() if one.op != "release"]
        known = await running.request("GET", f"{path}/web")
        return len(live) == WEB and known.get("status", {}).get("disruptionsAllowed") == 1

    await running.until("the fillers' shares are free and one disruption is allowed", settled)
    yield running
    await running.request("DELETE", "/apis/apps/v1/namespaces/default/replicasets/web")
    await running.request("DELETE", f"{path}/web")
    for pod in await running.pods():
        if not pod.metadata.owner_references:
            await running.delete_pod(pod.metadata.name)

    async def empty() -> bool:
        records = (await ledger_of(running)).values()
        return not await running.pods() and all(r.op == "release" for r in records)

    await running.until("every pod is gone and every share free", empty, limit_s=60)


def replica_set() -> dict[str, Any]:
    pod = small_pod("web", memory_mib=WEB_MIB)
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": WEB,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": pod["spec"]},
        },
    }


def big_pod() -> dict[str, Any]:
    """Two whole devices of one node, nearly: both pods of a node have to move."""
    pod = small_pod("big", memory_mib=BIG_MIB)
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
    return pod


async def all_run(cluster: Cluster, count: int) -> None:
    async def run() -> bool:
        pods = await cluster.pods()
        return len(pods) == count and all(pod.status.phase == "Running" for pod in pods)

    await cluster.until(f"{count} pods run", run, limit_s=60)


async def evicted(cluster: Cluster) -> list[str]:
    events = await cluster.request("GET", "/api/v1/namespaces/default/events")
    return [
        event["involvedObject"]["name"]
        for event in events["items"]
        if event["reason"] == "DefragEvicted"
    ]


async def create_big(cluster: Cluster) -> None:
    """Create the pod that does not fit, and wait until kube-scheduler has been refused."""
    await cluster.create_pod(big_pod())

    async def is_refused() -> bool:
        conditions = (await cluster.pod("big")).status.conditions or []
        return any(one.reason == "Unschedulable" for one in conditions)

    await cluster.until("the pod is refused", is_refused)


async def hamictl(cluster: Cluster, *words: str) -> Any:
    command = [sys.executable, "-m", "hamictl", "defrag", "big"]
    command += ["--scheduler", cluster.url("scheduler"), "--interval", "0", *words]
    return await anyio.open_process(command, stderr=subprocess.STDOUT)


async def output_of(process: Any) -> str:
    text = b""
    async for part in process.stdout:
        text += part
    await process.wait()
    return text.decode()


async def test_pods_move_one_after_another_although_the_scheduler_is_killed(
    cluster: Cluster,
) -> None:
    await create_big(cluster)
    before = {pod.metadata.name for pod in await cluster.pods()}
    planned = await hamictl(cluster)
    assert "2 moves make it fit" in await output_of(planned)
    assert await evicted(cluster) == []
    ready: list[int] = []
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while True:
                pods = await cluster.request("GET", "/api/v1/namespaces/default/pods")
                ready.append(sum(is_ready(pod) for pod in pods["items"]))
                await anyio.sleep(0.1)

        group.start_soon(watch)
        process = await hamictl(cluster, "--execute", "--max-time", "90")

        async def first() -> bool:
            return bool(await evicted(cluster))

        await cluster.until("the first pod is evicted", first)
        await cluster.processes["scheduler"].kill()
        await anyio.sleep(1.0)
        cluster.processes["scheduler"].start()
        await cluster.ready("scheduler")
        text = await output_of(process)
        group.cancel_scope.cancel()
    assert process.returncode == 0, text
    assert "2 pods moved" in text
    await all_run(cluster, WEB + 1)
    assert min(ready) >= WEB - 1, "the budget was not kept"

    async def are_told() -> bool:
        return len(await evicted(cluster)) == 2

    await cluster.until("both moves have an Event", are_told)
    moved = await evicted(cluster)
    assert len(set(moved)) == len(moved) == 2
    after = {pod.metadata.name for pod in await cluster.pods()}
    assert before - after == set(moved)
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return pod["metadata"].get("labels", {}).get("app") == "web" and any(
        one["type"] == "Ready" and one["status"] == "True" for one in conditions
    )


async def test_interrupt_stops_after_the_step_and_loses_no_pod(cluster: Cluster) -> None:
    seen = len(await evicted(cluster))
    await create_big(cluster)
    process = await hamictl(cluster, "--execute", "--interval", "60", "--max-time", "90")

    async def first() -> bool:
        return len(await evicted(cluster)) > seen

    await cluster.until("the first pod is evicted", first)
    process.send_signal(signal.SIGINT)
    text = await output_of(process)
    assert process.returncode == 1, text
    assert "stopped after the current step" in text

    async def replaced() -> bool:
        pods = [pod for pod in await cluster.pods() if pod.metadata.owner_references]
        return len(pods) == WEB and all(pod.status.phase == "Running" for pod in pods)

    await cluster.until("the evicted pod has a replacement", replaced)
    assert len(await evicted(cluster)) == seen + 1

    async def is_free() -> bool:
        records = (await ledger_of(cluster)).values()
        return not [one for one in records if one.op != "release" and one.held_for]

    await cluster.until("nothing is held", is_free)
