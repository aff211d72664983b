# SPDX-License-Identifier: Apache-2.0
"""Pods with limits above their requests: booked by request, growing into memory that is idle.

Real services and the real in-container library under the fake driver.
"""

import re
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hami_common.errors import Denied
from hami_common.pods import annotations as keys
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.fakes.gpucontainers import why_not
from tests.support.checker import lasting_problems, ledger_of
from tools import build_native, build_native_fakes

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

NODE = "gpu-t4"
T4_MIB = 15_360
METER = Path(__file__).parent / "meter.c"
INSIDE = "/opt/meter"


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        nvml_library=str(drivers / build_native_fakes.NVML),
        limiter=str(build_native.build("release")),
        backoff_s=0.2,
        settings={"scheduler": {"preempt_retry_s": "0.5"}},
    )
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

    await cluster.create_pod(pod("limited", memory_mib=6000, **limits))
    shown = await limits_file(cluster, "limited")
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
    (share,) = records["limited"].containers[0].shares
    assert (share.memory_mib, share.memory_limit_mib) == (6000, 14_000)
    assert (share.core_pct, share.core_limit_pct) == (30, 60)
    (share,) = records["rest"].containers[0].shares
    assert (share.memory_mib, share.memory_limit_mib) == (T4_MIB - 6000, 0)
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []
    for name in ("limited", "rest"):
        await cluster.delete_pod(name)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the program that containers run."""
    directory = tmp_path_factory.mktemp("meter")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", directory / "meter", METER, "-ldl"], check=True)
    return directory


def growing(
    name: str, programs: Path, held_mib: int, most_mib: int, *, memory_mib: int, **annotations: str
) -> dict[str, Any]:
    """A pod that takes memory at its start and then requests more, up to ``most_mib``."""
    made = pod(name, memory_mib=memory_mib, **annotations)
    made["spec"]["volumes"] = [{"name": "meter", "hostPath": {"path": str(programs)}}]
    (container,) = made["spec"]["containers"]
    container["command"] = ["sh", "-c", f"exec {INSIDE}/meter {held_mib} {most_mib}"]
    container["volumeMounts"] = [{"name": "meter", "mountPath": INSIDE, "readOnly": True}]
    return made


async def held_mib(cluster: Cluster, name: str) -> int:
    log = await cluster.container_log(name, "main")
    return int(([0, *re.findall(r"^held=(\d+)$", log, re.MULTILINE)])[-1])


async def device(cluster: Cluster, uuid: str) -> dict[str, Any]:
    async with cluster.session.get(f"{cluster.url('registry')}/v1/devices") as answer:
        items = (await answer.json())["items"]
    (found,) = (one for one in items if one["uuid"] == uuid)
    return dict(found)


async def test_burst_grows_into_idle_memory_and_ends_for_a_pod_that_fits_nowhere(
    cluster: Cluster, programs: Path
) -> None:
    if reason := why_not():
        pytest.skip(f"the limiter needs containers: {reason}")
    # Three of the four devices are taken as a whole.
    for number in range(3):
        whole = small_pod(f"whole-{number}")
        whole["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
        await cluster.create_pod(whole)
    limit = {keys.MEMORY_LIMIT: "10000"}
    await cluster.create_pod(growing("burst", programs, 1000, 12_000, memory_mib=3000, **limit))

    async def has_grown() -> bool:
        return await held_mib(cluster, "burst") > 9000

    await cluster.until("the pod uses three times its request", has_grown, limit_s=60)
    (record,) = (one for one in (await ledger_of(cluster)).values() if one.pod == "burst")
    (share,) = record.containers[0].shares
    assert share.memory_mib == 3000

    async def is_shown() -> bool:
        return bool((await device(cluster, share.uuid))["burst_mib"] >= 6000)

    await cluster.until("the registry shows the burst", is_shown)
    assert await held_mib(cluster, "burst") <= 10_000, "beyond its limit"

    # Fits beside the burst: nothing happens to it.
    beside = growing("beside", programs, 3000, 0, memory_mib=4000)
    await cluster.create_pod(beside)
    await cluster.until("beside runs", partial(cluster.pod_is, "beside", "Running"))
    assert await cluster.pod_is("burst", "Running")

    # Does not fit beside the burst, but beside its request.
    await cluster.create_pod(growing("wanting", programs, 5000, 0, memory_mib=6000))
    await cluster.until("wanting runs", partial(cluster.pod_is, "wanting", "Running"), limit_s=60)
    records = {one.pod: one for one in (await ledger_of(cluster)).values()}
    (of_wanting,) = records["wanting"].containers[0].shares
    assert of_wanting.uuid == share.uuid
    told: list[dict[str, Any]] = []

    async def is_told() -> bool:
        events = (await cluster.request("GET", "/api/v1/namespaces/default/events"))["items"]
        told[:] = [one for one in events if one["reason"] == "Preempted"]
        return bool(told)

    await cluster.until("the end of the burst has an Event", is_told)
    (preempted,) = told
    assert preempted["involvedObject"]["name"] == "burst"
    assert "beyond its request" in preempted["message"]
    assert await cluster.pod_is("beside", "Running")
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []
