# SPDX-License-Identifier: Apache-2.0
"""Pods with limits above their requests: only the requests are booked."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from hami_common.errors import Denied
from hami_common.pods import annotations as keys
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.support.checker import ledger_of, problems_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

T4_MIB = 15_360


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(nodes=(NodeSpec(name="gpu-t4", profile="4xT4"),), backoff_s=0.2)
    async with run_cluster(spec, tmp_path_factory.mktemp("bursts")) as running:
        yield running


def pod(name: str, *, memory_mib: int, **annotations: str) -> dict[str, Any]:
    """A pod with a share that shows its limits file."""
    made = small_pod(name, memory_mib=memory_mib)
    made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"] = "30"
    made["metadata"]["annotations"] = annotations
    return made


async def limits_file(cluster: Cluster, name: str) -> list[str]:
    await cluster.until(f"{name} runs", partial(cluster.pod_is, name, "Running"))

    async def is_shown() -> bool:
        return "exclusive" in await cluster.container_log(name, "main")

    await cluster.until(f"{name} shows its limits", is_shown)
    return (await cluster.container_log(name, "main")).splitlines()


async def test_limits_above_requests_are_in_the_container_and_only_requests_are_booked(
    cluster: Cluster,
) -> None:
    limits = {keys.MEMORY_LIMIT: "14000", keys.CORES_LIMIT: "main=60"}
    refused = pod("refused", memory_mib=6000, **limits, **{keys.CLASS: "guaranteed"})
    with pytest.raises(Denied, match=r"annotation hami\.io/memory-limit: a pod of class"):
        await cluster.create_pod(refused)

    await cluster.create_pod(pod("burst", memory_mib=6000, **limits))
    shown = await limits_file(cluster, "burst")
    assert [line for line in shown if line.startswith("device.0.") and "uuid" not in line] == [
        "device.0.vendor=nvidia",
        "device.0.memory_mib=6000",
        "device.0.core_pct=30",
        "device.0.memory_limit_mib=14000",
        "device.0.core_limit_pct=60",
        "device.0.exclusive=0",
    ]
    (uuid,) = (line.partition("=")[2] for line in shown if line.startswith("device.0.uuid="))

    # The rest of the device beside the request, which the limit would not leave.
    rest = {"nvidia.com/use-gpuuuid": uuid}
    await cluster.create_pod(pod("rest", memory_mib=T4_MIB - 6000, **rest))
    assert f"device.0.uuid={uuid}" in await limits_file(cluster, "rest")
    records = {one.pod: one for one in (await ledger_of(cluster)).values()}
    (share,) = records["burst"].containers[0].shares
    assert (share.memory_mib, share.memory_limit_mib) == (6000, 14_000)
    assert (share.core_pct, share.core_limit_pct) == (30, 60)
    (share,) = records["rest"].containers[0].shares
    assert (share.memory_mib, share.memory_limit_mib) == (T4_MIB - 6000, 0)
    assert await problems_of(cluster, cluster.verifier(), namespace="default") == []
