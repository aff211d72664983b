# SPDX-License-Identifier: Apache-2.0
"""Pods with limits above their requests: only the requests are booked, and bursts end for others.

The limiter is a file that passes for it: the test writes what its containers use.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from hami_common.errors import Denied, NotFound
from hami_common.pods import annotations as keys
from hami_nodeagent.shell.regions import region_path
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.support.checker import lasting_problems, ledger_of
from tests.support.regions import own_region
from tests.unit.nodeagent.shell.support import fake_library

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

NODE, DEVICES, T4_MIB = "gpu-t4", 4, 15_360
SHOWN_MIB = 8192
"""A burst of 8,000 MiB as it is reported, in steps of 256 MiB."""


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("bursts")
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        limiter=str(fake_library(directory)),
        backoff_s=0.2,
        settings={"scheduler": {"burst_evict_s": "1.0"}},
    )
    async with run_cluster(spec, directory) as running:
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
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []


async def message_of(cluster: Cluster, name: str, reason: str) -> str:
    """Message of the pod's Event with this reason, empty without one."""
    found = await cluster.request("GET", "/api/v1/namespaces/default/events")
    messages = (
        event["message"]
        for event in found["items"]
        if (event["involvedObject"]["name"], event["reason"]) == (name, reason)
    )
    return next(messages, "")


async def until_told(cluster: Cluster, name: str, reason: str, text: str) -> None:
    async def is_told() -> bool:
        return text in await message_of(cluster, name, reason)

    await cluster.until(f"{name} has the Event {reason}", is_told)


async def devices(cluster: Cluster) -> list[dict[str, Any]]:
    async with cluster.session.get(f"{cluster.url('registry')}/v1/devices") as answer:
        return list((await answer.json())["items"])


async def use(cluster: Cluster, name: str, mib: int) -> None:
    """Let the pod's container use so much memory of its device."""
    record = {one.pod: one for one in (await ledger_of(cluster)).values()}[name]
    pods_dir = cluster.directory / "kubelet" / NODE / "pods"
    path = region_path(pods_dir, record.pod_uid, "hami-region-main")
    path.write_bytes(own_region(record.containers[0].shares[0].uuid, mib << 20))


async def test_burst_is_not_offered_and_ends_for_a_pod_that_needs_its_memory(
    cluster: Cluster,
) -> None:
    for name in ("burst", "rest"):
        await cluster.delete_pod(name)
    uuids = [one["uuid"] for one in await devices(cluster)]
    names = [f"base-{number}" for number in range(DEVICES)]
    for name, uuid in zip(names, uuids, strict=True):
        on = {keys.MEMORY_LIMIT: "12000", "nvidia.com/use-gpuuuid": uuid}
        await cluster.create_pod(pod(name, memory_mib=2000, **on))
    for name in names:
        await cluster.until(f"{name} runs", partial(cluster.pod_is, name, "Running"))
        await use(cluster, name, 10_000)

    async def are_shown(mib: int) -> bool:
        return [one["burst_mib"] for one in await devices(cluster)] == [mib] * DEVICES

    await cluster.until("bursts are shown", partial(are_shown, SHOWN_MIB))
    await cluster.create_pod(pod("small", memory_mib=5000))
    await cluster.until("small runs beside a burst", partial(cluster.pod_is, "small", "Running"))
    await cluster.create_pod(pod("large", memory_mib=12_000))
    await cluster.until("large runs", partial(cluster.pod_is, "large", "Running"))
    left = [name for name in names if await cluster.pod_is(name, "Running")]
    (evicted,) = set(names) - set(left)
    text = f"this pod uses {SHOWN_MIB} MiB beyond its request"
    await until_told(cluster, evicted, "Preempted", text)
    refused: list[dict[str, Any]] = []

    async def is_recorded() -> bool:
        decisions = (await cluster.explain("large")).get("decisions", ())
        refused[:] = [one for one in decisions if one.get("closest")]
        return bool(refused)

    await cluster.until("the refusal is recorded device by device", is_recorded)
    codes = [device["code"] for device in refused[-1]["closest"][0]["devices"]]
    assert sorted(codes) == ["CardBurstUse"] * (DEVICES - 1) + ["CardInsufficientMemory"]


async def test_burst_onto_memory_of_another_pod_ends(cluster: Cluster) -> None:
    for name in ("small", "large", *(f"base-{number}" for number in range(DEVICES))):
        with suppress(NotFound):
            await cluster.delete_pod(name)
    uuid = (await devices(cluster))[0]["uuid"]
    on = {"nvidia.com/use-gpuuuid": uuid}
    await cluster.create_pod(pod("grown", memory_mib=2000, **on, **{keys.MEMORY_LIMIT: "12000"}))
    await cluster.create_pod(pod("calm", memory_mib=13_000, **on))
    for name in ("grown", "calm"):
        await cluster.until(f"{name} runs", partial(cluster.pod_is, name, "Running"))
    await use(cluster, "grown", 5000)
    await cluster.until("grown is evicted", partial(cluster.pod_is_gone, "grown"))
    await until_told(cluster, "grown", "BurstEvicted", "lacks")
    assert await cluster.pod_is("calm", "Running")
