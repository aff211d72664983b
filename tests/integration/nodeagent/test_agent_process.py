# SPDX-License-Identifier: Apache-2.0
"""The agent as a process: settings, readiness, signals, exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from hami_sim.process import Process
from tests.integration.nodeagent.plane import Ask, Plane, until

pytestmark = pytest.mark.anyio


def write_config(plane: Plane, path: Path) -> None:
    settings = plane.settings()
    path.write_text(
        "\n".join(
            [
                f'node_name = "{settings.node_name}"',
                f"nats_urls = {json.dumps(settings.nats_urls)}",
                f'kubeconfig = "{settings.kubeconfig}"',
                "http_port = 0",
                f'device_plugin_dir = "{settings.device_plugin_dir}"',
                f'pod_resources_socket = "{settings.pod_resources_socket}"',
                f'state_dir = "{settings.state_dir}"',
                f'trusted_keys_dir = "{settings.trusted_keys_dir}"',
                'injection = "env"',
                'enforcement = "none"',
                "start_timeout_s = 30",
                "config_poll_s = 0.1",
                "[drivers.nvidia]",
                f'simulated_profile = "{settings.drivers.nvidia.simulated_profile}"',
            ]
        )
    )


async def run_agent(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return await anyio.run_process(
        [sys.executable, "-m", "hami_nodeagent", *arguments], check=False
    )


async def test_process_serves_kubelet_and_health_until_terminated(plane: Plane) -> None:
    config = plane.directory / "agent.toml"
    write_config(plane, config)
    process = Process(
        "agent",
        [sys.executable, "-m", "hami_nodeagent", "--config", str(config)],
        log=plane.directory / "agent.log",
    )
    process.start()
    try:
        await plane.offered(128)
        lines = [json.loads(line) for line in process.log.read_text().splitlines()]
        port = next(line["port"] for line in lines if line["message"] == "listening")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

            async def is_ready() -> bool:
                async with http.get("/readyz") as answer:
                    return answer.status == 200

            await until(is_ready)
            await plane.place("web", Ask(shares=((1, 1000),)))
            await plane.until_phase("web", "Running")
            async with http.get("/metrics") as answer:
                metrics = await answer.text()
            told: dict[str, Any] = {}

            async def is_taken_over() -> bool:
                async with http.get("/configz") as answer:
                    told.update(await answer.json())
                return bool(told["observedGeneration"] == 2)

            config.write_text(f"{config.read_text()}\n[usage]\nlook_s = 1.5\nevent_s = 30.0\n")
            await until(is_taken_over)
            assert told["restartNeeded"] == ["usage.event_s"]
        assert 'hami_nodeagent_allocations_total{resource="nvidia.com/gpu"} 1.0' in metrics
        assert "hami_nodeagent_heartbeats_total" in metrics
    finally:
        code = await process.stop()
    assert code == 0, process.log.read_text()[-2000:]


async def test_bad_settings_are_exit_code_2_with_the_fix(plane: Plane) -> None:
    config = plane.directory / "agent.toml"
    write_config(plane, config)
    unknown = await run_agent("--config", str(config), "--set", "node_nam=x")
    assert unknown.returncode == 2
    assert b"did you mean node_name?" in unknown.stderr
    unwritable = await run_agent("--config", str(config), "--set", "state_dir=/proc/none")
    assert unwritable.returncode == 2
    assert b"give a directory that the agent may write" in unwritable.stderr
    checked = await run_agent("--config", str(config), "--check")
    assert checked.returncode == 0
    assert json.loads(checked.stdout)["node_name"] == "gpu-a"


async def test_missing_bus_on_a_fresh_node_is_exit_code_3(plane: Plane) -> None:
    config = plane.directory / "agent.toml"
    write_config(plane, config)
    await plane.nats.kill()
    ended = await run_agent("--config", str(config), "--set", "start_timeout_s=1")
    assert ended.returncode == 3, ended.stderr[-2000:]


async def test_after_a_reboot_without_the_bus_containers_of_the_node_may_start(
    plane: Plane,
) -> None:
    async with plane.agent():
        record = await plane.place("web", Ask(shares=((1, 1000),)))
        await plane.until_state(record.pod_uid, "running")
        ids = sorted((await plane.listed_ids())["web"])
    await plane.nats.kill()
    config = plane.directory / "agent.toml"
    write_config(plane, config)
    process = Process(
        "agent",
        [
            *(sys.executable, "-m", "hami_nodeagent", "--config", str(config)),
            *("--set", "start_timeout_s=0.5"),
        ],
        log=plane.directory / "agent.log",
    )
    process.start()
    try:
        await plane.offered(128)

        async def has_given_up_once() -> bool:
            return "bus not reached" in process.log.read_text()

        await until(has_given_up_once)
        assert process.is_running()
        assert await plane.may_start(ids)
    finally:
        code = await process.stop()
    assert code == 0
