# SPDX-License-Identifier: Apache-2.0
"""A process without an allocation uses devices: pods get the rest, and all of it once it ended."""

import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.hardware.fake_nvml import Process
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

NODE = "gpu-t4"
DEVICES, T4_MIB = 4, 15_360
USED_MIB, SHOWN_MIB = 12_000, 12_032
"""Use of the process on each device, and as it is reported, in steps of 256 MiB."""


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        backoff_s=0.2,
        settings={"nodeagent": {"usage.look_s": "0.2", "usage.idle_look_s": "0.2"}},
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("foreign")) as running:
        yield running


async def items(cluster: Cluster, path: str) -> list[dict[str, Any]]:
    async with cluster.session.get(f"{cluster.url('registry')}{path}") as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["items"])


async def shows(cluster: Cluster, mib: int) -> bool:
    found = await items(cluster, "/v1/devices")
    return [one["foreign_mib"] for one in found] == [mib] * DEVICES


async def refusal(cluster: Cluster, pod: str) -> str:
    """Message of the pod's condition as kube-scheduler writes it."""
    status = (await cluster.pod_document(pod))["status"]
    return " ".join(one.get("message", "") for one in status.get("conditions", ()))


async def is_in_the_record(cluster: Cluster, pod: str) -> bool:
    """Return whether a decision about the pod names the foreign use of each device."""
    return any(
        [device.get("foreign_mib") for device in node["devices"]] == [SHOWN_MIB] * DEVICES
        for decision in (await cluster.explain(pod)).get("decisions", ())
        for node in decision.get("closest", ())
    )


async def test_pods_get_what_a_foreign_process_leaves_and_all_after_it_ended(
    cluster: Cluster,
) -> None:
    await cluster.create_pod(small_pod("before", memory_mib=10_000))
    await cluster.until("before runs", partial(cluster.pod_is, "before", "Running"))
    process = Process(pid=os.getpid(), used_mib=USED_MIB)
    for index in range(DEVICES):
        cluster.hardware[NODE].set_processes(index, [process])
    await cluster.until("foreign use is shown", partial(shows, cluster, SHOWN_MIB))
    (model,) = await items(cluster, "/v1/capacity")
    assert model["foreign_mib"] == DEVICES * SHOWN_MIB
    assert model["largest_mib"] == T4_MIB - SHOWN_MIB

    whole = small_pod("whole")
    whole["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
    await cluster.create_pod(whole)
    await cluster.create_pod(small_pod("large", memory_mib=5000))
    await cluster.create_pod(small_pod("small", memory_mib=3000))
    await cluster.until("small runs", partial(cluster.pod_is, "small", "Running"))

    async def is_refused(pod: str) -> bool:
        return "used by processes outside HAMi" in await refusal(cluster, pod)

    for pod in ("whole", "large"):
        await cluster.until(f"{pod} is refused", partial(is_refused, pod))
        assert "CardForeignUse" in await refusal(cluster, pod)
    await cluster.until("the record names it", partial(is_in_the_record, cluster, "large"))
    assert await cluster.pod_is("before", "Running"), "its share is beside the foreign use"

    for index in range(DEVICES):
        cluster.hardware[NODE].set_processes(index, [])
    for pod in ("whole", "large"):
        await cluster.until(f"{pod} runs", partial(cluster.pod_is, pod, "Running"))
    assert await shows(cluster, 0)
