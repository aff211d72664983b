# SPDX-License-Identifier: Apache-2.0
"""Snapshot, events and capacity of the fleet, over HTTP and a real nats-server."""

import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import anyio
import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import HamiError
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.inventory import Heartbeat
from hami_common.model.device import Burst
from hami_common.model.placement import ContainerShares, Share
from hami_common.runtime import httpd
from hami_common.runtime.natsio import NatsBucket, NatsPublisher, connect, ensure_bus
from hami_registry.shell import fleet
from hami_sim.natsd import NatsServer
from tests.support.fleet import Document, Event, FleetClient, next_event
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
    """A bus, and one registry that reads it."""

    def __init__(
        self, http: aiohttp.ClientSession, registry: RunningRegistry, bus: Any, token: str = ""
    ) -> None:
        self.http = http
        self.registry = registry
        self.publisher = NatsPublisher(bus)
        self.ledger = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.reports = 1

    def acting_as(self, token: str) -> "Site":
        other = object.__new__(Site)
        other.__dict__.update(self.__dict__, headers={"Authorization": f"Bearer {token}"})
        return other

    async def get(self, path: str, status: int = 200) -> Any:
        url = self.registry.url + path
        async with self.http.get(url, headers=self.headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def allocate(
        self,
        namespace: str,
        pod: str,
        uuid: str = "a",
        mib: int = 300,
        op: str = "reserve",
        **more: Any,
    ) -> int:
        """Append a record of the node gpu-1; its revision."""
        share = Share(vendor="nvidia", uuid=uuid, memory_mib=mib, core_pct=more.pop("core", 10))
        record = AllocationRecord(
            op=op,  # type: ignore[arg-type]  # test data
            allocation_id="x",
            node="gpu-1",
            pod_uid=f"uid-{pod}",
            namespace=namespace,
            pod=pod,
            containers=(ContainerShares(name="main", kind="app", shares=(share,)),)
            if op == "reserve"
            else (),
        )
        key = subjects.allocation_key("gpu-1", record.pod_uid)
        return await self.ledger.append(key, codec.encode(record))

    async def use(self, foreign_mib: int, **bursts: int) -> None:
        """Report memory of device ``a`` that processes without an allocation, or pods, use."""
        self.reports += 1
        sent = report("a", "b", seq=self.reports)
        used = tuple(Burst(pod_uid=uid, memory_mib=mib) for uid, mib in bursts.items())
        first = replace(sent.devices[0], foreign_mib=foreign_mib, bursts=used)
        await send(self.publisher, replace(sent, devices=(first, *sent.devices[1:])))

    @asynccontextmanager
    async def viewing(
        self, since: str, namespace: str = "", header: str = ""
    ) -> AsyncIterator[aiohttp.StreamReader]:
        params = {"since": since, "namespace": namespace}
        headers = {**self.headers, **({"Last-Event-ID": header} if header else {})}
        url = f"{self.registry.url}/v1/fleet/events"
        given = {name: value for name, value in params.items() if value}
        async with self.http.get(url, params=given, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield answer.content

    async def until_fleet(self, is_wanted: Any, query: str = "") -> FleetClient:
        """The fleet once it matches."""
        with anyio.fail_after(20):
            while True:
                client = FleetClient(await self.get(f"/v1/fleet{query}"))
                if is_wanted(client):
                    return client
                await anyio.sleep(0.05)


@asynccontextmanager
async def site_with(server: NatsServer, **settings: Any) -> AsyncIterator[Site]:
    """Two devices of 1000 MiB, and allocations of two tenants on the first one."""
    async with (
        connect([server.url], name="test") as bus,
        aiohttp.ClientSession() as http,
    ):
        await ensure_bus(bus)
        async with run_registry(server.url, **settings) as registry:
            site = Site(http, registry, bus)
            await send(site.publisher, report("a", "b"))
            await site.allocate("team-a", "train-0")
            await site.allocate("team-b", "secret-pod")
            yield site


def pods(client: FleetClient) -> list[str]:
    return [one["pod"] for one in client.nodes.get("gpu-1", {}).get("allocations", ())]


def device(client: FleetClient, number: int = 0) -> Document:
    found: Document = client.nodes["gpu-1"]["devices"][number]
    return found


def has_all(client: FleetClient) -> bool:
    return len(pods(client)) == 2 and len(client.nodes["gpu-1"]["devices"]) == 2


async def until_event(content: aiohttp.StreamReader, client: FleetClient, is_wanted: Any) -> Event:
    """Apply events until the client matches."""
    with anyio.fail_after(20):
        while True:
            event = await next_event(content)
            assert event.name == "fleet", event
            assert event.id == event.data["id"]
            client.apply(event.data)
            if is_wanted(client):
                return event


async def test_events_after_a_snapshot_lead_to_the_next_one(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        client = await site.until_fleet(has_all)
        assert (device(client)["used_mib"], device(client)["used_slots"]) == (600, 2)
        assert device(client)["model"] == "NVIDIA H200"
        assert client.silent == ["gpu-1"]
        first = client.id
        async with site.viewing(first) as content:
            await site.allocate("team-a", "train-1", "b")
            await until_event(content, client, lambda c: len(pods(c)) == 3)
            await site.allocate("team-a", "train-0", op="release")
            event = await until_event(content, client, lambda c: "train-0" not in pods(c))
        await site.allocate("team-a", "train-2", "b")
        # Both a browser's own reconnect (header) and the first connect (query) leave no gap.
        known = client
        for since, header in ((first, event.id or ""), (first, "")):
            known = FleetClient(await site.get("/v1/fleet"))
            known.nodes["gpu-1"]["allocations"] = []
            async with site.viewing(since, header=header) as content:
                await until_event(content, known, lambda c: "train-2" in pods(c))
            assert pods(known) == ["secret-pod", "train-1", "train-2"]
        # An encoded snapshot is reused for a second.
        fresh = await site.until_fleet(lambda c: "train-2" in pods(c))
        assert fresh.shown() == known.shown()


async def test_unknown_position_is_answered_with_a_reset(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        client = await site.until_fleet(has_all)
        *counts, bus_identity = client.id.split("-")
        ahead = "-".join([*(str(int(part) + 1000) for part in counts), bus_identity])
        async with site.viewing(ahead) as content:
            event = await next_event(content)
            assert (event.name, event.id) == ("reset", "")
            assert "/v1/fleet" in event.data["reason"]
            assert await content.read() == b""
        for query, text in (
            ("", "is missing"),
            ("?since=4", "'4' is not a position"),
            ("?since=1-2-3-4-x", "is not a position"),
        ):
            answer = await site.get(f"/v1/fleet/events{query}", 400)
            assert text in answer["error"]["message"]


async def test_lost_bus_resets_the_viewers(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        client = await site.until_fleet(has_all)
        async with site.viewing(client.id) as content:
            assert (await next_event(content)).name == "fleet"
            await nats_server.stop()
            await nats_server.wipe()
            await nats_server.start()
            with anyio.fail_after(20):
                while (await next_event(content)).name != "reset":
                    pass


async def test_position_of_a_lost_bus_is_not_taken_for_one_of_the_new(
    nats_server: NatsServer,
) -> None:
    async with site_with(nats_server) as site:
        old = await site.until_fleet(has_all)
        await nats_server.stop()
        await nats_server.wipe()
        await nats_server.start()
        with anyio.fail_after(20):
            while "late" not in pods(new := FleetClient(await site.get("/v1/fleet"))):
                with suppress(HamiError):
                    for _ in range(4):  # more entries than the lost bus had
                        await site.allocate("team-a", "late")
                await anyio.sleep(0.1)
        counts = [[int(part) for part in one.id.split("-")] for one in (old, new)]
        assert counts[0][1] <= counts[1][1], "the old position would be a valid one by its number"
        async with site.viewing(old.id) as content:
            assert (await next_event(content)).name == "reset"


async def test_snapshot_is_compressed_for_callers_that_accept_it(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await site.until_fleet(has_all)
        url = f"{site.registry.url}/v1/fleet"
        bodies = []
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            for accepted, coding in (
                ("gzip, br", "gzip"),
                ("br, gzip;q=0.5", "gzip"),
                ("identity", None),
                ("gzip;q=0", None),
            ):
                async with http.get(url, headers={"Accept-Encoding": accepted}) as answer:
                    assert answer.headers.get("content-encoding") == coding, accepted
                    assert "accept-encoding" in answer.headers["vary"]
                    raw = await answer.read()
                    bodies.append(json.loads(gzip.decompress(raw) if coding else raw))
        assert all(FleetClient(body).shown() == FleetClient(bodies[0]).shown() for body in bodies)


async def test_viewer_that_does_not_read_is_cut(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpd, "STREAM_WRITE_S", 0.5)
    monkeypatch.setattr(fleet, "FLUSH_S", 0.005)
    async with site_with(nats_server, fleet_queue_size=1) as site:
        client = await site.until_fleet(has_all)
        other = FleetClient(await site.get("/v1/fleet"))
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            address = site.registry.url.removeprefix("http://").split(":")
            slow.connect((address[0], int(address[1])))
            path = f"/v1/fleet/events?since={client.id}"
            slow.sendall(f"GET {path} HTTP/1.1\r\nHost: registry\r\n\r\n".encode())
            async with site.viewing(client.id) as content:
                await lag(site, content, other)


async def lag(site: Site, content: aiohttp.StreamReader, other: FleetClient) -> None:
    """Send changes until one of two viewers is cut; the other one gets all of them."""
    uuids = [f"GPU-{number:036}" for number in range(250)]
    seq = 1
    with anyio.fail_after(25):
        while site.registry.sample("hami_registry_fleet_viewers_lagged_total") == 0:
            seq += 1
            await send(site.publisher, report(*uuids[: 150 + seq % 2], seq=seq))
            event = await next_event(content)
            other.apply(event.data)
        while site.registry.sample("hami_registry_fleet_viewers") > 1:
            await anyio.sleep(0.05)
    assert site.registry.sample("hami_registry_fleet_viewers_lagged_total") == 1
    # The other viewer still gets everything.
    await send(site.publisher, report("last", seq=seq + 1))
    await until_event(content, other, lambda c: len(c.nodes["gpu-1"]["devices"]) == 1)


async def test_viewers_with_the_same_rights_share_one_encoding(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        client = await site.until_fleet(has_all)
        clients = [FleetClient(await site.get("/v1/fleet")) for _ in range(3)]
        async with (
            site.viewing(client.id) as one,
            site.viewing(client.id) as two,
            site.viewing(client.id) as three,
        ):
            streams = (one, two, three)
            for content in streams:
                assert (await next_event(content)).name == "fleet"
            before = site.registry.sample("hami_registry_fleet_events_total")
            await site.allocate("team-a", "train-1")
            for content, viewer in zip(streams, clients, strict=True):
                await until_event(content, viewer, lambda c: "train-1" in pods(c))
            assert site.registry.sample("hami_registry_fleet_events_total") == before + 1


async def test_foreign_use_is_shown_and_lowers_the_capacity(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await site.until_fleet(has_all)
        (model,) = (await site.get("/v1/capacity?memory_mib=300&core_pct=20"))["items"]
        assert model["stranded"] == [{"cause": "silent", "devices": 2, "memory_mib": 1400}]
        await site.use(350)
        client = await site.until_fleet(lambda c: device(c)["foreign_mib"])
        assert (device(client)["foreign_mib"], device(client)["offer_mib"]) == (350, 50)
        assert device(client, 1)["offer_mib"] == 1000
        await site.use(500)
        client = await site.until_fleet(lambda c: device(c)["offer_mib"] == 0)
        assert device(client)["stranded_by"] == "foreign"
        await site.use(0)
        await site.until_fleet(lambda c: device(c)["offer_mib"] == 400)


async def test_bursts_are_shown_without_their_pods_and_lower_the_capacity(
    nats_server: NatsServer,
) -> None:
    async with site_with(nats_server) as site:
        await site.until_fleet(has_all)
        await site.use(50, eager=200, more=100)
        client = await site.until_fleet(lambda c: device(c)["burst_mib"])
        shown = device(client)
        assert (shown["foreign_mib"], shown["burst_mib"], shown["offer_mib"]) == (50, 300, 50)
        first, other = (await site.get("/v1/devices"))["items"]
        assert (first["burst_mib"], other["burst_mib"]) == (300, 0)
        assert "eager" not in str(first)
        await site.use(0, more=400)
        client = await site.until_fleet(lambda c: device(c)["offer_mib"] == 0)
        assert device(client)["stranded_by"] == "burst"
        (model,) = (await site.get("/v1/capacity"))["items"]
        assert (model["foreign_mib"], model["burst_mib"]) == (0, 400)


async def test_capacity_is_exported_as_metrics(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "CAPACITY_S", 0.05)
    labels = {"vendor": "nvidia", "model": "NVIDIA H200"}

    def shown(name: str, **more: str) -> float:
        return site.registry.sample(f"hami_registry_capacity_{name}", **labels, **more)

    beat = Heartbeat(node="gpu-1", boot_id="1", seq=1, time_s=0.0, vendors=("nvidia",))
    async with site_with(nats_server) as site:
        await site.until_fleet(has_all)
        await site.use(350)
        with anyio.fail_after(20):
            while shown("stranded_mib", cause="foreign") != 350:
                await site.publisher.publish(subjects.heartbeat("gpu-1"), codec.encode(beat))
                await anyio.sleep(0.05)
        assert (shown("largest_share_mib"), shown("largest_share_core_pct")) == (1000, 100)
        assert (shown("free_mib"), shown("foreign_mib")) == (1400, 350)
        # Device a has 50 MiB left, so a quarter (250 MiB, 25 %) fits on b alone.
        assert shown("shares_fitting", size="1/4") == 4
        assert shown("stranded_mib", cause="silent") == 0
        await send(site.publisher, report(seq=9))
        with anyio.fail_after(20):
            while (
                site.registry.context.registry.get_sample_value(
                    "hami_registry_capacity_free_mib", labels
                )
                is not None
            ):
                await anyio.sleep(0.05)


@pytest.fixture
def _reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    review_by_name(monkeypatch)


@pytest.mark.usefixtures("_reviews")
async def test_tenant_sees_its_own_allocations_and_the_amounts_of_others(
    nats_server: NatsServer,
) -> None:
    async with site_with(nats_server, auth="kubernetes") as guarded:
        admin, tenant = guarded.acting_as(ADMIN), guarded.acting_as(TENANT)
        everything = await admin.until_fleet(has_all)
        assert sorted(pods(everything)) == ["secret-pod", "train-0"]
        own = await tenant.get("/v1/fleet?namespace=team-a")
        client = FleetClient(own)
        assert pods(client) == ["train-0"]
        assert device(client) == device(everything), "the amounts include others"
        assert "team-b" not in json.dumps(own)
        assert "secret" not in json.dumps(own)
        async with tenant.viewing(client.id, "team-a") as content:
            assert (await next_event(content)).name == "fleet"
            await guarded.allocate("team-b", "secret-two", mib=100)
            event = await until_event(content, client, lambda c: device(c)["used_mib"] == 700)
            assert "secret" not in json.dumps(event.data)
            assert "team-b" not in json.dumps(event.data)
            await guarded.allocate("team-a", "train-1", mib=100)
            await until_event(content, client, lambda c: pods(c) == ["train-0", "train-1"])
        shown = json.dumps(await tenant.get("/v1/capacity?namespace=team-a"))
        assert "team-b" not in shown


@pytest.mark.usefixtures("_reviews")
@pytest.mark.parametrize("path", ["/v1/fleet", "/v1/fleet/events", "/v1/capacity"])
async def test_caller_without_the_permission_is_refused(nats_server: NatsServer, path: str) -> None:
    async with site_with(nats_server, auth="kubernetes") as guarded:
        since = "since=0-0-0-0" if path.endswith("events") else "namespace=team-a"
        for token, query, status in (
            ("", "", 401),
            (TENANT, "", 403),
            (TENANT, "&namespace=team-b", 403),
            (PODS_ONLY, "&namespace=team-a", 403),
        ):
            base = guarded.acting_as(token) if token else guarded
            joined = query if "namespace=" not in since else query.removeprefix("&")
            url = f"{path}?{since}{query}" if path.endswith("events") else f"{path}?{joined}"
            await base.get(url, status)
