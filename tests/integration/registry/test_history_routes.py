# SPDX-License-Identifier: Apache-2.0
"""Events, timeline, pressure and workloads over HTTP, from a real nats-server."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.breach import BreachRecord
from hami_common.events.decision import (
    Amounts,
    DecisionRecord,
    DeviceHolder,
    RefusalClass,
    RefusedDevice,
    RefusedNode,
)
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import NatsBucket, NatsPublisher, connect, ensure_bus
from hami_registry.shell import eventtail
from hami_sim.natsd import NatsServer
from tests.support.fleet import Event, next_event
from tests.support.registry import (
    ADMIN,
    PODS_ONLY,
    TENANT,
    RunningRegistry,
    report,
    review_by_name,
    run_registry,
    send,
)

pytestmark = pytest.mark.anyio


class Site:
    """A bus and a registry; node gpu-1 has the devices ``a`` and ``b`` of 1000 MiB."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        registry: RunningRegistry,
        publisher: NatsPublisher,
        bus: Any,
    ) -> None:
        self.http = http
        self.registry = registry
        self.publisher = publisher
        self.ledger = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.states = NatsBucket(bus, subjects.STATE_BUCKET)
        self.subscription: dict[str, Any] = {}
        """Of the newest stream of events."""
        self.now_s = SystemClock().now_s()

    async def get(self, path: str, status: int = 200, *, token: str = "") -> Any:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.http.get(self.registry.url + path, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    @asynccontextmanager
    async def tailing(
        self, query: str, *, token: str = "", last_id: str = ""
    ) -> AsyncIterator[aiohttp.StreamReader]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        if last_id:
            headers["Last-Event-ID"] = last_id
        async with self.http.get(
            f"{self.registry.url}/v1/events{query}", headers=headers
        ) as answer:
            assert answer.status == 200, await answer.text()
            event = await next_event(answer.content)
            assert (event.name, event.data["stream"]) == ("subscription", "HAMI_EVENTS")
            self.subscription = event.data
            yield answer.content

    async def replay(self, query: str, *, token: str = "") -> list[Event]:
        """Stored events up to event ``end``, which is left out."""
        found = []
        async with self.tailing(query, token=token) as content:
            with anyio.fail_after(10):
                while (event := await next_event(content)).name != "end":
                    found.append(event)
        return found

    async def allocate(
        self, namespace: str, pod: str, op: str = "reserve", *, age_s: float = 0.0, mib: int = 300
    ) -> None:
        share = Share(vendor="nvidia", uuid="a", memory_mib=mib, core_pct=40)
        record = AllocationRecord(
            op=op,  # type: ignore[arg-type]  # test data
            allocation_id=f"id-{pod}",
            node="gpu-1",
            pod_uid=f"uid-{pod}",
            namespace=namespace,
            pod=pod,
            time_s=self.now_s - age_s,
            containers=()
            if op == "release"
            else (ContainerShares(name="main", kind="app", shares=(share,), priority=1),),
        )
        key = subjects.allocation_key("gpu-1", record.pod_uid)
        await self.ledger.append(key, codec.encode(record))

    async def run(self, namespace: str, pod: str) -> None:
        state = StateRecord(
            state="running",
            allocation_id=f"id-{pod}",
            node="gpu-1",
            pod_uid=f"uid-{pod}",
            namespace=namespace,
            pod=pod,
            ledger_seq=1,
            time_s=self.now_s - 20,
        )
        await self.states.append(
            subjects.allocation_key("gpu-1", state.pod_uid), codec.encode(state)
        )

    async def use(self, minute: int, **waited_s: float) -> None:
        """Publish the usage of the node; ``waited_s`` by pod."""
        names = {"p": "team-a", "q": "team-b"}
        usage = UsageRecord(
            node="gpu-1",
            boot_id="1",
            seq=minute,
            time_s=self.now_s - 7200 + 60 * minute,
            every_s=60,
            shares=tuple(
                ShareUsage(
                    namespace=names[pod],
                    pod=pod,
                    pod_uid=f"uid-{pod}",
                    container="main",
                    vendor="nvidia",
                    uuid="a",
                    limit_mib=300,
                    used_mib=200 if minute == 7 else 100,
                    limit_core_pct=40,
                    core_pct=20,
                )
                for pod in waited_s
            ),
            containers=tuple(
                ContainerUsage(
                    namespace=names[pod],
                    pod=pod,
                    pod_uid=f"uid-{pod}",
                    container="main",
                    processes=1,
                    waited_s=value,
                    device_time_s=10.0 * minute,
                )
                for pod, value in waited_s.items()
            ),
        )
        await self.publish(subjects.usage_event("gpu-1"), usage)

    async def decide(self) -> None:
        """Refuse a pod of team-a, because of a holder in team-b."""
        device = RefusedDevice(
            uuid="a",
            code="CardInsufficientMemory",
            wanted=Amounts(memory_mib=900),
            free=Amounts(memory_mib=700),
            holders=(DeviceHolder(namespace="team-b", name="q", memory_mib=300),),
        )
        decision = DecisionRecord(
            verb="filter",
            namespace="team-a",
            pod="p",
            pod_uid="uid-p",
            time_s=self.now_s,
            verdict="refused",
            snapshot_id="1.1",
            refusals=(RefusalClass(code="CardInsufficientMemory", text="900 wanted", count=1),),
            closest=(RefusedNode(node="gpu-1", code="CardInsufficientMemory", devices=(device,)),),
        )
        await self.publish(subjects.decision_event("team-a", "p"), decision)

    async def breach(self) -> None:
        record = BreachRecord(
            kind="memory",
            node="gpu-1",
            vendor="nvidia",
            uuid="a",
            boot_id="1",
            seq=1,
            time_s=self.now_s - 10,
            namespace="team-b",
            pod="q",
            pod_uid="uid-q",
            limit_mib=300,
            used_mib=500,
        )
        await self.publish(subjects.breach_event("gpu-1", "uid-q"), record)

    async def publish(self, subject: str, record: Any) -> None:
        await self.publisher.publish_stored(subject, codec.encode(record))

    async def until(self, path: str, is_wanted: Any, *, token: str = "") -> Any:
        with anyio.fail_after(20):
            while True:
                found = await self.get(path, token=token)
                if is_wanted(found):
                    return found
                await anyio.sleep(0.05)


@asynccontextmanager
async def site_with(server: NatsServer, **settings: Any) -> AsyncIterator[Site]:
    async with connect([server.url], name="test") as bus, aiohttp.ClientSession() as http:
        await ensure_bus(bus)
        async with run_registry(server.url, **settings) as registry:
            site = Site(http, registry, NatsPublisher(bus), bus)
            await send(site.publisher, report("a", "b"))
            token = ADMIN if settings.get("auth") else ""
            await site.until("/v1/devices", lambda found: len(found["items"]) == 2, token=token)
            await site.allocate("team-a", "p", age_s=7200)
            await site.allocate("team-b", "q", age_s=7200)
            await site.run("team-a", "p")
            await site.until(
                "/v1/allocations",
                lambda found: {one["state"] for one in found["items"]} == {"running", "reserved"},
                token=token,
            )
            yield site


def subjects_of(events: list[Event]) -> list[str]:
    return [event.data["subject"].removeprefix("hami.v1.event.") for event in events]


async def until_copied(site: Site, *, token: str = "") -> None:
    """Wait for both allocations and the state, which the server copies, and for the devices."""
    query = "?since=0&follow=false&kind=allocation,state,device"
    with anyio.fail_after(20):
        while len(await site.replay(query, token=token)) < 4:
            await anyio.sleep(0.05)


async def test_events_replay_filter_and_resume_without_a_gap(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await until_copied(site)
        await site.decide()
        await site.use(1, p=0)
        await site.breach()
        every = await site.replay("?since=0&follow=false")
        words = [name.split(".")[0] for name in subjects_of(every)]
        assert sorted(set(words)) == [
            "allocation", "breach", "decision", "device", "state", "usage"
        ]  # fmt: skip
        for event in every:
            assert event.id == event.data["sequence"]
            assert event.data["specversion"] == "1.0"
            assert isinstance(event.data["data"], dict)
        device = next(event for event in every if ".device." in event.data["subject"])
        assert device.data["type"] == "io.hami.device.changed.v1"
        assert device.data["source"] == "/registry/registry-0"

        assert subjects_of(await site.replay("?since=0&follow=false&kind=breach&node=gpu-1")) == [
            "breach.gpu-1.uid-q"
        ]
        assert site.subscription["filter_subjects"] == ["hami.v1.event.breach.gpu-1.*"]
        assert site.subscription["schemas"] == ["breach.v1"]
        assert await site.replay("?since=0&follow=false&kind=breach&node=gpu-2") == []
        assert subjects_of(
            await site.replay("?since=0&follow=false&subject=hami.v1.event.*.*.uid-q")
        ) == ["allocation.gpu-1.uid-q", "breach.gpu-1.uid-q"]
        assert "usage.v1" not in site.subscription["schemas"]
        assert "breach.v1" in site.subscription["schemas"]
        assert len(await site.replay("?since=0&follow=false&limit=2")) == 2
        assert await site.replay("?follow=false") == []
        assert await site.replay("?since=2999-01-01T00:00:00Z&follow=false") == []
        assert len(await site.replay("?since=2000-01-01T00:00:00Z&follow=false")) == len(every)

        # Live, then again from the last id: what came in between is not lost.
        async with site.tailing("?kind=decision") as content:
            await site.decide()
            with anyio.fail_after(10):
                first = await next_event(content)
        await site.decide()
        async with site.tailing("?kind=decision", last_id=first.id or "") as content:
            with anyio.fail_after(10):
                second = await next_event(content)
            await site.decide()
            with anyio.fail_after(10):
                third = await next_event(content)
        assert int(first.id or 0) + 1 == int(second.id or 0) == int(third.id or 0) - 1


async def test_lost_position_is_reported_as_a_gap(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await until_copied(site)
        async with site.tailing("?since=900000&kind=allocation") as content:
            with anyio.fail_after(10):
                gap, first = await next_event(content), await next_event(content)
        assert gap.name == "gap"
        assert "the stream ends at" in gap.data["reason"]
        assert first.data["subject"] == "hami.v1.event.allocation.gpu-1.uid-p"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/events?kind=news", "'news' is not a kind"),
        ("/v1/events?kind=usage&namespace=team-a", "belong to no namespace"),
        ("/v1/events?subject=hami.v1.ask.x", "is not a filter within"),
        ("/v1/events?subject=hami.v1.event.a&kind=usage", "together with kind"),
        ("/v1/events?node=a_b", "is not a Kubernetes name"),
        ("/v1/events?since=yesterday", "neither a sequence nor a time"),
        ("/v1/events?since=2026-01-01", "neither a sequence nor a time"),
        ("/v1/events?limit=0", "is not a whole number from 1"),
        ("/v1/timeline", "is missing, and uuid too"),
        ("/v1/timeline?node=gpu-1&hours=0", "is not a number of hours"),
        ("/v1/timeline?node=gpu-1&hours=nan", "is not a number of hours"),
        ("/v1/pressure?hours=169", "is not a number of hours"),
    ],
)
async def test_wrong_parameters_are_refused_with_the_fix(
    nats_server: NatsServer, path: str, text: str
) -> None:
    async with site_with(nats_server) as site:
        answer = await site.get(path, 400)
        assert text in answer["error"]["message"]


async def test_timeline_of_a_device(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await until_copied(site)
        await site.breach()
        await site.allocate("team-b", "q", "release")
        found = await site.until(
            "/v1/timeline?uuid=a", lambda found: found["slices"][-1]["end_s"] is not None
        )
        assert found["node"] == "gpu-1"
        assert found["cut"] == ""
        assert [
            (one["pod"], one["memory_mib"], one["end_s"] is None) for one in found["slices"]
        ] == [
            ("p", 300, True),
            ("q", 300, False),
        ]
        assert [(one["kind"], one["what"], one["pod"]) for one in found["entries"]] == [
            ("allocation", "reserve", "p"),
            ("allocation", "reserve", "q"),
            ("state", "running", "p"),
            ("breach", "memory", "q"),
            ("allocation", "release", "q"),
        ]
        hour = await site.get("/v1/timeline?node=gpu-1&hours=1")
        assert [one["what"] for one in hour["entries"]] == ["running", "memory", "release"]
        assert len(hour["slices"]) == 2, "slices that began earlier are shown from their begin"
        await site.get("/v1/timeline?uuid=gone", 404)
        await site.get("/v1/timeline?node=gone", 404)


async def test_pressure_names_the_neighbor(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        for minute in range(5):
            await site.use(minute, p=2.0 * minute, q=0.0)
        found = await site.get("/v1/pressure?hours=3")
        (one,) = found["items"]
        assert (one["pod"], one["waited_s"], one["cause"]) == ("p", 8.0, "limit")
        (neighbor,) = one["devices"][0]["neighbors"]
        assert (neighbor["namespace"], neighbor["pod"]) == ("team-b", "q")
        assert neighbor["device_time_s"] == 40.0
        assert found["cut"] == ""
        assert (await site.get("/v1/pressure?hours=3&namespace=team-b"))["items"] == []
        assert (await site.get("/v1/pressure?hours=3&node=gpu-2"))["items"] == []


async def test_pressure_of_a_fleet_beyond_the_bound_reads_two_records_of_each_node(
    nats_server: NatsServer,
) -> None:
    async with site_with(nats_server, history_messages=10) as site:
        for minute in range(20):
            await site.use(minute, p=2.0 * minute, q=0.0)
        found = await site.get("/v1/pressure?hours=3")
        assert found["items"][0]["waited_s"] == 38.0
        assert "only the first and the newest record" in found["cut"]
        short = await site.get("/v1/timeline?node=gpu-1")
        assert short["cut"] == ""


async def test_workload_with_peak_and_right_size(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await until_copied(site)
        await site.decide()
        for minute in range(30):
            await site.use(minute, p=0.1 * minute, q=0.0)
        short = await site.get("/v1/workloads/team-a/p")
        assert short["sampled_s"] == 1800
        assert short["containers"][0]["right_size"] == []
        for minute in range(30, 60):
            await site.use(minute, p=0.1 * minute, q=0.0)
        found = await site.get("/v1/workloads/team-a/p")
        (container,) = found["containers"]
        (device,) = container["devices"]
        assert found["allocation"]["state"] == "running"
        assert (device["limit_mib"], device["used_mib"], device["peak_mib"]) == (300, 100, 200)
        assert device["peak_s"] == pytest.approx(site.now_s - 7200 + 420, abs=0.01)
        assert (device["p95_core_pct"], device["model"]) == (20, "NVIDIA H200")
        assert len(device["series"]["time_s"]) == 60
        assert container["pressure"]["cause"] == "limit"
        # The peak plus 15 %; its limit of compute held it back, so that is kept.
        (size,) = container["right_size"]
        assert (size["memory_mib"], size["core_pct"], size["hours"]) == (230, 40, 1.0)
        assert [(one["kind"], one["what"]) for one in found["entries"]] == [
            ("allocation", "reserve"),
            ("state", "running"),
            ("decision", "filter: refused"),
        ]
        assert found["entries"][-1]["text"] == "900 wanted"
        await site.get("/v1/workloads/team-a/q", 404)


@pytest.fixture
def _reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    review_by_name(monkeypatch)


@pytest.mark.usefixtures("_reviews")
async def test_tenant_gets_its_own_events_and_no_names_of_others(nats_server: NatsServer) -> None:
    async with site_with(nats_server, auth="kubernetes") as site:
        for minute in range(2):
            await site.use(minute, p=3.0 * minute, q=5.0 * minute)
        await site.decide()
        await site.breach()
        await until_copied(site, token=ADMIN)
        every = await site.replay("?since=0&follow=false", token=ADMIN)
        own = await site.replay("?since=0&follow=false&namespace=team-a", token=TENANT)
        assert {name.split(".")[0] for name in subjects_of(own)} == {
            "allocation",
            "state",
            "decision",
        }
        assert "team-b" in json.dumps([event.data for event in every])
        seen: list[Any] = [event.data for event in own]
        seen += [
            await site.get(path, token=TENANT)
            for path in (
                "/v1/timeline?node=gpu-1&namespace=team-a",
                "/v1/pressure?hours=3&namespace=team-a",
                "/v1/workloads/team-a/p",
            )
        ]
        assert "team-b" not in json.dumps(seen)
        assert "uid-q" not in json.dumps(seen)
        timeline, pressure, workload = seen[-3:]
        assert {one["pod"] for one in timeline["slices"]} == {"p", ""}
        for one in (pressure["items"][0], workload["containers"][0]["pressure"]):
            (neighbor,) = one["devices"][0]["neighbors"]
            assert (neighbor["namespace"], neighbor["device_time_s"]) == ("", 10.0)


@pytest.mark.usefixtures("_reviews")
async def test_caller_without_the_permission_is_refused(nats_server: NatsServer) -> None:
    async with site_with(nats_server, auth="kubernetes") as site:
        for path, token, status in (
            ("/v1/events", "", 401),
            ("/v1/events", TENANT, 403),
            ("/v1/events?namespace=team-b", TENANT, 403),
            ("/v1/timeline?node=gpu-1", TENANT, 403),
            ("/v1/timeline?node=gpu-1&namespace=team-a", PODS_ONLY, 403),
            ("/v1/pressure", TENANT, 403),
            ("/v1/pressure?namespace=team-b", TENANT, 403),
            ("/v1/workloads/team-b/q", TENANT, 403),
            ("/v1/pressure?namespace=team-a", PODS_ONLY, 200),
            ("/v1/workloads/team-a/p", PODS_ONLY, 200),
        ):
            await site.get(path, status, token=token)


async def test_streams_of_events_count_as_listeners(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        eventtail, "KEEP_ALIVE_S", 0.5
    )  # a closed connection is noticed when written to
    async with site_with(nats_server, listener_limit_per_caller=1) as site:
        async with site.tailing("?kind=usage"):
            await site.get("/v1/events", 429)
        with anyio.fail_after(10):
            while True:
                async with site.http.get(f"{site.registry.url}/v1/events?follow=false") as answer:
                    if answer.status == 200:
                        break
                await anyio.sleep(0.05)
