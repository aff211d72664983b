# SPDX-License-Identifier: Apache-2.0
"""Clusters for the end-to-end tests: started once per module, because a start costs seconds."""

import os
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
        "scheduler": {
            "lease_s": "1.0",
            "fence_delay_s": "0.5",
            "tick_s": "0.2",
            "retry_s": "0.1",
        },
    },
)


ON_REAL_PLANE = {
    "test_killed": {
        "bind-delivered-scheduler",
        "reserve-delivered-scheduler",
        "binding-delivered-scheduler",
        "binding-answer-lost-scheduler",
        "bound-not-sent-scheduler",
        "filter-asked-registry",
        "bind-asked-webhook",
        "pod-on-its-way-to-the-agent-agent-gpu-a.example",
        "reserve-acknowledgement-lost-nats",
        "prepared-not-sent-nats",
    },
    "test_scheduler_cut_from_nats": {"reserve-not-sent", "binding-delivered"},
    "test_api_server_killed": {"binding-delivered", "pod-on-its-way-to-the-agent"},
    "test_killed_at_every_step_leaves_one_truth": {"booked-1500", "annotation-sent-1500"},
    "test_stopped_for_a_minute_at_every_point": set(),
    "test_hot_replica_takes_over": set(),
    "test_every_vendor_has_pods_that_lived_and_one_that_is_refused_with_a_reason": set(),
    "test_shares_are_those_of_the_vendors_rules": set(),
    "test_stopped_scheduler_for_a_minute_in_the_middle_of_a_burst": set(),
    "test_pod_gets_its_share_by_a_claim_and_returns_both": set(),
    "test_policies_of_hami_choose_the_devices_of_claims": set(),
    "test_both_modes_share_devices_and_the_rest_waits": set(),
    "test_pod_with_a_higher_priority_displaces_others_by_either_mode": set(),
    "test_pods_of_both_modes_run_side_by_side_with_the_same_limits": set(),
    "test_same_pods_get_the_same_shares_by_claims": set(),
    "test_scheduler_answers_through_the_registry": set(),
    "test_cordon_of_a_node_reaches_the_scheduler": set(),
    "test_scenario_in_a_cluster_keeps_its_bounds": set(),
    "test_scenario_of_a_trace_keeps_its_bounds": set(),
    "test_all_use_cases_have_a_file": set(),
}
"""Failures that also run on the real control plane: each part dies, answers are lost.

The rest of the matrix covers our own exchanges, which are the same on both planes, and would cost
minutes; pods by claim run there in ``test_claims_acceptance``. Questions and cordons through the
registry run there in ``test_deploy``, with the tokens and roles of the manifests.
"""


LONGEST = (
    "test_real_node",
    "test_faults_peers",
    "test_freeze",
    "test_volcano",
    "test_volcano_extender",
    "test_life",
    "test_faults_services",
)
"""Files that take longest come first: one of them at the end would leave the other worker idle."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first; on the real control plane, select the tests worth their time."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    if os.environ["HAMI_PLANE"] != "real":
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        name, _, case = item.name.partition("[")
        chosen = ON_REAL_PLANE.get(name)
        (kept if chosen is None or case.rstrip("]") in chosen else left).append(item)
    if left:
        items[:] = kept
        config.hook.pytest_deselected(items=left)


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
