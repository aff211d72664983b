# SPDX-License-Identifier: Apache-2.0
"""Two schedulers as processes bind pods of one namespace to different nodes: its quota holds."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from hami_sim.natsd import NatsServer
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site
from tests.unit.scheduler.shell import builders

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

NODES = [f"n{number}" for number in range(4)]
POD_MIB = 1000
PODS_ALLOWED = 10


@pytest.fixture
async def http(anyio_backend: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        for node in NODES:
            await opened.add_node(builders.devices(node, count=2, slots=16, memory_mib=80000))
        yield opened


async def limit_default_namespace(site: Site) -> None:
    hard = {"limits.nvidia.com/gpumem": str(PODS_ALLOWED * POD_MIB)}
    quota = {"metadata": {"name": "gpu"}, "spec": {"hard": hard}}
    await site.kube.create("resourcequotas", quota, "default")


async def started(site: Site, http: aiohttp.ClientSession) -> list[SchedulerProcess]:
    schedulers = [
        site.scheduler(name, http, lease_s=2.0, fence_delay_s=0.5) for name in ("s1", "s2")
    ]
    for scheduler in schedulers:
        await scheduler.start()
    for scheduler in schedulers:
        await scheduler.until_ready()
    return schedulers


async def bind_all(schedulers: list[SchedulerProcess], pods: list[builders.Obj]) -> dict[str, str]:
    """Bind all at the same time, alternating between the schedulers; returns errors by pod."""
    errors: dict[str, str] = {}
    async with anyio.create_task_group() as group:

        async def bind(number: int, pod: builders.Obj) -> None:
            scheduler = schedulers[number % len(schedulers)]
            node = NODES[number % len(NODES)]
            errors[pod["metadata"]["name"]] = await scheduler.bind(pod, node)

        for number, pod in enumerate(pods):
            group.start_soon(bind, number, pod)
    return errors


async def until_used(scheduler: SchedulerProcess) -> None:
    """Wait until the scheduler shows that the quota is used up, and not exceeded."""

    async def used_mib() -> int:
        used: int = json.loads(await scheduler.get("/v1/quotas"))["items"][0]["used"]
        return used

    with anyio.fail_after(30):
        while await used_mib() != PODS_ALLOWED * POD_MIB:
            await anyio.sleep(0.05)


async def test_two_schedulers_fill_a_quota_exactly(site: Site, http: aiohttp.ClientSession) -> None:
    await limit_default_namespace(site)
    schedulers = await started(site, http)
    pods = {f"p{i}": await site.add_pod(f"p{i}", mem_mib=POD_MIB, cores=1) for i in range(24)}
    with anyio.fail_after(60):
        while len(await site.bound()) < PODS_ALLOWED:
            bound = await site.bound()
            await bind_all(schedulers, [p for n, p in pods.items() if n not in bound])
            assert len(await site.bound()) <= PODS_ALLOWED
    bound = await site.bound()
    await site.check_settled()
    for scheduler in schedulers:
        await until_used(scheduler)
        waits = next(pod for name, pod in pods.items() if name not in bound)
        assert "1000 MiB wanted, 10000 used, limit 10000" in await scheduler.bind(waits, "n0")
    metrics = (await schedulers[0].get("/metrics")).decode()
    assert (
        'hami_resource_quota_limit{namespace="default",quota_name="nvidia.com/gpumem",zone="vGPU"}'
        in metrics
    )


async def test_killed_in_the_middle_of_a_race_leaves_the_quota_whole(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await limit_default_namespace(site)
    first, second = await started(site, http)
    pods = {f"p{i}": await site.add_pod(f"p{i}", mem_mib=POD_MIB, cores=1) for i in range(20)}
    async with anyio.create_task_group() as group:
        group.start_soon(bind_all, [first, second], list(pods.values()))
        with anyio.fail_after(30):
            while not await site.log():
                await anyio.sleep(0.005)
        await first.process.kill()
    assert len(await site.bound()) <= PODS_ALLOWED
    with anyio.fail_after(60):
        while len(await site.bound()) < PODS_ALLOWED:
            bound = await site.bound()
            await bind_all([second], [pod for name, pod in pods.items() if name not in bound])
            assert len(await site.bound()) <= PODS_ALLOWED
            await anyio.sleep(0.1)
    await site.check_settled()
    await until_used(second)
