# SPDX-License-Identifier: Apache-2.0
"""Both allocation modes and claims of users under load: random arrivals, and schedulers that race.

One node with eight devices, which the ledger never books beyond their capacity. Memory in MiB.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest

from hami_common.dra.names import BOOKED
from hami_common.errors import Denied, NotFound
from hami_common.events.allocation import AllocationRecord
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from hami_sim.planes import RealPlane
from tests.support.checker import (
    claim_problems,
    inventory_of,
    ledger_of,
    over_capacity,
    problems_of,
)
from tests.support.churn import CLAIMS, WAYS, Churn, claim, claims_of, pod
from tests.support.hami_site import scheduler_without_extender

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.shares_cluster]

NODE = "gpu-a"
AGENT = f"agent-{NODE}"
DEVICES = 8
SLOTS = 25
OTHER = "other-scheduler"
"""A kube-scheduler that does not ask HAMi, and allocates claims by the slices alone."""
RACERS = {WAYS[0]: 15, WAYS[1]: 15, WAYS[2]: 15, OTHER: 55}
"""Pods for the last 50 shares, by way: with those of full devices, a node's 110 at most."""
ARRIVALS = 60
FROZEN_S = 10.0
"""Less than the heartbeat timeout of 15 s, after which a node gets no pods."""


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="8xA100-40", others=("4xMR-V100",)),),
        slots=SLOTS,
        node_cpu="400",
        backoff_s=0.2,
        dra=True,
        settings={
            "scheduler": {"tick_s": "0.2", "reconcile_s": "5"},
            "nodeagent": {"dra.write_s": "0.1"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("faults")) as running:
        yield running


async def test_devices_are_never_overbooked_while_pods_come_and_go(cluster: Cluster) -> None:
    """By the ledger's history, by claims, and by what containers were given; bench churn: 1,000."""
    assert await Churn(cluster, seed=3).run(ARRIVALS) == []


async def test_containers_of_one_pod_have_devices_of_two_vendors_by_one_claim(
    cluster: Cluster,
) -> None:
    """As by the device plugins; a vendor that claims cannot serve is refused with the fix."""
    given: dict[str, list[set[str]]] = {mode: [] for mode in WAYS[:2]}
    for mode in WAYS[:2]:
        made = two_vendors(mode)
        await cluster.create_pod(made)
        await cluster.until("it runs", partial(run, cluster, [mode]))
        record = (await live_records(cluster))[mode]
        assert bool(record.claim) == (mode == "dra")
        vendors = [one.shares[0].vendor for one in record.containers]
        assert vendors == ["nvidia", "iluvatar"]
        for one in made["spec"]["containers"]:

            async def has_limits(name: str = one["name"], mode: str = mode) -> bool:
                return "device.0.memory_mib=" in await cluster.container_log(mode, name)

            await cluster.until("the limits are shown", has_limits)
            lines = (await cluster.container_log(mode, one["name"])).splitlines()
            given[mode].append({line for line in lines if not line.startswith("allocation=")})
        await remove_all(cluster)
    assert given["dra"] == given["device-plugin"]
    refused = pod("refused", "dra", {"gpu": 1})
    refused["spec"]["containers"][0]["resources"]["limits"] = {"huawei.com/Ascend910B3": "1"}
    with pytest.raises(Denied, match="devices of ascend are given by annotations of pods"):
        await cluster.create_pod(refused)


def two_vendors(mode: str) -> dict[str, Any]:
    """A pod with a share of each vendor, in a container of its own."""
    made = pod(mode, mode, {"gpu": 1, "gpumem": 2000})
    (first,) = made["spec"]["containers"]
    limits = {"iluvatar.ai/MR-V100-vgpu": "1", "iluvatar.ai/MR-V100.vMem": "8"}
    made["spec"]["containers"].append({**first, "name": "other", "resources": {"limits": limits}})
    return made


async def live_records(cluster: Cluster) -> dict[str, AllocationRecord]:
    """The shares in the ledger, by the name of their pod."""
    return {one.pod: one for one in (await ledger_of(cluster)).values() if one.op != "release"}


async def running_pods(cluster: Cluster) -> set[str]:
    pods = await cluster.pods()
    return {one.metadata.name for one in pods if one.status.phase == "Running"}


async def reason_of(cluster: Cluster, name: str) -> str:
    """Return why a pod waits: its condition, or that of its claim once it is bound."""
    document = await cluster.pod_document(name)
    if not document["spec"].get("nodeName"):
        conditions = document["status"].get("conditions") or ()
        return "; ".join(one.get("message", "") for one in conditions)
    found = await cluster.request("GET", f"{CLAIMS}/{name}")
    return "; ".join(
        condition["message"]
        for device in (found.get("status") or {}).get("devices") or ()
        for condition in device["conditions"]
        if condition["type"] == BOOKED and condition["status"] == "False"
    )


@pytest.mark.real
async def test_two_kube_schedulers_race_for_the_last_shares_by_frozen_slices(
    cluster: Cluster,
) -> None:
    """The last 50 shares are for 30 pods of both modes, and for claims of both schedulers."""
    assert isinstance(cluster.plane, RealPlane)
    other = scheduler_without_extender(cluster.plane.control, cluster.directory, OTHER, name=OTHER)
    other.start()
    full = [f"full-{number}" for number in range(DEVICES - 2)]
    try:
        for name in full:
            await cluster.create_pod(pod(name, WAYS[0], {"gpu": 1}))
        await cluster.until("six devices are full", partial(run, cluster, full))
        agent = cluster.processes[AGENT]
        agent.freeze()
        try:
            async with anyio.create_task_group() as group:
                for way, count in RACERS.items():
                    for number in range(count):
                        group.start_soon(ask, cluster, f"{way}-{number}", way)
                await anyio.sleep(FROZEN_S)
        finally:
            agent.thaw()

        async def are_full() -> bool:
            return len(await running_pods(cluster) - {*full}) == 2 * SLOTS

        await cluster.until("the last shares are in use", are_full, limit_s=90)
        records = await live_records(cluster)
        assert set(records) == await running_pods(cluster)
        assert await settled(cluster) == []
        pods = await cluster.pods()
        waiting = [one.metadata.name for one in pods if one.status.phase == "Pending"]
        assert len(waiting) == sum(RACERS.values()) - 2 * SLOTS
        for name in waiting:

            async def is_explained(name: str = name) -> bool:
                return bool(await reason_of(cluster, name))

            await cluster.until(f"{name} has a reason", is_explained)
        by_way = Counter(name.rpartition("-")[0] for name in records)
        assert by_way[OTHER] > 0, by_way
        await remove_all(cluster)
    finally:
        await other.stop()


async def run(cluster: Cluster, names: list[str]) -> bool:
    return {*names} <= await running_pods(cluster)


async def ask(cluster: Cluster, name: str, way: str) -> None:
    """Create a pod, and its claim; those of ``OTHER`` are placed by that scheduler."""
    amounts = {"gpu": 1, "gpumem": 100, "gpucores": 0}
    made = pod(name, "claim" if way == OTHER else way, amounts)
    if way == OTHER:
        made["spec"]["schedulerName"] = OTHER
    if "resourceClaims" in made["spec"]:
        await cluster.create(CLAIMS, claim(name, amounts))
    await cluster.create_pod(made)


async def settled(cluster: Cluster) -> list[str]:
    """Return what is wrong once the parts had time to agree."""
    problems = ["not looked yet"]
    with anyio.move_on_after(60):
        while problems:
            problems = await problems_of(cluster, cluster.verifier(), namespace="default")
            live = list((await live_records(cluster)).values())
            inventory = await inventory_of(cluster)
            problems += claim_problems(await claims_of(cluster), live, inventory)
            problems += over_capacity([one.containers for one in live], inventory)
            if problems:
                await anyio.sleep(0.2)
    return problems


async def remove_all(cluster: Cluster) -> None:
    async with anyio.create_task_group() as group:
        for one in await cluster.pods():
            group.start_soon(cluster.delete_pod, one.metadata.name)
    for found in await claims_of(cluster):
        with suppress(NotFound):  # of a pod that is gone
            await cluster.request("DELETE", f"{CLAIMS}/{found.metadata.name}")

    async def is_empty() -> bool:
        return not await cluster.pods() and not await live_records(cluster)

    await cluster.until("nothing is left", is_empty, limit_s=60)
