# SPDX-License-Identifier: Apache-2.0
"""Preemption, gangs, retried pods, and the choice of the node, on a cluster."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod
from tests.support.checker import lasting_problems, ledger_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120), pytest.mark.shares_cluster]

NODES = ("gpu-a", "gpu-b")
SPEC = ClusterSpec(
    nodes=tuple(NodeSpec(name=node, profile="2xA30") for node in NODES),
    node_cpu="100",
    backoff_s=0.2,
    settings={
        "nodeagent": {"discovery_s": "1", "probe_s": "0.3", "health.recover_s": "1"},
        "scheduler": {
            "gang_lease_s": "15",
            "preempt_retry_s": "1",
            "capacity_touch_s": "0.3",
            "nodes_to_score": "1",
        },
    },
)
LARGE_MIB = 20_000
"""One of these fits on a device, two do not."""
RETRIED_S = 2.0
SLOW_MACHINE = 10
"""Ordinary bindings by which a pod may be later: on a shared machine, pauses are longer than any
step here.
"""


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two nodes with two devices each, and two priorities."""
    async with run_cluster(SPEC, tmp_path_factory.mktemp("preempt")) as cluster:
        for name, value in (("low", 10), ("high", 1000)):
            await cluster.create(
                "/apis/scheduling.k8s.io/v1/priorityclasses",
                {
                    "apiVersion": "scheduling.k8s.io/v1",
                    "kind": "PriorityClass",
                    "metadata": {"name": name},
                    "value": value,
                },
            )
        yield cluster


@pytest.fixture
async def cluster(running: Cluster) -> AsyncIterator[Cluster]:
    """The cluster without pods, before and after."""
    yield running
    for pod in await running.pods():
        await running.delete_pod(pod.metadata.name)

    async def empty() -> bool:
        records = (await ledger_of(running)).values()
        return not await running.pods() and all(r.op == "release" for r in records)

    await running.until("every pod is gone and every share free", empty, limit_s=60)


def large_pod(name: str, **more: Any) -> dict[str, Any]:
    annotations = more.pop("annotations", {})
    pod = small_pod(name, memory_mib=LARGE_MIB, **more)
    pod["metadata"]["annotations"] = annotations
    return pod


async def all_run(cluster: Cluster, names: list[str]) -> None:
    async def run() -> bool:
        phases = {pod.metadata.name: pod.status.phase for pod in await cluster.pods()}
        return all(phases.get(name) == "Running" for name in names)

    await cluster.until(f"{names} run", run, limit_s=60)


async def until_condition(cluster: Cluster, name: str, text: str) -> None:
    """Wait until the pod's condition has the text."""

    async def said() -> bool:
        conditions = (await cluster.pod(name)).status.conditions or []
        return any(text in condition.message for condition in conditions)

    await cluster.until(f"the condition of {name} contains {text!r}", said)


async def sound(cluster: Cluster) -> list[str]:
    return await lasting_problems(cluster, cluster.verifier(), namespace="default")


async def test_policy_decides_and_the_preference_of_a_pod_counts_more(cluster: Cluster) -> None:
    names = [f"packed-{number}" for number in range(3)]
    for name in names:
        await cluster.create_pod(small_pod(name))
        await all_run(cluster, [name])
    (full,) = {(await cluster.pod(name)).spec.node_name for name in names}
    (empty,) = set(NODES) - {full}
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [empty]}
    wish = {"weight": 100, "preference": {"matchExpressions": [term]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    await cluster.create_pod(small_pod("wishes", affinity=affinity))
    await all_run(cluster, ["wishes"])
    assert (await cluster.pod("wishes")).spec.node_name == empty
    assert await sound(cluster) == []


async def test_pod_with_a_high_priority_gets_the_room_of_one_with_a_low(cluster: Cluster) -> None:
    names = [f"low-{number}" for number in range(4)]
    for name in names[:3]:
        await cluster.create_pod(large_pod(name, priorityClassName="low"))
    await cluster.create_pod(large_pod(names[3]))  # priority 0
    await all_run(cluster, names)
    await cluster.create_pod(large_pod("urgent", priorityClassName="high"))
    await all_run(cluster, ["urgent", *names[:3]])

    async def gone() -> bool:
        return await cluster.pod_is_gone(names[3])

    await cluster.until("only the pod with the lowest priority went", gone)

    async def told() -> bool:
        events = await cluster.request("GET", "/api/v1/namespaces/default/events")
        found = {(event["reason"], event["involvedObject"]["name"]) for event in events["items"]}
        return {("Preempted", names[3]), ("Preempting", "urgent")} <= found

    await cluster.until("both pods have an Event", told)
    assert await sound(cluster) == []


async def test_gang_runs_when_its_last_member_is_there(cluster: Cluster) -> None:
    gang = {"hami.io/gang": "g", "hami.io/gang-size": "4"}
    names = [f"g-{number}" for number in range(4)]
    for name in names[:3]:
        await cluster.create_pod(large_pod(name, annotations=gang))
    await until_condition(cluster, names[0], "gang default/g has 3 of 4 pods")
    assert all(not pod.spec.node_name for pod in await cluster.pods())
    await cluster.create_pod(large_pod(names[3], annotations=gang))
    await all_run(cluster, names)
    assert {pod.spec.node_name for pod in await cluster.pods()} == set(NODES)
    await cluster.delete_pod(names[1])
    await cluster.create_pod(large_pod("g-again", annotations=gang))
    await all_run(cluster, ["g-again"])
    assert await sound(cluster) == []


async def test_gang_that_does_not_fit_waits_whole_until_there_is_room(cluster: Cluster) -> None:
    await cluster.create_pod(large_pod("in-the-way"))
    await all_run(cluster, ["in-the-way"])
    gang = {"hami.io/gang": "w", "hami.io/gang-size": "4"}
    names = [f"w-{number}" for number in range(4)]
    for name in names:
        await cluster.create_pod(large_pod(name, annotations=gang))
    await until_condition(cluster, names[0], "no room for 4 pods at the same time")
    assert [pod for pod in await cluster.pods() if pod.spec.node_name][1:] == []
    await cluster.delete_pod("in-the-way")
    await all_run(cluster, names)
    assert await sound(cluster) == []


async def test_waiting_pods_are_tried_again_when_capacity_returns(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """Only our wake-up triggers the retry: kube-scheduler itself retries unschedulable pods after
    minutes.
    """
    names = [f"full-{number}" for number in range(4)]
    begin_s = anyio.current_time()
    await cluster.create_pod(large_pod(names[0]))
    await assigned(cluster, names[0])
    ordinary_s = anyio.current_time() - begin_s
    for name in names[1:]:
        await cluster.create_pod(large_pod(name))
    await all_run(cluster, names)
    await cluster.create_pod(large_pod("after-release"))
    await until_condition(cluster, "after-release", "CardInsufficientMemory")
    took_s = {}
    await cluster.delete_pod(names[0])

    async def released() -> bool:
        return await cluster.pod_is_gone(names[0])

    await cluster.until("the pod is gone", released)
    begin_s = anyio.current_time()
    await assigned(cluster, "after-release")
    took_s["release"] = round(anyio.current_time() - begin_s, 2)

    node = (await cluster.pod(names[1])).spec.node_name
    await cluster.request(
        "PATCH",
        f"/api/v1/nodes/{node}",
        {"metadata": {"annotations": {"hami.io/device-cordon": ",".join(await uuids(cluster))}}},
        content_type="application/merge-patch+json",
    )
    await cluster.delete_pod(names[1])
    await cluster.create_pod(large_pod("after-uncordon"))
    await until_condition(cluster, "after-uncordon", "CardCordoned")
    await cluster.request(
        "PATCH",
        f"/api/v1/nodes/{node}",
        {"metadata": {"annotations": {"hami.io/device-cordon": None}}},
        content_type="application/merge-patch+json",
    )
    begin_s = anyio.current_time()
    await assigned(cluster, "after-uncordon")
    took_s["uncordon"] = round(anyio.current_time() - begin_s, 2)
    record_property("tried_again_after_s", took_s)
    assert max(took_s.values()) < RETRIED_S + SLOW_MACHINE * ordinary_s, (took_s, ordinary_s)
    assert await sound(cluster) == []


async def assigned(cluster: Cluster, name: str) -> None:
    async def has_node() -> bool:
        return bool((await cluster.pod(name)).spec.node_name)

    await cluster.until(f"{name} has a node", has_node)


async def uuids(cluster: Cluster) -> list[str]:
    async with cluster.session.get(f"{cluster.url('registry')}/v1/devices") as response:
        document = await response.json()
    items = document["items"] if isinstance(document, dict) else document
    return [device["uuid"] for device in items]
