# SPDX-License-Identifier: Apache-2.0
"""Behavior of a real nats-server that the ledger depends on (design D3, D23, D34)."""

import shutil
from pathlib import Path

import anyio
import pytest

from hami_common.bus import subjects
from hami_common.errors import Conflict
from hami_common.ports import Entry, Expect, Reset, Synced
from hami_common.runtime import natsio
from hami_common.runtime.natsio.jetstream import api
from hami_sim.natsd import NatsServer, run_nats_server

pytestmark = pytest.mark.anyio

NODE = "ip-10-0-0-1.ec2.internal"
FENCE = subjects.node_fence(NODE)
ALLOC = subjects.ALLOC_BUCKET


def key(uid: str) -> str:
    return subjects.allocation_key(NODE, uid)


def fence(sequence: int) -> Expect:
    return Expect(subject=FENCE, sequence=sequence)


async def test_purging_a_nodes_newest_record_would_move_its_fence_back(
    nats_server: NatsServer,
) -> None:
    """``forget`` refuses it, because a stale writer, fenced out before, would get in again."""
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        await bucket.append(key("a"), b"1", expect=fence(0))
        await bucket.append(key("b"), b"2", expect=fence(1))
        with pytest.raises(Conflict):
            await bucket.append(key("stale"), b"3", expect=fence(1))
        with pytest.raises(Conflict, match="carries the fence"):
            await bucket.forget(key("b"))
        await api(
            bus,
            "STREAM.PURGE.KV_hami_alloc",
            {"filter": subjects.kv_subject(ALLOC, key("b"))},
        )
        assert await bucket.last_revision(FENCE) == 1
        assert await bucket.append(key("stale"), b"3", expect=fence(1)) == 3


async def test_core_subscribers_of_the_bucket_see_refused_appends_but_the_feed_does_not(
    nats_server: NatsServer,
) -> None:
    """No service may act on a core subscription to ``$KV.…``."""
    async with (
        natsio.connect([nats_server.url], name="t") as bus,
        bus.subscribe(subjects.kv_subject(ALLOC, ">")) as raw,
        bus.subscribe(subjects.alloc_feed(NODE)) as republished,
    ):
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        await bucket.append(key("a"), b"accepted", expect=fence(0))
        with pytest.raises(Conflict):
            await bucket.append(key("b"), b"refused", expect=fence(0))
        await bucket.append(key("c"), b"accepted too", expect=fence(1))
        seen_raw: list[bytes] = []
        with anyio.fail_after(20):
            while len(seen_raw) < 3:
                seen_raw += [message.data for message in await raw.receive()]
        seen: list[bytes] = []
        with anyio.fail_after(20):
            while len(seen) < 2:
                seen += [message.data for message in await republished.receive()]
    assert seen_raw == [b"accepted", b"refused", b"accepted too"]
    assert seen == [b"accepted", b"accepted too"]


async def test_republished_records_contain_their_sequence_and_the_keys_previous_one(
    nats_server: NatsServer,
) -> None:
    """``Nats-Last-Sequence`` is per subject: the feed's gap detection is built on that."""
    async with (
        natsio.connect([nats_server.url], name="t") as bus,
        bus.subscribe(subjects.alloc_feed(NODE)) as republished,
    ):
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        for uid in ("a", "b", "a", "b"):
            await bucket.append(key(uid), b"x")
        got: list[tuple[str, str, str]] = []
        with anyio.fail_after(20):
            while len(got) < 4:
                got += [
                    (
                        message.subject.rpartition(".")[2],
                        message.headers["Nats-Sequence"],
                        message.headers["Nats-Last-Sequence"],
                    )
                    for message in await republished.receive()
                ]
    assert got == [("a", "1", "0"), ("b", "2", "0"), ("a", "3", "1"), ("b", "4", "2")]


async def test_the_events_stream_equals_the_accepted_appends_under_load(
    nats_server: NatsServer,
) -> None:
    """5,000 accepted appends by 16 fenced writers on few keys: each becomes exactly one event."""
    total, writers = 5_000, 16
    accepted: list[tuple[int, str]] = []
    refused = 0

    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)

        async def write(number: int) -> None:
            nonlocal refused
            node = f"node-{number % 4}"  # four writers fight over each node
            node_fence = subjects.node_fence(node)
            known = 0
            while len(accepted) < total:
                pod = subjects.allocation_key(node, f"pod-{len(accepted) % 10}")
                expect = Expect(subject=node_fence, sequence=known)
                try:
                    known = await bucket.append(pod, b"%d" % number, expect=expect)
                except Conflict:
                    refused += 1
                    known = await bucket.last_revision(node_fence)
                else:
                    accepted.append((known, pod))

        async with anyio.create_task_group() as group:
            for number in range(writers):
                group.start_soon(write, number)
        assert refused > 0, "the writers never met, so the test proves nothing"

        events: list[str] = []
        async with natsio.pull_events(bus, subjects.EVENTS_STREAM, batch=500) as deliveries:
            with anyio.fail_after(20):
                async for delivery in deliveries:
                    events.append(delivery.subject)
                    await delivery.ack()
                    if len(events) == len(accepted):
                        break
            with anyio.move_on_after(0.5):
                extra = await anext(deliveries)
                pytest.fail(f"one event too many: {extra.subject}")
    expected = [f"hami.v1.event.allocation.{pod}" for _, pod in sorted(accepted)]
    assert events == expected


async def test_events_keep_the_writers_cloudevents_headers(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        for bucket, kind in (
            (subjects.ALLOC_BUCKET, "allocation"),
            (subjects.STATE_BUCKET, "state"),
            (subjects.DEVICES_BUCKET, "device"),
        ):
            await natsio.NatsBucket(bus, bucket).append(
                "node.x", b"{}", headers={"ce-type": f"io.hami.{kind}.v1"}
            )
        got: dict[str, str] = {}
        async with natsio.pull_events(bus, subjects.EVENTS_STREAM) as deliveries:
            with anyio.fail_after(20):
                while len(got) < 3:
                    delivery = await anext(deliveries)
                    got[delivery.subject] = delivery.headers["ce-type"]
                    await delivery.ack()
    assert got == {
        f"hami.v1.event.{kind}.node.x": f"io.hami.{kind}.v1"
        for kind in ("allocation", "state", "device")
    }


async def test_forgetting_a_key_makes_no_event(nats_server: NatsServer) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        await bucket.append(key("a"), b"1")
        await bucket.append(key("b"), b"2")
        async with natsio.pull_events(bus, subjects.EVENTS_STREAM) as deliveries:
            with anyio.fail_after(20):
                assert [(await anext(deliveries)).data for _ in range(2)] == [b"1", b"2"]
                await bucket.forget(key("a"))
                await bucket.append(key("c"), b"3")
                assert (await anext(deliveries)).data == b"3"


async def test_a_watch_that_reads_while_the_server_is_killed_misses_and_repeats_nothing(
    nats_server: NatsServer,
) -> None:
    seen: list[int] = []
    async with natsio.connect([nats_server.url], name="t", request_timeout_s=5) as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        written: list[int] = []

        async def write(count: int) -> None:
            for number in range(count):
                revision = await bucket.append(key(f"pod-{number % 20}"), b"x")
                written.append(revision)

        async with bucket.watch() as items, anyio.create_task_group() as group:

            async def read() -> None:
                async for item in items:
                    if isinstance(item, Entry):
                        seen.append(item.revision)
                    elif isinstance(item, Reset):
                        pytest.fail("the store was not lost")

            group.start_soon(read)
            for _ in range(3):
                await write(200)
                generation = bus.generation
                await nats_server.restart()
                with anyio.fail_after(20):
                    await bus.wait_connected(after=generation)
            await write(200)
            with anyio.fail_after(20):
                while not seen or seen[-1] < written[-1]:
                    await anyio.sleep(0.005)
            group.cancel_scope.cancel()
    assert seen == written


async def test_a_watch_continues_when_the_server_lost_its_consumer(
    nats_server: NatsServer,
) -> None:
    async with natsio.connect([nats_server.url], name="t") as bus:
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        await bucket.append(key("a"), b"1")
        async with bucket.watch() as items:
            with anyio.fail_after(20):
                assert isinstance(await anext(items), Entry)
                assert await anext(items) == Synced(revision=1)
                for consumer in (await api(bus, "CONSUMER.NAMES.KV_hami_alloc"))["consumers"]:
                    if consumer.startswith("t-"):
                        await api(bus, f"CONSUMER.DELETE.KV_hami_alloc.{consumer}")
                await bucket.append(key("a"), b"2")
                entry = await anext(items)
        assert isinstance(entry, Entry)
        assert (entry.value, entry.revision) == (b"2", 2)


async def test_a_watch_reports_reset_when_the_store_was_set_back_and_written_on(
    tmp_path: Path,
) -> None:
    """A restored backup has the same stream, and soon even higher sequences, yet other values."""
    async with (
        run_nats_server(tmp_path / "n") as server,
        natsio.connect([server.url], name="t") as bus,
    ):
        await natsio.ensure_bus(bus)
        bucket = natsio.NatsBucket(bus, ALLOC)
        await bucket.append(key("a"), b"1")
        await server.stop()
        shutil.copytree(server.store, tmp_path / "backup")
        await server.start()
        with anyio.fail_after(20):
            await bus.wait_connected(after=1)
        await bucket.append(key("a"), b"lost")
        async with bucket.watch() as items:
            with anyio.fail_after(30):
                first = await anext(items)
                assert isinstance(first, Entry)
                assert (first.value, first.revision) == (b"lost", 2)
                assert isinstance(await anext(items), Synced)
                await server.stop()
                await server.wipe()
                shutil.copytree(tmp_path / "backup", server.store)
                await server.start()
                async with natsio.connect([server.url], name="other") as other:
                    second = natsio.NatsBucket(other, ALLOC)
                    assert await second.append(key("b"), b"new history") == 2
                    await second.append(key("b"), b"newer history")
                    seen = [await anext(items)]
                    while not isinstance(seen[-1], Synced):
                        seen.append(await anext(items))
        assert Reset() in seen
        values = [item.value for item in seen[seen.index(Reset()) :] if isinstance(item, Entry)]
        assert values[-1] == b"newer history"
        assert b"lost" not in values
