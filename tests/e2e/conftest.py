# SPDX-License-Identifier: Apache-2.0
"""Clusters for the end-to-end tests: started once per module, because a start costs seconds."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster

TAPPED = ClusterSpec(
    nodes=(
        NodeSpec(name="gpu-a.example", profile="8xA100-40"),
        NodeSpec(name="gpu-b", profile="4xT4"),
    ),
    slots=16,
    taps=True,
    schedulers=2,
    backoff_s=0.2,
    settings={
        # Leases are short so that a stalled scheduler is outlived within a test; the order of the
        # delays is that of production.
        "scheduler": {"lease_s": "1.0", "fence_delay_s": "0.5", "tick_s": "0.2", "retry_s": "0.1"},
    },
)


@pytest.fixture(scope="module")
async def tapped_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two nodes, two active schedulers, a tap in every connection that matters."""
    async with run_cluster(TAPPED, tmp_path_factory.mktemp("tapped")) as cluster:
        yield cluster


def small_pod(name: str, *, memory_mib: int = 1000, **more: Any) -> dict[str, Any]:
    """A pod with one share that prints its limits and stays."""
    command = ["sh", "-c", "cat /etc/hami/limits; trap 'exit 0' TERM; while :; do sleep 0.2; done"]
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "image": "app",
                    "command": command,
                    "resources": {"limits": limits},
                }
            ],
            **more,
        },
    }
