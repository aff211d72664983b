# SPDX-License-Identifier: Apache-2.0
"""The ledger on three real servers: no double win, no stale answer, survival of a lost server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Conflict, Unavailable
from hami_common.ports import Entry, Expect, Synced
from hami_common.runtime import natsio
from hami_common.runtime.natsio.jetstream import api
from hami_sim.natsd import NatsServer, run_nats_server
from hami_sim.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

ALLOC = subjects.ALLOC_BUCKET
LIMITS = natsio.BusLimits(replicas=3)


@pytest.fixture
async def cluster(tmp_path: Path, anyio_backend: str) -> AsyncIterator[list[NatsServer]]:
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in ports)
    async with AsyncExitStack() as stack:
        servers = []
        for number, port in enumerate(ports):
            config = (
                f"server_name: s{number}\n"
                f"cluster {{ name: hami, listen: 127.0.0.1:{port}, routes: [{routes}] }}\n"
            )
            servers.append(
                await stack.enter_async_context(
                    run_nats_server(tmp_path / f"s{number}", config_text=config)
                )
            )
        yield servers


async def test_declaring_waits_for_the_cluster_to_form(cluster: list[NatsServer]) -> None:
    async with natsio.connect([s.url for s in cluster], name="t") as bus:
        await natsio.ensure_bus(bus, limits=LIMITS)
        info = await api(bus, "STREAM.INFO.KV_hami_alloc")
        assert info["config"]["num_replicas"] == 3


async def test_of_six_racers_on_three_servers_exactly_one_wins_each_race_and_all_read_it(
    cluster: list[NatsServer],
) -> None:
    races = 60
    async with AsyncExitStack() as stack:
        buses = [
            await stack.enter_async_context(natsio.connect([server.url], name=f"r{number}"))
            for server in cluster
            for number in range(2)
        ]
        await natsio.ensure_bus(buses[0], limits=LIMITS)
        buckets = [natsio.NatsBucket(bus, ALLOC) for bus in buses]
        sequence = 0
        for race in range(races):
            expect = Expect(subject=subjects.node_fence("n"), sequence=sequence)
            won: list[int] = []

            async def run(
                number: int, *, race: int = race, expect: Expect = expect, won: list[int] = won
            ) -> None:
                key = subjects.allocation_key("n", f"pod-{race}-{number}")
                try:
                    won.append(await buckets[number].append(key, b"x", expect=expect))
                except Conflict:
                    # The loser reads back from whichever replica it reaches: never a stale answer.
                    entries = await buckets[number].latest(subjects.node_keys("n"))
                    assert entries[-1].revision > expect.sequence
                except Unavailable:
                    # A slow machine may change leaders now and then: the outcome is read back.
                    entry = await buckets[number].get(key)
                    if entry is not None:
                        won.append(entry.revision)

            async with anyio.create_task_group() as group:
                for number in range(len(buckets)):
                    group.start_soon(run, number)
            assert len(won) == 1, f"race {race} was won {len(won)} times"
            (sequence,) = won
        assert len(await buckets[0].latest(subjects.node_keys("n"))) == races


async def test_a_watch_and_a_writer_survive_the_loss_of_the_streams_leader(
    cluster: list[NatsServer],
) -> None:
    by_name = {f"s{number}": server for number, server in enumerate(cluster)}
    async with natsio.connect([s.url for s in cluster], name="t", request_timeout_s=1.0) as bus:
        await natsio.ensure_bus(bus, limits=LIMITS)
        bucket = natsio.NatsBucket(bus, ALLOC)
        fence = subjects.node_fence("n")
        written: list[int] = []
        seen: list[int] = []

        async def write_one(number: int) -> None:
            """Read an unknown outcome back before a retry, as the scheduler does."""
            value = b"%d" % number
            while True:
                try:
                    known = await bucket.last_revision(fence)
                    entries = await bucket.latest(subjects.node_keys("n"))
                    if entries and entries[-1].value == value:
                        written.append(entries[-1].revision)
                        return
                    key = subjects.allocation_key("n", f"pod-{number % 5}")
                    expect = Expect(subject=fence, sequence=known)
                    written.append(await bucket.append(key, value, expect=expect))
                except (Unavailable, Conflict):
                    await anyio.sleep(0.05)
                else:
                    return

        async with bucket.watch() as items, anyio.create_task_group() as group:

            async def read() -> None:
                async for item in items:
                    if isinstance(item, Entry):
                        seen.append(item.revision)
                    else:
                        assert isinstance(item, Synced), "the store was not lost"

            group.start_soon(read)
            with anyio.fail_after(45):
                for number in range(30):
                    await write_one(number)
                info = await api(bus, "STREAM.INFO.KV_hami_alloc")
                await by_name[info["cluster"]["leader"]].kill()
                for number in range(30, 60):
                    await write_one(number)
                while not seen or seen[-1] < written[-1]:
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    assert seen == sorted(set(seen))
    assert set(seen) == set(written)
