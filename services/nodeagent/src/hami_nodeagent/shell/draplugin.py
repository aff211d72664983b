# SPDX-License-Identifier: Apache-2.0
"""Serves kubelet as the plugin of the DRA driver ``gpu.hami.io`` (kubelet's DRAPlugin v1, v1beta1).

The health of devices is served at the same socket, see ``shell.drahealth``.

Two sockets: kubelet finds the registration socket in its directory, asks it for the name and the
socket of the driver, and calls that one. Kubelet reads the directory again when it starts, so a
restart of kubelet needs nothing here. Claims of one call are prepared at the same time; each has
its own result, and a refusal is a text ``hami: <code>: <sentence>`` in Events of the pod.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio

from hami_common.dra import names
from hami_common.errors import Unavailable
from hami_common.kubeletapi import (
    dra,
    dra_grpc,
    dra_v1beta1,
    dra_v1beta1_grpc,
    drahealth_grpc,
    drahealth_v1alpha1_grpc,
    pluginregistration,
    pluginregistration_grpc,
)
from hami_common.runtime.tasks import finish_within
from hami_nodeagent.core.resourceclaims import Refuse
from hami_nodeagent.shell import drahealth
from hami_nodeagent.shell.pluginproxy import identity
from hami_nodeagent.shell.prepare import Preparer
from hami_nodeagent.shell.site import Site

REGISTRATION_SOCKET = f"{names.DRIVER}-reg.sock"
SOCKET = "dra.sock"
VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *drahealth.VERSIONS)
_STOP_S = 2.0
_LOOK_S = 2.0
"""Interval at which the sockets are checked: one that was removed is made again."""

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class Calls(dra_grpc.DRAPluginServicer):
    """The service in version v1."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    async def NodePrepareResources(  # noqa: N802 - the protocol's name
        self, request: dra.NodePrepareResourcesRequest, context: _Context
    ) -> dra.NodePrepareResourcesResponse:
        """Prepare the claims of a pod."""
        del context
        answers: dict[str, dra.NodePrepareResourceResponse] = {}

        async def prepare(claim: dra.Claim) -> None:
            outcome = await self._preparer.prepare(
                namespace=claim.namespace, name=claim.name, uid=claim.uid
            )
            if isinstance(outcome, Refuse):
                answers[claim.uid] = dra.NodePrepareResourceResponse(error=outcome.message)
                return
            answers[claim.uid] = dra.NodePrepareResourceResponse(
                devices=[
                    dra.Device(
                        request_names=[one.request],
                        pool_name=one.pool,
                        device_name=one.device,
                        cdi_device_ids=one.cdi_ids,
                        share_id=one.share_id,
                    )
                    for one in outcome.devices
                ]
            )

        async with anyio.create_task_group() as group:
            for claim in request.claims:
                group.start_soon(prepare, claim)
        return dra.NodePrepareResourcesResponse(claims=answers)

    async def NodeUnprepareResources(  # noqa: N802 - the protocol's name
        self, request: dra.NodeUnprepareResourcesRequest, context: _Context
    ) -> dra.NodeUnprepareResourcesResponse:
        """Remove what was prepared for claims."""
        del context
        answers = {}
        for claim in request.claims:
            refusal = await self._preparer.unprepare(uid=claim.uid)
            answers[claim.uid] = dra.NodeUnprepareResourceResponse(
                error="" if refusal is None else refusal.message
            )
        return dra.NodeUnprepareResourcesResponse(claims=answers)


class CallsV1beta1(dra_v1beta1_grpc.DRAPluginServicer):
    """The same in version v1beta1, whose messages have the same form on the wire."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def NodePrepareResources(  # noqa: N802 - the protocol's name
        self, request: dra_v1beta1.NodePrepareResourcesRequest, context: _Context
    ) -> dra_v1beta1.NodePrepareResourcesResponse:
        """Prepare the claims of a pod."""
        asked = dra.NodePrepareResourcesRequest.FromString(request.SerializeToString())
        answer = await self._calls.NodePrepareResources(asked, context)
        return dra_v1beta1.NodePrepareResourcesResponse.FromString(answer.SerializeToString())

    async def NodeUnprepareResources(  # noqa: N802 - the protocol's name
        self, request: dra_v1beta1.NodeUnprepareResourcesRequest, context: _Context
    ) -> dra_v1beta1.NodeUnprepareResourcesResponse:
        """Remove what was prepared for claims."""
        asked = dra.NodeUnprepareResourcesRequest.FromString(request.SerializeToString())
        answer = await self._calls.NodeUnprepareResources(asked, context)
        return dra_v1beta1.NodeUnprepareResourcesResponse.FromString(answer.SerializeToString())


class Registration(pluginregistration_grpc.RegistrationServicer):
    """Describes the driver to kubelet."""

    def __init__(self, socket: Path) -> None:
        self._info = pluginregistration.PluginInfo(
            type="DRAPlugin", name=names.DRIVER, endpoint=str(socket), supported_versions=VERSIONS
        )

    async def GetInfo(  # noqa: N802 - the protocol's name
        self, request: pluginregistration.InfoRequest, context: _Context
    ) -> pluginregistration.PluginInfo:
        """Return name, socket and versions of the driver."""
        del request, context
        return self._info

    async def NotifyRegistrationStatus(  # noqa: N802 - the protocol's name
        self, request: pluginregistration.RegistrationStatus, context: _Context
    ) -> pluginregistration.RegistrationStatusResponse:
        """Log whether kubelet accepted the driver."""
        del context
        if request.plugin_registered:
            _log.info("DRA driver registered with kubelet", extra={"driver": names.DRIVER})
        else:
            extra = {"driver": names.DRIVER, "problem": request.error}
            _log.error("DRA driver refused by kubelet", extra=extra)
        return pluginregistration.RegistrationStatusResponse()


class DraPlugin:
    """Both sockets of the plugin."""

    def __init__(self, *, site: Site, preparer: Preparer) -> None:
        settings = site.settings.dra
        self._clock = site.clock
        self._socket = Path(settings.plugin_dir) / SOCKET
        self._registration = Path(settings.registry_dir) / REGISTRATION_SOCKET
        self._preparer = preparer
        self._health = drahealth.Health(site)

    async def run(self) -> None:
        """Serve until cancelled; ``Unavailable`` when a socket cannot be made or vanished."""
        service, registration = grpc.aio.server(), grpc.aio.server()
        calls = Calls(self._preparer)
        dra_grpc.add_DRAPluginServicer_to_server(calls, service)
        dra_v1beta1_grpc.add_DRAPluginServicer_to_server(CallsV1beta1(calls), service)
        drahealth_grpc.add_DRAResourceHealthServicer_to_server(self._health, service)
        drahealth_v1alpha1_grpc.add_DRAResourceHealthServicer_to_server(
            drahealth.HealthV1alpha1(self._health), service
        )
        pluginregistration_grpc.add_RegistrationServicer_to_server(
            Registration(self._socket), registration
        )
        async with _listening(service, self._socket), _listening(registration, self._registration):
            own = [identity(one) for one in (self._socket, self._registration)]
            _log.info("DRA driver offered to kubelet", extra={"socket": str(self._registration)})
            while own == [identity(one) for one in (self._socket, self._registration)]:
                await self._clock.sleep(_LOOK_S)
        raise Unavailable(peer="kubelet", detail="a socket of the DRA driver was removed")


@asynccontextmanager
async def _listening(server: grpc.aio.Server, path: Path) -> AsyncIterator[None]:
    try:
        _make_way(path)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
    except (RuntimeError, OSError) as error:
        raise Unavailable(peer=str(path), detail=str(error)) from error
    own = identity(path)
    try:
        yield
    finally:
        with finish_within(_STOP_S + 1.0):
            await server.stop(grace=None)
        _remove(path, own)


def _make_way(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


def _remove(path: Path, own: str) -> None:
    """Remove a socket unless another agent has put its own there."""
    if identity(path) == own:
        path.unlink(missing_ok=True)
