# SPDX-License-Identifier: Apache-2.0
"""A device plugin for tests: offers the given ids, records calls, returns the given answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import grpc
import grpc.aio

from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[Sequence[str]], Awaitable[api.ContainerAllocateResponse]]


REGISTER_S = 20.0


class Refused(Exception):
    """Raised by an answer: becomes the plugin's error."""


class TestPlugin(deviceplugin_grpc.DevicePluginServicer):
    """One resource of a node; use it as an async context manager and then `register`."""

    __test__ = False

    def __init__(
        self,
        directory: Path,
        resource: str,
        ids: Sequence[str],
        *,
        endpoint: str = "test.sock",
        pre_start: bool = False,
        preferred: Callable[[Sequence[str], Sequence[str], int], Sequence[str]] | None = None,
    ) -> None:
        self.resource = resource
        self.ids = tuple(ids)
        self.allocated: list[list[str]] = []
        self.pre_started: list[list[str]] = []
        self.options_asked = 0
        self.streams = 0
        """Open ``ListAndWatch`` streams."""
        self.answer: Answer = _echo
        self.pre_start_answer: Callable[[Sequence[str]], Awaitable[None]] | None = None
        self._directory = directory
        self.socket = directory / endpoint
        self._endpoint = endpoint
        self._health = dict.fromkeys(ids, "Healthy")
        self._numa: dict[str, int] = {}
        self._changed = anyio.Event()
        self._options = api.DevicePluginOptions(
            pre_start_required=pre_start, get_preferred_allocation_available=preferred is not None
        )
        self._preferred = preferred
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.serve()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    async def serve(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        deviceplugin_grpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def register(self, *, resource: str = "", version: str = "v1beta1") -> None:
        async with grpc.aio.insecure_channel(f"unix:{self._directory / 'kubelet.sock'}") as channel:
            await deviceplugin_grpc.RegistrationStub(channel).Register(
                api.RegisterRequest(
                    version=version,
                    endpoint=self._endpoint,
                    resource_name=resource or self.resource,
                    options=self._options,
                ),
                # A failed dial of an earlier channel would make this one fail unasked.
                wait_for_ready=True,
                timeout=REGISTER_S,
            )

    def set_health(self, health: Mapping[str, str]) -> None:
        self._health = dict(health)
        self._changed.set()

    def set_numa(self, node_by_id: Mapping[str, int]) -> None:
        self._numa = dict(node_by_id)

    # -- the protocol

    async def GetDevicePluginOptions(  # noqa: N802 - the protocol's name
        self, request: api.Empty, context: _Context
    ) -> api.DevicePluginOptions:
        self.options_asked += 1
        return self._options

    async def ListAndWatch(  # noqa: N802 - the protocol's name
        self, request: api.Empty, context: _Context
    ) -> AsyncIterator[api.ListAndWatchResponse]:
        self.streams += 1
        try:
            while True:
                self._changed = anyio.Event()
                yield api.ListAndWatchResponse(
                    devices=[
                        api.Device(ID=id_, health=health, topology=self._topology(id_))
                        for id_, health in self._health.items()
                    ]
                )
                await self._changed.wait()
        finally:
            self.streams -= 1

    def _topology(self, id_: str) -> api.TopologyInfo | None:
        if id_ not in self._numa:
            return None
        return api.TopologyInfo(nodes=[api.NUMANode(ID=self._numa[id_])])

    async def GetPreferredAllocation(  # noqa: N802 - the protocol's name
        self, request: api.PreferredAllocationRequest, context: _Context
    ) -> api.PreferredAllocationResponse:
        assert self._preferred is not None
        responses = [
            api.ContainerPreferredAllocationResponse(
                deviceIDs=self._preferred(
                    list(wanted.available_deviceIDs),
                    list(wanted.must_include_deviceIDs),
                    wanted.allocation_size,
                )
            )
            for wanted in request.container_requests
        ]
        return api.PreferredAllocationResponse(container_responses=responses)

    async def Allocate(  # noqa: N802 - the protocol's name
        self, request: api.AllocateRequest, context: _Context
    ) -> api.AllocateResponse:
        responses = []
        for wanted in request.container_requests:
            ids = list(wanted.devices_ids)
            self.allocated.append(ids)
            try:
                responses.append(await self.answer(ids))
            except Refused as error:
                await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return api.AllocateResponse(container_responses=responses)

    async def PreStartContainer(  # noqa: N802 - the protocol's name
        self, request: api.PreStartContainerRequest, context: _Context
    ) -> api.PreStartContainerResponse:
        ids = list(request.devices_ids)
        self.pre_started.append(ids)
        if self.pre_start_answer is not None:
            try:
                await self.pre_start_answer(ids)
            except Refused as error:
                await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return api.PreStartContainerResponse()


async def _echo(ids: Sequence[str]) -> api.ContainerAllocateResponse:
    return api.ContainerAllocateResponse(envs={"TEST_DEVICES": ",".join(sorted(ids))})
