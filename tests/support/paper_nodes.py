# SPDX-License-Identifier: Apache-2.0
"""Nodes on paper: Kubernetes has them and agents report their devices, but no process runs there.

For tests that end when a pod is bound, or is not: throughput of scheduling, reasons of pods that
wait. Each node is a Node object with the status that kubelet would report, and one vendor's
devices, which reach the scheduler as all devices do: reported on the bus, published by the
registry, kept in use by heartbeats. No component admits or starts a pod, and no lease is renewed:
stop the controllers that would miss that. Memory in MiB; times in seconds.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import anyio
from msgspec import Struct
from nats.aio.client import Client as NatsClient
from nats.js.client import JetStreamContext

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.inventory import Heartbeat, NodeReport
from hami_common.model.device import DeviceFacts, Link
from hami_common.runtime.clock import SystemClock
from hami_sim.cluster import Cluster

HEARTBEAT_S = 5.0
VENDOR = "nvidia"
_WORKERS = 24

Document = dict[str, Any]
T = TypeVar("T")
_clock = SystemClock()


class PaperNode(Struct, frozen=True, kw_only=True):
    """One node and its devices; none: kubelet alone, no agent."""

    name: str
    devices: tuple[DeviceFacts, ...] = ()
    links: tuple[Link, ...] = ()
    slots: int = 10
    """Ids per device that kubelet announces."""
    annotations: Mapping[str, str] = {}

    def document(self) -> Document:
        """The Node object, with the status that kubelet would report."""
        amounts = {"cpu": "192", "memory": "2000Gi", "ephemeral-storage": "1000Gi", "pods": "250"}
        if self.devices:
            amounts["nvidia.com/gpu"] = str(len(self.devices) * self.slots)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        troubles = ("MemoryPressure", "DiskPressure", "PIDPressure")
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "annotations": dict(self.annotations),
                "labels": {
                    "kubernetes.io/arch": "amd64",
                    "kubernetes.io/hostname": self.name,
                    "kubernetes.io/os": "linux",
                    "node.kubernetes.io/instance-type": "gpu-8",
                    "topology.kubernetes.io/zone": "zone-a",
                },
            },
            "status": {
                "capacity": amounts,
                "allocatable": amounts,
                "conditions": [
                    *(_condition(kind, "False", now) for kind in troubles),
                    _condition("Ready", "True", now),
                ],
                "addresses": [{"type": "Hostname", "address": self.name}],
                "images": [
                    {"names": [f"registry.example/team/image-{i}:1"], "sizeBytes": 10**9 + i}
                    for i in range(10)
                ],
                "nodeInfo": {
                    "architecture": "amd64",
                    "bootID": "0",
                    "containerRuntimeVersion": "containerd://2.1.0",
                    "kernelVersion": "6.8.0",
                    "kubeProxyVersion": "",
                    "kubeletVersion": "v1.34.4",
                    "machineID": "0",
                    "operatingSystem": "linux",
                    "osImage": "Linux",
                    "systemUUID": self.name,
                },
            },
        }


def _condition(kind: str, status: str, now: str) -> Document:
    return {
        "type": kind,
        "status": status,
        "reason": "Kubelet",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def devices_of(
    node: str, count: int, *, memory_mib: int = 81_559, **more: Any
) -> tuple[DeviceFacts, ...]:
    """``count`` devices of one model on two NUMA nodes."""
    return tuple(
        DeviceFacts(
            uuid=f"GPU-{node}-{index}",
            vendor=VENDOR,
            index=index,
            type="NVIDIA H100",
            memory_mib=memory_mib,
            numa=index * 2 // count,
            **more,
        )
        for index in range(count)
    )


class PaperAgents:
    """Publishes on the bus for the agents of all nodes that have devices."""

    def __init__(self, client: NatsClient, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        """Use a connection of the caller's."""
        self._heartbeat_s = heartbeat_s
        self._client = client
        self._bus: JetStreamContext = client.jetstream()
        self._boot_id = f"{time.time_ns() // 1_000_000:013d}-paper"
        self._seq: dict[str, int] = {}
        self.heard: set[str] = set()
        """Nodes with live agents."""

    async def report(self, node: PaperNode) -> None:
        """Report a node's devices, first or repeated."""
        self._seq[node.name] = self._seq.get(node.name, 0) + 1
        message = NodeReport(
            node=node.name,
            vendor=VENDOR,
            boot_id=self._boot_id,
            seq=self._seq[node.name],
            time_s=_clock.now_s(),
            devices=node.devices,
            links=node.links,
        )
        await self._bus.publish(subjects.report(node.name, VENDOR), codec.encode(message))
        self.heard.add(node.name)

    async def beat(self, name: str) -> None:
        """One heartbeat of one node's agent."""
        message = Heartbeat(
            node=name,
            boot_id=self._boot_id,
            seq=self._seq[name],
            time_s=_clock.now_s(),
            vendors=(VENDOR,),
        )
        await self._client.publish(subjects.heartbeat(name), codec.encode(message))

    async def live(self) -> None:
        """Send heartbeats until cancelled, spread over each interval."""
        while True:
            names = sorted(self.heard)
            begun = anyio.current_time()
            for number, name in enumerate(names):
                await anyio.sleep_until(begun + self._heartbeat_s * number / len(names))
                if name in self.heard:
                    await self.beat(name)
            await anyio.sleep_until(begun + self._heartbeat_s)


async def add_nodes(cluster: Cluster, nodes: Iterable[PaperNode]) -> None:
    """Create the Node objects, untainted: admission taints a new node until a controller has seen
    it.

    Stop the controllers before: they would detect that no kubelet renews a lease.
    """

    async def add(node: PaperNode) -> None:
        await cluster.create("/api/v1/nodes", node.document())
        await cluster.request(
            "PATCH",
            f"/api/v1/nodes/{node.name}",
            {"spec": {"taints": None}},
            content_type="application/merge-patch+json",
        )

    await each(nodes, add)


async def each(items: Iterable[T], work: Callable[[T], Awaitable[object]]) -> None:
    """Do ``work`` for each item, some at a time."""
    left = iter(items)

    async def take() -> None:
        for item in left:
            await work(item)

    async with anyio.create_task_group() as group:
        for _ in range(_WORKERS):
            group.start_soon(take)
