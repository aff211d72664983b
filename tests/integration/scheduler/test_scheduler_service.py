# SPDX-License-Identifier: Apache-2.0
"""Schedulers as processes on a real nats-server and a simulated API server, under faults."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import pytest

from hami_common.errors import Unavailable
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.decision import DecisionRecord
from hami_core.replay.snapshot import Snapshot, load
from hami_sim.apiserver import Fault, Match
from hami_sim.natsd import NatsServer
from tests.integration.scheduler.site import SchedulerProcess, Site, open_site, until
from tests.unit.scheduler.shell import builders

pytestmark = pytest.mark.anyio

BINDING = Match(resource="pods", subresource="binding")


@pytest.fixture
async def http(anyio_backend: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with open_site(tmp_path, nats_server) as opened:
        yield opened


async def bind_all(
    schedulers: list[SchedulerProcess], pods: list[builders.Obj], node: str
) -> dict[str, str]:
    """Bind all pods at the same time, spread over the schedulers; returns errors by pod."""
    errors: dict[str, str] = {}
    async with anyio.create_task_group() as group:

        async def bind(number: int, pod: builders.Obj) -> None:
            name = pod["metadata"]["name"]
            errors[name] = await schedulers[number % len(schedulers)].bind(pod, node)

        for number, pod in enumerate(pods):
            group.start_soon(bind, number, pod)
    return errors


async def test_hundred_pods_at_once_to_one_node_never_share_a_slot(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=8, slots=16, memory_mib=80000))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    pods = [await site.add_pod(f"p{i}", mem_mib=5000, cores=5) for i in range(100)]
    errors = await bind_all([scheduler], pods, "n1")
    assert set(errors.values()) == {""}
    assert len(await site.bound()) == 100
    await site.check_settled()


async def test_two_schedulers_on_one_node_fill_it_exactly(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=4, slots=8, memory_mib=16000))
    schedulers = [site.scheduler(name, http, lease_s=3.0) for name in ("s1", "s2")]
    for scheduler in schedulers:
        await scheduler.start()
    for scheduler in schedulers:
        await scheduler.until_ready()
    pods = [await site.add_pod(f"p{i}", mem_mib=2000, cores=5) for i in range(40)]
    waiting = {pod["metadata"]["name"]: pod for pod in pods}
    with anyio.fail_after(60):
        while len(await site.bound()) < 32:
            # Every pod is given to both, as after a change of the elected kube-scheduler.
            errors = await bind_all(schedulers, [*waiting.values(), *waiting.values()], "n1")
            await site.check()
            waiting = {name: pod for name, pod in waiting.items() if errors[name]}
    assert len(await site.bound()) == 32
    await site.check_settled()


async def test_wiped_bus_is_rebuilt_from_the_pods(site: Site, http: aiohttp.ClientSession) -> None:
    node = builders.devices("n1", count=2, slots=16, memory_mib=16000)
    await site.add_node(node)
    schedulers = [site.scheduler(name, http) for name in ("s1", "s2")]
    for scheduler in schedulers:
        await scheduler.start()
        await scheduler.until_ready()
    pods = [await site.add_pod(f"p{i}", mem_mib=2500, cores=5) for i in range(14)]
    assert set((await bind_all(schedulers[:1], pods[:10], "n1")).values()) == {""}
    await site.check_settled()
    before = {r.pod_uid: (r.allocation_id, r.containers) for r in await site.log()}

    await site.nats.stop()
    await site.nats.wipe()
    refused = await bind_all(schedulers[:1], pods[10:11], "n1")
    assert "" not in refused.values()
    await site.nats.start()
    with anyio.fail_after(60):
        while {r.pod_uid: (r.allocation_id, r.containers) for r in await _log(site)} != before:
            await anyio.sleep(0.05)
    await site.put_devices(node)
    for scheduler in schedulers:
        await scheduler.until_ready()
    with anyio.fail_after(60):
        # 12 fit: 6 of 2,500 MiB on each device.
        while len(await site.bound()) < 12:
            await bind_all(schedulers, pods[10:], "n1")
            await site.check()
    await bind_all(schedulers, pods[10:], "n1")
    assert len(await site.bound()) == 12
    await site.check_settled()


async def _log(site: Site) -> list[AllocationRecord]:
    try:
        return await site.log()
    except Unavailable:
        return []


async def test_bus_restarted_in_the_middle_loses_no_pod(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=8, slots=16, memory_mib=80000))
    scheduler = site.scheduler("s1", http, bus_timeout_s=1.0)
    await scheduler.start()
    await scheduler.until_ready()
    pods = [await site.add_pod(f"p{i}", mem_mib=5000, cores=5) for i in range(60)]
    async with anyio.create_task_group() as group:
        group.start_soon(bind_all, [scheduler], pods, "n1")
        await until(lambda: len(site.api.requests(BINDING)) >= 5)
        await site.nats.kill()
        await site.nats.start()
    await site.check()
    with anyio.fail_after(60):
        while len(bound := await site.bound()) < 60:
            await scheduler.until_ready()
            rest = [pod for pod in pods if pod["metadata"]["name"] not in bound]
            await bind_all([scheduler], rest, "n1")
            await site.check()
    await site.check_settled()


async def test_scheduler_killed_in_the_middle_is_followed_by_another(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=8, slots=8, memory_mib=40000))
    first = site.scheduler("s1", http, lease_s=2.0, fence_delay_s=0.5)
    second = site.scheduler("s2", http, lease_s=2.0, fence_delay_s=0.5)
    for scheduler in (first, second):
        await scheduler.start()
        await scheduler.until_ready()
    pods = [await site.add_pod(f"p{i}", mem_mib=5000, cores=5) for i in range(64)]
    async with anyio.create_task_group() as group:
        group.start_soon(bind_all, [first], pods, "n1")
        await until(lambda: len(site.api.requests(BINDING)) >= 10)
        await first.process.kill()
    await site.check()
    with anyio.fail_after(60):
        while len(bound := await site.bound()) < 64:
            rest = [pod for pod in pods if pod["metadata"]["name"] not in bound]
            await bind_all([second], rest, "n1")
            await site.check()
    await site.check_settled()


async def test_resumed_scheduler_finds_its_reservation_lost(
    site: Site, http: aiohttp.ClientSession
) -> None:
    """The Binding of a frozen replica is delayed until its share is assigned to another pod."""
    await site.add_node(builders.devices("n1", count=1, memory_mib=16000))
    first = site.scheduler("s1", http, lease_s=1.0, fence_delay_s=0.2, tick_s=0.2)
    second = site.scheduler("s2", http, lease_s=1.0, fence_delay_s=0.2, tick_s=0.2)
    for scheduler in (first, second):
        await scheduler.start()
        await scheduler.until_ready()
    slow = await site.add_pod("slow", mem_mib=12000)
    quick = await site.add_pod("quick", mem_mib=12000)
    site.api.faults.add(Fault(match=BINDING, action="delay", delay_s=10.0, times=1))
    errors: dict[str, str] = {}
    async with anyio.create_task_group() as group:

        async def bind_slow() -> None:
            errors["slow"] = await first.bind(slow, "n1")

        group.start_soon(bind_slow)
        with anyio.fail_after(30):
            while not await site.log():
                await anyio.sleep(0.02)
        first.process.freeze()
        with anyio.fail_after(60):
            while await second.bind(quick, "n1"):
                await anyio.sleep(0.1)
        first.process.thaw()
    assert errors["slow"]
    assert await site.bound() == {"quick": "n1"}
    await site.check_settled()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(match=BINDING, action="lose-response", times=5),
        Fault(match=BINDING, action="cut", times=5),
        Fault(match=BINDING, action="deny", code=500, times=5),
        Fault(match=BINDING, action="deny", code=403, times=5),
        Fault(match=BINDING, action="deny", code=429, retry_after_s=0, times=5),
    ],
    ids=["lose-response", "cut", "deny-500", "deny-403", "deny-429"],
)
async def test_failed_bindings_are_retried_to_success(
    site: Site, http: aiohttp.ClientSession, fault: Fault
) -> None:
    await site.add_node(builders.devices("n1", count=2, memory_mib=16000))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    pods = [await site.add_pod(f"p{i}", mem_mib=2000) for i in range(12)]
    site.api.faults.add(fault)
    with anyio.fail_after(60):
        while len(bound := await site.bound()) < 12:
            rest = [pod for pod in pods if pod["metadata"]["name"] not in bound]
            await bind_all([scheduler], rest, "n1")
            await site.check()
    await site.check_settled()


async def test_ended_pods_release_and_waiting_ones_are_requeued(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=1, memory_mib=16000))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    first = await site.add_pod("first", mem_mib=12000)
    assert await scheduler.bind(first, "n1") == ""
    second = await site.add_pod("second", mem_mib=12000)
    answer = await scheduler.filter(second, ["n1", "n2"])
    assert answer["NodeNames"] == []
    assert "CardInsufficientMemory" in answer["FailedNodes"]["n1"]
    await site.kube.patch(
        "pods",
        "first",
        {"status": {"phase": "Succeeded"}},
        namespace="default",
        subresource="status",
    )
    with anyio.fail_after(60):
        while (await scheduler.filter(second, ["n1", "n2"]))["NodeNames"] != ["n1"]:
            await anyio.sleep(0.02)
    touch = Match(verb="patch", resource="nodes")
    await until(lambda: len(site.api.requests(touch)) > 0)
    assert await scheduler.bind(second, "n1") == ""
    await site.kube.delete("pods", "second", "default", gracePeriodSeconds="0")
    with anyio.fail_after(60):
        while any(record.op != "release" for record in await site.log()):
            await anyio.sleep(0.02)


async def test_label_taken_from_a_running_pod_does_not_free_its_share(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=1, memory_mib=16000))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    pod = await site.add_pod("a", mem_mib=12000)
    assert await scheduler.bind(pod, "n1") == ""
    label = {"metadata": {"labels": {"hami.io/managed": None}}}
    await site.kube.patch("pods", "a", label, namespace="default")
    with anyio.fail_after(60):
        while not (await site.kube.get("pods", "a", "default"))["metadata"].get("labels"):
            await anyio.sleep(0.02)
    assert [record.op for record in await site.log()] == ["reserve"]
    await site.check_settled()


async def test_decisions_reach_the_event_stream(site: Site, http: aiohttp.ClientSession) -> None:
    await site.add_node(builders.devices("n1"))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    pod = await site.add_pod("a")
    async with site.bus.subscribe("hami.v1.event.decision.default.a") as decisions:
        await scheduler.filter(pod, ["n1", "nope"])
        assert await scheduler.bind(pod, "n1") == ""
        records: list[DecisionRecord] = []
        with anyio.fail_after(60):
            while len(records) < 2:
                for message in await decisions.receive():
                    assert message.headers["ce-specversion"] == "1.0"
                    assert message.headers["traceparent"].startswith("00-")
                    told = codec.decode(message.data, DecisionRecord, what=message.subject)
                    records += told.unfolded()
    assert [(r.verb, r.verdict) for r in records] == [("filter", "feasible"), ("bind", "placed")]
    assert records[0].refusals[0].nodes == ("nope",)
    assert records[1].containers[0].shares[0].uuid == "GPU-n1-0"


async def test_snapshot_answers_as_the_scheduler_does(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1", count=2))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    pod = await site.add_pod("a", mem_mib=3000)
    assert await scheduler.bind(pod, "n1") == ""
    snapshot = codec.decode(await scheduler.get("/v1/snapshot"), Snapshot, what="snapshot")
    ledger = load(snapshot)
    ledger.check()
    assert [holding.record.pod for holding in ledger.holdings()] == ["a"]
    assert ledger.fence("n1") == snapshot.holdings[0].revision


async def test_changed_settings_are_taken_over_and_a_mistake_is_not(
    site: Site, http: aiohttp.ClientSession
) -> None:
    scheduler = site.scheduler("s1", http, config_poll_s=0.1)
    config = site.directory / "s1.toml"
    before = config.read_text()
    await scheduler.start()
    await scheduler.until_ready()

    async def told(key: str, wanted: object) -> dict[str, object]:
        with anyio.fail_after(60):
            while (page := json.loads(await scheduler.get("/configz")))[key] != wanted:
                await anyio.sleep(0.05)
        return dict(page)

    await told("observedGeneration", 1)
    config.write_text(f"{before}lease_s = 31.0\n[policy]\nnode = 'spread'\n")
    assert (await told("observedGeneration", 2))["restartNeeded"] == ["lease_s"]
    snapshot = codec.decode(await scheduler.get("/v1/snapshot"), Snapshot, what="snapshot")
    assert snapshot.policy.node == "spread"
    config.write_text(f"{before}[polici]\nnode = 'binpack'\n")
    problem = "setting polici: is not a known key; did you mean policy?"
    assert (await told("problem", problem))["observedGeneration"] == 2
    assert b"hami_settings_file_valid 0.0" in await scheduler.get("/metrics")
    assert await scheduler.status("/readyz") == 200


async def test_malformed_and_oversized_bodies_are_rejected_with_the_reason(
    site: Site, http: aiohttp.ClientSession
) -> None:
    scheduler = site.scheduler("s1", http, body_limit_bytes=2000)
    await scheduler.start()
    await scheduler.until_ready()
    status, body = await scheduler.post("/filter", b"{")
    assert status == 400
    assert "ExtenderArgs" in json.loads(body)["error"]["message"]
    status, body = await scheduler.post("/bind", b'{"PodName": "a"}')
    assert status == 400
    assert "PodNamespace" in json.loads(body)["error"]["message"]
    status, body = await scheduler.post("/filter", b" " * 3000)
    assert status == 413
    assert json.loads(body)["error"]["limit_bytes"] == 2000


async def test_stop_finishes_binds_in_flight_and_exits_cleanly(
    site: Site, http: aiohttp.ClientSession
) -> None:
    await site.add_node(builders.devices("n1"))
    scheduler = site.scheduler("s1", http)
    await scheduler.start()
    await scheduler.until_ready()
    pod = await site.add_pod("a")
    site.api.faults.add(Fault(match=BINDING, action="delay", delay_s=1.0, times=1))
    errors: list[str] = []
    async with anyio.create_task_group() as group:

        async def bind() -> None:
            errors.append(await scheduler.bind(pod, "n1"))

        group.start_soon(bind)
        with anyio.fail_after(30):
            while not await site.log():
                await anyio.sleep(0.02)
        assert await scheduler.process.stop() == 0
    assert errors == [""]
    await site.check_settled()


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"nats_urls": ["nats://127.0.0.1:9"], "start_timeout_s": 0.5}, 3, "NATS is unavailable"),
        ({"signing_key_file": "/nowhere/key.pem"}, 2, "signing_key_file"),
        ({"signing_key": "x"}, 2, "signing_key_file"),
        ({"lease_s": "soon"}, 2, "lease_s"),
    ],
    ids=["no-bus", "no-key", "misspelt", "wrong-type"],
)
async def test_start_that_cannot_succeed_says_why(
    site: Site, http: aiohttp.ClientSession, settings: dict[str, object], code: int, text: str
) -> None:
    scheduler = site.scheduler("s1", http, **settings)
    scheduler.process.start()
    with anyio.fail_after(60):
        while scheduler.process.is_running():
            await anyio.sleep(0.02)
    assert await scheduler.process.stop() == code
    assert text in scheduler.process.log.read_text()
