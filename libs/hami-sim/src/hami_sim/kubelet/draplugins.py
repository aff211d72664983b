# SPDX-License-Identifier: Apache-2.0
"""Finds the plugins of DRA drivers by their registration sockets and keeps a connection to each.

Rules: ``pkg/kubelet/pluginmanager`` and ``pkg/kubelet/cm/dra/plugin`` of kubelet 1.37:

- a plugin is registered while its socket is in the directory; a socket that is re-created counts as
  another one. The first of the plugin's versions that kubelet knows is used, and the newest version
  of the health service;
- a driver may have several plugins; calls go to the newest one that is connected;
- kubelet keeps one connection to each plugin and restores it when it breaks. A driver without any
  connection for a while, and all drivers when kubelet starts, lose the node's ResourceSlices.

The directory is read periodically; kubelet is notified by inotify, and acts on that every second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import grpc
import grpc.aio
from anyio.abc import TaskGroup
from google.protobuf.message import Message

from hami_common.errors import HamiError, NotFound
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
from hami_sim.kube import Objects
from hami_sim.kubelet.claims import ClaimError, ClaimManager
from hami_sim.kubelet.plugins import DIAL_S, answer, channel_to, check_socket_path, go_text

_LOG = logging.getLogger(__name__)
DIRECTORY: Final = "plugins_registry"
KIND: Final = "DRAPlugin"
V1: Final = "v1.DRAPlugin"
V1BETA1: Final = "v1beta1.DRAPlugin"
HEALTH_V1: Final = "v1.DRAResourceHealth"
HEALTH_V1ALPHA1: Final = "v1alpha1.DRAResourceHealth"
_SERVICES: Final = (V1, V1BETA1)
_HEALTH_SERVICES: Final = (HEALTH_V1, HEALTH_V1ALPHA1)
_CALL_S: Final = 45.0
_INFO_S: Final = 1.0
_NOTIFY_S: Final = 5.0
_POLL_S: Final = 0.2
"""Interval at which the directory and the state of connections are read."""
_RETRY_S: Final = 0.5
_RETRY_MAX_S: Final = 120.0
_HEALTH_RETRY_S: Final = 5.0

Identity = tuple[int, int]
"""Inode and time of change of a socket."""


class DraPlugin:
    """The connection to one plugin of a driver."""

    def __init__(self, driver: str, endpoint: str, *, service: str, health_service: str) -> None:
        """``service`` and ``health_service``: the versions to use; no health service: empty."""
        self.driver = driver
        self.endpoint = endpoint
        self.is_connected = False
        self._channel = channel_to(endpoint)
        # The fields of an older version are the first ones of the newest.
        is_newest = service == V1
        self._api: Any = dra if is_newest else dra_v1beta1
        grpc_api: Any = dra_grpc if is_newest else dra_v1beta1_grpc
        self._stub = grpc_api.DRAPluginStub(self._channel)
        self._watch: Callable[[], AsyncIterable[Message]] | None = None
        if health_service:
            is_newest = health_service == HEALTH_V1
            api: Any = drahealth if is_newest else drahealth_v1alpha1
            grpc_api = drahealth_grpc if is_newest else drahealth_v1alpha1_grpc
            stub = grpc_api.DRAResourceHealthStub(self._channel)
            self._watch = lambda: stub.NodeWatchResources(api.NodeWatchResourcesRequest())

    async def prepare(
        self, claims: Sequence[dra.Claim]
    ) -> Mapping[str, dra.NodePrepareResourceResponse]:
        """Call NodePrepareResources in the plugin's version; ClaimError if that fails."""
        request = dra.NodePrepareResourcesRequest(claims=claims).SerializeToString()
        call = self._stub.NodePrepareResources(
            self._api.NodePrepareResourcesRequest.FromString(request), timeout=_CALL_S
        )
        response = await answer(call, ClaimError)
        return dra.NodePrepareResourcesResponse.FromString(response.SerializeToString()).claims

    async def unprepare(
        self, claims: Sequence[dra.Claim]
    ) -> Mapping[str, dra.NodeUnprepareResourceResponse]:
        """Call NodeUnprepareResources in the plugin's version; ClaimError if that fails."""
        request = dra.NodeUnprepareResourcesRequest(claims=claims).SerializeToString()
        call = self._stub.NodeUnprepareResources(
            self._api.NodeUnprepareResourcesRequest.FromString(request), timeout=_CALL_S
        )
        response = await answer(call, ClaimError)
        return dra.NodeUnprepareResourcesResponse.FromString(response.SerializeToString()).claims

    async def keep_connected(self, changed: Callable[[], None]) -> None:
        """Connect, and again whenever the connection breaks; report each change."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if self.is_connected != (state is grpc.ChannelConnectivity.READY):
                self.is_connected = not self.is_connected
                changed()
            with anyio.move_on_after(_POLL_S):
                await self._channel.wait_for_state_change(state)

    async def watch_health(self, claims: ClaimManager, wake: Callable[[str], None]) -> None:
        """Feed the plugin's reports to the manager and wake the workers of pods they concern."""
        if self._watch is None:
            return
        while True:
            try:
                async for message in self._watch():
                    report = drahealth.NodeWatchResourcesResponse.FromString(
                        message.SerializeToString()
                    )
                    for uid in claims.take_health(self.driver, report.devices):
                        wake(uid)
            except grpc.aio.AioRpcError as error:
                text = go_text(error)
                _LOG.info("health stream ended", extra={"driver": self.driver, "error": text})
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            finally:
                claims.clear_health(self.driver)
            await anyio.sleep(_HEALTH_RETRY_S)

    async def close(self) -> None:
        """Close the connection."""
        self.is_connected = False
        with anyio.CancelScope(shield=True):
            await self._channel.close()


class _Socket:
    """A registration socket that was found."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        self.plugin: DraPlugin | None = None
        self.scope = anyio.CancelScope()
        self.left = anyio.Event()


class DraPlugins:
    """All plugins of a node."""

    def __init__(self, directory: Path, *, slices: NodeSlices, wipe_after_s: float) -> None:
        """``directory``: of the sockets; ``wipe_after_s``: for which slices outlive a driver."""
        self._directory = directory
        self._slices = slices
        self._wipe_after_s = wipe_after_s
        self._sockets: dict[Path, _Socket] = {}
        self._plugins: list[DraPlugin] = []
        self._wipes: dict[str, anyio.CancelScope] = {}
        self._tasks: TaskGroup | None = None

    def find(self, driver: str) -> DraPlugin:
        """Choose the plugin for a call: the newest that is connected, else the newest."""
        plugins = [plugin for plugin in self._plugins if plugin.driver == driver]
        if not plugins:
            raise ClaimError(f"DRA driver {driver} is not registered")
        return next((p for p in reversed(plugins) if p.is_connected), plugins[-1])

    async def run(self, claims: ClaimManager, wake: Callable[[str], None]) -> None:
        """Register the plugins that are found and leave those that vanish, until cancelled.

        ``claims`` gets the devices' health; ``wake`` is called with the UIDs of pods it changes.
        """
        check_socket_path(self._directory / "x")
        self._directory.mkdir(parents=True, exist_ok=True)
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._slices.wipe, "", name="slices of an earlier kubelet")
            while True:
                found = _sockets_in(self._directory)
                for path, socket in list(self._sockets.items()):
                    if found.get(path) != socket.identity:
                        del self._sockets[path]
                        socket.scope.cancel()
                        await socket.left.wait()
                for path in found.keys() - self._sockets.keys():
                    socket = self._sockets[path] = _Socket(path, found[path])
                    name = f"DRA plugin {path.name}"
                    self._tasks.start_soon(self._serve, socket, claims, wake, name=name)
                await anyio.sleep(_POLL_S)

    async def _serve(
        self, socket: _Socket, claims: ClaimManager, wake: Callable[[str], None]
    ) -> None:
        retry_s = _RETRY_S
        try:
            with socket.scope:
                while (plugin := await self._register(socket)) is None:
                    await anyio.sleep(retry_s)
                    retry_s = min(2 * retry_s, _RETRY_MAX_S)
                driver = plugin.driver
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(plugin.keep_connected, lambda: self._note_change(driver))
                    tasks.start_soon(plugin.watch_health, claims, wake)
        finally:
            await self._remove(socket)
            socket.left.set()

    async def _register(self, socket: _Socket) -> DraPlugin | None:
        """Ask a plugin for its driver, add it and notify it; None: try again later."""
        try:
            async with channel_to(socket.path) as channel:
                with anyio.fail_after(DIAL_S):
                    await channel.channel_ready()
                stub = pluginregistration_grpc.RegistrationStub(channel)
                request = pluginregistration.InfoRequest()
                info = await answer(stub.GetInfo(request, timeout=_INFO_S), ClaimError)
                error = self._refusal(info, socket.path)
                if not error:
                    self._add(info, socket)
                status = pluginregistration.RegistrationStatus(
                    plugin_registered=not error, error=error
                )
                await answer(stub.NotifyRegistrationStatus(status, timeout=_NOTIFY_S), ClaimError)
        except (ClaimError, TimeoutError) as failure:
            await self._remove(socket)
            error = str(failure) or "no connection"
        text = "DRA plugin not registered" if error else "DRA plugin registered"
        _LOG.info(text, extra={"socket": str(socket.path), "error": error})
        return socket.plugin

    def _refusal(self, info: pluginregistration.PluginInfo, path: Path) -> str:
        """Word why a plugin is not registered; empty if it is."""
        endpoint = info.endpoint or str(path)
        prefix = "RegisterPlugin error -- "
        if info.type != KIND:
            return f"{prefix}no handler registered for plugin type: {info.type} at socket {path}"
        if not set(info.supported_versions) & set(_SERVICES):
            why = "empty list of supported gRPC services (aka supported versions)"
            if info.supported_versions:
                why = (
                    f"none of services supported by the plugin ({_quoted(info.supported_versions)})"
                    f" are supported by the kubelet ({_quoted(_SERVICES)})"
                )
            return (
                f"{prefix}plugin validation failed with err: invalid supported gRPC versions of "
                f"DRA driver plugin {info.name} at endpoint {endpoint}: {why}"
            )
        if any((p.driver, p.endpoint) == (info.name, endpoint) for p in self._plugins):
            return (
                f"{prefix}plugin registration failed with err: endpoint {endpoint} already "
                f"registered for DRA driver plugin {info.name}"
            )
        return ""

    def _add(self, info: pluginregistration.PluginInfo, socket: _Socket) -> None:
        offered = info.supported_versions
        socket.plugin = DraPlugin(
            info.name,
            info.endpoint or str(socket.path),
            service=next(service for service in offered if service in _SERVICES),
            health_service=next((s for s in _HEALTH_SERVICES if s in offered), ""),
        )
        self._plugins.append(socket.plugin)
        self._note_change(info.name)

    async def _remove(self, socket: _Socket) -> None:
        if (plugin := socket.plugin) is not None:
            socket.plugin = None
            self._plugins.remove(plugin)
            await plugin.close()
            self._note_change(plugin.driver)

    def _note_change(self, driver: str) -> None:
        """Plan to remove the slices of a driver without connection, or no longer."""
        if any(plugin.driver == driver and plugin.is_connected for plugin in self._plugins):
            if (scope := self._wipes.pop(driver, None)) is not None:
                scope.cancel()
        elif driver not in self._wipes and self._tasks is not None:
            self._wipes[driver] = scope = anyio.CancelScope()
            self._tasks.start_soon(self._wipe_later, driver, scope, name=f"slices of {driver}")

    async def _wipe_later(self, driver: str, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep(self._wipe_after_s)
            await self._slices.wipe(driver)
            self._wipes.pop(driver, None)


class NodeSlices:
    """The ResourceSlices of a node at the API server."""

    def __init__(self, client: Objects, node: str) -> None:
        self._client = client
        self._node = node

    async def wipe(self, driver: str) -> None:
        """Delete a driver's slices, an empty name means those of all; retry until it is done."""
        fields = {"spec.nodeName": self._node} | ({"spec.driver": driver} if driver else {})
        selector = ",".join(f"{field}={value}" for field, value in fields.items())
        retry_s = 1.0
        while True:
            try:
                await self._client.delete_all(
                    "resourceslices.resource.k8s.io", field_selector=selector
                )
            except NotFound:
                return
            except HamiError as error:
                extra = {"node": self._node, "driver": driver, "error": str(error)}
                _LOG.info("resource slices not deleted", extra=extra)
                await anyio.sleep(retry_s)
                retry_s = min(2 * retry_s, 300.0)
            else:
                return


def _sockets_in(directory: Path) -> dict[Path, Identity]:
    """Find the sockets below a directory whose names do not begin with a dot."""
    found: dict[Path, Identity] = {}
    for base, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in files:
            path = Path(base) / name
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if not name.startswith(".") and path.is_socket():
                found[path] = (status.st_ino, status.st_mtime_ns)
    return found


def _quoted(texts: Sequence[str]) -> str:
    return "[" + " ".join(f'"{text}"' for text in texts) + "]"
