# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims on a real node: kubelet, containerd and runc under the real control plane.

Only on the newest Kubernetes, as all of Dynamic Resource Allocation. Memory in MiB.
"""

import json
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from hami_common.dra.names import DRIVER, UNHEALTHY, monitor_pool, pool_name
from hami_common.pods import annotations
from hami_sim.cluster import ClusterSpec, NodeSpec
from tests.cluster.node.cluster import KUBELET_TAP, NodeCluster, run_node_cluster
from tests.cluster.node.needs import programs_or_skip
from tests.cluster.node.node import base
from tests.e2e.test_real_node import (
    AGENT,
    FOLLOW,
    LIMIT_S,
    NODE,
    all_run,
    has_its_own,
    records_of,
    share,
    told_by,
)
from tests.e2e.test_resize import resize
from tests.support.checker import lasting_problems

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

MONITOR = Path(__file__).parents[2] / "deploy/kustomize/components/dra-monitor/device-class.yaml"
GROUP = "/apis/resource.k8s.io/v1"
CLAIMS = f"{GROUP}/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"
SYNC_S = 5
"""Kubelet's interval between two tries to prepare a claim; by default 60 to 90 s."""
SPEC = ClusterSpec(
    nodes=(NodeSpec(name=NODE, profile="8xA100-40"),),
    slots=16,
    injection="devices",
    backoff_s=0.2,
    dra=True,
    settings={
        "scheduler": {"reconcile_s": "5"},
        "nodeagent": {"dra.monitor": "true", "dra.fault_effect": "NoExecute"},
    },
)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NodeCluster]:
    programs = programs_or_skip()
    with tempfile.TemporaryDirectory(prefix="hn-", dir=base()) as disk:
        async with run_node_cluster(
            SPEC, programs, tmp_path_factory.mktemp("real"), Path(disk), sync_s=SYNC_S
        ) as cluster:
            document = yaml.safe_load(MONITOR.read_text())
            await cluster.create(f"{GROUP}/deviceclasses", document)
            await cluster.until("slices are published", lambda: has_slice(cluster))
            yield cluster


async def has_slice(cluster: NodeCluster) -> bool:
    pools = [one["spec"]["pool"]["name"] for one in await slices_of(cluster)]
    return sorted(pools) == [pool_name(NODE), monitor_pool(NODE)]


async def slices_of(cluster: NodeCluster) -> list[dict[str, Any]]:
    return list((await cluster.request("GET", f"{GROUP}/resourceslices"))["items"])


def exactly(memory_mib: int, **more: Any) -> dict[str, Any]:
    """A request of one share."""
    capacity = {"requests": {"memory": f"{memory_mib}Mi", "cores": "30"}}
    return {"deviceClassName": "hami-share", "capacity": capacity, **more}


async def use_claim(
    cluster: NodeCluster,
    name: str,
    memory_mib: int,
    request: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Create a claim, and a pod with the same name that uses it."""
    wanted = request or exactly(memory_mib)
    spec = {"devices": {"requests": [{"name": "main", "exactly": wanted}]}}
    await cluster.create(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    pod: dict[str, Any] = share(name, memory_mib, **more)
    resources = pod["spec"]["containers"][0]["resources"]
    for resource in ("nvidia.com/gpu", "nvidia.com/gpumem"):
        del resources["limits"][resource]
    resources["claims"] = [{"name": "gpu", "request": "main"}]
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": name}]
    await cluster.create_pod(pod)


async def end(cluster: NodeCluster, name: str) -> None:
    """Delete a pod and the claim with its name."""
    await cluster.request("DELETE", f"{PODS}/{name}")
    await cluster.request("DELETE", f"{CLAIMS}/{name}")


async def slice_of(cluster: NodeCluster) -> dict[str, Any]:
    """The node's slice with shared devices."""
    found = await slices_of(cluster)
    return next(one for one in found if one["spec"]["pool"]["name"] == pool_name(NODE))


async def test_claim_and_pod_share_the_devices_of_a_node(cluster: NodeCluster) -> None:
    spec = (await slice_of(cluster))["spec"]
    assert (spec["driver"], spec["pool"]["name"]) == (DRIVER, pool_name(NODE))
    tolerations = [{"key": UNHEALTHY, "operator": "Exists", "effect": "NoExecute"}]
    await use_claim(cluster, "claimed", 5000, exactly(5000, tolerations=tolerations))
    await cluster.create_pod(share("asked", 7000))
    await all_run(cluster, ["claimed", "asked"])
    assert await has_its_own(cluster, ["claimed", "asked"]) == []
    records = await records_of(cluster)
    assert records["claimed"].origin == "claim"
    [asked] = records["asked"].containers[0].shares
    left = f"{40_960 - asked.memory_mib}Mi"

    async def shows_what_is_left() -> bool:
        values = {
            device["attributes"]["uuid"]["string"]: device["capacity"]["memory"]["value"]
            for device in (await slice_of(cluster))["spec"]["devices"]
        }
        return bool(values[asked.uuid] == left)

    await cluster.until("the slice shows what pods leave", shows_what_is_left)
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []


async def taints_of(cluster: NodeCluster, uuid: str) -> list[tuple[str, str]]:
    """Key and effect of each taint of a device."""
    return [
        (taint["key"], taint["effect"])
        for device in (await slice_of(cluster))["spec"]["devices"]
        if device["attributes"]["uuid"]["string"] == uuid
        for taint in device.get("taints", [])
    ]


async def test_fault_of_a_claimed_device_evicts_pods_that_do_not_tolerate_it(
    cluster: NodeCluster,
) -> None:
    [used] = (await records_of(cluster))["claimed"].containers[0].shares
    devices = (await slice_of(cluster))["spec"]["devices"]
    index = next(
        one["attributes"]["index"]["int"]
        for one in devices
        if one["attributes"]["uuid"]["string"] == used.uuid
    )

    async def shows(health: str) -> bool:
        pod = await cluster.request("GET", f"{PODS}/claimed")
        (status,) = pod["status"]["containerStatuses"]
        shown = {
            found["name"]: [one["health"] for one in found["resources"]]
            for found in status.get("allocatedResourcesStatus") or ()
        }
        return shown == {"claim:gpu/main": [health]}

    await cluster.until("kubelet shows a healthy device", lambda: shows("Healthy"))
    expression = f'device.attributes["{DRIVER}"].uuid == "{used.uuid}"'
    beside = exactly(1000, selectors=[{"cel": {"expression": expression}}])
    await use_claim(cluster, "beside", 1000, beside)
    await all_run(cluster, ["beside"])
    cluster.hardware[NODE].lose(index)
    await cluster.until("kubelet shows the fault", lambda: shows("Unhealthy"))

    async def is_tainted() -> bool:
        return await taints_of(cluster, used.uuid) == [(UNHEALTHY, "NoExecute")]

    await cluster.until("the device is tainted", is_tainted)

    async def is_evicted() -> bool:
        pods = (await cluster.request("GET", PODS))["items"]
        return "beside" not in [one["metadata"]["name"] for one in pods]

    await cluster.until("the pod without a toleration is evicted", is_evicted, limit_s=60)
    await use_claim(cluster, "avoids", 1000)
    await all_run(cluster, ["claimed", "avoids"])
    [other] = (await records_of(cluster))["avoids"].containers[0].shares
    assert other.uuid != used.uuid
    await end(cluster, "avoids")
    await cluster.request("DELETE", f"{CLAIMS}/beside")
    cluster.hardware[NODE].restore(index)
    await cluster.until("kubelet shows that it is over", lambda: shows("Healthy"), limit_s=60)

    async def is_clean() -> bool:
        return await taints_of(cluster, used.uuid) == []

    await cluster.until("the taint is gone", is_clean)


async def test_claim_lives_through_restarts_and_ends_with_its_pod(cluster: NodeCluster) -> None:
    directory = cluster.node.containerd.cdi_directory

    async def has_one_file() -> bool:
        return len(list(directory.iterdir())) == 1

    await cluster.until("files of ended claims are removed", has_one_file, limit_s=LIMIT_S)
    await cluster.processes[AGENT].kill()
    await cluster.node.restart_kubelet()
    cluster.processes[AGENT].start()
    await cluster.registered()
    await use_claim(cluster, "second", 6000)
    await all_run(cluster, ["claimed", "asked", "second"])
    assert await has_its_own(cluster, ["claimed", "second"]) == []
    for name in ("claimed", "second", "asked"):
        await cluster.request("DELETE", f"{PODS}/{name}")

    async def are_released() -> bool:
        records = await records_of(cluster)
        return all(record.op == "release" for record in records.values())

    await cluster.until("all shares are released", are_released, limit_s=LIMIT_S)
    with anyio.fail_after(60):
        while list(directory.iterdir()):
            await anyio.sleep(0.2)


def moved(name: str, memory_mib: int, *, mode: str, **more: Any) -> dict[str, Any]:
    """A pod that gets its resource limits in this allocation mode."""
    pod: dict[str, Any] = share(name, memory_mib, **more)
    pod["metadata"]["annotations"] = {annotations.ALLOCATION_MODE: mode}
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"] = "30"
    return pod


async def test_pod_has_by_its_claim_what_the_device_plugin_gives(cluster: NodeCluster) -> None:
    names = ["by-plugin", "by-claim"]
    for name, mode in zip(names, ("device-plugin", "dra"), strict=True):
        await cluster.create_pod(moved(name, 3000, mode=mode))
    await all_run(cluster, names)
    assert await has_its_own(cluster, names) == []
    records = await records_of(cluster)
    assert [bool(records[name].claim) for name in names] == [False, True]
    given = [
        {
            key: value
            for key, value in (await told_by(cluster, name)).env.items()
            if key not in ("HOSTNAME", "NVIDIA_VISIBLE_DEVICES")
        }
        for name in names
    ]
    assert given[0] == given[1]
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []


async def test_resize_of_a_pod_with_a_claim_reaches_its_container(cluster: NodeCluster) -> None:
    await cluster.create_pod(moved("follows", 2000, mode="dra", script=FOLLOW))
    await all_run(cluster, ["follows"])

    async def is_running() -> bool:
        status, refused = await resize(cluster, "follows")
        return status == 400 and "its allocation is" not in refused["error"]["message"]

    await cluster.until("the scheduler knows that it runs", is_running)
    for memory_mib in (2500, 1000):
        status, done = await resize(cluster, "follows", memory_mib=memory_mib)
        assert (status, done["in_force"]) == (200, True)

        async def is_seen(wanted: str = f"memory_mib={memory_mib}\n") -> bool:
            return wanted in await cluster.container_log("follows", "main")

        await cluster.until(f"the container reads {memory_mib}", is_seen)
    [shares] = (await records_of(cluster))["follows"].containers
    left = f"{40_960 - 1000 + 2000}Mi"

    async def is_offered() -> bool:
        """kube-scheduler subtracts the 2000 MiB of the claim's allocation."""
        values = {
            device["attributes"]["uuid"]["string"]: device["capacity"]["memory"]["value"]
            for device in (await slice_of(cluster))["spec"]["devices"]
        }
        return bool(values[shares.shares[0].uuid] == left)

    await cluster.until("the slice offers what the resize freed", is_offered)


async def test_resize_of_a_claim_reaches_its_container_and_the_claim(cluster: NodeCluster) -> None:
    await use_claim(cluster, "grows", 2000, script=FOLLOW)
    await all_run(cluster, ["grows"])
    for memory_mib in (2500, 1000):
        status, done = await resize(cluster, "", claim="grows", memory_mib=memory_mib)
        assert (status, done.get("in_force")) == (200, True), done

        async def is_seen(wanted: str = f"memory_mib={memory_mib}\n") -> bool:
            return wanted in await cluster.container_log("grows", "main")

        await cluster.until(f"the container reads {memory_mib}", is_seen)

        async def is_shown(wanted: str = f"{memory_mib}Mi") -> bool:
            claim = await cluster.request("GET", f"{CLAIMS}/grows")
            return [one["data"] for one in claim["status"].get("devices", [])] == [
                {"memory": wanted, "cores": "30"}
            ]

        await cluster.until(f"the claim shows {memory_mib}", is_shown)
    record = (await records_of(cluster))["grows"]
    assert [one.memory_mib for one in record.containers[0].shares] == [1000]
    status, refused = await resize(cluster, "", claim="grows", memory_mib=90_000)
    assert (status, refused["error"]["code"]) == (409, "no-room")
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []
    await end(cluster, "grows")


async def test_container_with_two_requests_has_one_share_of_both(cluster: NodeCluster) -> None:
    requests = [
        {"name": name, "exactly": exactly(memory_mib)}
        for name, memory_mib in (("small", 1100), ("large", 2200))
    ]
    apart = [{"distinctAttribute": f"{DRIVER}/uuid", "requests": ["small", "large"]}]
    await cluster.create(
        CLAIMS,
        {
            "metadata": {"name": "both"},
            "spec": {"devices": {"requests": requests, "constraints": apart}},
        },
    )
    pod: dict[str, Any] = share("both", 0, script=FOLLOW)
    resources = pod["spec"]["containers"][0]["resources"]
    for resource in ("nvidia.com/gpu", "nvidia.com/gpumem"):
        del resources["limits"][resource]
    resources["claims"] = [{"name": "gpu"}]
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "both"}]
    await cluster.create_pod(pod)
    await all_run(cluster, ["both"])

    async def has_told(text: str = "---") -> bool:
        return text in await cluster.container_log("both", "main")

    await cluster.until("the container has read its limits", has_told)
    text = await cluster.container_log("both", "main")
    for line in ("devices=2\n", "memory_mib=1100\n", "memory_mib=2200\n"):
        assert line in text
    status, done = await resize(cluster, "", claim="both", container="large", memory_mib=2500)
    assert (status, done.get("in_force")) == (200, True), done

    is_seen = partial(has_told, "memory_mib=2500\n")
    await cluster.until("the container reads the new limit", is_seen)
    assert await lasting_problems(cluster, cluster.verifier(), namespace="default") == []
    await end(cluster, "both")


async def test_pods_with_claims_come_back_after_a_reboot_and_leave_nothing(
    cluster: NodeCluster,
) -> None:
    names = ["by-plugin", "by-claim"]
    told = {name: await told_by(cluster, name) for name in names}
    directory = cluster.node.containerd.cdi_directory
    uid = (await claims_of(cluster))[(await records_of(cluster))["by-claim"].claim]
    spec = (directory / f"hami-{uid}.json").read_bytes()
    await cluster.kill_plugin()
    await cluster.taps[KUBELET_TAP].cut()
    for file in directory.iterdir():
        file.unlink()
    await cluster.node.reboot()
    await cluster.start_plugin()
    await cluster.taps[KUBELET_TAP].heal()

    async def is_back() -> bool:
        statuses = [(await cluster.pod(name)).status.container_statuses or [] for name in names]
        return all(one and one[0].restart_count > 0 and one[0].ready for one in statuses)

    await cluster.until("the containers were started again", is_back, limit_s=LIMIT_S)
    assert {name: await told_by(cluster, name) for name in names} == told
    assert (directory / f"hami-{uid}.json").read_bytes() == spec
    for name in (*names, "follows"):
        await cluster.request("DELETE", f"{PODS}/{name}")

    async def are_gone() -> bool:
        records = await records_of(cluster)
        return not await claims_of(cluster) and all(
            record.op == "release" for record in records.values()
        )

    await cluster.until("claims and shares are gone", are_gone, limit_s=LIMIT_S)
    with anyio.fail_after(30):
        while list(directory.iterdir()):
            await anyio.sleep(0.2)


async def claims_of(cluster: NodeCluster) -> dict[str, str]:
    """The uids of the claims that pods own, by name."""
    items = (await cluster.request("GET", CLAIMS))["items"]
    return {
        one["metadata"]["name"]: one["metadata"]["uid"]
        for one in items
        if one["metadata"].get("ownerReferences")
    }


async def test_refusal_by_quota_is_a_condition_of_the_claim(cluster: NodeCluster) -> None:
    quotas = "/api/v1/namespaces/default/resourcequotas"
    hard = {"limits.nvidia.com/gpumem": "4000"}
    await cluster.create(quotas, {"metadata": {"name": "memory"}, "spec": {"hard": hard}})

    async def is_in_force() -> bool:
        return "hard" in (await cluster.request("GET", f"{quotas}/memory")).get("status", {})

    await cluster.until("the quota is in force", is_in_force)
    await use_claim(cluster, "over", 5000)

    async def verdict() -> tuple[str, str]:
        status = (await cluster.request("GET", f"{CLAIMS}/over")).get("status") or {}
        found = [c for d in status.get("devices", ()) for c in d["conditions"]]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")

    async def is_refused() -> bool:
        return await verdict() == ("False", "ResourceQuotaNotFit")

    await cluster.until("the claim is refused", is_refused, limit_s=LIMIT_S)
    await cluster.request("DELETE", f"{quotas}/memory")

    async def is_booked() -> bool:
        return await verdict() == ("True", "Booked")

    await cluster.until("the claim is booked", is_booked, limit_s=LIMIT_S)
    await all_run(cluster, ["over"])
    await cluster.request("DELETE", f"{PODS}/over")


async def test_admin_access_gives_all_devices_of_the_node(cluster: NodeCluster) -> None:
    watch = {"deviceClassName": "hami-monitor", "adminAccess": True}
    labels = {"resource.kubernetes.io/admin-access": "true"}
    await cluster.request(
        "PATCH",
        "/api/v1/namespaces/default",
        {"metadata": {"labels": labels}},
        content_type="application/merge-patch+json",
    )
    await use_claim(cluster, "watch", 0, watch)

    async def runs() -> bool:
        pod = await cluster.request("GET", f"{PODS}/watch")
        return bool((pod.get("status") or {}).get("phase") == "Running")

    await cluster.until("the pod runs", runs, limit_s=LIMIT_S)
    uid = (await cluster.request("GET", f"{CLAIMS}/watch"))["metadata"]["uid"]
    text = (cluster.node.containerd.cdi_directory / f"hami-{uid}.json").read_text()
    (device,) = json.loads(text)["devices"]
    variables = dict(one.split("=", 1) for one in device["containerEdits"]["env"])
    assert len(variables["NVIDIA_VISIBLE_DEVICES"].split(",")) == 8
    assert "watch" not in await records_of(cluster)
    await cluster.request("DELETE", f"{PODS}/watch")
