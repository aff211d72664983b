# SPDX-License-Identifier: Apache-2.0
"""Preemption and gangs with schedulers as processes, a real nats-server and real budgets."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.events.allocation import AllocationRecord
from hami_sim.apiserver import Fault, Match
from hami_sim.natsd import NatsServer
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site, until
from tests.unit.scheduler.shell import builders

pytestmark = pytest.mark.anyio

EVICTION = Match(resource="pods", subresource="eviction")
FAST: dict[str, Any] = {
    "lease_s": 2.0,
    "fence_delay_s": 0.3,
    "tick_s": 0.2,
    "retry_s": 0.1,
    "preempt_retry_s": 0.3,
    "gang_lease_s": 3.0,
    "gang_retry_s": 0.1,
}


@pytest.fixture
async def http(anyio_backend: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        yield opened


async def two_schedulers(site: Site, http: aiohttp.ClientSession) -> list[SchedulerProcess]:
    schedulers = [site.scheduler(name, http, **FAST) for name in ("s1", "s2")]
    for scheduler in schedulers:
        await scheduler.start()
    for scheduler in schedulers:
        await scheduler.until_ready()
    return schedulers


async def make_pod(site: Site, name: str, **more: Any) -> builders.Obj:
    pod = builders.pod(name, mem_mib=9000, annotated=more.pop("annotations", None))
    del pod["metadata"]["uid"], pod["status"]
    pod["metadata"]["labels"] |= more.pop("labels", {})
    pod["spec"] |= more
    return await site.kube.create("pods", pod, "default")


def live(records: list[AllocationRecord]) -> list[AllocationRecord]:
    return [record for record in records if record.op != "release"]


async def test_two_gangs_for_the_same_nodes_run_one_after_the_other(
    site: Site, http: aiohttp.ClientSession
) -> None:
    names = ["n1", "n2", "n3"]
    for node in names:
        await site.add_node(builders.devices(node, count=2, memory_mib=10_000))
    schedulers = await two_schedulers(site, http)
    pods: dict[str, builders.Obj] = {}
    for gang in ("a", "b"):
        told = {"hami.io/gang": gang, "hami.io/gang-size": "5"}
        for number in range(5):
            name = f"{gang}-{number}"
            pods[name] = await make_pod(site, name, annotations=told)
    calls = itertools.count()

    async def try_one(name: str) -> None:
        scheduler = schedulers[next(calls) % 2]
        answer = await scheduler.filter(pods[name], names)
        if answer["NodeNames"]:
            assert len(answer["NodeNames"]) == 1
            await scheduler.bind(pods[name], answer["NodeNames"][0])

    async def round_of_all(gangs: str) -> set[str]:
        """Try every waiting member once, all at the same time; returns gangs with bound pods."""
        bound = await site.bound()
        async with anyio.create_task_group() as group:
            for name in pods:
                if name[0] in gangs and name not in bound:
                    group.start_soon(try_one, name)
        await site.check()
        return {name[0] for name in await site.bound()}

    with anyio.fail_after(60):
        while len(await site.bound()) < 5:
            assert len(await round_of_all("ab")) <= 1, "members of both gangs were bound"
    first = next(iter(await site.bound()))[0]
    for name in [name for name in pods if name[0] == first]:
        await site.kube.delete("pods", name, "default", gracePeriodSeconds="0")
        del pods[name]
    with anyio.fail_after(60):
        while len(await site.bound()) < 5:
            await round_of_all("ab")
    await site.check_settled()


async def test_scheduler_killed_before_it_evicts_is_followed_and_budgets_hold(
    site: Site, http: aiohttp.ClientSession
) -> None:
    for name, value in (("low", 1), ("mid", 5), ("high", 10)):
        await site.kube.create(
            "priorityclasses.scheduling.k8s.io", {"metadata": {"name": name}, "value": value}
        )
    names = ["n1", "n2"]
    for node in names:
        await site.add_node(builders.devices(node, memory_mib=10_000))
    first, second = await two_schedulers(site, http)
    guarded = await make_pod(site, "guarded", labels={"app": "db"}, priorityClassName="low")
    plain = await make_pod(site, "plain", priorityClassName="mid")
    for pod, node in ((guarded, "n1"), (plain, "n2")):
        assert await first.bind(pod, node) == ""
        status = {
            "phase": "Running",
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await site.kube.patch(
            "pods",
            pod["metadata"]["name"],
            {"status": status},
            namespace="default",
            subresource="status",
        )
    budget = {
        "metadata": {"name": "db"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "db"}}},
    }
    await site.kube.create("poddisruptionbudgets.policy", budget, "default")
    urgent = await make_pod(site, "urgent", priorityClassName="high")
    site.api.faults.add(Fault(match=EVICTION, action="delay", delay_s=60.0, times=1))
    assert (await first.filter(urgent, names))["NodeNames"] == []
    await until(lambda: len(site.api.requests(EVICTION)) >= 1 or bool(site.api.faults.met))
    await first.process.kill()
    (held,) = [record for record in live(await site.log()) if record.held_for]
    assert (held.pod, held.node) == ("urgent", "n2"), "a budget keeps the cheaper one"
    with anyio.fail_after(60):
        while True:
            answer = await second.filter(urgent, names)
            pods = {pod["metadata"]["name"]: pod for pod in await site.pods()}
            if "plain" in pods and pods["plain"]["metadata"].get("deletionTimestamp"):
                await site.kube.delete("pods", "plain", "default", gracePeriodSeconds="0")
            await site.check()
            if answer["NodeNames"] and not await second.bind(urgent, answer["NodeNames"][0]):
                break
            await anyio.sleep(0.05)
    assert await site.bound() == {"guarded": "n1", "urgent": "n2"}
    await site.check_settled()
