# SPDX-License-Identifier: Apache-2.0
"""The device plugin for agents: what it grants, and its life with a kubelet that restarts.

Kubelet is its registration service here; what a granted container may open on a real node is in
``tests/e2e/test_real_node.py``.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from hami_common.errors import SettingsInvalid
from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc
from hami_common.runtime.service import ServiceContext
from hami_nodeagent.shell import agentdevices
from hami_nodeagent.shell.pluginproxy import KUBELET_SOCKET

pytestmark = pytest.mark.anyio

PATTERNS = ("/dev/null", "/dev/zer*", "/dev/no-such-device*", "/dev/fd")
"""Two devices, an empty path, and a path that is no device."""
GRANTED = ["/dev/null", "/dev/zero"]


class Kubelet(deviceplugin_grpc.RegistrationServicer):
    """Takes registrations in a directory of plugins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: list[api.RegisterRequest] = []

    async def Register(  # noqa: N802 - the protocol's name
        self, request: api.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> api.Empty:
        del context
        self.requests.append(request)
        return api.Empty()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Kubelet"]:
        """As a restart of kubelet: the sockets of all plugins are removed, its own is replaced."""
        for socket in self.directory.glob("*.sock"):
            socket.unlink()
        server = grpc.aio.server()
        deviceplugin_grpc.add_RegistrationServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self.directory / KUBELET_SOCKET}")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(grace=0)


@asynccontextmanager
async def plugin(
    directory: Path, *, devices: tuple[str, ...] = PATTERNS, cdi_device: str = ""
) -> AsyncIterator[agentdevices.AgentDevices]:
    settings = agentdevices.Settings(
        devices=devices, cdi_device=cdi_device, device_plugin_dir=str(directory), poll_s=0.02
    )
    served = agentdevices.AgentDevices(settings)
    async with anyio.create_task_group() as group:
        group.start_soon(served.keep)
        yield served
        group.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.01)


@asynccontextmanager
async def stub_of(directory: Path) -> AsyncIterator["deviceplugin_grpc.DevicePluginAsyncStub"]:
    address = f"unix:{directory / agentdevices.SOCKET}"
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.default_authority", "localhost")]
    ) as channel:
        yield deviceplugin_grpc.DevicePluginStub(channel)


async def test_each_id_grants_the_named_devices(short_path: Path) -> None:
    kubelet = Kubelet(short_path)
    async with kubelet.running(), plugin(short_path):
        await until(lambda: len(kubelet.requests) == 1)
        assert kubelet.requests[0].resource_name == agentdevices.RESOURCE
        assert kubelet.requests[0].endpoint == agentdevices.SOCKET
        async with stub_of(short_path) as stub:
            async for listed in stub.ListAndWatch(api.Empty()):
                assert [(one.ID, one.health) for one in listed.devices] == [
                    (name, "Healthy") for name in agentdevices.DEVICE_IDS
                ]
                break
            for one in agentdevices.DEVICE_IDS:
                asked = api.ContainerAllocateRequest(devices_ids=[one])
                given = await stub.Allocate(api.AllocateRequest(container_requests=[asked]))
                (response,) = given.container_responses
                assert [one.host_path for one in response.devices] == GRANTED
                assert {one.permissions for one in response.devices} == {"rw"}
            for wrong in (["other"], list(agentdevices.DEVICE_IDS)):
                other = api.ContainerAllocateRequest(devices_ids=wrong)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Allocate(api.AllocateRequest(container_requests=[other]))
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_cdi_device_is_granted_before_any_node_is_there(short_path: Path) -> None:
    kubelet = Kubelet(short_path)
    patterns = ("/dev/no-such-device*",)
    async with (
        kubelet.running(),
        plugin(short_path, devices=patterns, cdi_device="nvidia.com/gpu=all"),
    ):
        await until(lambda: len(kubelet.requests) == 1)
        async with stub_of(short_path) as stub:
            asked = api.ContainerAllocateRequest(devices_ids=["all"])
            given = await stub.Allocate(api.AllocateRequest(container_requests=[asked]))
            (response,) = given.container_responses
            assert [one.name for one in response.cdi_devices] == ["nvidia.com/gpu=all"]
            assert not response.devices


async def test_plugin_of_nodes_registers_once_one_is_there(short_path: Path) -> None:
    kubelet = Kubelet(short_path)
    async with kubelet.running(), plugin(short_path, devices=("/dev/no-such-device*",)) as served:
        await anyio.sleep(0.2)
        assert served.registered_count == 0


async def test_plugin_registers_again_after_kubelet_restarts(short_path: Path) -> None:
    kubelet = Kubelet(short_path)
    async with plugin(short_path) as served:
        async with kubelet.running():
            await until(lambda: served.registered_count == 1)
        async with kubelet.running():
            await until(lambda: served.registered_count == 2)
            async with stub_of(short_path) as stub:
                await stub.GetDevicePluginOptions(api.Empty(), wait_for_ready=True, timeout=20)
    assert not (short_path / agentdevices.SOCKET).exists()


@pytest.mark.parametrize(
    "devices", [(), ("/dev",), ("/dev/",), ("/etc/shadow",), ("/dev/../etc/shadow",), ("kfd",)]
)
async def test_only_nodes_below_dev_are_granted(devices: tuple[str, ...]) -> None:
    context: Any = ServiceContext.__new__(ServiceContext)
    context.settings = agentdevices.Settings(devices=devices)
    with pytest.raises(SettingsInvalid, match="no device node"):
        await agentdevices.serve_devices(context)


@pytest.mark.parametrize("name", ["all", "nvidia.com/gpu", "nvidia.com/gpu=", "gpu=all"])
async def test_cdi_device_has_a_qualified_name(name: str) -> None:
    context: Any = ServiceContext.__new__(ServiceContext)
    context.settings = agentdevices.Settings(cdi_device=name)
    with pytest.raises(SettingsInvalid, match="no qualified name"):
        await agentdevices.serve_devices(context)
