# SPDX-License-Identifier: Apache-2.0
"""Pods that get the devices of their resource limits by claims: webhook to container."""

import copy
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from hami_common.dra.podclaims import claim_of
from hami_common.errors import HamiError
from hami_common.pods import annotations as keys
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

NODE = "gpu-t4"
PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SPEC = ClusterSpec(nodes=(NodeSpec(name=NODE, profile="4xT4"),), backoff_s=0.2, dra=True)
Obj = dict[str, Any]


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with run_cluster(SPEC, tmp_path_factory.mktemp("modes")) as running:
        yield running


def in_dra(name: str) -> Obj:
    pod = small_pod(name)
    pod["metadata"]["annotations"] = {keys.ALLOCATION_MODE: "dra"}
    return pod


async def runs(cluster: Cluster, *names: str) -> None:
    for name in names:
        await cluster.until(f"pod {name} runs", partial(cluster.pod_is, name, "Running"))


async def test_pods_of_both_modes_run_side_by_side_with_the_same_limits(cluster: Cluster) -> None:
    made = await cluster.create_pod(in_dra("claimed"))
    await cluster.create_pod(small_pod("plugged"))
    await runs(cluster, "claimed", "plugged")
    claim = await cluster.request("GET", f"{CLAIMS}/{claim_of(await cluster.pod('claimed'))}")
    (owner,) = claim["metadata"]["ownerReferences"]
    assert owner["uid"] == made["metadata"]["uid"]
    limits: dict[str, set[str]] = {}
    for name in ("claimed", "plugged"):

        async def shows_limits(name: str = name) -> bool:
            return "device.0.memory_mib=" in await cluster.container_log(name, "main")

        await cluster.until("limits are shown", shows_limits)
        log = await cluster.container_log(name, "main")
        limits[name] = {line for line in log.splitlines() if "memory_mib" in line}
    assert limits["claimed"] == limits["plugged"]


async def test_manifest_is_applied_again_and_copied(cluster: Cluster) -> None:
    await cluster.create_pod(in_dra("claimed"))
    await runs(cluster, "claimed")
    live = await cluster.pod_document("claimed")
    await applies_again(cluster, live)
    labels, annotations = live["metadata"]["labels"], live["metadata"]["annotations"]
    spec = {key: value for key, value in live["spec"].items() if key != "nodeName"}
    metadata = {"name": "copy", "labels": labels, "annotations": annotations}
    await cluster.create_pod({"metadata": metadata, "spec": spec})
    await runs(cluster, "copy")
    names = {claim_of(await cluster.pod(name)) for name in ("claimed", "copy")}
    assert len(names) == 2
    for name in ("claimed", "copy"):
        await cluster.delete_pod(name)

    async def are_gone() -> bool:
        return not (await cluster.request("GET", CLAIMS))["items"]

    await cluster.until("the claims are gone", are_gone)


async def applies_again(cluster: Cluster, live: Obj) -> None:
    """The manifest's limits, which the live pod does not have, are accepted if unchanged."""
    limits = small_pod("claimed")["spec"]["containers"][0]["resources"]["limits"]
    again = copy.deepcopy(live)
    again["spec"]["containers"][0]["resources"]["limits"] = limits
    del again["metadata"]["resourceVersion"]
    after = await cluster.request("PUT", f"{PODS}/claimed", again)
    assert after["spec"] == live["spec"]
    again["spec"]["containers"][0]["resources"]["limits"] = {**limits, "nvidia.com/gpumem": "2000"}
    with pytest.raises(HamiError, match="delete the pod and create it again"):
        await cluster.request("PUT", f"{PODS}/claimed", again)
