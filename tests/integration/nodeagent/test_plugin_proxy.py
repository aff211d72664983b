# SPDX-License-Identifier: Apache-2.0
"""The plugin proxy: kubelet keeps its plugin, and its calls get answers, when agents restart."""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import anyio
import grpc.aio
import pytest

from hami_common.kubeletapi import deviceplugin
from hami_sim.process import Process
from tests.integration.nodeagent.plane import RESOURCE, SHOW, Ask, Plane, until

pytestmark = pytest.mark.anyio

IDS = 128


PLUGINS = 2
"""Of the vendor, and of the neutral resource."""


class Pair:
    """Agent and proxy as processes."""

    def __init__(
        self, plane: Plane, *, hold_s: float = 60.0, leave_s: float = 0.0, name: str = ""
    ) -> None:
        """``name``: suffix of the files of this pair, where there are several."""
        self.plane = plane
        self._suffix = name
        sockets = plane.directory / f"plugins{name}"
        settings = plane.settings()
        nvidia = settings.drivers.nvidia
        self.proxy = self._process(
            "plugin-proxy",
            "plugin-proxy",
            f"device_plugin_dir={settings.device_plugin_dir}",
            f"plugin_socket_dir={sockets}",
            f"hold_s={hold_s}",
            f"leave_with_agent_s={2 * leave_s}",
            "call_wait_s=40",
        )
        self.agent = self._process(
            "agent",
            "",
            f"node_name={settings.node_name}",
            f"nats_urls={settings.nats_urls[0]}",
            f"kubeconfig={settings.kubeconfig}",
            f"device_plugin_dir={settings.device_plugin_dir}",
            f"plugin_socket_dir={sockets}",
            f"pod_resources_socket={settings.pod_resources_socket}",
            f"state_dir={settings.state_dir}",
            f"trusted_keys_dir={settings.trusted_keys_dir}",
            f"leave_s={leave_s}",
            "http_port=0",
            "injection=env",
            "enforcement=none",
            f"drivers.nvidia.simulated_profile={nvidia.simulated_profile}",
        )

    def _process(self, name: str, word: str, *values: str) -> Process:
        flags = [part for value in values for part in ("--set", value)]
        words: Sequence[str] = [word] if word else []
        return Process(
            name,
            [sys.executable, "-m", "hami_nodeagent", *words, *flags],
            log=Path(self.plane.directory / f"{name}{self._suffix}.log"),
        )

    async def lines(self, text: str) -> int:
        """Count the lines in which the agent logged ``text``."""
        return self.agent.log.read_text().count(text)


@pytest.fixture
async def pair(request: pytest.FixtureRequest, plane: Plane) -> AsyncIterator[Pair]:
    """Both run, and kubelet offers every id."""
    built = Pair(plane, **getattr(request, "param", {}))
    built.proxy.start()
    built.agent.start()
    try:
        await plane.offered(IDS)
        yield built
    finally:
        await built.agent.stop()
        await built.proxy.stop()


async def test_pods_go_through_the_proxy_with_their_own_shares(pair: Pair) -> None:
    plane = pair.plane
    for number in range(4):
        await plane.place(f"pod-{number}", Ask(shares=((number, 1000 + number),)))
    for number in range(4):
        await plane.until_phase(f"pod-{number}", "Running")


async def test_pod_created_while_the_agent_is_dead_runs_after_its_restart(pair: Pair) -> None:
    plane = pair.plane
    await pair.agent.kill()
    await plane.place("web", Ask(shares=((1, 1000),), command=SHOW))
    with anyio.move_on_after(1):
        await plane.until_phase("web", "Failed")
        pytest.fail("kubelet rejected the pod")
    pair.agent.start()
    await plane.until_phase("web", "Running")


async def test_restarted_agent_does_not_register_again(pair: Pair) -> None:
    plane = pair.plane

    async def registered() -> bool:
        return await pair.lines("registered with kubelet") == PLUGINS

    await until(registered)
    await pair.agent.kill()
    pair.agent.start()

    async def ready() -> bool:
        return await pair.lines('"message":"ready"') == 2

    await until(ready)
    await plane.offered(IDS)
    await plane.place("web", Ask(shares=((2, 500),)))
    await plane.until_phase("web", "Running")
    assert await registered()


@pytest.mark.parametrize("pair", [{"hold_s": 2.0}], indirect=True)
async def test_kubelet_sees_no_devices_while_the_agent_is_stopped(pair: Pair) -> None:
    await pair.agent.stop()
    await pair.plane.offered(0)
    pair.agent.start()
    await pair.plane.offered(IDS)


async def test_killed_proxy_is_replaced_and_kubelet_finds_the_plugin_again(pair: Pair) -> None:
    await pair.proxy.kill()
    await pair.plane.offered(0)
    pair.proxy.start()
    await pair.plane.offered(IDS)
    await pair.plane.place("web", Ask(shares=((0, 500),)))
    await pair.plane.until_phase("web", "Running")


async def test_refusals_of_the_agent_arrive_as_they_are(pair: Pair) -> None:
    async with pair.plane.plugin() as plugin:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plugin.Allocate(
                deviceplugin.AllocateRequest(
                    container_requests=[
                        deviceplugin.ContainerAllocateRequest(devices_ids=["no-such-id"])
                    ]
                )
            )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"never announced for {RESOURCE}" in str(refused.value.details())


@pytest.mark.parametrize("pair", [{"leave_s": 10.0}], indirect=True)
async def test_both_serve_pods_on_their_way_when_they_are_stopped(pair: Pair) -> None:
    """A reservation is made, both are asked to stop, and kubelet gets the pod afterwards."""
    plane = pair.plane
    async with anyio.create_task_group() as group:
        web = plane.record(await plane.create("web", Ask(shares=((1, 1000),), command=SHOW)))
        ledger_seq = await plane.reserve(web)
        group.start_soon(pair.agent.stop)
        group.start_soon(pair.proxy.stop)
        await anyio.sleep(2.0)
        assert pair.agent.is_running()
        assert pair.proxy.is_running()
        await plane.bind(web, ledger_seq)
        await plane.until_phase("web", "Running")
    assert "serves no more pods" in pair.agent.log.read_text()


@pytest.mark.parametrize("pair", [{"leave_s": 10.0}], indirect=True)
async def test_successor_waits_ready_and_takes_over_when_both_are_stopped(pair: Pair) -> None:
    """A rollout with ``maxSurge`` fails no pod, and kubelet has the plugin again soon."""
    plane = pair.plane
    await plane.place("before", Ask(shares=((1, 1000),), command=SHOW))
    await plane.until_phase("before", "Running")
    successor = Pair(plane, leave_s=10.0, name="-next")
    successor.proxy.start()
    successor.agent.start()
    try:

        async def waits() -> bool:
            log = successor.agent.log
            return log.exists() and "waits for the agent that serves" in log.read_text()

        await until(waits)
        address = f"http://127.0.0.1:{port_of(successor.agent)}/readyz"
        async with aiohttp.ClientSession() as http, http.get(address) as answer:
            assert answer.status == 200
        assert await successor.lines("registered with kubelet") == 0
        async with anyio.create_task_group() as group:
            group.start_soon(pair.agent.stop)
            group.start_soon(pair.proxy.stop)

        async def registered() -> bool:
            return await successor.lines("registered with kubelet") >= PLUGINS

        await until(registered)
        await plane.offered(IDS)
        await plane.place("after", Ask(shares=((2, 500),), command=SHOW))
        await plane.until_phase("after", "Running")
        assert await successor.lines("registered with kubelet") == PLUGINS
    finally:
        await successor.agent.stop()
        await successor.proxy.stop()


def port_of(process: Process) -> int:
    """Return the port on which a process serves HTTP."""
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    return next(int(line["port"]) for line in lines if line["message"] == "listening")
