# SPDX-License-Identifier: Apache-2.0
"""Gives an unprivileged agent container the devices that its vendor's library or tool opens.

A mount of ``/dev`` shows nodes; only a container whose cgroup allows them can open them, and only
kubelet's device manager or a container runtime sets that rule. So this process is a device plugin
of one resource, which only an agent's pod asks for: ``Allocate`` names the nodes that
fit the patterns, and the CDI device that stands for all devices of a vendor, whose specification
adds the driver's libraries. A policy of the API server keeps pods of other namespaces from the
resource.

It registers once a node is there, or at once with a CDI device, and again whenever kubelet has
restarted. A container keeps its device nodes: later nodes become visible to an agent when its pod
is replaced. While no specification defines the CDI device, kubelet fails to create the container
and tries again. Outside documents: k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1, CDI 0.5. Seconds
throughout.
"""

import logging
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio

from hami_common.errors import SettingsInvalid
from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc
from hami_common.runtime.service import ServiceContext, run
from hami_common.runtime.settings import ServiceSettings
from hami_common.runtime.tasks import background, finish_within
from hami_nodeagent.shell.pluginproxy import KUBELET_SOCKET, VERSION, identity

SERVICE = "agent-devices"
RESOURCE = "hami.io/agent-devices"
DEVICE_IDS = ("all", "all-for-the-successor")
"""In a rollout, an agent and its successor are on a node at the same time (``shell.turn``)."""
SOCKET = "hami-agent-devices.sock"
DEV = "/dev"
_HEALTHY = "Healthy"
_CALL_S = 5.0
_STOP_S = 1.0

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]


class Settings(ServiceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the plugin. Bus and API server are not used."""

    devices: tuple[str, ...] = ()
    """Device nodes below ``/dev`` that agents may open, as shell patterns."""
    cdi_device: str = ""
    """CDI device that agents get, for example ``nvidia.com/gpu=all``; empty: none."""
    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    """Directory of kubelet's plugin sockets."""
    poll_s: float = 1.0
    """Interval at which device nodes and sockets are checked."""


def main(argv: Sequence[str]) -> int:
    """Run the plugin; returns the exit code."""
    return run(serve_devices, service=SERVICE, settings_type=Settings, argv=argv)


async def serve_devices(context: ServiceContext[Settings]) -> None:
    """Serve kubelet until asked to stop."""
    _check(context.settings)
    async with background() as group:
        group.start_soon(AgentDevices(context.settings).keep)
        context.ready.set()
        await context.stopping.wait()


def _check(settings: Settings) -> None:
    """Reject patterns that match nothing or anything outside ``/dev``, and unqualified names."""
    kind, _, name = settings.cdi_device.partition("=")
    if settings.cdi_device and not ("/" in kind and name):
        raise SettingsInvalid(
            field="cdi_device",
            problem=f"{settings.cdi_device!r} is no qualified name of a CDI device",
            fix="give it as <vendor>/<class>=<name>, such as nvidia.com/gpu=all",
        )
    for pattern in settings.devices or (() if settings.cdi_device else ("",)):
        parts = Path(pattern).parts
        if parts[:2] != ("/", "dev") or len(parts) <= len(Path(DEV).parts) or ".." in parts:
            raise SettingsInvalid(
                field="devices",
                problem=f"{pattern!r} names no device node",
                fix="give patterns of paths below /dev, such as /dev/dri/renderD*",
            )


def nodes_of(patterns: Sequence[str]) -> list[str]:
    """Return character and block devices that match, sorted."""
    found = {path for one in patterns for path in Path(DEV).glob(str(Path(one).relative_to(DEV)))}
    return sorted(str(path) for path in found if _is_device(path))


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


class AgentDevices(deviceplugin_grpc.DevicePluginServicer):
    """Device plugin service and its registration with kubelet."""

    def __init__(self, settings: Settings) -> None:
        """Serve in the plugin directory of ``settings``."""
        self._settings = settings
        directory = Path(settings.device_plugin_dir)
        self._kubelet = directory / KUBELET_SOCKET
        self._own = directory / SOCKET
        self.registered_count = 0

    async def keep(self) -> None:
        """Register, and again after each restart of kubelet."""
        while True:
            kubelet = identity(self._kubelet)
            try:
                if kubelet and (self._settings.cdi_device or nodes_of(self._settings.devices)):
                    async with self._served() as own:
                        await self._register()
                        await self._until_replaced(kubelet, own)
            except (OSError, RuntimeError, grpc.aio.AioRpcError) as error:
                _log.warning("not registered with kubelet", extra={"problem": str(error)})
            await anyio.sleep(self._settings.poll_s)

    async def _until_replaced(self, kubelet: str, own: str) -> None:
        """Return once kubelet restarted, which removes the sockets of all plugins."""
        while True:
            await anyio.sleep(self._settings.poll_s)
            if (identity(self._kubelet), identity(self._own)) != (kubelet, own):
                return

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        deviceplugin_grpc.add_DevicePluginServicer_to_server(self, server)
        self._own.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{self._own}")
        await server.start()
        own = identity(self._own)
        try:
            yield own
        finally:
            with finish_within(_STOP_S + 1.0):
                await server.stop(grace=0)
            if identity(self._own) == own:
                self._own.unlink(missing_ok=True)

    async def _register(self) -> None:
        request = api.RegisterRequest(version=VERSION, endpoint=SOCKET, resource_name=RESOURCE)
        async with grpc.aio.insecure_channel(
            f"unix:{self._kubelet}", options=[("grpc.default_authority", "localhost")]
        ) as channel:
            await deviceplugin_grpc.RegistrationStub(channel).Register(request, timeout=_CALL_S)
        self.registered_count += 1
        granted = {"nodes": nodes_of(self._settings.devices), "cdi": self._settings.cdi_device}
        _log.info("registered with kubelet", extra={"resource": RESOURCE, **granted})

    async def GetDevicePluginOptions(  # noqa: N802 - the protocol's name
        self, request: api.Empty, context: _Context
    ) -> api.DevicePluginOptions:
        """Return empty options."""
        del request, context
        return api.DevicePluginOptions()

    async def ListAndWatch(  # noqa: N802 - the protocol's name
        self, request: api.Empty, context: _Context
    ) -> AsyncIterator[api.ListAndWatchResponse]:
        """Send one id, and keep the stream open."""
        del request, context
        yield api.ListAndWatchResponse(
            devices=[api.Device(ID=one, health=_HEALTHY) for one in DEVICE_IDS]
        )
        await anyio.sleep_forever()

    async def GetPreferredAllocation(  # noqa: N802 - the protocol's name
        self, request: api.PreferredAllocationRequest, context: _Context
    ) -> api.PreferredAllocationResponse:
        """Return an empty answer; the options do not offer this call."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is one id only")

    async def PreStartContainer(  # noqa: N802 - the protocol's name
        self, request: api.PreStartContainerRequest, context: _Context
    ) -> api.PreStartContainerResponse:
        """Return an empty answer; the options do not offer this call."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nothing is to be done")

    async def Allocate(  # noqa: N802 - the protocol's name
        self, request: api.AllocateRequest, context: _Context
    ) -> api.AllocateResponse:
        """Return every matching node, at its own path, and the CDI device."""
        if any(
            len(one.devices_ids) != 1 or one.devices_ids[0] not in DEVICE_IDS
            for one in request.container_requests
        ):
            detail = f"hami: a container asks for one {RESOURCE}, as an id of {DEVICE_IDS}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        devices = [
            api.DeviceSpec(host_path=path, container_path=path, permissions="rw")
            for path in nodes_of(self._settings.devices)
        ]
        name = self._settings.cdi_device
        named = [api.CDIDevice(name=name)] if name else []
        answer = api.ContainerAllocateResponse(devices=devices, cdi_devices=named)
        return api.AllocateResponse(container_responses=[answer] * len(request.container_requests))
