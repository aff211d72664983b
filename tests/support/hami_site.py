# SPDX-License-Identifier: Apache-2.0
"""A cluster with the device plugins of HAMi 2.10 or Volcano, as kubelet and the API server see it.

Real: API server, controllers, the DaemonSets of HAMi's device plugins and of this project's agents,
a kube-scheduler that places their pods. Simulated: kubelets, devices, and HAMi itself. HAMi's
scheduler is ``HamiSite.place``: it writes HAMi's annotations and binds the pod. The plugins are
gRPC servers of the test, which serve where the DaemonSet's pod runs, with their own ids of devices.
The agents' pods stay in ContainerCreating, since the host paths of their manifests do not exist on
this machine; their processes start and stop with these pods. Memory in MiB.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import yaml
from msgspec import Struct

from hami_common.compat import hamiformat, volcano
from hami_common.kubeletapi import deviceplugin as api
from hami_sim.cluster import AGENTS_NAMESPACE, NodeSpec
from hami_sim.hardware import profile as hardware
from hami_sim.kubernetes import ControlPlane, programs
from hami_sim.kubernetes.pki import HOST
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.contract.kubelet.plugin import TestPlugin
from tests.support.installed import SLEEPER, Installed

Obj = dict[str, Any]
HAMI_NAMESPACE = "kube-system"
AGENT = "app.kubernetes.io/name=hami-nodeagent"
LOOK_S = 0.2
RUN_S = 60.0


class Kind(Struct, frozen=True, kw_only=True):
    """HAMi's plugin of one vendor."""

    word: str
    vendor: str
    resource: str
    plugin: tuple[str, str]
    """Label of the plugin's pods."""
    label: tuple[str, str]
    """Label of nodes that run it."""
    register: str
    handshake: str
    allocated: str
    slots: int
    amounts: tuple[str, ...] = ()
    """Resources for MiB and percent of all devices, of which kubelet gets an id for each unit."""


NVIDIA = Kind(
    word="NVIDIA",
    vendor="nvidia",
    resource="nvidia.com/gpu",
    plugin=("app.kubernetes.io/component", "hami-device-plugin"),
    label=("gpu", "on"),
    register="hami.io/node-nvidia-register",
    handshake="hami.io/node-handshake",
    allocated="hami.io/vgpu-devices-allocated",
    slots=5,
)
ILUVATAR = Kind(
    word="MR-V100",
    vendor="iluvatar",
    resource="iluvatar.ai/MR-V100-vgpu",
    plugin=("app.kubernetes.io/name", "ix-device-plugin"),
    label=("iluvatar", "on"),
    register="hami.io/node-MR-V100-register",
    handshake="hami.io/node-handshake-MR-V100",
    allocated="hami.io/MR-V100-devices-allocated",
    slots=100,
)
VOLCANO = Kind(
    word="NVIDIA",
    vendor="nvidia",
    resource="volcano.sh/vgpu-number",
    plugin=("name", "volcano-device-plugin"),
    label=("volcano.sh/vgpu-plugin", "on"),
    register=volcano.REGISTER,
    handshake=volcano.HANDSHAKE,
    allocated=volcano.POD_IDS,
    slots=10,
    amounts=("volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores"),
)
REPORT_S = 20.0
"""Interval of Volcano's handshake: its scheduler drops a node after 60 s."""


def registration(node: NodeSpec, kind: Kind, slots: int) -> str:
    """A node's devices as HAMi's plugin registers them."""
    machine = hardware.load(node.profile)
    rows = [
        (machine.uuid_of(node.name, index), machine.memory_mib_of(index), machine.name_of(index))
        for index in range(len(machine.devices))
    ]
    if kind is NVIDIA:
        return json.dumps(
            [
                {"id": uuid, "index": index, "count": slots, "devmem": mib, "devcore": 100}
                | {"type": name, "mode": "hami-core", "health": True}
                for index, (uuid, mib, name) in enumerate(rows)
            ]
        )
    if kind is VOLCANO:
        return "".join(
            f"{uuid},{slots},{mib},NVIDIA-{name},true,hami-core:" for uuid, mib, name in rows
        )
    return "".join(
        f"{uuid},{slots},{mib},100,{kind.word},0,true,{index},hami-core:"
        for index, (uuid, mib, _) in enumerate(rows)
    )


class HamiSite:
    """HAMi on some nodes of an installation, and the agents that replace it there."""

    def __init__(self, kinds: Mapping[str, Kind], slots: Mapping[str, int]) -> None:
        """HAMi's plugin by node; its split count, where it is not the kind's."""
        self.kinds = kinds
        self._slots = slots
        self._plugins: dict[str, list[TestPlugin]] = {}
        """By node: that of the devices, then those of amounts."""
        self._reported_s: dict[str, float] = {}
        self._serving: set[str] = set()
        self._agents: set[str] = set()
        self._stack = AsyncExitStack()
        self._environment: dict[str, str] = {}
        """For the container that kubelet starts next."""

    async def build(self, site: Installed) -> None:
        """Install HAMi's DaemonSets, and what a cluster with them has."""
        await site.until_registered(*(node.name for node in site.spec.nodes))
        await start_default_scheduler(site)
        await site.client.call(
            "POST",
            "/apis/node.k8s.io/v1/runtimeclasses",
            body={"metadata": {"name": "nvidia"}, "handler": "nvidia"},
        )
        for kind in {kind.word: kind for kind in self.kinds.values()}.values():
            await _create_daemon_set(site, kind)
        for node in site.spec.nodes:
            directory = site.directory / "kubelet" / node.name / "device-plugins"
            # Stands for the DaemonSet hami-agent-devices, whose plugin has tests of its own.
            devices = TestPlugin(
                directory, "hami.io/agent-devices", ["all"], endpoint="hami-agent-devices.sock"
            )
            await self._stack.enter_async_context(devices)
            await devices.register()
            if node.name in self.kinds:
                await self._join(site, node)

    async def _join(self, site: Installed, node: NodeSpec) -> None:
        kind = self.kinds[node.name]
        directory = site.directory / "kubelet" / node.name / "device-plugins"
        machine = hardware.load(node.profile)
        slots = self._slots.get(node.name, kind.slots)
        ids = [
            f"{machine.uuid_of(node.name, index)}-{slot}"
            for index in range(len(machine.devices))
            for slot in range(slots)
        ]
        plugin = TestPlugin(directory, kind.resource, ids, endpoint=f"{kind.vendor}-gpu.sock")
        plugin.answer = self._answer
        count = len(machine.devices)
        totals = (sum(map(machine.memory_mib_of, range(count))), 100 * count)
        self._plugins[node.name] = [
            plugin,
            *(
                TestPlugin(directory, name, [f"{n}" for n in range(total)], endpoint=f"{n_th}.sock")
                for n_th, (name, total) in enumerate(zip(kind.amounts, totals, strict=False))
            ),
        ]
        patch = {"metadata": {"labels": dict([kind.label])}}
        await site.client.patch("nodes", node.name, patch)
        await self._register(site, node)

    async def _register(self, site: Installed, node: NodeSpec) -> None:
        """Write the node's annotations as its plugin does."""
        kind = self.kinds[node.name]
        slots = self._slots.get(node.name, kind.slots)
        state = "Reported" if kind is VOLCANO else "Requesting"
        notes = {
            kind.register: registration(node, kind, slots),
            kind.handshake: f"{state}_2026-08-01 10:00:00",
        }
        await site.client.patch("nodes", node.name, {"metadata": {"annotations": notes}})
        self._reported_s[node.name] = anyio.current_time()

    async def _answer(self, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        del ids  # HAMi's plugin reads the devices from the pod's annotation
        return api.ContainerAllocateResponse(envs=self._environment)

    async def follow(self, site: Installed, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Start and stop HAMi's plugins and our agents with the pods of their DaemonSets."""
        try:
            task_status.started()
            while True:
                for node in site.spec.nodes:
                    if node.name in self._plugins:
                        await self._follow_plugins(site, node)
                for node in site.spec.nodes:
                    pods = await _pods_on(site, AGENTS_NAMESPACE, AGENT, node.name)
                    if pods and node.name not in self._agents:
                        self._agents.add(node.name)
                        await site.start_agent(node, pods[0]["metadata"]["name"])
                    elif not pods and node.name in self._agents:
                        self._agents.discard(node.name)
                        await site.stop_agent(node)
                await anyio.sleep(LOOK_S)
        finally:
            with anyio.CancelScope(shield=True):
                for name in self._serving:
                    for plugin in self._plugins[name]:
                        await _end(plugin)
                await self._stack.aclose()
                if DEFAULT_SCHEDULER in site.processes:
                    await site.processes[DEFAULT_SCHEDULER].stop()

    async def _follow_plugins(self, site: Installed, node: NodeSpec) -> None:
        """Serve the node's plugins while the pod of their DaemonSet runs there."""
        name, kind = node.name, self.kinds[node.name]
        pods = await _pods_on(site, HAMI_NAMESPACE, "=".join(kind.plugin), name)
        if name in self._serving:
            if not pods:
                for plugin in self._plugins[name]:
                    await _end(plugin)
                self._serving.discard(name)
            elif kind is VOLCANO and anyio.current_time() - self._reported_s[name] >= REPORT_S:
                await self._register(site, node)
        elif any(pod["status"]["phase"] == "Running" for pod in pods):
            for plugin in self._plugins[name]:
                await plugin.serve()
                await plugin.register()
            await self._register(site, node)
            self._serving.add(name)

    async def until_serves(self, site: Installed, node: str) -> None:
        """Wait until kubelet offers the devices of HAMi's plugin, and no agent runs."""
        wanted = {plugin.resource: str(len(plugin.ids)) for plugin in self._plugins[node]}

        async def serves() -> bool:
            status = (await site.client.get("nodes", node))["status"]
            is_offered = wanted.items() <= status.get("allocatable", {}).items()
            return is_offered and node in self._serving and node not in self._agents

        await site.until(f"{node} offers {', '.join(wanted)} of the plugin", serves)

    def check_asked(self, node: str) -> None:
        """Check that kubelet asked the plugin for devices."""
        assert self._plugins[node][0].allocated

    async def place(
        self, site: Installed, name: str, node: str, containers: Sequence[Obj], text: str
    ) -> None:
        """Place a pod as HAMi does, and wait until it runs; ``text`` has its shares."""
        kind = self.kinds[node]
        shares = hamiformat.decode_shares(text, what=kind.allocated)
        given = [one for entry in shares for one in entry]
        self._environment = {"NVIDIA_VISIBLE_DEVICES": ",".join(one.id for one in given)} | {
            f"CUDA_DEVICE_MEMORY_LIMIT_{place}": f"{one.memory_mib}m"
            for place, one in enumerate(given)
        }
        pod: Obj = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "labels": {"hami.io/vgpu-node": node},
                "annotations": {
                    kind.allocated: text,
                    "hami.io/vgpu-node": node,
                    "hami.io/vgpu-time": "1785578400",
                    "hami.io/bind-time": "1785578401",
                    "hami.io/bind-phase": "allocating",
                },
            },
            "spec": {
                "schedulerName": "hami-scheduler",
                "terminationGracePeriodSeconds": 1,
                "containers": [{"image": "app", "command": SLEEPER, **one} for one in containers],
            },
        }
        # Without the plugin kubelet would start the pod without devices.
        await self.until_serves(site, node)
        await site.client.create("pods", pod, "default")
        await site.client.bind(name, node)
        await site.until(f"{name} runs", partial(site.pod_is, name, "Running"), limit_s=RUN_S)
        self.check_asked(node)
        phase = {"metadata": {"annotations": {"hami.io/bind-phase": "success"}}}
        await site.client.patch("pods", name, phase, namespace="default")


async def _end(plugin: TestPlugin) -> None:
    await plugin.close()
    plugin.socket.unlink(missing_ok=True)


async def _pods_on(site: Installed, namespace: str, selector: str, node: str) -> list[Obj]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    query = {"labelSelector": selector, "fieldSelector": f"spec.nodeName={node}"}
    items: list[Obj] = (await site.client.call("GET", path, query=query))["items"]
    # Kubelet rejects a pod until it has read the node's new labels; its DaemonSet retries.
    return [pod for pod in items if pod["status"]["phase"] != "Failed"]


DEFAULT_SCHEDULER = "default-kube-scheduler"


async def start_default_scheduler(site: Installed) -> None:
    """Start the cluster's own kube-scheduler, which places the pods of DaemonSets."""
    process = scheduler_without_extender(site.plane.control, site.directory, DEFAULT_SCHEDULER)
    site.processes[DEFAULT_SCHEDULER] = process
    process.start()


def scheduler_without_extender(
    control: ControlPlane, directory: Path, process: str, *, name: str = "default-scheduler"
) -> Process:
    """Return a further kube-scheduler, for pods with the scheduler ``name``; not started."""
    login = control.kubeconfig_for("system:kube-scheduler")
    file = directory / f"{process}.yaml"
    document = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(login)},
        "profiles": [{"schedulerName": name}],
    }
    file.write_text(yaml.safe_dump(document))
    return Process(
        process,
        [
            control.programs.path(programs.SCHEDULER),
            f"--config={file}",
            f"--bind-address={HOST}",
            f"--secure-port={free_port()}",
            f"--authentication-kubeconfig={login}",
            f"--authorization-kubeconfig={login}",
        ],
        log=directory / "logs" / f"{process}.log",
    )


async def _create_daemon_set(site: Installed, kind: Kind) -> None:
    labels = dict([kind.plugin])
    document = {
        "metadata": {"name": kind.plugin[1]},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeSelector": dict([kind.label]),
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{"name": "plugin", "image": "plugin", "command": SLEEPER}],
                },
            },
        },
    }
    path = f"/apis/apps/v1/namespaces/{HAMI_NAMESPACE}/daemonsets"
    await site.client.call("POST", path, body=document)
