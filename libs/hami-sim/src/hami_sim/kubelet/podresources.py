# SPDX-License-Identifier: Apache-2.0
"""Serves PodResources v1 on a unix socket, as kubelet 1.37: what each active pod's containers hold.

Ordinary init containers are left out, sidecars are not. One entry per device and NUMA node.
Requests beyond the limit get RESOURCE_EXHAUSTED: kubelet answers 100 a second in bursts of 10.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio

from hami_common.kubeletapi import podresources as api
from hami_common.kubeletapi import podresources_grpc
from hami_sim.kubelet.claims import ClaimManager
from hami_sim.kubelet.devices import DeviceManager
from hami_sim.kubelet.objects import (
    Obj,
    app_containers,
    init_containers,
    is_sidecar,
    key_of,
    uid_of,
)
from hami_sim.kubelet.plugins import check_socket_path

SOCKET = "kubelet.sock"
_Context = grpc.aio.ServicerContext[Any, Any]


class TokenBucket:
    """Allows `rate_per_s` on average and `burst` at once; a rate of 0 allows everything."""

    def __init__(self, rate_per_s: float, burst: int, *, now_s: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._now_s = now_s
        self._tokens = float(burst)
        self._at_s = now_s()

    def allow(self) -> bool:
        """Return true if one more request may pass now."""
        if self._rate_per_s <= 0:
            return True
        now_s = self._now_s()
        self._tokens = min(
            float(self._burst), self._tokens + (now_s - self._at_s) * self._rate_per_s
        )
        self._at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class PodResources(podresources_grpc.PodResourcesListerServicer):
    """The service; reads the devices, the claims and the pods, holds no lock."""

    def __init__(
        self,
        directory: Path,
        devices: DeviceManager,
        claims: ClaimManager,
        *,
        active_pods: Callable[[], Collection[Obj]],
        bucket: TokenBucket,
    ) -> None:
        self.socket = directory / SOCKET
        self._directory = directory
        self._devices = devices
        self._claims = claims
        self._active_pods = active_pods
        self._bucket = bucket
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        check_socket_path(self.socket)
        self._directory.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        podresources_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            with anyio.CancelScope(shield=True):
                await self._server.stop(grace=None)
            self._server = None

    async def _admit(self, context: _Context) -> None:
        if not self._bucket.allow():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    async def List(  # noqa: N802 - the protocol's name
        self,
        request: api.ListPodResourcesRequest,  # noqa: ARG002 - empty
        context: grpc.aio.ServicerContext[
            api.ListPodResourcesRequest, api.ListPodResourcesResponse
        ],
    ) -> api.ListPodResourcesResponse:
        """List all active pods; frees the devices of those that are not active any more."""
        await self._admit(context)
        pods = self._active_pods()
        self._devices.free_inactive()
        return api.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in pods])

    async def Get(  # noqa: N802 - the protocol's name
        self,
        request: api.GetPodResourcesRequest,
        context: grpc.aio.ServicerContext[api.GetPodResourcesRequest, api.GetPodResourcesResponse],
    ) -> api.GetPodResourcesResponse:
        """Return one active pod by name."""
        await self._admit(context)
        wanted = (request.pod_namespace, request.pod_name)
        pod = next((pod for pod in self._active_pods() if key_of(pod) == wanted), None)
        if pod is None:
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
            )
        return api.GetPodResourcesResponse(pod_resources=self._pod(pod))

    async def GetAllocatableResources(  # noqa: N802 - the protocol's name
        self,
        request: api.AllocatableResourcesRequest,  # noqa: ARG002 - empty
        context: grpc.aio.ServicerContext[
            api.AllocatableResourcesRequest, api.AllocatableResourcesResponse
        ],
    ) -> api.AllocatableResourcesResponse:
        """List every healthy device of the node."""
        await self._admit(context)
        return api.AllocatableResourcesResponse(
            devices=_entries(self._devices.allocatable_devices())
        )

    def _pod(self, pod: Obj) -> api.PodResources:
        namespace, name = key_of(pod)
        long_lived = [c for c in init_containers(pod) if is_sidecar(c)] + app_containers(pod)
        return api.PodResources(
            name=name,
            namespace=namespace,
            containers=[
                api.ContainerResources(
                    name=container["name"],
                    devices=_entries(self._devices.devices_of(uid_of(pod), container["name"])),
                    dynamic_resources=self._claims.dynamic_resources(pod, container),
                )
                for container in long_lived
            ],
        )


def _entries(
    ids_by_resource: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> list[api.ContainerDevices]:
    entries = []
    for resource, ids in ids_by_resource.items():
        for id_, nodes in ids.items():
            if not nodes:
                entries.append(api.ContainerDevices(resource_name=resource, device_ids=[id_]))
            entries.extend(
                api.ContainerDevices(
                    resource_name=resource,
                    device_ids=[id_],
                    topology=api.TopologyInfo(nodes=[api.NUMANode(ID=node)]),
                )
                for node in nodes
            )
    return entries
