# SPDX-License-Identifier: Apache-2.0
"""Totals in node status, with a real kubelet and kube-scheduler without this project's extender.

One cluster serves all tests, in their order. Memory in MiB, times in seconds.
"""

import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hami_common.errors import NotFound
from hami_common.pods import annotations
from hami_common.units import parse_quantity
from hami_sim.cluster import ClusterSpec, NodeSpec
from hami_sim.planes import RealPlane
from tests.cluster.node.cluster import KUBELET_TAP, NodeCluster, run_node_cluster
from tests.cluster.node.image import APP
from tests.cluster.node.needs import programs_or_skip
from tests.cluster.node.node import base
from tests.support.checker import lasting_problems

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

NODE: Final = "real-gpu"
AGENT: Final = f"agent-{NODE}"
COMPONENT: Final = Path(__file__).parents[2] / "deploy/kustomize/components/advertise-amounts"
ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
SLOTS: Final = 4
CARDS: Final = 8
CARD_MIB: Final = 40960
TOTAL_MIB: Final = CARDS * CARD_MIB
TOTALS: Final = {
    "gpu": CARDS * SLOTS,
    "gpumem": TOTAL_MIB,
    "gpucores": 100 * CARDS,
    "gpumem-percentage": 100 * CARDS * SLOTS,
    "priority": 7 * CARDS * SLOTS,
}
LIMIT_S: Final = 60.0
OK: Final = 200
FORBIDDEN: Final = 403
SPEC: Final = ClusterSpec(
    nodes=(NodeSpec(name=NODE, profile="8xA100-40"),),
    slots=SLOTS,
    injection="devices",
    backoff_s=0.2,
    settings={"nodeagent": {"advertise_amounts": "true"}},
)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeCluster]:
    programs = programs_or_skip()
    with tempfile.TemporaryDirectory(prefix="hn-", dir=base()) as disk:
        async with run_node_cluster(
            SPEC, programs, tmp_path_factory.mktemp("real"), Path(disk)
        ) as cluster:
            yield cluster


def share(name: str, memory_mib: int) -> dict[str, Any]:
    wanted = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib), "cpu": "10m"}
    container = {
        "name": "main",
        "image": APP,
        "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 100000 & wait $!"],
        "resources": {"limits": wanted},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }


async def amounts(cluster: NodeCluster) -> dict[str, int]:
    """Allocatable amounts of NVIDIA's resources, by the last part of the name."""
    status = await cluster.node_status()
    return {
        name.removeprefix("nvidia.com/"): int(parse_quantity(text) or 0)
        for name, text in status["allocatable"].items()
        if name.startswith("nvidia.com/")
    }


async def shows_totals(cluster: NodeCluster) -> bool:
    with suppress(NotFound):
        return await amounts(cluster) == TOTALS
    return False


async def condition(cluster: NodeCluster, name: str) -> tuple[str, str]:
    """Status and message of the pod's condition PodScheduled."""
    document = await cluster.pod_document(name)
    for one in (document.get("status") or {}).get("conditions") or ():
        if one["type"] == "PodScheduled":
            return one["status"], one.get("message", "")
    return "", ""


async def test_missing_right_is_an_event_of_the_node(cluster: NodeCluster) -> None:
    async def is_told() -> bool:
        events = (await cluster.request("GET", "/api/v1/events"))["items"]
        return any(
            one["reason"] == "AmountsNotAdvertised" and one["involvedObject"]["name"] == NODE
            for one in events
        )

    await cluster.until("the node has the event", is_told, limit_s=LIMIT_S)
    assert set(await amounts(cluster)) == {"gpu"}


async def test_totals_appear_with_the_rights_of_the_component(
    cluster: NodeCluster, record_property: Callable[[str, object], None]
) -> None:
    begin_s = time.monotonic()
    for document in yaml.safe_load_all((COMPONENT / "rbac.yaml").read_text()):
        await cluster.create(f"{RBAC}/{document['kind'].lower()}s", document)
    await cluster.until("totals appear", lambda: shows_totals(cluster), limit_s=LIMIT_S)
    record_property("rights_to_totals_s", f"{time.monotonic() - begin_s:.1f}")
    node = await cluster.request("GET", f"/api/v1/nodes/{NODE}")
    listed = node["metadata"]["annotations"][annotations.advertised_amounts("nvidia")]
    assert "nvidia.com/gpumem" in listed.split(",")


async def test_node_is_initialized_for_karpenter_soon_after_the_agent_starts(
    cluster: NodeCluster, record_property: Callable[[str, object], None]
) -> None:
    """Karpenter waits until each resource that a pod requests is above 0 in allocatable."""
    requested = ("gpu", "gpumem", "gpucores", "gpumem-percentage", "priority")
    agent = cluster.processes[AGENT]
    await agent.stop()
    note = annotations.advertised_amounts("nvidia")
    removed = {f"nvidia.com/{name}": None for name in requested[1:]}
    patch = {
        "metadata": {"annotations": {note: None}},
        "status": {"capacity": removed, "allocatable": removed},
    }
    await cluster.request(
        "PATCH",
        f"/api/v1/nodes/{NODE}/status",
        patch,
        content_type="application/merge-patch+json",
    )
    assert "gpumem" not in await amounts(cluster)
    begin_s = time.monotonic()
    agent.start()

    async def is_initialized() -> bool:
        known = await amounts(cluster)
        return all(known.get(name, 0) > 0 for name in requested)

    await cluster.until("the node is initialized", is_initialized, limit_s=LIMIT_S)
    record_property("agent_start_to_initialized_s", f"{time.monotonic() - begin_s:.1f}")


async def test_totals_that_are_zeroed_are_written_again(cluster: NodeCluster) -> None:
    """As kubelet does it where its directory of device plugins is empty when it registers."""
    zeros = {"nvidia.com/gpumem": "0", "nvidia.com/gpucores": "0"}
    patch = {"status": {"capacity": zeros, "allocatable": zeros}}
    path = f"/api/v1/nodes/{NODE}"
    await cluster.request(
        "PATCH", f"{path}/status", patch, content_type="application/merge-patch+json"
    )
    await cluster.until("totals are written again", lambda: shows_totals(cluster), limit_s=LIMIT_S)


async def test_totals_return_to_a_node_that_kubelet_registers_again(cluster: NodeCluster) -> None:
    await cluster.node.kill_kubelet()
    await cluster.request("DELETE", f"/api/v1/nodes/{NODE}")
    await cluster.node.start_kubelet()
    await cluster.registered()
    await cluster.until("totals return", lambda: shows_totals(cluster), limit_s=LIMIT_S)
    node = await cluster.request("GET", f"/api/v1/nodes/{NODE}")
    assert annotations.advertised_amounts("nvidia") in node["metadata"]["annotations"]


async def test_full_node_keeps_its_pods_across_a_restart_of_kubelet(cluster: NodeCluster) -> None:
    names = [f"full-{number}" for number in range(2 * CARDS)]
    for name in names:
        await cluster.create_pod(share(name, CARD_MIB // 2))

    async def all_run() -> bool:
        running = {
            pod.metadata.name for pod in await cluster.pods() if pod.status.phase == "Running"
        }
        return running == set(names)

    await cluster.until("all memory is given", all_run, limit_s=LIMIT_S)
    await cluster.taps[KUBELET_TAP].cut()
    await cluster.node.restart_kubelet()
    await cluster.registered()
    await cluster.taps[KUBELET_TAP].heal()

    async def is_admitted_again() -> bool:
        return await cluster.metric(AGENT, "hami_nodeagent_grants") == len(names)

    await cluster.until("all pods hold their shares", is_admitted_again, limit_s=LIMIT_S)
    assert {pod.status.phase for pod in await cluster.pods()} == {"Running"}
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []


async def test_pods_that_end_give_their_amounts_to_later_pods(cluster: NodeCluster) -> None:
    for number in range(2):
        await cluster.delete_pod(f"full-{number}")
        await cluster.create_pod(share(f"later-{number}", CARD_MIB // 2))

    async def all_run() -> bool:
        pods = {pod.metadata.name: pod.status.phase for pod in await cluster.pods()}
        return [pods.get(f"later-{number}") for number in range(2)] == ["Running"] * 2

    await cluster.until("later pods run", all_run, limit_s=LIMIT_S)


async def test_default_scheduler_places_and_refuses_by_sums(cluster: NodeCluster) -> None:
    """Half of a card is left by sums; each pod gets its node, or a reason with the resource."""
    await cluster.delete_pod("full-2")

    async def has_left() -> bool:
        return len(await cluster.pods()) == 2 * CARDS - 1

    await cluster.until("the pod is gone", has_left, limit_s=LIMIT_S)
    await cluster.request("DELETE", f"{ADMISSION}/mutatingwebhookconfigurations/hami-webhook")
    await cluster.processes["kube-scheduler"].stop()
    assert isinstance(cluster.plane, RealPlane)
    scheduler = cluster.plane.add_default_scheduler()
    scheduler.start()
    try:
        await cluster.create_pod(share("too-much", CARD_MIB // 2 + 1))

        async def is_refused() -> bool:
            status, message = await condition(cluster, "too-much")
            return status == "False" and "Insufficient nvidia.com/gpumem" in message

        await cluster.until("the sum refuses the pod", is_refused, limit_s=LIMIT_S)
        await cluster.create_pod(share("fits", CARD_MIB // 2))

        async def is_bound() -> bool:
            return (await cluster.pod("fits")).spec.node_name == NODE

        await cluster.until("the pod is bound by sums", is_bound, limit_s=LIMIT_S)

        async def has_failed() -> bool:
            return await cluster.pod_is("fits", "Failed")

        # Sums are never sufficient: without an allocation the agent gives it no device.
        await cluster.until("kubelet rejects the pod", has_failed, limit_s=LIMIT_S)
        assert (await cluster.pod_document("fits"))["status"]["reason"] == (
            "UnexpectedAdmissionError"
        )
    finally:
        await scheduler.stop()


async def attempt(cluster: NodeCluster, node: str, patch: dict[str, Any]) -> tuple[int, str]:
    """Patch the node's status in a dry run, as the agent of ``node``; returns status and text."""
    headers = {
        "Authorization": f"Bearer {cluster.plane.access().token}",
        "Content-Type": "application/merge-patch+json",
        "Impersonate-User": "system:serviceaccount:hami-agents:hami-nodeagent",
        "Impersonate-Extra-authentication.kubernetes.io%2Fnode-name": node,
    }
    url = f"{cluster.api_url}/api/v1/nodes/{NODE}/status?dryRun=All"
    async with cluster.session.patch(url, json=patch, headers=headers) as response:
        return response.status, await response.text()


async def test_policy_limits_an_agent_to_extended_resources_of_its_own_node(
    cluster: NodeCluster,
) -> None:
    for document in yaml.safe_load_all((COMPONENT / "node-status-policy.yaml").read_text()):
        kind = document["kind"]
        plural = "validatingadmissionpolicies" if kind.endswith("Policy") else f"{kind.lower()}s"
        await cluster.create(f"{ADMISSION}/{plural}", document)
    amount = {"status": {"capacity": {"a.example/b": "1"}, "allocatable": {"a.example/b": "1"}}}

    async def is_in_force() -> bool:
        return (await attempt(cluster, "other-node", amount))[0] == FORBIDDEN

    await cluster.until("the policy is in force", is_in_force, limit_s=LIMIT_S)
    for patch, message in (
        ({"metadata": {"labels": {"zone": "b"}}}, "labels"),
        ({"status": {"conditions": []}}, "conditions"),
        ({"status": {"capacity": {"cpu": "64"}}}, "extended resources only"),
        ({"status": {"capacity": {"cpu": None}}}, "extended resources only"),
        ({"status": {"capacity": {"hugepages-3Mi": "0"}}}, "extended resources only"),
    ):
        status, text = await attempt(cluster, NODE, patch)
        assert (status, message in text) == (FORBIDDEN, True), text
    removed = {"status": {"capacity": {"nvidia.com/gpumem": None}}}
    marked = {"metadata": {"annotations": {annotations.advertised_amounts("nvidia"): None}}}
    for patch in (amount, removed, marked):
        assert (await attempt(cluster, NODE, patch))[0] == OK, patch
