# SPDX-License-Identifier: Apache-2.0
"""A node whose devices are found through NVML: the real binding on a fake driver library."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.hardware import profile
from tests.e2e.conftest import small_pod
from tools.build_native_fakes import DEFAULT_OUT, build

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

NODE = "gpu-h200"
APPLICATION_XID, FATAL_XID = 31, 79


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="8xH200"),),
        nvml_library=str(build(Path(DEFAULT_OUT)) / "libnvidia-ml.so.1"),
        backoff_s=0.2,
        settings={"nodeagent": {"probe_s": "0.3", "health.recover_s": "5"}},
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("nvml")) as running:
        yield running


async def devices(cluster: Cluster) -> list[dict[str, Any]]:
    async with cluster.session.get(f"{cluster.url('registry')}/v1/devices") as response:
        document = await response.json()
    return list(document["items"] if isinstance(document, dict) else document)


async def test_registry_shows_what_nvml_says(cluster: Cluster) -> None:
    found = await devices(cluster)
    h200 = profile.load("8xH200")
    assert [d["uuid"] for d in found] == [h200.uuid_of(NODE, i) for i in range(8)]
    assert {d["type"] for d in found} == {"NVIDIA H200"}
    assert {d["memory_mib"] for d in found} == {h200.model.memory_mib}


async def test_agent_logs_that_its_driver_was_not_run_on_hardware(cluster: Cluster) -> None:
    (log,) = (cluster.directory / "logs").glob("agent-*.log")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = [one for one in lines if one["message"] == "vendor driver not tested on hardware"]
    assert [(one["vendor"], one["level"]) for one in told] == [("nvidia", "WARNING")]


async def test_pod_runs_on_a_device_found_through_nvml(cluster: Cluster) -> None:
    await cluster.create_pod(small_pod("shares", memory_mib=2000))

    async def runs() -> bool:
        return await cluster.pod_is("shares", "Running")

    await cluster.until("the pod runs", runs)
    story = await cluster.story_of("shares")
    assert story["containers"][0]["devices"][0]["memory_mib"] == 2000
    await cluster.delete_pod("shares")


async def test_application_fault_condemns_no_device_and_a_fatal_one_does_at_once(
    cluster: Cluster,
) -> None:
    async def healthy(index: int) -> bool:
        return bool((await devices(cluster))[index]["healthy"])

    cluster.nvml[NODE].xid(0, APPLICATION_XID)
    cluster.nvml[NODE].xid(1, FATAL_XID)

    async def condemned() -> bool:
        return not await healthy(1)

    await cluster.until("the device with the fatal fault is out of service", condemned)
    assert await healthy(0)

    async def recovered() -> bool:
        return await healthy(1)

    await cluster.until("it returns without a restart", recovered)


async def test_lost_device_leaves_the_others_in_service(cluster: Cluster) -> None:
    cluster.nvml[NODE].lose(5)

    async def lost() -> bool:
        return [d["healthy"] for d in await devices(cluster)].count(False) == 1

    await cluster.until("one device is out of service", lost)
    assert not (await devices(cluster))[5]["healthy"]
