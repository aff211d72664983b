# SPDX-License-Identifier: Apache-2.0
"""The whole system on a real control plane and one real node.

A ``Cluster`` whose simulated kubelet is replaced by kubelet, containerd and runc. The agent and
its proxy run with the node's mounts, as their DaemonSet would with host paths; the hardware stays
simulated. With a fake NVML, containers get the fake driver by CDI, and the node has an image that
uses it. A tap stands between kubelet and the API server.
"""

import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
import msgspec
import yaml
from anyio.abc import TaskGroup

from hami_common.dra.names import DRIVER
from hami_common.kubeletapi import podresources, podresources_grpc
from hami_common.units import parse_quantity
from hami_sim.cluster import Cluster, ClusterSpec
from hami_sim.hardware import profile as hardware
from hami_sim.kubernetes import Programs
from hami_sim.kubernetes.pki import HOST
from hami_sim.process import Process
from tests.cluster.node.driver import CONTROL_NODES, drive_image, specification
from tests.cluster.node.node import NodeSpec, RealNode
from tests.cluster.node.space import KUBELET_DIRECTORY

KUBELET_TAP = "kubelet-api"
_KUBELET = "kubelet"
_STATUS = "/api/v1/nodes/{}"
_AGENT_PATHS = {
    "plugin_socket_dir": "/run/hami-agent/plugins",
    "device_plugin_dir": str(KUBELET_DIRECTORY / "device-plugins"),
    "pod_resources_socket": str(KUBELET_DIRECTORY / "pod-resources" / "kubelet.sock"),
    "dra.registry_dir": str(KUBELET_DIRECTORY / "plugins_registry"),
    "dra.plugin_dir": str(KUBELET_DIRECTORY / "plugins" / DRIVER),
}


class NodeCluster(Cluster):
    """One real node, the only one in ``spec.nodes``; made by ``run_node_cluster``."""

    node: RealNode
    """Set once the control plane runs."""

    def __init__(
        self,
        spec: ClusterSpec,
        directory: Path,
        group: TaskGroup,
        disk: Path,
        programs: Programs,
        *,
        sync_s: int,
        device_nodes: Sequence[str] = (),
    ) -> None:
        """Keep the node below ``disk``, which needs a short path."""
        claims = {"dra.cdi_dir": str(disk / "cdi"), "dra.region_dir": str(disk / "claims")}
        agent = {**_AGENT_PATHS, **claims, **spec.settings.get("nodeagent", {})}
        settings = {**spec.settings, "nodeagent": agent}
        super().__init__(
            msgspec.structs.replace(spec, settings=settings, plane="real"), directory, group
        )
        self._disk = disk
        self._sync_s = sync_s
        self._device_nodes = tuple(device_nodes)
        self._programs = programs

    def _add(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        if name == _KUBELET:
            return
        super()._add(name, module, arguments, env)
        if name in self.plugin_proxies:
            arguments = ["plugin-proxy"]  # its defaults are the places on a node
        if name in (*self.agents, *self.plugin_proxies):
            argv = [sys.executable, "-m", module, *arguments]
            self.processes[name] = _OnNode(
                name,
                lambda: self.node.space.look_command(argv),
                log=self.directory / "logs" / f"{name}.log",
                env={"PYTHONUNBUFFERED": "1", **(env or {})},
            )

    async def _add_all(self) -> None:
        await super()._add_all()
        [spec] = self.spec.nodes
        login = yaml.safe_load(
            Path(self.plane.kubelet_login([spec.name]).format(node=spec.name)).read_text()
        )
        cluster = login["clusters"][0]["cluster"]
        port = await self._make_tap(KUBELET_TAP, self.plane.port)
        cluster["server"] = f"https://{HOST}:{port}"
        kubeconfig = self.directory / "kubelet.kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(login))
        minors = self.minors().values()
        if self.spec.nvml_library:
            self._install_driver()
        self.node = RealNode(
            NodeSpec(
                name=spec.name,
                kubelet=Path(self._programs.path("kubelet")),
                kubeconfig=kubeconfig,
                client_ca=Path(cluster["certificate-authority"]),
                devices=(
                    *(f"nvidia{minor}" for minor in minors),
                    *CONTROL_NODES,
                    *self._device_nodes,
                ),
                configuration={"syncFrequency": f"{self._sync_s}s"},
                images=(drive_image(),) if self.spec.nvml_library else (),
            ),
            self._disk,
        )
        await self.node.start()

    def _install_driver(self) -> None:
        """Write the CDI specification by which containers get the fake driver and its machine."""
        [spec] = self.spec.nodes
        machine = self.nvml[spec.name].path
        machine.parent.chmod(0o777)  # containers of any user share the devices
        described = specification(
            hardware.load(spec.profile),
            self.nvml[spec.name].uuids,
            libraries=Path(self.spec.nvml_library).parent,
            state=machine,
        )
        directory = self._disk / "cdi"
        directory.mkdir()
        (directory / "nvidia.yaml").write_text(json.dumps(described))

    async def stop(self) -> None:
        """End the services, then the node, then the control plane."""
        for name in (*self.agents, *self.plugin_proxies):
            if name in self.processes:
                await self.processes[name].stop()
        if hasattr(self, "node"):
            await self.node.cut_power()
        await super().stop()

    async def kill_plugin(self) -> None:
        """Kill all programs that kubelet connects to: the agent, and the proxy in front of it."""
        for name in (*self.agents, *self.plugin_proxies):
            await self.processes[name].kill()

    async def start_plugin(self) -> None:
        """Start both again; returns when kubelet has the ids."""
        for name in (*self.agents, *self.plugin_proxies):
            self.processes[name].start()
        await self.registered()

    # ---------------------------------------------------------------- status of the node

    def minors(self) -> dict[str, int]:
        """Minor number of each device node by the device's UUID."""
        [spec] = self.spec.nodes
        profile = hardware.load(spec.profile)
        return {
            profile.uuid_of(spec.name, index): device.minor
            for index, device in enumerate(profile.devices)
        }

    async def container_log(self, pod: str, container: str, *, namespace: str = "default") -> str:
        """Output of the newest run of a container, from the node's disk."""
        return self.node.log(pod, container, namespace=namespace)

    async def node_status(self) -> dict[str, Any]:
        """The node's status."""
        document = await self.request("GET", _STATUS.format(self.node.name))
        return dict(document["status"])

    async def cpu_milli(self) -> int:
        """Processor capacity that kubelet offers to pods."""
        cores = parse_quantity((await self.node_status())["allocatable"]["cpu"])
        assert cores is not None
        return int(cores * 1000)

    async def boot_id(self) -> str:
        """Boot id of the node according to kubelet."""
        return str((await self.node_status())["nodeInfo"]["bootID"])

    async def metric(self, process: str, name: str, *, labels: str = ".*") -> float:
        """Sum of a metric over those of its series whose labels match."""
        async with self.session.get(f"{self.url(process)}/metrics") as response:
            text = await response.text()
        values = re.findall(rf"^{name}(?:{{{labels}}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    async def registered(self) -> None:
        """Wait until the running kubelet has the ids of this project's plugin."""

        async def has_ids() -> bool:
            request = podresources.AllocatableResourcesRequest()
            async with grpc.aio.insecure_channel(
                f"unix:{self.node.pod_resources_socket}"
            ) as channel:
                stub = podresources_grpc.PodResourcesListerStub(channel)
                try:
                    return bool((await stub.GetAllocatableResources(request)).devices)
                except grpc.aio.AioRpcError:
                    return False

        await self.until("kubelet has the plugin's ids", has_ids, limit_s=60)


class _OnNode(Process):
    """A process with the node's mounts, which are others after a reboot."""

    def __init__(
        self,
        name: str,
        command: Callable[[], list[str]],
        *,
        log: Path,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(name, [], log=log, env=env)
        self._command = command

    def start(self) -> None:
        """Start it on the node as it is now."""
        self._argv = self._command()
        super().start()


@asynccontextmanager
async def run_node_cluster(
    spec: ClusterSpec,
    programs: Programs,
    directory: Path,
    disk: Path,
    *,
    sync_s: int = 60,
    device_nodes: Sequence[str] = (),
) -> AsyncIterator[NodeCluster]:
    """A cluster that is ready on entry and gone on exit.

    ``sync_s``: kubelet's interval between syncs of a pod, until the next of which it does not try
    again to prepare a claim. ``device_nodes``: names in /dev beside those of NVIDIA's devices.
    """
    async with anyio.create_task_group() as group:
        cluster = NodeCluster(
            spec, directory, group, disk, programs, sync_s=sync_s, device_nodes=device_nodes
        )
        try:
            await cluster.start()
            yield cluster
        finally:
            with anyio.move_on_after(60, shield=True):
                await cluster.stop()
        group.cancel_scope.cancel()
