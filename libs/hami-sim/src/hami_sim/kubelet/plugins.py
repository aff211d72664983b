# SPDX-License-Identifier: Apache-2.0
"""Speaks the device plugin protocol v1beta1: Registration here, calls to each plugin.

A Register call dials the plugin and asks its options before it is answered, so a plugin must serve
first. When a plugin's ListAndWatch ends, whatever plugin is registered for that resource at that
moment is dropped: kubelet 1.34 does so too, and a plugin that registers again while its old stream
still stands loses the new registration with the old. Errors carry the words of a Go gRPC client,
because they end in pod statuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import grpc
import grpc.aio
from anyio.abc import TaskGroup

from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc
from hami_sim.kubelet.devices import CHECKPOINT, DeviceError, DeviceManager
from hami_sim.kubelet.objects import is_extended

T = TypeVar("T")

VERSION = "v1beta1"
CLOSING = "rpc error: code = Canceled desc = grpc: the client connection is closing"
SOCKET = "kubelet.sock"
DIAL_S = 10.0
_MAX_SOCKET_PATH = 107
_LOG = logging.getLogger(__name__)

_GO_CODES = {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
    grpc.StatusCode.UNKNOWN: "Unknown",
    grpc.StatusCode.INVALID_ARGUMENT: "InvalidArgument",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DeadlineExceeded",
    grpc.StatusCode.NOT_FOUND: "NotFound",
    grpc.StatusCode.ALREADY_EXISTS: "AlreadyExists",
    grpc.StatusCode.PERMISSION_DENIED: "PermissionDenied",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "ResourceExhausted",
    grpc.StatusCode.FAILED_PRECONDITION: "FailedPrecondition",
    grpc.StatusCode.ABORTED: "Aborted",
    grpc.StatusCode.OUT_OF_RANGE: "OutOfRange",
    grpc.StatusCode.UNIMPLEMENTED: "Unimplemented",
    grpc.StatusCode.INTERNAL: "Internal",
    grpc.StatusCode.UNAVAILABLE: "Unavailable",
    grpc.StatusCode.DATA_LOSS: "DataLoss",
    grpc.StatusCode.UNAUTHENTICATED: "Unauthenticated",
}


def go_text(error: grpc.aio.AioRpcError) -> str:
    """Word an error as a Go client prints it."""
    return f"rpc error: code = {_GO_CODES[error.code()]} desc = {error.details()}"


def check_socket_path(path: Path) -> None:
    """Refuse a path that does not fit into a socket address."""
    if len(str(path).encode()) > _MAX_SOCKET_PATH:
        msg = (
            f"{path}: a unix socket's path has at most {_MAX_SOCKET_PATH} bytes; use a shorter root"
        )
        raise ValueError(msg)


async def answer(call: Awaitable[T], failure: type[Exception] = DeviceError) -> T:
    """Return the plugin's answer; raise ``failure`` if it refuses or its connection is closed.

    gRPC cancels the waiting task when the channel is closed under a call. No caller requested that
    cancellation, so it must not reach the loop that admits pods.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise failure(go_text(error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # gRPC's own error would end a task group whose scope does not recognize it.
            await anyio.lowlevel.checkpoint_if_cancelled()
            raise
        raise failure(CLOSING) from None


def channel_to(socket: Path | str) -> grpc.aio.Channel:
    """Open a channel to a plugin's socket, with the authority that a Go client sends."""
    return grpc.aio.insecure_channel(
        f"unix:{socket}",
        options=[
            ("grpc.default_authority", "localhost"),
            ("grpc.enable_http_proxy", 0),
            # Not shared with an earlier channel, which may still wait before it dials again.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


class PluginClient:
    """The connection to one plugin's socket."""

    def __init__(self, socket: Path, *, prestart_timeout_s: float) -> None:
        self._channel = channel_to(socket)
        self._stub = deviceplugin_grpc.DevicePluginStub(self._channel)
        self._prestart_timeout_s = prestart_timeout_s
        self._watching = anyio.CancelScope()

    async def dial(self) -> api.DevicePluginOptions:
        """Connect and ask for the plugin's options."""
        try:
            with anyio.fail_after(DIAL_S):
                await self._channel.channel_ready()
        except TimeoutError as error:
            raise DeviceError("failed to dial device plugin: context deadline exceeded") from error
        try:
            return await self._stub.GetDevicePluginOptions(api.Empty())
        except grpc.aio.AioRpcError as error:
            raise DeviceError(f"failed to get device plugin options: {go_text(error)}") from error

    async def watch(self, resource: str, devices: DeviceManager) -> bool:
        """Feed the plugin's device lists to the manager; whether the plugin ended the stream."""
        with self._watching:
            try:
                async for response in self._stub.ListAndWatch(api.Empty()):
                    devices.update(resource, list(response.devices))
            except grpc.aio.AioRpcError as error:
                text = go_text(error)
                _LOG.info("ListAndWatch ended", extra={"resource": resource, "error": text})
            return True
        return False

    async def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> list[str]:
        """Call GetPreferredAllocation for one container."""
        request = api.PreferredAllocationRequest(
            container_requests=[
                api.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available,
                    must_include_deviceIDs=must_include,
                    allocation_size=size,
                )
            ]
        )
        response = await answer(self._stub.GetPreferredAllocation(request))
        return (
            list(response.container_responses[0].deviceIDs) if response.container_responses else []
        )

    async def allocate(self, ids: Sequence[str]) -> Sequence[api.ContainerAllocateResponse]:
        """Call Allocate for one container; there is no deadline, as in kubelet."""
        request = api.AllocateRequest(
            container_requests=[api.ContainerAllocateRequest(devices_ids=ids)]
        )
        response = await answer(self._stub.Allocate(request))
        return list(response.container_responses)

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Call PreStartContainer."""
        await answer(
            self._stub.PreStartContainer(
                api.PreStartContainerRequest(devices_ids=ids), timeout=self._prestart_timeout_s
            )
        )

    async def close(self) -> None:
        """Close the connection; a watch ends first, for gRPC would cancel its task."""
        self._watching.cancel()
        with anyio.CancelScope(shield=True):
            await self._channel.close()


class Registration(deviceplugin_grpc.RegistrationServicer):
    """kubelet.sock: takes plugins and keeps one client for each resource."""

    def __init__(
        self,
        directory: Path,
        devices: DeviceManager,
        tasks: TaskGroup,
        *,
        prestart_timeout_s: float,
    ) -> None:
        self.socket = directory / SOCKET
        self._directory = directory
        self._devices = devices
        self._tasks = tasks
        self._prestart_timeout_s = prestart_timeout_s
        self._clients: dict[str, PluginClient] = {}
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Remove every socket in the directory, then listen: each plugin has to register again."""
        check_socket_path(self.socket)
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            if path.name != CHECKPOINT and path.is_socket():
                path.unlink()
        self._server = grpc.aio.server()
        deviceplugin_grpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop listening and leave every plugin."""
        with anyio.CancelScope(shield=True):
            if self._server is not None:
                await self._server.stop(grace=None)
                self._server = None
            for client in self._clients.values():
                await client.close()
            self._clients.clear()

    async def drop(self, resource: str) -> None:
        """Leave the plugin of a resource, as if its process had died."""
        client = self._clients.pop(resource, None)
        if client is not None:
            await client.close()
            self._devices.disconnect(resource)

    async def Register(  # noqa: N802 - the protocol's name
        self,
        request: api.RegisterRequest,
        context: grpc.aio.ServicerContext[api.RegisterRequest, api.Empty],
    ) -> api.Empty:
        """Take a plugin: check, dial back, ask its options, begin to watch."""
        if request.version != VERSION:
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{VERSION}"]',
            )
        if not is_extended(request.resource_name):
            await context.abort(
                grpc.StatusCode.UNKNOWN, f'the ResourceName "{request.resource_name}" is invalid'
            )
        socket = self._directory / request.endpoint
        client = PluginClient(socket, prestart_timeout_s=self._prestart_timeout_s)
        replaced = self._clients.get(request.resource_name)
        self._clients[request.resource_name] = client
        try:
            options = await client.dial()
        except DeviceError as error:
            self._clients.pop(request.resource_name, None)
            await client.close()
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        self._devices.connect(request.resource_name, client, options)
        self._tasks.start_soon(
            self._follow, request.resource_name, client, name=f"plugin {request.resource_name}"
        )
        _LOG.info(
            "device plugin registered",
            extra={"resource": request.resource_name, "replaces": replaced is not None},
        )
        return api.Empty()

    async def _follow(self, resource: str, client: PluginClient) -> None:
        try:
            if await client.watch(resource, self._devices):
                await self.drop(resource)
        finally:
            await client.close()
