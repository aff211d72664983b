# SPDX-License-Identifier: Apache-2.0
"""Pods in allocation mode ``dra``: webhook, scheduler, kube-scheduler, agent and kubelet together.

The manifests are those of device-plugin mode; only the annotation differs.
"""

import json
from collections.abc import AsyncIterator

import pytest

from hami_common.dra.claims import ResourceClaim
from hami_common.errors import NotFound
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import decode
from hami_common.pods import annotations as keys
from hami_core.ledger.podclaim import holds, is_reserved_for
from hami_sim.cluster import Cluster, ClusterSpec, NodeSpec, run_cluster
from tests.e2e.conftest import small_pod

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
NODE = "gpu-t4"
"""Four devices of 15,360 MiB."""


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        nodes=(NodeSpec(name=NODE, profile="4xT4"),),
        backoff_s=0.2,
        dra=True,
        settings={
            "scheduler": {"tick_s": "0.2", "lease_s": "3"},
            "nodeagent": {"dra.write_s": "0.1"},
        },
    )
    async with run_cluster(spec, tmp_path_factory.mktemp("podclaims")) as running:
        yield running


async def create(cluster: Cluster, name: str, memory_mib: int, mode: str = "dra") -> str:
    """Create a pod in this allocation mode; returns its uid."""
    pod = small_pod(name, memory_mib=memory_mib)
    pod["metadata"]["annotations"] = {keys.ALLOCATION_MODE: mode}
    return str((await cluster.create_pod(pod))["metadata"]["uid"])


async def run(cluster: Cluster, name: str, memory_mib: int, mode: str = "dra") -> AllocationRecord:
    """Create a pod and wait until it runs; returns its record."""
    uid = await create(cluster, name, memory_mib, mode)
    await cluster.until(f"pod {name} runs", lambda: cluster.pod_is(name, "Running"))
    return (await cluster.ledger_of(NODE, uid))[-1][1]


async def claim_of(cluster: Cluster, name: str) -> ResourceClaim:
    """The claim that the spec of the pod names."""
    pod = await cluster.pod_document(name)
    (entry,) = pod["spec"]["resourceClaims"]
    document = await cluster.request("GET", f"{CLAIMS}/{entry['resourceClaimName']}")
    return decode(json.dumps(document).encode(), ResourceClaim, what="claim")


async def test_pod_gets_its_share_by_a_claim_and_returns_both(cluster: Cluster) -> None:
    record = await run(cluster, "p", 3000)
    assert (record.origin, record.pod) == ("", "p")
    claim = await claim_of(cluster, "p")
    assert record.claim == claim.metadata.name
    assert holds(claim, record)
    assert is_reserved_for(claim, record.pod_uid)

    async def shows_limits() -> bool:
        return "device.0.memory_mib=3000\n" in await cluster.container_log("p", "main")

    await cluster.until("limits are shown", shows_limits)
    await cluster.delete_pod("p")

    async def is_released() -> bool:
        return (await cluster.ledger_of(NODE, record.pod_uid))[-1][1].op == "release"

    async def is_collected() -> bool:
        try:
            await cluster.request("GET", f"{CLAIMS}/{record.claim}")
        except NotFound:
            return True
        return False

    await cluster.until("the share is released", is_released)
    await cluster.until("the claim is gone", is_collected)


async def test_policies_of_hami_choose_the_devices_of_claims(cluster: Cluster) -> None:
    """The default policy spreads pods over devices."""
    records = [await run(cluster, f"p{number}", 1000) for number in range(4)]
    uuids = {record.containers[0].shares[0].uuid for record in records}
    assert len(uuids) == 4
    for record in records:
        assert holds(await claim_of(cluster, record.pod), record)
    async with cluster.session.get(f"{cluster.url('scheduler')}/metrics") as response:
        metrics = await response.text()
    assert 'hami_scheduler_claims_total{outcome="written"} 4.0' in metrics


async def test_pod_with_claims_of_its_own_gets_its_devices_beside_them(cluster: Cluster) -> None:
    """kube-scheduler allocates the claims of such a pod, by first fit; HAMi chooses again."""
    templates = CLAIMS.replace("resourceclaims", "resourceclaimtemplates")
    request = {"deviceClassName": "hami-share", "capacity": {"requests": {"memory": "2000Mi"}}}
    spec = {"devices": {"requests": [{"name": "own", "exactly": request}]}}
    await cluster.create(templates, {"metadata": {"name": "own"}, "spec": {"spec": spec}})
    first = await run(cluster, "first", 1000)
    pod = small_pod("second", memory_mib=1000)
    pod["metadata"]["annotations"] = {keys.ALLOCATION_MODE: "dra"}
    pod["spec"]["resourceClaims"] = [{"name": "own", "resourceClaimTemplateName": "own"}]
    side = {"name": "side", "image": "app", "resources": {"claims": [{"name": "own"}]}}
    pod["spec"]["containers"].append(side)
    uid = str((await cluster.create_pod(pod))["metadata"]["uid"])
    await cluster.until("pod second runs", lambda: cluster.pod_is("second", "Running"))
    document = await cluster.pod_document("second")
    assert document["spec"]["schedulerName"] == "hami-scheduler"
    record = (await cluster.ledger_of(NODE, uid))[-1][1]
    claim = await cluster.request("GET", f"{CLAIMS}/{record.claim}")
    assert holds(decode(json.dumps(claim).encode(), ResourceClaim, what="claim"), record)
    assert record.containers[0].shares[0].uuid != first.containers[0].shares[0].uuid


async def test_both_modes_share_devices_and_the_rest_waits(cluster: Cluster) -> None:
    for number in range(4):
        await run(cluster, f"plugin-{number}", 8000, "device-plugin")
    for number in range(4):
        await run(cluster, f"claim-{number}", 7000)
    uid = await create(cluster, "late", 7000)

    async def reason_is_shown() -> bool:
        """Of HAMi's filter, as in mode ``device-plugin``, and not "cannot allocate all claims"."""
        status = (await cluster.pod_document("late")).get("status") or {}
        conditions = status.get("conditions") or ()
        return any("CardInsufficientMemory" in one.get("message", "") for one in conditions)

    await cluster.until("the reason of the filter is shown", reason_is_shown)
    plugin_uid = await create(cluster, "late-plugin", 7000, "device-plugin")
    await cluster.delete_pod("claim-2")
    await cluster.delete_pod("plugin-3")
    await cluster.until("pod late runs", lambda: cluster.pod_is("late", "Running"))
    await cluster.until("pod late-plugin runs", lambda: cluster.pod_is("late-plugin", "Running"))
    record = (await cluster.ledger_of(NODE, uid))[-1][1]
    assert holds(await claim_of(cluster, "late"), record)
    assert not (await cluster.ledger_of(NODE, plugin_uid))[-1][1].claim


async def test_pod_with_a_higher_priority_displaces_others_by_either_mode(cluster: Cluster) -> None:
    """kube-scheduler itself never preempts for devices of claims."""
    await cluster.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000}
    )
    for number, mode in enumerate(("device-plugin", "device-plugin", "dra", "dra")):
        await run(cluster, f"low-{number}", 15000, mode)
    pod = small_pod("urgent", memory_mib=15000, priorityClassName="high")
    pod["metadata"]["annotations"] = {keys.ALLOCATION_MODE: "dra"}
    uid = str((await cluster.create_pod(pod))["metadata"]["uid"])
    await cluster.until("pod urgent runs", lambda: cluster.pod_is("urgent", "Running"))
    record = (await cluster.ledger_of(NODE, uid))[-1][1]
    assert holds(await claim_of(cluster, "urgent"), record)
