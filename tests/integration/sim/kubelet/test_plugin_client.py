# SPDX-License-Identifier: Apache-2.0
"""Closing a plugin's connection during a call ends the call, never its caller."""

from pathlib import Path

import anyio
import anyio.lowlevel
import grpc.aio
import pytest

from hami_common.kubeletapi import deviceplugin as api
from hami_common.kubeletapi import deviceplugin_grpc
from hami_sim.kubelet.devices import DeviceError
from hami_sim.kubelet.plugins import CLOSING, PluginClient

pytestmark = pytest.mark.anyio


class Hanging(deviceplugin_grpc.DevicePluginServicer):
    """A plugin that never answers Allocate."""

    def __init__(self) -> None:
        self.asked = anyio.Event()

    async def Allocate(  # noqa: N802 - the protocol's name
        self,
        request: api.AllocateRequest,
        context: grpc.aio.ServicerContext[api.AllocateRequest, api.AllocateResponse],
    ) -> api.AllocateResponse:
        del request, context
        self.asked.set()
        await anyio.sleep_forever()
        return api.AllocateResponse()


async def test_call_fails_when_its_connection_is_closed_and_the_caller_continues(
    short_path: Path,
) -> None:
    server = grpc.aio.server()
    plugin = Hanging()  # type: ignore[abstract]  # only Allocate is called
    deviceplugin_grpc.add_DevicePluginServicer_to_server(plugin, server)
    server.add_insecure_port(f"unix:{short_path}/plugin.sock")
    await server.start()
    client = PluginClient(short_path / "plugin.sock", prestart_timeout_s=5)
    steps: list[str] = []

    async def admit() -> None:
        try:
            await client.allocate(["x"])
        except DeviceError as error:
            steps.append(str(error))
        await anyio.lowlevel.checkpoint()
        steps.append("next pod")

    async with anyio.create_task_group() as group:
        group.start_soon(admit)
        with anyio.fail_after(30):
            await plugin.asked.wait()
        await client.close()
    assert steps == [CLOSING, "next pod"]
    await server.stop(grace=None)
