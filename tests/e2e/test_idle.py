# SPDX-License-Identifier: Apache-2.0
"""Idle pods from sample to action: agent, registry, event stream, scheduler, API server.

The driver reports no utilization, so every container is idle. Costs about 20 s.
"""

import json
import os
from collections.abc import AsyncIterator

import pytest

from hami_common.errors import NotFound
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.kubernetes import configuration
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

IDLE_S = 4.0
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
RULES = [
    {"policy": "evict", "namespaces": ["default"]},
    {"policy": "recall", "namespaces": ["other"]},
]


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name="gpu-a", profile="2xA30"),),
        backoff_s=0.2,
        settings={
            "registry": {"idle_after_s": str(IDLE_S)},
            "scheduler": {
                "idle.enabled": "true",
                "idle.rules": json.dumps(RULES),
                "idle.actions_per_minute": "60",
                "idle.retry_s": "2",
            },
            "nodeagent": {"usage.event_s": "0.5", "usage.look_s": "0.3"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("idle")) as running:
        if os.environ["HAMI_PLANE"] == "real":
            await grant(running)
        yield running


async def grant(cluster: Cluster) -> None:
    """Create the roles of the component: the scheduler has no other right to its Lease."""
    for document in configuration.shipped("../components/idle-policies/rbac.yaml"):
        kind, namespace = document["kind"].lower(), document["metadata"]["namespace"]
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/{kind}s"
        await cluster.create(path, document)


async def reasons(cluster: Cluster, name: str, namespace: str) -> set[str]:
    events = await cluster.request("GET", f"/api/v1/namespaces/{namespace}/events")
    return {event["reason"] for event in events["items"] if event["involvedObject"]["name"] == name}


async def test_idle_pod_is_evicted_within_its_budget_and_recall_is_explained(
    cluster: Cluster,
) -> None:
    await cluster.create("/api/v1/namespaces", {"metadata": {"name": "other"}})
    await cluster.create(
        BUDGETS,
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "keep"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "keep"}}},
        },
    )
    kept = small_pod("kept")
    kept["metadata"]["labels"] = {"app": "keep"}
    await cluster.create_pod(kept)
    await cluster.create_pod(small_pod("spare"))
    await cluster.create_pod(small_pod("notebook"), namespace="other")

    async def spare_is_gone() -> bool:
        try:
            pod = await cluster.pod("spare")
        except NotFound:
            return True
        return pod.metadata.deletion_timestamp is not None

    await cluster.until("the idle pod is evicted", spare_is_gone, limit_s=60)

    async def is_explained() -> bool:
        return (
            "IdlePodEvicted" in await reasons(cluster, "spare", "default")
            and "IdleActionRefused" in await reasons(cluster, "kept", "default")
            and "IdleActionRefused" in await reasons(cluster, "notebook", "other")
        )

    await cluster.until("eviction and refusals are explained", is_explained, limit_s=30)
    assert await cluster.pod_is("kept", "Running")
    assert await cluster.pod_is("notebook", "Running", namespace="other")
