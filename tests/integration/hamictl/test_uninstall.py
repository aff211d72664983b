# SPDX-License-Identifier: Apache-2.0
"""``hamictl uninstall`` on a simulated API server; kubelet is played by the test.

A node is compared with what it was before the installation. The removal pods' work on a host
is tested in ``tests/unit/nodeagent/shell/test_removal.py``.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import msgspec
import pytest

from hami_common.compat import volcano
from hami_common.dra.names import DRIVER, pool_name
from hami_common.pods import annotations
from hami_common.runtime import kubeio
from hami_common.runtime.clock import SystemClock
from hami_sim.apiserver import ApiServer, Settings
from hami_sim.kube import Access
from hamictl import uninstalling
from hamictl.uninstalling import Outcome, Uninstaller
from tests.support import claims
from tests.support.kubeclient import KubeClient, StatusError

pytestmark = pytest.mark.anyio

OFFERED = ("hami.io/accelerators", "nvidia.com/gpu")
"""Resources of the device plugins of one agent."""
NODE = "gpu-1"
OTHER = "cpu-1"
AGENT_LABELS = {"app.kubernetes.io/name": "hami-nodeagent", "hami.io/vendor": "nvidia"}
REPORT = {"removed": ["/var/lib/hami"], "kept": [], "problems": []}

Obj = dict[str, Any]


class Site:
    def __init__(self, api: ApiServer, kube: kubeio.KubeClient, admin: KubeClient) -> None:
        self.api = api
        self.admin = admin
        self.kube = kube
        self.report: Obj = REPORT
        self.removals: list[Obj] = []
        self.said: list[str] = []
        self.has_forgotten = False

    async def install(self) -> Obj:
        """Add what the manifests and the services add; returns the node as it was before."""
        await self.admin.create("nodes", {"metadata": {"name": OTHER, "labels": {"zone": "a"}}})
        before = await self.admin.create(
            "nodes",
            {
                "metadata": {"name": NODE, "labels": {"zone": "a"}, "annotations": {"team": "x"}},
                "status": {"capacity": {"cpu": "8"}, "allocatable": {"cpu": "8"}},
            },
        )
        marks = {annotations.CAPACITY_RETURNED: "5", annotations.DEVICE_CORDON: "GPU-1"}
        metadata = {"labels": {"hami.io/nvidia": "true"}, "annotations": marks}
        await self.admin.patch("nodes", NODE, {"metadata": metadata})
        await self.amounts("20", "20")
        await self.admin.create("deployments.apps", workload("hami-scheduler"), "hami-system")
        await self.admin.create(
            "daemonsets.apps", workload("hami-nodeagent-nvidia", **AGENT_LABELS), "hami-agents"
        )
        return before

    async def amounts(self, capacity: str, allocatable: str) -> None:
        status = {
            "capacity": {"cpu": "8", **dict.fromkeys(OFFERED, capacity)},
            "allocatable": {"cpu": "8", **dict.fromkeys(OFFERED, allocatable)},
        }
        await self.admin.patch("nodes", NODE, {"status": status}, subresource="status")

    async def pod(self, *, phase: str = "Running") -> None:
        metadata = {"name": "web", "labels": {annotations.MANAGED_LABEL: "true"}}
        spec = {"nodeName": NODE, "containers": [{"name": "main", "image": "x"}]}
        await self.admin.create("pods", {"metadata": metadata, "spec": spec}, "default")
        await self.admin.patch(
            "pods", "web", {"status": {"phase": phase}}, namespace="default", subresource="status"
        )

    async def kubelet(self) -> None:
        """Run removal pods, and forget the device plugin after the agents are gone."""
        while True:
            for pod in (await self.admin.list("pods", "hami-agents"))["items"]:
                if pod["metadata"].get("deletionTimestamp"):
                    name = pod["metadata"]["name"]
                    await self.admin.delete("pods", name, "hami-agents", gracePeriodSeconds="0")
                    continue
                if (pod.get("status") or {}).get("phase") == "Succeeded":
                    continue
                self.removals.append(pod)
                message = json.dumps(self.report)
                ended = {"terminated": {"exitCode": 0, "message": message}}
                status = {
                    "phase": "Succeeded",
                    "containerStatuses": [{"name": "remove", "state": ended}],
                }
                await self.admin.patch(
                    *("pods", pod["metadata"]["name"], {"status": status}),
                    namespace="hami-agents",
                    subresource="status",
                )
            if not self.has_forgotten and not (await self.admin.list("daemonsets.apps"))["items"]:
                await self.amounts("20", "0")
                await anyio.sleep(0.2)
                await self.amounts("0", "0")
                self.has_forgotten = True
            await anyio.sleep(0.05)

    def uninstaller(self) -> Uninstaller:
        return Uninstaller(
            self.kube,
            namespace="hami-system",
            agents_namespace="hami-agents",
            clock=SystemClock(),
            node_limit_s=40.0,
            kubelet_limit_s=60.0,
            report=self.said.append,
        )

    async def uninstall(self) -> Outcome:
        async with anyio.create_task_group() as group:
            group.start_soon(self.kubelet)
            outcome = await self.uninstaller().run()
            group.cancel_scope.cancel()
        return outcome


def workload(name: str, **labels: str) -> Obj:
    labels = labels or {"app.kubernetes.io/name": name}
    container = {
        "name": "agent",
        "image": "registry.example/hami-nodeagent:1",
        "env": [
            {"name": "HAMI_NODEAGENT_NODE_NAME", "value": "n"},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        ],
    }
    spec = {
        "nodeSelector": {"hami.io/nvidia": "true"},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "hami-nodeagent-config-abc"}}],
    }
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def plain(node: Obj) -> Obj:
    """A node without what changes with every write."""
    metadata = {key: node["metadata"].get(key) or {} for key in ("name", "labels", "annotations")}
    status = node.get("status") or {}
    return {
        "metadata": metadata,
        "spec": node.get("spec") or {},
        "status": {key: status.get(key) or {} for key in ("capacity", "allocatable")},
    }


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(uninstalling, "POLL_S", 0.05)
    monkeypatch.setattr(uninstalling, "STEADY_S", 0.5)
    async with (
        ApiServer(Settings()) as api,
        KubeClient(Access(url=api.url, token=api.token)) as admin,
        kubeio.connect(str(api.kubeconfig(tmp_path / "kubeconfig")), start_timeout_s=20) as kube,
    ):
        yield Site(api, kube, admin)


async def test_node_is_as_before_the_installation(site: Site) -> None:
    before = await site.install()
    outcome = await site.uninstall()
    assert outcome.is_complete
    assert plain(await site.admin.get("nodes", NODE)) == plain(before)
    (result,) = outcome.nodes
    assert result.node == NODE
    assert result.files_removed == ("/var/lib/hami",)
    assert result.resources_removed == OFFERED
    assert set(result.keys_removed) == {
        *(annotations.CAPACITY_RETURNED, annotations.DEVICE_CORDON, "hami.io/nvidia"),
    }
    for kind in ("daemonsets.apps", "deployments.apps", "pods"):
        assert (await site.admin.list(kind))["items"] == [], kind
    maps = (await site.admin.list("configmaps", "hami-agents"))["items"]
    assert uninstalling.PLAN not in [one["metadata"]["name"] for one in maps]


async def test_advertised_totals_are_removed_although_they_are_positive(site: Site) -> None:
    before = await site.install()
    total = {"nvidia.com/gpumem": "160000", "nvidia.com/gpucores": "400"}
    status = {"status": {"capacity": total, "allocatable": total}}
    await site.admin.patch("nodes", NODE, status, subresource="status")
    key = annotations.advertised_amounts("nvidia")
    described = {volcano.REGISTER: "GPU-1:", volcano.HANDSHAKE: volcano.handshake(0)}
    marks = {"metadata": {"annotations": {key: ",".join(sorted(total)), **described}}}
    await site.admin.patch("nodes", NODE, marks)
    planned = await site.uninstaller().plan()
    assert planned.nodes[0].resources_removed == (
        *(*OFFERED, "nvidia.com/gpucores", "nvidia.com/gpumem"),
    )
    outcome = await site.uninstall()
    assert outcome.is_complete
    assert plain(await site.admin.get("nodes", NODE)) == plain(before)
    (result,) = outcome.nodes
    assert {key, *described} <= set(result.keys_removed)
    assert set(result.resources_removed) == {*total, *OFFERED}


async def test_removal_pod_runs_the_agents_image_with_its_settings_on_its_node(
    site: Site,
) -> None:
    await site.install()
    await site.uninstall()
    (pod,) = site.removals
    assert pod["spec"]["nodeName"] == NODE
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example/hami-nodeagent:1"
    assert container["args"][-2:] == ["--config", "/etc/hami-agent/config/nodeagent.toml"]
    # The variable of NVIDIA's toolkit would be refused by our own policy elsewhere.
    assert [one["name"] for one in container["env"]] == ["HAMI_NODEAGENT_NODE_NAME"]


async def test_second_run_changes_nothing(site: Site) -> None:
    await site.install()
    await site.uninstall()
    again = await site.uninstall()
    assert again == Outcome(pods=(), deleted=(), nodes=())


async def test_interrupted_run_is_finished_by_the_next(site: Site) -> None:
    before = await site.install()
    async with anyio.create_task_group() as group:
        group.start_soon(site.uninstaller().run)  # no kubelet: it waits for its removal pod
        with anyio.fail_after(20):
            while not (await site.admin.list("pods", "hami-agents"))["items"]:
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert (await site.admin.list("daemonsets.apps"))["items"] == []
    outcome = await site.uninstall()
    assert outcome.is_complete
    assert outcome.nodes[0].files_removed == ("/var/lib/hami",)
    assert plain(await site.admin.get("nodes", NODE)) == plain(before)


async def test_files_of_running_containers_stay_and_a_later_run_removes_them(site: Site) -> None:
    await site.install()
    await site.pod()
    site.report = {"removed": [], "kept": ["/var/lib/hami/libvgpu"], "problems": []}
    first = await site.uninstall()
    assert first.is_complete
    assert first.pods[0].pod == "web"
    assert first.nodes[0].files_kept == ("/var/lib/hami/libvgpu",)
    await site.admin.delete("pods", "web", "default")
    site.report = REPORT
    second = await site.uninstall()
    assert second.nodes[0].files_removed == ("/var/lib/hami",)


async def test_plan_lists_pods_and_nodes_and_changes_nothing(site: Site) -> None:
    await site.install()
    await site.pod()
    versions = {
        one["metadata"]["name"]: one["metadata"]["resourceVersion"]
        for one in (await site.admin.list("nodes"))["items"]
    }
    planned = await site.uninstaller().plan()
    assert [(one.pod, one.node) for one in planned.pods] == [("web", NODE)]
    assert len(planned.deleted) == 2
    assert planned.nodes[0].resources_removed == OFFERED
    assert versions == {
        one["metadata"]["name"]: one["metadata"]["resourceVersion"]
        for one in (await site.admin.list("nodes"))["items"]
    }
    assert len((await site.admin.list("daemonsets.apps"))["items"]) == 1


CLAIMS = "resourceclaims.resource.k8s.io"
SLICES = "resourceslices.resource.k8s.io"


async def _claimed(site: Site) -> None:
    """Create a claim with a device of the node, which a pod without our label uses."""
    container = {"name": "main", "image": "x", "resources": {"claims": [{"name": "gpu"}]}}
    uses = [{"name": "gpu", "resourceClaimName": "c"}]
    spec = {"nodeName": NODE, "containers": [container], "resourceClaims": uses}
    user = await site.admin.create("pods", {"metadata": {"name": "user"}, "spec": spec}, "default")
    document = claims.claim("c", claims.result("GPU-1", NODE), reserved_for=("user",))
    status = document.pop("status")
    status["reservedFor"][0]["uid"] = user["metadata"]["uid"]
    status["allocation"]["devices"]["results"][0]["shareID"] = str(UUID(int=1))
    exactly = {"deviceClassName": "hami-share"}
    document["spec"]["devices"]["requests"][0]["exactly"] = exactly
    await site.admin.create(CLAIMS, document, "default")
    await site.admin.patch(
        CLAIMS, "c", {"status": status}, namespace="default", subresource="status"
    )


async def test_pods_with_claims_of_users_are_listed_with_their_claim(site: Site) -> None:
    await site.install()
    await _claimed(site)
    await site.pod()
    planned = await site.uninstaller().plan()
    assert [(one.pod, one.node, one.claim) for one in planned.pods] == [
        ("web", NODE, ""),
        ("user", NODE, "c"),
    ]
    assert [one.pod for one in planned.pods_by_claim] == ["user"]


class OneClaimList:
    """An API server with these claims, and nothing else."""

    def __init__(self, *documents: Any) -> None:
        self._body = msgspec.json.encode({"items": documents, "metadata": {}})

    async def list_pages(self, path: str, **_: Any) -> list[bytes]:
        return [self._body] if "resourceclaims" in path else []


@pytest.mark.parametrize("data", [{"memory": "2000Mi"}, ["odd"], {"deep": {"a": 1}}])
async def test_claims_of_other_drivers_are_not_decoded(data: Any) -> None:
    own, foreign = (
        claims.claim(name, claims.result("GPU-1", NODE, driver=driver), reserved_for=("user",))
        for name, driver in (("c", DRIVER), ("other", "gpu.example"))
    )
    for document in (own, foreign):
        (one,) = document["status"]["allocation"]["devices"]["results"]
        status = {name: one[name] for name in ("driver", "pool", "device")}
        document["status"]["devices"] = [{**status, "data": data}]
    foreign["status"]["reservedFor"] = "unknown form"
    kube: Any = OneClaimList(own, foreign)
    uninstaller = Uninstaller(
        kube,
        namespace="hami-system",
        agents_namespace="hami-agents",
        clock=SystemClock(),
        node_limit_s=1,
        kubelet_limit_s=0,
        report=print,
    )
    assert [(one.pod, one.claim) for one in await uninstaller.pods()] == [("user", "c")]


async def test_slices_of_our_driver_are_deleted_and_others_stay(site: Site) -> None:
    await site.install()
    for driver in (DRIVER, "gpu.example"):
        pool = {"name": pool_name(NODE), "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": driver, "nodeName": NODE, "pool": pool, "devices": [{"name": "d"}]}
        await site.admin.create(SLICES, {"metadata": {"name": driver}, "spec": spec})
    planned = await site.uninstaller().plan()
    assert planned.nodes[0].slices_removed == (DRIVER,)
    outcome = await site.uninstall()
    assert outcome.is_complete
    assert outcome.nodes[0].slices_removed == (DRIVER,)
    left = (await site.admin.list(SLICES))["items"]
    assert [one["metadata"]["name"] for one in left] == ["gpu.example"]


async def test_finished_pods_do_not_count(site: Site) -> None:
    await site.install()
    await site.pod(phase="Succeeded")
    assert (await site.uninstaller().plan()).pods == ()


async def test_resource_of_another_device_plugin_stays(site: Site) -> None:
    await site.install()
    await site.admin.delete("daemonsets.apps", "hami-nodeagent-nvidia", "hami-agents")
    await site.amounts("4", "4")
    outcome = await site.uninstaller().run()
    assert outcome.is_complete
    status = (await site.admin.get("nodes", NODE))["status"]
    assert status["capacity"]["nvidia.com/gpu"] == "4"


async def test_after_the_manifests_were_deleted_nodes_are_still_cleaned(site: Site) -> None:
    before = await site.install()
    await site.admin.delete("daemonsets.apps", "hami-nodeagent-nvidia", "hami-agents")
    await site.admin.delete("deployments.apps", "hami-scheduler", "hami-system")
    await site.amounts("0", "0")
    outcome = await site.uninstaller().run()
    assert plain(await site.admin.get("nodes", NODE)) == plain(before)
    assert outcome.nodes[0].files_removed == ()


async def test_node_that_does_not_answer_is_a_problem_and_not_a_success(site: Site) -> None:
    await site.install()
    uninstaller = Uninstaller(
        site.kube,
        namespace="hami-system",
        agents_namespace="hami-agents",
        clock=SystemClock(),
        node_limit_s=0.3,
        kubelet_limit_s=0.3,
        report=site.said.append,
    )
    outcome = await uninstaller.run()
    assert not outcome.is_complete
    assert "does not answer" in outcome.nodes[0].problem
    with pytest.raises(StatusError):
        await site.admin.get("pods", "none", "hami-agents")
