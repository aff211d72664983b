# SPDX-License-Identifier: Apache-2.0
"""Serves PodResources ``List`` with the devices that containers were granted.

Kubelet chooses device ids itself and only prefers ours, and it knows no MIG instance. Monitoring
tools that resolve its ids may therefore name another device. This service answers with kubelet's
list, in which the ids of this agent's resources are replaced: by ids of the granted devices, and by
the UUIDs of MIG instances. A container without a grant is listed without devices of these
resources. Protocol: kubelet PodResources v1; only ``List`` is served. Seconds throughout.
"""

import logging
from collections.abc import Collection
from pathlib import Path

import anyio
import grpc
import grpc.aio

from hami_common.errors import Unavailable
from hami_common.kubeletapi import podresources as api
from hami_common.kubeletapi import podresources_grpc
from hami_common.runtime.tasks import finish_within
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.core.splits import exact_ids
from hami_nodeagent.shell.pluginproxy import identity
from hami_nodeagent.shell.podresources import PodResources
from hami_nodeagent.shell.site import Site

_STOP_S = 1.0
_ONLY_LIST = "this socket serves List only; ask kubelet's"
_MIG_UUID = "mig_uuid"
"""Handle of a MIG instance."""

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[api.ListPodResourcesRequest, api.ListPodResourcesResponse]


class PodsView(podresources_grpc.PodResourcesListerServicer):
    """The service at one socket."""

    def __init__(
        self, *, site: Site, kubelet: PodResources, resources: Collection[str], socket: Path
    ) -> None:
        self._site = site
        self._picture = site.picture
        self._kubelet = kubelet
        self._resources = resources
        self._socket = socket

    async def run(self) -> None:
        """Serve until cancelled."""
        server = grpc.aio.server()
        podresources_grpc.add_PodResourcesListerServicer_to_server(self, server)
        try:
            self._socket.unlink(missing_ok=True)
            server.add_insecure_port(f"unix:{self._socket}")
            await server.start()
        except (RuntimeError, OSError) as error:
            raise Unavailable(peer=str(self._socket), detail=str(error)) from error
        own = identity(self._socket)
        _log.info("PodResources view served", extra={"socket": str(self._socket)})
        try:
            await anyio.sleep_forever()
        finally:
            with finish_within(_STOP_S + 1.0):
                await server.stop(grace=0)
            if identity(self._socket) == own:
                self._socket.unlink(missing_ok=True)

    async def List(  # noqa: N802 - the protocol's name
        self, request: api.ListPodResourcesRequest, context: _Context
    ) -> api.ListPodResourcesResponse:
        """Return kubelet's list with the granted devices."""
        del request
        try:
            answer = await self._kubelet.answer(timeout_s=self._site.settings.list_timeout_s)
        except Unavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        for pod in answer.pod_resources:
            for container in pod.containers:
                self._replace(pod, container)
        return answer

    async def Get(  # noqa: N802 - the protocol's name
        self,
        request: api.GetPodResourcesRequest,
        context: grpc.aio.ServicerContext[api.GetPodResourcesRequest, api.GetPodResourcesResponse],
    ) -> api.GetPodResourcesResponse:
        """Refuse: only ``List`` is served."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _ONLY_LIST)

    async def GetAllocatableResources(  # noqa: N802 - the protocol's name
        self,
        request: api.AllocatableResourcesRequest,
        context: grpc.aio.ServicerContext[
            api.AllocatableResourcesRequest, api.AllocatableResourcesResponse
        ],
    ) -> api.AllocatableResourcesResponse:
        """Refuse: only ``List`` is served."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _ONLY_LIST)

    def _replace(self, pod: api.PodResources, container: api.ContainerResources) -> None:
        ids: dict[str, set[str]] = {}
        kept = []
        for entry in container.devices:
            if entry.resource_name in self._resources:
                ids.setdefault(entry.resource_name, set()).update(entry.device_ids)
            else:
                kept.append(entry)
        if not ids:
            return
        for resource, of_resource in ids.items():
            grant = next(
                (
                    grant
                    for grant in self._picture.grants.of_ids(resource, of_resource)
                    if (grant.namespace, grant.pod, grant.container)
                    == (pod.namespace, pod.name, container.name)
                ),
                None,
            )
            if grant is not None:
                kept += [
                    api.ContainerDevices(resource_name=resource, device_ids=[one])
                    for one in self._ids(grant)
                ]
        del container.devices[:]
        container.devices.extend(kept)

    def _ids(self, grant: Grant) -> list[str]:
        """Return the ids of the granted devices, in the order of the shares."""
        board = self._picture.partitions
        entry = self._picture.entries_by_uid.get(grant.pod_uid)
        instances: dict[str, list[str]] = {}
        if entry is not None and entry.record.allocation_id == grant.allocation_id:
            for owner, uuid in sorted(board.owners(entry, grant.container, grant.vendor).items()):
                instance = board.carried.get(owner)
                name = instance.handles.get(_MIG_UUID, "") if instance is not None else ""
                instances.setdefault(uuid, []).append(name)
        found = []
        for kubelet_id, uuid in zip(exact_ids(grant.ids, grant.uuids), grant.uuids, strict=True):
            names = instances.get(uuid)
            found.append(names.pop(0) if names else kubelet_id)
        return [one for one in found if one]
