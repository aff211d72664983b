# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/integrations: killed repeatedly, on poisoned messages, in bash."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import AllocationRecord
from hami_common.events.usage import UsageRecord
from hami_common.runtime.natsio import (
    Bus,
    Delivery,
    NatsBucket,
    NatsPublisher,
    connect,
    ensure_bus,
    pull_events,
)
from hami_common.runtime.natsio.jetstream import api
from hami_sim.natsd import NatsServer
from tests.support.registry import run_registry

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).parents[3] / "examples" / "integrations"
KILLS_AT = (1, 90, 180)
EVENTS = 300
POISON = b'{"node":'


@asynccontextmanager
async def bus_on(server: NatsServer) -> AsyncIterator[Bus]:
    async with connect([server.url], name="test") as bus:
        await ensure_bus(bus)
        yield bus


async def make_consumer(bus: Bus, name: str, **more: Any) -> None:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **more}
    await api(
        bus,
        f"CONSUMER.CREATE.{subjects.EVENTS_STREAM}.{name}",
        {"stream_name": subjects.EVENTS_STREAM, "config": config, "action": ""},
    )


async def send(bus: Bus, number: int) -> None:
    """One event: every other copied by the server from the ledger."""
    headers = codec.event_headers(
        event_id=f"id-{number}",
        event_type="io.hami.allocation.reserve.v1" if number % 2 else "io.hami.usage.sampled.v1",
        source="/test/t",
        time_s=1.0,
    )
    if number % 2:
        record = AllocationRecord(
            op="reserve",
            allocation_id=str(number),
            node="n",
            pod_uid=f"u{number}",
            namespace="a",
            pod="p",
        )
        key = subjects.allocation_key("n", f"u{number}")
        await NatsBucket(bus, subjects.ALLOC_BUCKET).append(
            key, codec.encode(record), headers=headers
        )
    else:
        usage = UsageRecord(node="n", boot_id="b", seq=number, time_s=1.0)
        await NatsPublisher(bus).publish_stored(
            subjects.usage_event("n"), codec.encode(usage), headers=headers
        )


async def poison(bus: Bus) -> str:
    subject = subjects.usage_event("poisoned")
    await NatsPublisher(bus).publish_stored(subject, POISON, headers={"ce-id": "bad"})
    return subject


@contextmanager
def running(
    *command: object, output: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("ab") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **environment},
            stdout=file,
            stderr=file,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def letter_on(bus: Bus, subject: str) -> Delivery:
    with anyio.fail_after(30):
        async with pull_events(
            bus, subjects.DEAD_LETTERS_STREAM, filter_subjects=(subject,)
        ) as letters:
            return await anext(letters)


def rows(store: Path, query: str) -> list[Any]:
    if not store.exists():
        return []
    with sqlite3.connect(store, timeout=20) as reader:
        try:
            return reader.execute(query).fetchall()
        except sqlite3.OperationalError:  # the table is not there yet
            return []


async def test_killed_consumer_has_each_event_and_its_effect_exactly_once(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    store, output = tmp_path / "events.db", tmp_path / "output"
    environment = {"NATS_URL": nats_server.url, "HAMI_STORE": str(store), "HAMI_CONSUMER": "bills"}
    program = (sys.executable, EXAMPLES / "to_sqlite.py")

    async def stored(count: int) -> None:
        with anyio.fail_after(60):
            while len(rows(store, "SELECT id FROM event")) < count:
                await anyio.sleep(0.002)

    async with bus_on(nats_server) as bus, anyio.create_task_group() as group:
        # A short wait: messages that a killed program had not acknowledged are redelivered soon.
        await make_consumer(bus, "bills", ack_wait=1_000_000_000)

        async def produce() -> None:
            for number in range(EVENTS):
                await send(bus, number)
                if number == EVENTS // 2:
                    await poison(bus)

        group.start_soon(produce)
        for count in KILLS_AT:
            with running(*program, output=output, **environment) as process:
                await stored(count)
                assert process.poll() is None, output.read_text()
        with running(*program, output=output, **environment) as process:
            await stored(EVENTS)
            assert process.poll() is None, output.read_text()
        info = await api(bus, f"STREAM.INFO.{subjects.EVENTS_STREAM}")
    assert info["state"]["messages"] == EVENTS + 1
    assert sorted(rows(store, "SELECT source, id FROM event")) == sorted(
        ("/test/t", f"id-{number}") for number in range(EVENTS)
    )
    assert dict(rows(store, "SELECT type, events FROM tally")) == {
        "io.hami.allocation.reserve.v1": EVENTS // 2,
        "io.hami.usage.sampled.v1": EVENTS // 2,
    }


async def test_terminated_event_becomes_a_dead_letter(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    environment = {"NATS_URL": nats_server.url, "HAMI_STORE": str(tmp_path / "events.db")}
    async with run_registry(nats_server.url) as registry, bus_on(nats_server) as bus:
        subject = await poison(bus)
        with running(
            sys.executable, EXAMPLES / "to_sqlite.py", output=tmp_path / "output", **environment
        ):
            letter = await letter_on(bus, subjects.dead_letter("to-sqlite", subject))
        assert (letter.data, letter.headers["ce-id"]) == (POISON, "bad")
        expected = {
            "hami-reason": "terminated",
            "hami-problem": "the consumer gave no reason",
            "hami-subject": subject,
            "hami-stream": "HAMI_EVENTS",
            "hami-deliveries": "1",
        }
        assert {name: letter.headers[name] for name in expected} == expected
        await metric(registry, "terminated")


async def test_event_that_is_never_acknowledged_becomes_a_dead_letter(
    nats_server: NatsServer,
) -> None:
    """Also when no registry ran at the time the server dead-lettered it."""
    async with bus_on(nats_server) as bus:
        subject = await poison(bus)
        await make_consumer(bus, "team-a_mine", max_deliver=2, ack_wait=200_000_000)
        client = await nats.connect(nats_server.url)
        events = await client.jetstream().pull_subscribe_bind("team-a_mine", "HAMI_EVENTS")
        with anyio.fail_after(30):
            for _ in range(2):
                (message,) = await events.fetch(1, timeout=20)
                assert message.subject == subject
            with pytest.raises(nats.errors.TimeoutError):  # the server notices as it is asked again
                await events.fetch(1, timeout=1)
        await client.close()
        async with run_registry(nats_server.url) as registry:
            letter = await letter_on(bus, f"{subjects.DEAD_LETTER_PREFIX}.team-a_mine.{subject}")
            assert letter.data == POISON
            assert letter.headers["hami-reason"] == "max-deliveries"
            assert letter.headers["hami-problem"] == "delivered 2 times and never acknowledged"
            await metric(registry, "max-deliveries")


async def metric(registry: Any, reason: str) -> None:
    with anyio.fail_after(20):
        while registry.sample("hami_registry_dead_letters_total", reason=reason) < 1:
            await anyio.sleep(0.01)


async def test_bash_alone_reads_every_event_and_resumes_after_a_kill(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    environment = {"NATS_PORT": str(nats_server.port), "HAMI_CONSUMER": "shell"}

    async def printed(count: int) -> list[str]:
        with anyio.fail_after(30):
            while True:
                lines = output.read_text().splitlines() if output.exists() else []
                if len(set(lines)) >= count:
                    return lines
                await anyio.sleep(0.01)

    async with bus_on(nats_server) as bus:
        await make_consumer(bus, "shell", ack_wait=1_000_000_000)
        for number in range(60):
            await send(bus, number)
        with running(EXAMPLES / "tail.sh", output=output, **environment) as process:
            await printed(60)
            await send(bus, 60)
            await printed(61)
            assert process.poll() is None
        for number in range(61, 70):
            await send(bus, number)
        with running(EXAMPLES / "tail.sh", output=output, **environment):
            lines = await printed(70)
    first = dict.fromkeys(lines)
    assert len(first) == 70
    subject, _, payload = next(iter(first)).partition(" ")
    assert subject == subjects.usage_event("n")
    assert codec.decode(payload.encode(), UsageRecord, what=subject).node == "n"
    assert sum(".event.allocation." in line for line in first) == 35


async def test_bash_reports_why_it_cannot_read(nats_server: NatsServer, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with running(EXAMPLES / "tail.sh", output=output, NATS_PORT=str(nats_server.port)) as process:
        with anyio.fail_after(20):
            while process.poll() is None:
                await anyio.sleep(0.01)
        assert process.returncode == 1
    assert "stream not found" in output.read_text()
