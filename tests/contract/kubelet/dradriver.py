# SPDX-License-Identifier: Apache-2.0
"""A DRA driver for tests: registers, prepares claims with CDI files, records calls, reports health.

A claim's device of request ``r`` gets a CDI device that sets ``GIVEN_R`` to the claim's name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import grpc
import grpc.aio
from msgspec import Struct

from hami_common.kubeletapi import (
    dra,
    dra_grpc,
    dra_v1beta1,
    dra_v1beta1_grpc,
    drahealth,
    drahealth_grpc,
    drahealth_v1alpha1,
    drahealth_v1alpha1_grpc,
    pluginregistration,
    pluginregistration_grpc,
)

_Context = grpc.aio.ServicerContext[Any, Any]
_Hook = Callable[[], Awaitable[None]]

V1 = "v1.DRAPlugin"
V1BETA1 = "v1beta1.DRAPlugin"
HEALTH_V1 = "v1.DRAResourceHealth"
HEALTH_V1ALPHA1 = "v1alpha1.DRAResourceHealth"


class Claim(Struct, frozen=True, order=True):
    """A claim as kubelet names it."""

    namespace: str
    uid: str
    name: str


class TestDriver:
    """One plugin of a driver; `serve` it, and `close` it in the end."""

    __test__ = False

    def __init__(
        self,
        kubelet_directory: Path,
        cdi_directory: Path,
        *,
        name: str = "",
        versions: Sequence[str] = (V1, V1BETA1),
    ) -> None:
        """``name``: of the driver, when it has another plugin already."""
        word = uuid4().hex[:6]
        self.name = name or f"d{word}.example.com"
        self.type = "DRAPlugin"
        self.versions = tuple(versions)
        self.statuses: list[pluginregistration.RegistrationStatus] = []
        """Kubelet's answer to each registration."""
        self.prepared: list[list[Claim]] = []
        """Claims of each NodePrepareResources call."""
        self.unprepared: list[list[Claim]] = []
        self.used: set[str] = set()
        """Versions in which kubelet called."""
        self.requests: dict[str, Sequence[str]] = {}
        """Requests of each claim by its name, in the order of their devices; others have `r0`."""
        self.refusal: Refusal | None = None
        """Answer of NodePrepareResources while it is set."""
        self.unprepare_error = ""
        self.before_info: _Hook | None = None
        self.before_prepare: _Hook | None = None
        self.before_unprepare: _Hook | None = None
        self.share_ids: Mapping[str, str] = {}
        """By device."""
        self.writes_files = True
        self._cdi_directory = cdi_directory
        self.registry = kubelet_directory / "plugins_registry" / f"{self.name}-{word}-reg.sock"
        self.socket = kubelet_directory / "plugins" / self.name / f"{word}.sock"
        self._health: list[tuple[str, int, str]] | None = None
        self._health_timeout_s = 0
        self._health_changed = anyio.Event()
        self._servers: dict[str, grpc.aio.Server] = {}

    @property
    def kind(self) -> str:
        """Kind of the driver's CDI devices."""
        return f"{self.name}/share"

    # -- life

    async def serve(self) -> None:
        """Serve, the registration socket last; kubelet finds it."""
        await self.start_service()
        await self.start_registration()

    async def start_registration(self) -> None:
        """Serve the registration only."""
        server = grpc.aio.server()
        pluginregistration_grpc.add_RegistrationServicer_to_server(_registration(self), server)
        await self._listen("registry", server, self.registry)

    async def start_service(self) -> None:
        """Serve the calls only."""
        server = grpc.aio.server()
        dra_grpc.add_DRAPluginServicer_to_server(_calls(self, dra, V1), server)
        dra_v1beta1_grpc.add_DRAPluginServicer_to_server(_calls(self, dra_v1beta1, V1BETA1), server)
        drahealth_grpc.add_DRAResourceHealthServicer_to_server(
            _health(self, drahealth, HEALTH_V1), server
        )
        drahealth_v1alpha1_grpc.add_DRAResourceHealthServicer_to_server(
            _health(self, drahealth_v1alpha1, HEALTH_V1ALPHA1), server
        )
        await self._listen("service", server, self.socket)

    async def _listen(self, role: str, server: grpc.aio.Server, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers[role] = server

    async def stop_service(self) -> None:
        """End the service; the registration socket stays."""
        await self._stop("service")

    async def close(self) -> None:
        """End; both sockets go."""
        with anyio.CancelScope(shield=True):
            await self._stop("registry")
            await self._stop("service")
        self.registry.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)

    async def _stop(self, role: str) -> None:
        if (server := self._servers.pop(role, None)) is not None:
            await server.stop(grace=None)

    def set_health(
        self, devices: Sequence[tuple[str, int, str]] | None, *, timeout_s: int = 0
    ) -> None:
        """Report (device, health, message) of all devices; None: end the stream."""
        self._health = None if devices is None else list(devices)
        self._health_timeout_s = timeout_s
        self._health_changed.set()

    # -- what kubelet asks

    def info(self) -> pluginregistration.PluginInfo:
        """Describe the driver to kubelet."""
        return pluginregistration.PluginInfo(
            type=self.type,
            name=self.name,
            endpoint=str(self.socket),
            supported_versions=self.versions,
        )

    async def prepare(self, claims: list[Claim]) -> dict[str, list[dra.Device]]:
        """Prepare claims; return the devices by the claims' UIDs."""
        self.prepared.append(claims)
        if self.before_prepare is not None:
            await self.before_prepare()
        return {claim.uid: self._devices(claim) for claim in claims}

    def _devices(self, claim: Claim) -> list[dra.Device]:
        requests = self.requests.get(claim.name, ("r0",))
        entries = [
            {
                "name": f"{claim.uid}-{request}",
                "containerEdits": {"env": [f"GIVEN_{request.upper()}={claim.name}"]},
            }
            for request in requests
        ]
        if self.writes_files:
            spec = {"cdiVersion": "0.5.0", "kind": self.kind, "devices": entries}
            fresh = self._cdi_directory / f"{claim.uid}.tmp"
            fresh.write_text(json.dumps(spec))
            fresh.replace(self._cdi_directory / f"{claim.uid}.json")
        return [
            dra.Device(
                request_names=[request],
                pool_name="pool",
                device_name=f"gpu-{number}",
                cdi_device_ids=[f"{self.kind}={claim.uid}-{request}"],
                share_id=self.share_ids.get(f"gpu-{number}"),
            )
            for number, request in enumerate(requests)
        ]

    async def unprepare(self, claims: list[Claim]) -> None:
        """Unprepare claims."""
        self.unprepared.append(claims)
        if self.before_unprepare is not None:
            await self.before_unprepare()
        if not self.unprepare_error:
            for claim in claims:
                (self._cdi_directory / f"{claim.uid}.json").unlink(missing_ok=True)

    async def health(self, api: Any) -> AsyncIterator[Any]:
        """Stream the health of all devices."""
        while self._health is not None:
            self._health_changed = anyio.Event()
            yield api.NodeWatchResourcesResponse(
                devices=[
                    api.DeviceHealth(
                        device=api.DeviceIdentifier(pool_name="pool", device_name=device),
                        health=health,
                        health_check_timeout_seconds=self._health_timeout_s,
                        message=message,
                    )
                    for device, health, message in self._health
                ]
            )
            await self._health_changed.wait()


class Refusal(Struct, frozen=True, kw_only=True):
    """A wrong answer of NodePrepareResources."""

    error: str = ""
    """Of each claim."""
    status: str = ""
    """Error of the whole call."""
    skips: bool = False
    """Leave out the last claim."""
    adds: str = ""
    """UID of a claim that was not in the call."""


def _registration(driver: TestDriver) -> Any:
    class Registration:
        async def GetInfo(  # noqa: N802 - the protocol's name
            self, request: pluginregistration.InfoRequest, context: _Context
        ) -> pluginregistration.PluginInfo:
            if driver.before_info is not None:
                await driver.before_info()
            return driver.info()

        async def NotifyRegistrationStatus(  # noqa: N802 - the protocol's name
            self, request: pluginregistration.RegistrationStatus, context: _Context
        ) -> pluginregistration.RegistrationStatusResponse:
            driver.statuses.append(request)
            return pluginregistration.RegistrationStatusResponse()

    return Registration()


def _calls(driver: TestDriver, api: Any, version: str) -> Any:
    def claims_of(request: Any) -> list[Claim]:
        driver.used.add(version)
        return [Claim(claim.namespace, claim.uid, claim.name) for claim in request.claims]

    class Calls:
        async def NodePrepareResources(  # noqa: N802 - the protocol's name
            self, request: Any, context: _Context
        ) -> Any:
            devices = await driver.prepare(claims_of(request))
            refusal = driver.refusal or Refusal()
            if refusal.status:
                await context.abort(grpc.StatusCode.INTERNAL, refusal.status)
            answers = {
                uid: api.NodePrepareResourceResponse(
                    devices=[api.Device.FromString(d.SerializeToString()) for d in found],
                    error=refusal.error,
                )
                for uid, found in devices.items()
            }
            if refusal.skips:
                answers.popitem()
            if refusal.adds:
                answers = {refusal.adds: api.NodePrepareResourceResponse()}
            return api.NodePrepareResourcesResponse(claims=answers)

        async def NodeUnprepareResources(  # noqa: N802 - the protocol's name
            self, request: Any, context: _Context
        ) -> Any:
            claims = claims_of(request)
            await driver.unprepare(claims)
            answer = api.NodeUnprepareResourceResponse(error=driver.unprepare_error)
            return api.NodeUnprepareResourcesResponse(
                claims={claim.uid: answer for claim in claims}
            )

    return Calls()


def _health(driver: TestDriver, api: Any, version: str) -> Any:
    class Health:
        async def NodeWatchResources(  # noqa: N802 - the protocol's name
            self, request: Any, context: _Context
        ) -> AsyncIterator[Any]:
            driver.used.add(version)
            async for response in driver.health(api):
                yield response

    return Health()
