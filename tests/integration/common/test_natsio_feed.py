# SPDX-License-Identifier: Apache-2.0
"""The agent's feed on a real nats-server: every kind of gap is found and closed (design D23)."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Unavailable
from hami_common.ports import Entry, Reset, Synced
from hami_common.runtime import natsio
from hami_sim.natsd import NatsServer, run_nats_server

pytestmark = pytest.mark.anyio

NODE = "node.a"
Item = Entry | Synced | Reset


def key(uid: str) -> str:
    return subjects.allocation_key(NODE, uid)


async def entries(items: AsyncIterator[Item], count: int) -> list[Entry]:
    found: list[Entry] = []
    with anyio.fail_after(30):
        while len(found) < count:
            item = await anext(items)
            if isinstance(item, Entry):
                found.append(item)
    return found


async def test_a_feed_makes_no_consumer(nats_server: NatsServer) -> None:
    """A thousand consumers are a stream's default limit; agents are more than that."""
    async with natsio.connect([nats_server.url], name="agent") as bus:
        await natsio.ensure_bus(bus)
        async with natsio.RepublishedFeed(bus, NODE).watch() as items:
            assert await anext(items) == Synced(revision=0)
            answer = await bus.request("$JS.API.CONSUMER.NAMES.KV_hami_alloc")
    assert b"agent" not in answer.data


async def test_records_of_each_key_are_ordered_up_to_the_latest_under_load(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
        last: dict[str, int] = {}

        async def write() -> None:
            for number in range(1_000):
                uid = key(f"p{number % 30}")
                last[uid] = await bucket.append(uid, b"%d" % number)

        seen: dict[str, list[int]] = {}
        async with (
            natsio.RepublishedFeed(bus, NODE).watch() as items,
            anyio.create_task_group() as group,
        ):

            async def read() -> None:
                async for item in items:
                    if isinstance(item, Entry):
                        seen.setdefault(item.key, []).append(item.revision)

            group.start_soon(read)
            await write()
            with anyio.fail_after(20):
                while {uid: revisions[-1] for uid, revisions in seen.items()} != last:
                    await anyio.sleep(0.005)
            group.cancel_scope.cancel()
    for revisions in seen.values():
        assert revisions == sorted(set(revisions))


async def test_a_record_with_a_missing_predecessor_makes_the_feed_read_again(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, subjects.ALLOC_BUCKET)
        await bucket.append(key("a"), b"1")
        feed = natsio.RepublishedFeed(bus, NODE, check_s=3600)
        async with feed.watch() as items:
            await entries(items, 1)
            # As if revisions 2 and 3 of key a had been lost on the way and 4 arrived.
            await bus.publish(
                f"{subjects.ALLOC_FEED_PREFIX}.{key('a')}",
                b"4",
                headers={
                    "Nats-Stream": "KV_hami_alloc",
                    "Nats-Subject": subjects.kv_subject(subjects.ALLOC_BUCKET, key("a")),
                    "Nats-Sequence": "4",
                    "Nats-Time-Stamp": "2026-01-01T00:00:00Z",
                    "Nats-Last-Sequence": "3",
                },
            )
            (entry,) = await entries(items, 1)
            assert (entry.value, entry.revision) == (b"4", 4)
            # The store knows only revision 1 of it, so what was delivered before is void.
            with anyio.fail_after(20):
                assert await anext(items) == Reset()
            (entry,) = await entries(items, 1)
            assert (entry.value, entry.revision) == (b"1", 1)
        assert feed.gap_count == 1


async def test_a_record_that_never_came_is_found_by_looking(tmp_path: Path) -> None:
    """The server withholds one key's records from the agent; only a read can find them."""
    hidden = f"{subjects.ALLOC_FEED_PREFIX}.{key('hidden')}"
    config = (
        "authorization { users = ["
        " {user: all, password: x},"
        f' {{user: agent, password: x, permissions: {{ subscribe: {{ deny: "{hidden}" }} }} }}'
        "] }"
    )
    async with run_nats_server(tmp_path / "n", config_text=config) as server:
        url = server.url.replace("nats://", "nats://{}:x@")
        async with (
            natsio.connect([url.format("all")], name="writer") as writer,
            natsio.connect([url.format("agent")], name="agent") as agent,
        ):
            await natsio.ensure_bus(writer)
            bucket = natsio.NatsBucket(writer, subjects.ALLOC_BUCKET)
            feed = natsio.RepublishedFeed(agent, NODE, check_s=0.2)
            async with feed.watch() as items:
                with anyio.fail_after(20):
                    assert await anext(items) == Synced(revision=0)
                await bucket.append(key("seen"), b"1")
                await bucket.append(key("hidden"), b"2")
                found = await entries(items, 2)
    assert [entry.value for entry in found] == [b"1", b"2"]
    assert feed.gap_count >= 1


async def test_records_written_while_the_agent_was_cut_off_arrive_after_reconnect(
    nats_server: NatsServer,
) -> None:
    async with (
        natsio.connect([nats_server.url], name="agent") as agent,
        natsio.connect([nats_server.url], name="writer") as writer,
    ):
        await natsio.ensure_bus(writer)
        bucket = natsio.NatsBucket(writer, subjects.ALLOC_BUCKET)
        async with natsio.RepublishedFeed(agent, NODE, check_s=3600).watch() as items:
            with anyio.fail_after(20):
                assert await anext(items) == Synced(revision=0)
            for number in range(3):
                await nats_server.restart()
                with anyio.fail_after(20):
                    await writer.wait_connected(after=number + 1)
                await bucket.append(key(f"p{number}"), b"%d" % number)
                (entry,) = await entries(items, 1)
                assert entry.value == b"%d" % number


class _Unread(natsio.NatsBucket):
    """A bucket whose reader, the registry, is unavailable."""

    is_away = True

    async def identity(self) -> str:
        if self.is_away:
            raise Unavailable(peer="registry", detail="is away")
        return await super().identity()


async def test_records_are_delivered_while_earlier_ones_cannot_be_read(
    nats_server: NatsServer,
) -> None:
    """An agent with a login of its own reads its node's records through the registry."""
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = _Unread(bus, subjects.ALLOC_BUCKET)
        await bucket.append(key("old"), b"1")
        async with natsio.RepublishedFeed(bus, NODE, bucket=bucket, check_s=3600).watch() as items:
            for number in (2, 3):
                await bucket.append(key(f"p{number}"), b"%d" % number)
                (entry,) = await entries(items, 1)
                assert (entry.value, entry.revision) == (b"%d" % number, number)
            bucket.is_away = False
            with anyio.fail_after(20):
                assert (await anext(items)).revision == 1  # type: ignore[union-attr] # else it fails
                assert await anext(items) == Synced(revision=3)
