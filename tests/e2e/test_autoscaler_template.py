# SPDX-License-Identifier: Apache-2.0
"""Templates of ``hamictl autoscaler-template``, decided on by kube-scheduler's own plugins.

cluster-autoscaler simulates with the in-tree plugins of kube-scheduler, one profile, no extender:
so does the kube-scheduler of these tests. Nodes are objects without kubelet. Memory in MiB.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
import yaml
from click.testing import CliRunner, Result

from hami_common.pods import annotations
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.core.amounts import totals
from hami_sim.kubernetes import ControlPlane, programs, run_control_plane
from hami_sim.ports import free_port
from hami_sim.process import Process
from hamictl import nodetemplates
from hamictl.cli import main
from tests.cluster.needs import control_plane_or_skip
from tests.support import builders
from tests.support.kubeclient import KubeClient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(400),
]

Obj = dict[str, Any]
CARDS: Final = 8
CARD_MIB: Final = 40_000
SLOTS: Final = 10
LIMIT_S: Final = 60.0
FULL: Final = "full"
"""A node of the pool, all of whose memory is requested and most of whose slots are free."""
CLOUD: Final = {"cpu": "32", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(CARDS)}
"""Resources that a cloud provider knows of its instance type."""
TAINT: Final = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


def amounts() -> dict[str, str]:
    """The totals that the node's agent advertises."""
    vendor = Catalog.from_settings().vendor("nvidia")
    cards = builders.devices(FULL, CARDS, memory_mib=CARD_MIB).devices
    found = totals(vendor, cards, is_usable=lambda _: True, pods=())
    return {name: str(amount) for name, amount in found.items()}


class Site:
    """The control plane, and the pool."""

    def __init__(self, plane: ControlPlane, client: KubeClient, directory: Path) -> None:
        self.plane = plane
        self.client = client
        self.directory = directory

    async def add_node(
        self, name: str, offered: Mapping[str, str], **metadata: Mapping[str, str]
    ) -> None:
        """Add a node that is ready."""
        status = {
            "capacity": dict(offered),
            "allocatable": dict(offered),
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
            ],
        }
        await self.client.create(
            "nodes",
            {
                "metadata": {"name": name, **metadata},
                "spec": {"taints": [TAINT]},
                "status": status,
            },
        )

    async def add_pod(self, name: str, memory_mib: int, *, node: str = "") -> None:
        """Create a pod with one share; with ``node`` it is assigned."""
        limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib)}
        spec: Obj = {
            "containers": [{"name": "c", "image": "i:1", "resources": {"limits": limits}}],
            # No kubelet keeps the nodes ready.
            "tolerations": [{"operator": "Exists"}],
        }
        if node:
            spec["nodeName"] = node
        await self.client.create("pods", {"metadata": {"name": name}, "spec": spec}, "default")

    async def node_of(self, pod: str) -> str:
        found = await self.client.get("pods", pod, "default")
        return str(found["spec"].get("nodeName", ""))

    async def refusal(self, pod: str) -> str:
        """Message of kube-scheduler's refusal, once there is one."""
        while True:
            found = await self.client.get("pods", pod, "default")
            for one in found["status"].get("conditions") or ():
                if one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable":
                    return str(one["message"])
            await anyio.sleep(0.1)

    async def hamictl(self, *words: str) -> Result:
        environment = {"KUBECONFIG": str(self.plane.kubeconfig)}
        arguments = ["autoscaler-template", *words]
        return await anyio.to_thread.run_sync(
            lambda: CliRunner().invoke(main, arguments, env=environment)
        )

    @asynccontextmanager
    async def scheduler(self, configuration: Obj) -> AsyncIterator[None]:
        """Run a kube-scheduler with a configuration that was printed for an autoscaler."""
        login = self.plane.kubeconfig_for("system:kube-scheduler")
        file = self.directory / "scheduler.yaml"
        document = {
            **configuration,
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(login)},
        }
        file.write_text(yaml.safe_dump(document))
        process = Process(
            "autoscaler-oracle",
            [
                self.plane.programs.path(programs.SCHEDULER),
                f"--config={file}",
                "--bind-address=127.0.0.1",
                f"--secure-port={free_port()}",
                f"--authentication-kubeconfig={login}",
                f"--authorization-kubeconfig={login}",
            ],
            log=self.directory / "oracle.log",
        )
        process.start()
        try:
            yield
        finally:
            await process.stop()

    async def clear(self) -> None:
        for pod in (await self.client.list("pods", "default"))["items"]:
            name = pod["metadata"]["name"]
            await self.client.delete("pods", name, "default", gracePeriodSeconds="0")
        for node in (await self.client.list("nodes"))["items"]:
            await self.client.delete("nodes", node["metadata"]["name"])


@pytest.fixture(scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    found = control_plane_or_skip()
    async with run_control_plane(tmp_path_factory.mktemp("plane"), found) as plane:
        yield plane


@pytest.fixture
async def site(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Site]:
    """The pool's node as its agent advertises it, full by sums with one pod on each card."""
    async with KubeClient(plane.access()) as client:
        site = Site(plane, client, tmp_path)
        offered = {**CLOUD, "nvidia.com/gpu": str(CARDS * SLOTS), **amounts()}
        labels = {"pool": "a100", nodetemplates.INSTANCE_TYPE: "p4d.24xlarge"}
        note = {annotations.advertised_amounts("nvidia"): ",".join(sorted(amounts()))}
        await site.add_node(FULL, offered, labels=labels, annotations=note)
        for number in range(CARDS):
            await site.add_pod(f"holder-{number}", CARD_MIB, node=FULL)
        try:
            yield site
        finally:
            await site.clear()


def template_by(tags: list[Obj]) -> dict[str, str]:
    """Resources of a node that cluster-autoscaler makes from a cloud's type and tags."""
    start = f"{nodetemplates.ASG_PREFIX}resources/"
    return CLOUD | {
        tag["Key"].removeprefix(start): tag["Value"] for tag in tags if tag["Key"].startswith(start)
    }


async def test_pending_share_fits_a_node_with_our_tags_and_no_other(site: Site) -> None:
    printed = await site.hamictl(FULL, "--for", "scheduler-config")
    assert printed.exit_code == 0, printed.output
    async with site.scheduler(yaml.safe_load(printed.output)):
        with anyio.fail_after(LIMIT_S):
            await site.add_pod("share", 3000)
            # Slots are free on the full node, memory is not.
            assert "Insufficient nvidia.com/gpumem" in await site.refusal("share")
            # The plain template of the cloud.
            await site.add_node("plain", CLOUD)
            await site.add_pod("again", 3000)
            # kube-scheduler judges it again once it knows the node.
            while "2 Insufficient nvidia.com/gpumem" not in await site.refusal("again"):
                await anyio.sleep(0.2)
            found = await site.hamictl(FULL, "--label", "pool", "--name", "asg-a100")
            assert found.exit_code == 0, found.output
            await site.add_node("tagged", template_by(json.loads(found.stdout)))
            for pod in ("share", "again"):
                while await site.node_of(pod) != "tagged":
                    await anyio.sleep(0.1)


async def test_tool_names_the_tags_that_a_plain_template_lacks(site: Site, tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump({"kind": "Node", "status": {"capacity": CLOUD}}))
    checked = await site.hamictl(FULL, "--check", str(plain))
    assert checked.exit_code == 1
    prefix = f"{nodetemplates.ASG_PREFIX}resources"
    total = CARDS * CARD_MIB
    assert (
        f"nvidia.com/gpumem is missing, full has {total}: "
        f"set tag {prefix}/nvidia.com/gpumem={total}" in checked.output
    )
    assert "nvidia.com/gpu is 8, full has 80" in checked.output
    tags = await site.hamictl(FULL)
    described = tmp_path / "tags.json"
    for document in (json.loads(tags.stdout), {"Tags": json.loads(tags.stdout)}):
        described.write_text(json.dumps(document))
        checked = await site.hamictl(FULL, "--check", str(described))
        assert checked.exit_code == 0, checked.output


async def test_ignoring_amounts_finds_room_on_full_devices(site: Site) -> None:
    """The reason that --counts-only is not the default."""
    printed = await site.hamictl(FULL, "--for", "scheduler-config", "--counts-only")
    assert printed.exit_code == 0, printed.output
    async with site.scheduler(yaml.safe_load(printed.output)):
        with anyio.fail_after(LIMIT_S):
            await site.add_pod("share", 3000)
            while await site.node_of("share") != FULL:
                await anyio.sleep(0.1)


async def test_node_without_amounts_is_refused_with_the_fix(site: Site) -> None:
    await site.add_node("bare", CLOUD)
    refused = await site.hamictl("bare")
    assert refused.exit_code == 1
    assert "node bare does not offer nvidia.com/gpumem" in refused.output
    assert "advertise-amounts" in refused.output


async def test_node_overlay_adds_extended_resources_to_the_instance_type(site: Site) -> None:
    """Karpenter rejects an overlay with cpu, memory, ephemeral-storage or pods."""
    printed = await site.hamictl(FULL, "--for", "karpenter", "--name", "a100")
    assert printed.exit_code == 0, printed.output
    selects = {
        "key": "node.kubernetes.io/instance-type",
        "operator": "In",
        "values": ["p4d.24xlarge"],
    }
    assert yaml.safe_load(printed.stdout) == {
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "NodeOverlay",
        "metadata": {"name": "a100"},
        "spec": {
            "requirements": [selects],
            "capacity": {"nvidia.com/gpu": str(CARDS * SLOTS), **amounts()},
        },
    }


async def test_cluster_api_annotations_state_the_node(site: Site) -> None:
    printed = await site.hamictl(FULL, "--for", "capi", "--label", "pool")
    assert printed.exit_code == 0, printed.output
    notes = yaml.safe_load(printed.stdout)["metadata"]["annotations"]
    prefix = nodetemplates.CAPI_PREFIX
    assert {key.removeprefix(prefix): value for key, value in notes.items()} == {
        "cpu": "32",
        "memory": "256Gi",
        "gpu-type": "nvidia.com/gpu",
        "gpu-count": "80",
        "labels": "pool=a100",
        "taints": "gpu=yes:NoSchedule",
    }
    assert "cannot state nvidia.com/gpumem" in printed.stderr
