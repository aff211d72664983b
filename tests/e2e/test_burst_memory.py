# SPDX-License-Identifier: Apache-2.0
"""A pod grows above its request, and another pod gets the memory that it requests.

Real scheduler, registry, agent and in-container library under the fake driver. Memory in MiB; costs
about 20 s.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hami_common.pods import annotations as keys
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.fakes.gpucontainers import why_not
from tools import build_native, build_native_fakes

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180), pytest.mark.shares_cluster]

NODE, T4_MIB = "gpu-t4", 15_360
REQUEST_MIB, LIMIT_MIB = 2000, 9000
PIECE_MIB = 500
GROW = "alloc 500M"
INSIDE = "/opt/drive"


@pytest.fixture(scope="module")
def drivers() -> Path:
    return build_native_fakes.build(build_native_fakes.DEFAULT_OUT)


@pytest.fixture(scope="module")
async def cluster(
    drivers: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        nvml_library=str(drivers / build_native_fakes.NVML),
        limiter=str(build_native.build("release")),
        backoff_s=0.2,
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("burst-memory")) as running:
        yield running


def growing(name: str, drivers: Path) -> dict[str, Any]:
    """A pod that allocates a piece again and again, and prints whether it got it."""
    made = small_pod(name, memory_mib=REQUEST_MIB)
    script = f"(printf 'init\\ndevice 0\\n'; while echo '{GROW}'; do sleep 0.1; done)"
    container = made["spec"]["containers"][0]
    container["command"] = ["sh", "-c", f"{script} | exec {INSIDE}/drive link"]
    container["volumeMounts"] = [{"name": "drive", "mountPath": INSIDE, "readOnly": True}]
    made["spec"]["volumes"] = [{"name": "drive", "hostPath": {"path": str(drivers)}}]
    made["metadata"]["annotations"] = {keys.MEMORY_LIMIT: str(LIMIT_MIB)}
    return made


async def pieces(cluster: Cluster, name: str) -> int:
    """Return how many allocations have succeeded."""
    return (await cluster.container_log(name, "main")).count("ok ")


async def device_of(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the registry's view of the pod's device."""
    pod = await cluster.pod(name)
    records = await cluster.ledger_of(pod.spec.node_name, pod.metadata.uid)
    uuid = records[-1][1].containers[0].shares[0].uuid
    async with cluster.session.get(f"{cluster.url('registry')}/v1/devices") as answer:
        assert answer.status == 200, await answer.text()
        return next(one for one in (await answer.json())["items"] if one["uuid"] == uuid)


async def test_pod_grows_above_its_request_until_another_pod_requests_the_memory(
    cluster: Cluster, drivers: Path
) -> None:
    if reason := why_not():
        pytest.skip(f"the limiter needs containers: {reason}")
    await cluster.create_pod(growing("burst", drivers))
    await cluster.until("burst runs", partial(cluster.pod_is, "burst", "Running"))

    async def is_grown() -> bool:
        return await pieces(cluster, "burst") * PIECE_MIB > LIMIT_MIB - 2 * PIECE_MIB

    await cluster.until("burst has grown", is_grown)

    async def is_shown() -> bool:
        shown = await device_of(cluster, "burst")
        return bool(shown["burst_mib"] > LIMIT_MIB - REQUEST_MIB - 2 * PIECE_MIB)

    await cluster.until("the registry shows the burst", is_shown)
    device = await device_of(cluster, "burst")
    assert device["foreign_mib"] == 0
    assert device["burst_mib"] <= LIMIT_MIB - REQUEST_MIB

    # Requests of both fit; the burst is in the way and returns its memory by eviction.
    rest = small_pod("rest", memory_mib=T4_MIB - REQUEST_MIB)
    rest["metadata"]["annotations"] = {"nvidia.com/use-gpuuuid": device["uuid"]}
    await cluster.create_pod(rest)
    await cluster.until("rest runs", partial(cluster.pod_is, "rest", "Running"), limit_s=60)

    async def is_over() -> bool:
        return bool((await device_of(cluster, "rest"))["burst_mib"] == 0)

    await cluster.until("the burst has ended", is_over)
