# SPDX-License-Identifier: Apache-2.0
"""The node under test in the kubelet contract, and the builders that the suites use.

A plane gives a `Node`: an API client and the node's sockets. Suites use only these two, so the
same suites run on a simulated kubelet and on a real one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import grpc.aio
import msgspec

from hami_common.kubeletapi import podresources, podresources_grpc
from tests.contract.kubelet.plugin import TestPlugin
from tests.support.kubeclient import KubeClient, StatusError

Obj = dict[str, Any]
WAIT_S = 60.0
POLL_S = 0.02
SLEEP = "exec sleep 1000"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node under test."""

    client: KubeClient
    name: str
    namespace: str
    plugin_directory: Path
    pod_resources_socket: Path
    image: str
    """Has sh, cat, ls and sleep."""
    restart: Callable[[], Awaitable[None]]
    """Restart kubelet, not the containers; returns when it listens again."""
    reboot: Callable[[], Awaitable[None]]
    """End everything on the node at once and start it again; returns when kubelet listens."""
    logs: Callable[[str, str], Awaitable[str]]
    """(pod, container) → what the newest run printed."""
    cdi_directory: Path
    """Directory of the container runtime's CDI files."""

    @property
    def kubelet_directory(self) -> Path:
        """Kubelet's root directory."""
        return self.plugin_directory.parent

    # -- plugins

    def plugin(self, ids: Sequence[str], **more: Any) -> TestPlugin:
        """A plugin for a resource that no other test uses."""
        word = uuid4().hex[:8]
        return TestPlugin(
            self.plugin_directory,
            f"contract.example.com/{word}",
            ids,
            endpoint=f"contract-{word}.sock",
            **more,
        )

    async def minor_release(self) -> int:
        """Kubelet's minor release, such as 34."""
        info = (await self.client.get("nodes", self.name))["status"]["nodeInfo"]
        return int(info["kubeletVersion"].split(".")[1])

    async def amounts(self, resource: str) -> tuple[str, str]:
        """(capacity, allocatable) as the node's status shows them; empty when it shows none."""
        status = (await self.client.get("nodes", self.name))["status"]
        return status["capacity"].get(resource, ""), status["allocatable"].get(resource, "")

    async def shows(self, resource: str, capacity: int, allocatable: int) -> None:
        """Wait until the node's status shows these amounts."""
        want = (str(capacity), str(allocatable))
        await until(lambda: self.amounts(resource), want.__eq__, within_s=40.0)

    async def write_amount(self, resource: str, amount: str | None) -> None:
        """Write the capacity of a resource that no plugin has; kubelet makes it allocatable."""
        patch = {"status": {"capacity": {resource: amount}}}
        await self.client.patch("nodes", self.name, patch, subresource="status")
        want = (amount or "", amount or "")
        await until(lambda: self.amounts(resource), want.__eq__, within_s=40.0)

    async def joined(self, plugin: TestPlugin, count: int) -> None:
        """Register a plugin and wait until its devices are offered.

        Kubelet itself must know them: the node's status may be one from before a restart.
        """
        await plugin.register()

        async def known() -> int:
            try:
                answer = await self.ask(
                    "GetAllocatableResources", podresources.AllocatableResourcesRequest()
                )
            except grpc.aio.AioRpcError:
                return -1  # it answers no more for a moment
            return sum(
                len(devices.device_ids)
                for devices in answer.devices
                if devices.resource_name == plugin.resource
            )

        await until(known, count.__eq__)
        await self.shows(plugin.resource, count, count)

    # -- pods

    async def run(
        self,
        containers: Sequence[Obj],
        *,
        inits: Sequence[Obj] = (),
        metadata: Obj | None = None,
        **spec: Any,
    ) -> str:
        """Create a pod, bound to this node unless its spec says otherwise; returns its name."""
        name = f"pod-{uuid4().hex[:8]}"
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**(metadata or {}), "name": name},
            "spec": {
                "nodeName": self.name,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 3,
                "containers": [self._filled(c) for c in containers],
                "initContainers": [self._filled(c) for c in inits],
                **spec,
            },
        }
        await self.client.create("pods", pod, self.namespace)
        return name

    def _filled(self, container: Obj) -> Obj:
        return {"image": self.image, "imagePullPolicy": "IfNotPresent", **container}

    async def pod(self, name: str) -> Obj | None:
        """Read a pod, None when it is gone."""
        try:
            return await self.client.get("pods", name, self.namespace)
        except StatusError as error:
            if error.code == 404:
                return None
            raise

    async def in_phase(self, name: str, *phases: str) -> Obj:
        """Wait until a pod is in one of the phases."""

        async def read() -> Obj:
            pod = await self.pod(name)
            assert pod is not None, f"pod {name} is gone"
            return pod

        return await until(read, lambda pod: pod.get("status", {}).get("phase") in phases)

    async def admits(self, containers: Sequence[Obj]) -> str:
        """Create such a pod again until one runs: kubelet judges by the node as it last saw it."""

        async def phase() -> tuple[str, str]:
            name = await self.run(containers)
            return name, (await self.in_phase(name, "Running", "Failed"))["status"]["phase"]

        name, _ = await until(phase, lambda seen: seen[1] == "Running")
        return name

    async def prints(self, pod: str, text: str, *, container: str = "main") -> str:
        """Wait until a container has printed a text."""
        return await until(lambda: self.logs(pod, container), lambda printed: text in printed)

    async def delete(self, name: str, *, grace_s: int | None = None) -> None:
        """Request a pod's deletion."""
        body = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        await self.client.delete("pods", name, self.namespace, body=body)

    async def gone(self, name: str) -> None:
        """Wait until a pod's object is gone."""
        await until(lambda: self.pod(name), lambda pod: pod is None)

    # -- PodResources

    async def listed(self) -> dict[str, podresources.PodResources]:
        """List this namespace's pods by name; waits when kubelet answers no more for a moment."""
        while True:
            try:
                answer = await self.ask("List", podresources.ListPodResourcesRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await anyio.sleep(POLL_S)
                continue
            return {
                pod.name: pod for pod in answer.pod_resources if pod.namespace == self.namespace
            }

    async def ask(self, method: str, request: Any) -> Any:
        """Call PodResources."""
        async with grpc.aio.insecure_channel(f"unix:{self.pod_resources_socket}") as channel:
            return await getattr(podresources_grpc.PodResourcesListerStub(channel), method)(request)

    async def ids(self, pod: str, resource: str, *, container: str = "main") -> set[str]:
        """Ids of a container according to PodResources."""
        found = (await self.listed()).get(pod)
        return ids_in(found, resource, container) if found is not None else set()


def identity(socket: Path) -> tuple[int, int]:
    """Changes when the socket is re-created, although file systems reuse inode numbers."""
    status = socket.stat()
    return status.st_ino, status.st_mtime_ns


def ids_in(pod: podresources.PodResources, resource: str, container: str = "main") -> set[str]:
    return {
        id_
        for entry in pod.containers
        if entry.name == container
        for devices in entry.devices
        if devices.resource_name == resource
        for id_ in devices.device_ids
    }


def asks(
    resource: str = "", count: int = 1, *, name: str = "main", script: str = SLEEP, **more: Any
) -> Obj:
    """A container that requests devices and runs a shell script."""
    limits = {**more.pop("limits", {}), **({resource: str(count)} if resource and count else {})}
    return {
        "name": name,
        "command": ["sh", "-c", script],
        "resources": {"limits": limits},
        **more,
    }


T = TypeVar("T")


async def until(
    read: Callable[[], Awaitable[T]],
    holds: Callable[[T], bool],
    *,
    within_s: float = WAIT_S,
) -> T:
    """Read until the condition holds; a failure shows the last value."""
    value: T | None = None
    with anyio.move_on_after(within_s):
        while True:
            value = await read()
            if holds(value):
                return value
            await anyio.sleep(POLL_S)
    msg = f"after {within_s:g} s it is still {value!r}"
    raise AssertionError(msg)
