# SPDX-License-Identifier: Apache-2.0
"""Consumption and idle shares over HTTP, from a real nats-server; hand-computed cases."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import SettingsInvalid
from hami_common.events import codec
from hami_common.events.allocation import Account, AllocationRecord
from hami_common.events.usage import ContainerUsage, ShareUsage, UsageRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.prices import Prices
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import NatsBucket, NatsPublisher, connect, ensure_bus, jetstream
from hami_sim.natsd import NatsServer
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

HOUR_S = 3600.0
LABELS = (("team", "red"),)
EURO = Prices(currency="EUR", device_hour={"NVIDIA H200": 2.0})


class Site:
    """A bus and a registry; node gpu-1 has the devices ``a`` and ``b`` of 1000 MiB for 2 hours."""

    def __init__(
        self, http: aiohttp.ClientSession, registry: RunningRegistry, bus: Any, token: str
    ) -> None:
        self.http = http
        self.registry = registry
        self.bus = bus
        self.publisher = NatsPublisher(bus)
        self.ledger = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.now_s = SystemClock().now_s()
        self.token = token
        self.revision = self.allocations = 0

    async def get(self, path: str, status: int = 200, *, token: str = "") -> Any:
        given = token or self.token
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        async with self.http.get(self.registry.url + path, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def allocate(
        self, namespace: str, pod: str, *, age_s: float, op: str = "reserve", **more: Any
    ) -> None:
        share = Share(vendor="nvidia", uuid="a", memory_mib=more.pop("mib", 500))
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
            else (ContainerShares(name="main", kind="app", shares=(share,)),),
            **more,
        )
        key = subjects.allocation_key("gpu-1", record.pod_uid)
        self.revision = await self.ledger.append(key, codec.encode(record))
        self.allocations += 1

    async def settled(self) -> None:
        """Return once the registry has read the ledger, and the server has copied its records."""
        with anyio.fail_after(20):
            while await self.read_up_to() < self.revision:
                await anyio.sleep(0.02)
            while True:
                subject = {"subjects_filter": "hami.v1.event.allocation.>"}
                state = (await self.api("STREAM.INFO.HAMI_EVENTS", subject))["state"]
                if sum(state.get("subjects", {}).values()) >= self.allocations:
                    return
                await anyio.sleep(0.02)

    async def read_up_to(self) -> int:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        async with self.http.get(f"{self.registry.url}/v1/devices", headers=headers) as answer:
            return int(answer.headers["x-hami-ledger-seq"])

    async def api(self, subject: str, request: Any = None) -> Any:
        return await jetstream.api(self.bus, subject, request)

    async def use(self, namespace: str, pod: str, *, age_s: float, device_s: float = 0.0) -> None:
        who: Any = {
            "namespace": namespace,
            "pod": pod,
            "pod_uid": f"uid-{pod}",
            "container": "main",
        }
        usage = UsageRecord(
            node="gpu-1",
            boot_id="1",
            seq=round(100_000 - age_s),
            time_s=self.now_s - age_s,
            every_s=600,
            shares=(
                ShareUsage(
                    vendor="nvidia", uuid="a", allocation_id=f"id-{pod}", used_mib=100, **who
                ),
            ),
            containers=(ContainerUsage(launches=1, device_time_s=device_s, **who),),
        )
        await self.publisher.publish_stored(subjects.usage_event("gpu-1"), codec.encode(usage))

    async def consumption(self, query: str = "", **more: Any) -> Any:
        """Of the last hour, once all records are read."""
        await self.settled()
        interval = f"from={self.now_s - HOUR_S:.3f}&to={self.now_s:.3f}"
        return await self.get(f"/v1/consumption?{interval}{query}", **more)


@asynccontextmanager
async def site_with(
    server: NatsServer, token: str = "", prices: Prices = EURO, **settings: Any
) -> AsyncIterator[Site]:
    async with connect([server.url], name="test") as bus, aiohttp.ClientSession() as http:
        await ensure_bus(bus)
        async with run_registry(server.url, prices=prices, **settings) as registry:
            site = Site(http, registry, bus, token)
            boot_ms = round((site.now_s - 2 * HOUR_S) * 1000)
            await send(site.publisher, report("a", "b", boot_id=f"{boot_ms}-1a2b"))
            with anyio.fail_after(10):
                while not (await site.get("/v1/devices"))["items"]:
                    await anyio.sleep(0.05)
            yield site


async def test_consumption_is_as_computed_by_hand(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        # Half of a device for half an hour, of which the limiter counted a fifth at work.
        await site.allocate(
            "team-a", "train", age_s=2400, account=Account(queue="gold"), labels=LABELS
        )
        await site.use("team-a", "train", age_s=2400, device_s=0.0)
        await site.use("team-a", "train", age_s=1500, device_s=180.0)
        await site.allocate("team-a", "train", age_s=600, op="release")
        # A quarter since two hours, so for the whole interval.
        await site.allocate("team-b", "serve", age_s=7200, mib=250)
        found = await site.consumption()
        a, b = (next(row for row in found["items"] if row["name"] == f"team-{n}") for n in "ab")
        assert (a["reserved_s"], b["reserved_s"]) == (pytest.approx(900), pytest.approx(900))
        assert a["used_s"] == pytest.approx(0.2 * 900)
        assert a["wasted_s"] == pytest.approx(0.3 * 900)
        assert a["unmeasured_s"] == pytest.approx(450)
        assert a["device_time_s"] == pytest.approx(180)
        assert (a["cost"], b["whole_cost"]) == (pytest.approx(0.5), pytest.approx(2.0))
        assert found["total"]["saved_s"] == pytest.approx(900 + 2700)
        assert found["fleet"]["capacity_s"] == pytest.approx(7200)
        assert found["fleet"]["free_s"] == pytest.approx(7200 - 1800)
        assert (found["currency"], found["unknown"], found["cut"]) == ("EUR", 0, "")
        assert found["complete_since_s"] == 0
        by_queue = await site.consumption("&by=queue")
        assert {row["name"] for row in by_queue["items"]} == {"", "gold"}
        by_label = await site.consumption("&by=label&label=team")
        assert {row["name"]: row["reserved_s"] for row in by_label["items"]} == {
            "red": pytest.approx(900),
            "": pytest.approx(900),
        }
        by_model = await site.consumption("&by=model")
        (model,) = by_model["items"]
        assert model["occupied_s"] == pytest.approx(3600)


async def test_a_tenant_reads_its_own_namespace_only(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    review_by_name(monkeypatch)
    async with site_with(nats_server, ADMIN, auth="kubernetes") as site:
        await site.allocate("team-a", "train", age_s=1800)
        await site.allocate("team-b", "secret", age_s=1800)
        for path in ("/v1/consumption", "/v1/idle"):
            for token in (TENANT, PODS_ONLY):
                await site.get(path, 403, token=token)
            await site.get(f"{path}?namespace=team-b", 403, token=TENANT)
        found = await site.consumption("&namespace=team-a&by=pod", token=TENANT)
        assert [row["name"] for row in found["items"]] == ["team-a/train"]
        assert found["total"]["reserved_s"] == pytest.approx(900)
        assert found["fleet"] is None
        assert "secret" not in str(found)


async def test_idle_shares_are_listed_until_they_work(nats_server: NatsServer) -> None:
    async with site_with(nats_server) as site:
        await site.allocate("team-a", "train", age_s=4000)
        for age_s in (3600, 3000, 2400, 1800, 1200, 600, 0):
            await site.use("team-a", "train", age_s=age_s, device_s=7.0 if age_s < 3600 else 0.0)
        await site.settled()
        found = await site.get("/v1/idle?minutes=45")
        (share,) = found["items"]
        assert (share["namespace"], share["pod"], share["index"]) == ("team-a", "train", 0)
        assert share["since_s"] == pytest.approx(site.now_s - 3000, abs=0.01)
        assert share["is_since_known"]
        assert share["lost_s"] == pytest.approx(0.5 * (found["to_s"] - share["since_s"]))
        assert (await site.get("/v1/idle?minutes=60"))["items"] == []
        assert (await site.get("/v1/idle?minutes=45&namespace=team-b"))["items"] == []


async def test_a_reservation_of_before_the_interval_is_found_in_the_stream(
    nats_server: NatsServer,
) -> None:
    async with site_with(nats_server) as site:
        await site.allocate("team-a", "train", age_s=5000)
        await site.allocate("team-a", "train", age_s=1800, op="release")
        found = await site.consumption()
        assert found["total"]["reserved_s"] == pytest.approx(900)
        # Events that the stream has removed are missing from then on.
        before_s = SystemClock().now_s()
        await site.api("STREAM.PURGE.HAMI_EVENTS")
        site.allocations = 0
        await site.allocate("team-a", "next", age_s=0)
        assert (await site.consumption())["complete_since_s"] >= before_s
        # Two releases, whose reservations are not stored any more.
        await site.allocate("team-a", "older", age_s=1200, op="release")
        assert (await site.consumption())["unknown"] == 2


async def test_wrong_parameters_and_prices_are_refused(nats_server: NatsServer) -> None:
    async with site_with(nats_server, prices=Prices()) as site:
        found = await site.consumption()
        assert (found["currency"], found["total"]["cost"]) == ("", None)
        for query, part in (
            ("from=yesterday", "is no time"),
            ("from=2026-05-01T00:00:00", "is no time"),
            ("from=9e9", "is no time"),
            ("from=10&to=5", "is not before the end"),
            ("by=colour", "is not one of its values"),
            ("by=label", "query parameter label: is absent, with by=label"),
            ("label=team", "query parameter label: is given without by=label"),
        ):
            answer = await site.get(f"/v1/consumption?{query}", 400)
            assert part in answer["error"]["message"], query
        answer = await site.get("/v1/idle?minutes=0", 400)
        assert "is not a whole number from 1 to 10080" in answer["error"]["message"]
        use = site.registry.context.settings_file.use
        with pytest.raises(SettingsInvalid, match=r"prices\.currency"):
            use(_with(site, Prices(currency="euro", device_hour={"*": 1.0})))
        use(_with(site, EURO))
        assert (await site.consumption())["currency"] == "EUR"


def _with(site: Site, prices: Prices) -> Any:
    settings = site.registry.context.settings
    return type(settings)(
        **{name: getattr(settings, name) for name in settings.__struct_fields__}
        | {"prices": prices}
    )
