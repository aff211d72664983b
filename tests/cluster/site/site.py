# SPDX-License-Identifier: Apache-2.0
"""A whole cluster of one real node, in a network namespace of its own: a site to install HAMi on.

::

    async with run_site(Site(parts, directory)) as site:
        await site.kubectl("get", "nodes")
        await site.node.reboot()

The control plane and kube-proxy run as processes; kubelet, containerd and runc make the node, whose
hardware is simulated (``hardware``). Pods reach Services by address and by name, the API server
reaches webhooks by their Services, and volumes are bound by a default StorageClass. HAMi is not
installed. ``directory`` needs a short path in memory or on a disk of its own. On exit every
process, mount, cgroup, interface and namespace of the site is gone.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess

import anyio
import yaml

from hami_common.errors import HamiError
from hami_sim.kube import Objects
from hami_sim.kubernetes import ControlPlane, Programs
from hami_sim.kubernetes.programs import APISERVER, KUBELET
from hami_sim.process import Process
from tests.cluster.node.containerd import POD_SUBNET
from tests.cluster.node.image import Image
from tests.cluster.node.node import NodeSpec, RealNode
from tests.cluster.site import manifests
from tests.cluster.site.hardware import HANDLER, Hardware
from tests.cluster.site.network import Network
from tests.cluster.site.parts import Parts
from tests.cluster.site.reach import Reach

NODE = "node-1"
PROFILE = "8xA100-40"
READY_S = 180.0
_POLL_S = 0.2
_API_PORT = 6443
_KUBELET_PORT = 10250
_PROXY = "kube-proxy"


class Site:
    """One site; made by ``run_site``."""

    def __init__(self, parts: Parts, directory: Path, *, profile: str = PROFILE) -> None:
        """Keep everything below ``directory``; ``profile`` names the node's hardware."""
        self.directory = directory
        self.network = Network()
        self.hardware = Hardware(profile, NODE)
        self.timings_s: dict[str, float] = {}
        self.plane: ControlPlane
        """Set once ``start`` runs."""
        self.node: RealNode
        """Set once the control plane runs."""
        self.proxy: Process
        """kube-proxy; a process of the node."""
        self._programs = Programs(parts.kubernetes)
        self._parts = parts

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for use on this machine."""
        return self.plane.kubeconfig

    # ---------------------------------------------------------------- start and end

    async def start(self) -> None:
        """Bring everything up; returns when the node is Ready and names are resolved."""
        begun_s = anyio.current_time()
        self.network.start()
        self.plane = ControlPlane(
            self.directory / "plane",
            self._programs,
            host=self.network.address,
            within=self.network.command(),
        )
        self.plane.ports[APISERVER] = _API_PORT
        await self.plane.start()
        self.plane.add_default_scheduler().start()
        self.timings_s["control_plane"] = anyio.current_time() - begun_s
        place = self.directory / "node"
        self.node = RealNode(self._node_spec(), place)
        for name in range(manifests.VOLUME_COUNT):
            (place / "lib" / "volumes" / f"local-{name}").mkdir(parents=True)
        self.hardware.install(place / "lib", place / "etc")
        (place / "etc" / "resolv.conf").write_text(manifests.RESOLVER)
        self._configure_proxy()
        await self.start_node()
        objects = yaml.safe_dump_all(manifests.all_objects(NODE))
        await self.reach.kubectl("apply", "--filename", "-", stdin=objects.encode())
        await self.until("the node is Ready", self.is_node_ready)
        await self.kubectl(
            *("--namespace", "kube-system", "rollout", "status", "deployment/coredns"),
            *("--timeout", f"{READY_S:g}s"),
        )
        self.timings_s["site"] = anyio.current_time() - begun_s

    async def start_node(self) -> None:
        """Start the node, with kube-proxy as one of its processes."""
        await self.node.start()
        self.proxy = Process(
            _PROXY,
            self.node.space.command(
                [self._programs.path(_PROXY), "--config", self.directory / "kube-proxy.yaml"]
            ),
            log=self.directory / "logs" / f"{_PROXY}.log",
        )
        self.proxy.start()

    async def reboot(self) -> None:
        """Cut the node's power and start it again; returns when it is Ready."""
        await self.node.cut_power()
        await self.proxy.kill()
        await self.start_node()
        await self.until("the node is Ready", self.is_node_ready)

    async def stop(self) -> None:
        """End the node, the control plane and the network."""
        if hasattr(self, "node"):
            await self.node.cut_power()
        if hasattr(self, "proxy"):
            await self.proxy.kill()
        if hasattr(self, "plane"):
            await self.plane.stop()
        self.network.stop()

    def _node_spec(self) -> NodeSpec:
        pki = self.plane.pki
        return NodeSpec(
            name=NODE,
            kubelet=Path(self._programs.path(KUBELET)),
            kubeconfig=self.plane.kubeconfig_for_node(NODE),
            client_ca=Path(pki.file("ca.crt")),
            devices=self.hardware.device_nodes,
            network=self.network.file,
            address=self.network.address,
            runtimes={HANDLER: self.hardware.runtime},
            images=(self._dns_image(),),
            configuration={
                "address": self.network.address,
                "port": _KUBELET_PORT,
                "clusterDNS": [manifests.DNS_ADDRESS],
                "clusterDomain": manifests.DOMAIN,
                "makeIPTablesUtilChains": True,
                "authorization": {"mode": "Webhook"},
            },
        )

    def _dns_image(self) -> Image:
        return Image(
            name=manifests.DNS_IMAGE,
            files={"coredns": (self._parts.coredns / "coredns").read_bytes()},
            command=["/coredns"],
            is_entrypoint=True,
        )

    def _configure_proxy(self) -> None:
        configuration = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "hostnameOverride": NODE,
            "clusterCIDR": POD_SUBNET,
            "clientConnection": {"kubeconfig": str(self.plane.kubeconfig_for("system:kube-proxy"))},
            # These would be set for the whole machine.
            "conntrack": {
                "maxPerCore": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        (self.directory / "kube-proxy.yaml").write_text(yaml.safe_dump(configuration))

    # ---------------------------------------------------------------- use

    @property
    def reach(self) -> Reach:
        """Access to the site, also from another process."""
        return Reach(
            programs=str(self._programs.directory),
            kubeconfig=str(self.kubeconfig),
            node=NODE,
            on_node=tuple(self.node.space.command([])),
            ctr=tuple(self.node.containerd.ctr()),
        )

    async def kubectl(self, *arguments: str, check: bool = True) -> CompletedProcess[str]:
        """Run kubectl as the administrator; ``Unavailable`` with its output when it fails."""
        return await self.reach.kubectl(*arguments, check=check)

    def objects(self) -> Objects:
        """The API server's objects, for the administrator."""
        return Objects(self.plane.access())

    async def is_node_ready(self) -> bool:
        """Return true if the API server shows the node as Ready."""
        try:
            node = await self.node_object()
        except HamiError:
            return False
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in node["status"].get("conditions", ())
        )

    async def node_object(self) -> manifests.Document:
        """The node, as the API server shows it."""
        async with self.objects() as client:
            return dict(await client.get("nodes", NODE))

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], *, limit_s: float = READY_S
    ) -> None:
        """Wait for ``condition``; TimeoutError names ``what`` after ``limit_s``."""
        with anyio.move_on_after(limit_s):
            while not await condition():
                await anyio.sleep(_POLL_S)
            return
        msg = f"{what}: not in {limit_s:g} s"
        raise TimeoutError(msg)


@asynccontextmanager
async def run_site(site: Site) -> AsyncIterator[Site]:
    """The site, ready on entry and gone on exit."""
    try:
        await site.start()
        yield site
    finally:
        with anyio.CancelScope(shield=True):
            await site.stop()
