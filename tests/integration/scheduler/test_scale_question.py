# SPDX-License-Identifier: Apache-2.0
"""The answer of ``/v1/whatif/scale`` equals what happens when so many nodes are really added."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from hami_sim.natsd import NatsServer
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site
from tests.unit.scheduler.shell import builders

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
SIZES = (9000, 4000, 9000, 12000, 4000, 15000, 9000, 7000, 9000, 4000, 16000, 2000)
"""MiB of the waiting pods; by sums three nodes would do."""
LIMIT_S = 30.0


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        yield opened


async def place_all(scheduler: SchedulerProcess, site: Site, pods: list[builders.Obj]) -> int:
    """Place pods as kube-scheduler does; returns how many no node took."""
    names = [devices.node for devices in site.capacity]
    left = 0
    for pod in pods:
        fitting = (await scheduler.filter(pod, names))["NodeNames"]
        if not fitting:
            left += 1
            continue
        status, body = await scheduler.post("/prioritize", builders.filter_body(pod, fitting))
        assert status == 200
        scores = {one["Host"]: one["Score"] for one in json.loads(body)}
        best = max(fitting, key=lambda name: scores.get(name, 0))
        assert await scheduler.bind(pod, best) == ""
    return left


async def test_least_number_is_what_adding_nodes_needs(site: Site, tmp_path: Path) -> None:
    await site.add_node(builders.devices("n1", count=2))
    async with aiohttp.ClientSession() as http:
        scheduler = site.scheduler("s1", http)
        await scheduler.start()
        await scheduler.until_ready()
        pods = [await site.add_pod(f"p{n}", mem_mib=mib, cores=0) for n, mib in enumerate(SIZES)]

        async def scale() -> dict[str, object]:
            status, body = await scheduler.post("/v1/whatif/scale", b'{"template": "n1"}')
            assert status == 200, body
            answer: dict[str, object] = json.loads(body)
            return answer

        with anyio.fail_after(LIMIT_S):
            while len((await scale())["pods"]) < len(pods):  # type: ignore[arg-type]  # a list
                await anyio.sleep(0.1)
        answer = await scale()
        least = answer["nodes"]
        assert isinstance(least, int)
        assert least >= 3
        assert answer["refused"] == 0
        for number in range(1, least):
            await site.add_node(builders.devices(f"n1-real-{number}", count=2))
        await scheduler.until_ready()
        with anyio.fail_after(LIMIT_S):
            while (await scale())["nodes"] != 1:
                await anyio.sleep(0.1)
        assert await place_all(scheduler, site, pods) > 0
        await site.check_settled()
        for pod in pods:
            name = pod["metadata"]["name"]
            await site.kube.delete("pods", name, "default", gracePeriodSeconds="0")
        with anyio.fail_after(LIMIT_S):
            while any(record.op != "release" for record in await site.log()):
                await anyio.sleep(0.1)
        pods = [await site.add_pod(f"q{n}", mem_mib=mib, cores=0) for n, mib in enumerate(SIZES)]
        await site.add_node(builders.devices(f"n1-real-{least}", count=2))
        with anyio.fail_after(LIMIT_S):
            answer = await scale()
            while answer["nodes"] != 0 or len(answer["pods"]) < len(pods):  # type: ignore[arg-type]
                await anyio.sleep(0.1)
                answer = await scale()
        assert await place_all(scheduler, site, pods) == 0
        await site.check_settled()
