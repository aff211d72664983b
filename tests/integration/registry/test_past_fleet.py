# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/fleet?at=`` answers who held what at a past time, from the events of a real stream."""

from datetime import UTC, datetime
from typing import Any

import aiohttp
import anyio
import pytest

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.model.placement import ContainerShares, Share
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import Bus, NatsBucket, NatsPublisher, connect, ensure_bus
from hami_sim.natsd import NatsServer
from tests.support.registry import (
    ADMIN,
    TENANT,
    report,
    review_by_name,
    run_registry,
    send,
)

pytestmark = pytest.mark.anyio


async def allocate(
    bus: Bus, pod: str, time_s: float, *, mib: int = 0, namespace: str = "team-a"
) -> None:
    """Reserve ``mib`` of device ``b`` for a pod, or release them."""
    share = Share(vendor="nvidia", uuid="b", memory_mib=mib)
    record = AllocationRecord(
        op="reserve" if mib else "release",
        allocation_id=f"id-{pod}",
        node="gpu-1",
        pod_uid=f"uid-{pod}",
        namespace=namespace,
        pod=pod,
        time_s=time_s,
        containers=(ContainerShares(name="main", kind="app", shares=(share,)),) if mib else (),
    )
    key = subjects.allocation_key("gpu-1", record.pod_uid)
    await NatsBucket(bus, subjects.ALLOC_BUCKET).append(key, codec.encode(record))


async def run(bus: Bus, pod: str, time_s: float) -> None:
    state = StateRecord(
        state="running",
        allocation_id=f"id-{pod}",
        node="gpu-1",
        pod_uid=f"uid-{pod}",
        namespace="team-a",
        pod=pod,
        ledger_seq=1,
        time_s=time_s,
    )
    key = subjects.allocation_key("gpu-1", state.pod_uid)
    await NatsBucket(bus, subjects.STATE_BUCKET).append(key, codec.encode(state))


def at(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, tz=UTC).isoformat().replace("+00:00", "Z")


async def get(http: aiohttp.ClientSession, url: str, token: str = ADMIN, status: int = 200) -> Any:
    async with http.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


def held(document: Any) -> list[tuple[str, str, int, int]]:
    """Pod, state, device and memory of each share."""
    words, pods, shares = document["words"], document["allocations"], document["shares"]
    rows = zip(shares["device"], shares["memory_mib"], strict=True)
    return [
        (pod, words[state], *next(rows))
        for pod, state in zip(pods["pod"], pods["state"], strict=True)
    ]


async def test_holders_and_devices_of_a_time(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    review_by_name(monkeypatch)
    now_s = SystemClock().now_s()
    async with (
        connect([nats_server.url], name="test") as bus,
        aiohttp.ClientSession() as http,
    ):
        await ensure_bus(bus)
        await allocate(bus, "p", now_s - 30, mib=300)
        await run(bus, "p", now_s - 26)
        await allocate(bus, "p", now_s - 15)
        await allocate(bus, "q", now_s - 6, mib=400)
        await allocate(bus, "other", now_s - 28, mib=100, namespace="team-b")
        async with run_registry(nats_server.url, auth="kubernetes") as registry:
            await send(NatsPublisher(bus), report("a", "b"))
            base = f"{registry.url}/v1/fleet"
            with anyio.fail_after(10):
                while (await get(http, base))["devices"]["used_mib"] != [0, 500]:
                    await anyio.sleep(0.05)
            expected = {
                33: ([], 0),
                29: ([("p", "reserved", 1, 300)], 300),
                22: ([("p", "running", 1, 300), ("other", "reserved", 1, 100)], 400),
                9: ([("other", "reserved", 1, 100)], 100),
                3: ([("other", "reserved", 1, 100), ("q", "reserved", 1, 400)], 500),
            }
            # The server copies records into the stream of events soon after they are stored.
            with anyio.fail_after(10):
                for age_s, (pods, _) in expected.items():
                    url = f"{base}?at={at(now_s - age_s)}"
                    while sorted(held(await get(http, url))) != sorted(pods):
                        await anyio.sleep(0.05)
            for age_s, (pods, used_mib) in expected.items():
                document = await get(http, f"{base}?at={at(now_s - age_s)}")
                assert sorted(held(document)) == sorted(pods), age_s
                assert document["nodes"]["name"] == ["gpu-1"]
                assert document["devices"]["used_mib"] == [0, used_mib], age_s
                assert document["time_s"] == pytest.approx(now_s - age_s, abs=0.001)
            # A tenant gets its own pods, and the amounts of all.
            mine = await get(http, f"{base}?namespace=team-a&at={at(now_s - 22)}", TENANT)
            assert held(mine) == [("p", "running", 1, 300)]
            assert mine["devices"]["used_mib"] == [0, 400]
            await get(http, f"{base}?at={at(now_s - 22)}", TENANT, 403)
            for wrong in (at(now_s + 100), at(now_s - 8 * 86_400), "yesterday", "", "2026-01-01"):
                problem = await get(http, f"{base}?at={wrong}", status=400)
                assert "query parameter at" in problem["error"]["message"]


async def test_time_beyond_the_bounds_of_reading_is_refused(nats_server: NatsServer) -> None:
    now_s = SystemClock().now_s()
    async with (
        connect([nats_server.url], name="test") as bus,
        aiohttp.ClientSession() as http,
        run_registry(nats_server.url, history_messages=2) as registry,
    ):
        for number in range(3):
            await allocate(bus, f"p{number}", now_s - 10, mib=10)
        with anyio.fail_after(10):
            while True:
                url = f"{registry.url}/v1/fleet?at={at(now_s)}"
                async with http.get(url) as answer:
                    if answer.status == 400:
                        assert "2 events" in await answer.text()
                        return
                await anyio.sleep(0.05)
