# SPDX-License-Identifier: Apache-2.0
"""Stores every event in SQLite and counts them by type, each exactly once, however it is killed."""

import asyncio
import contextlib
import json
import os
import sqlite3

import nats

TABLES = """CREATE TABLE IF NOT EXISTS event (source, id, type, payload, PRIMARY KEY (source, id));
            CREATE TABLE IF NOT EXISTS tally (type PRIMARY KEY, events);"""
COUNT = "INSERT INTO tally VALUES (?, 1) ON CONFLICT DO UPDATE SET events = events + 1"


async def _main() -> None:
    store = sqlite3.connect(os.environ.get("HAMI_STORE", "events.db"))
    store.executescript(TABLES)
    bus = await nats.connect(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))
    name = os.environ.get("HAMI_CONSUMER", "to-sqlite")
    events = await bus.jetstream().pull_subscribe("hami.v1.event.>", name, "HAMI_EVENTS")
    while True:
        with contextlib.suppress(nats.errors.TimeoutError):  # nothing new
            batch = await events.fetch(100, timeout=5)
            with store:  # one transaction: an event and its effect, or neither
                for message in batch:
                    try:
                        row = [message.headers[f"ce-{key}"] for key in ("source", "id", "type")]
                        row.append(json.dumps(json.loads(message.data)))
                    except (TypeError, KeyError, ValueError):
                        await message.term()  # unusable: it becomes a dead letter
                        continue
                    if store.execute("INSERT OR IGNORE INTO event VALUES (?,?,?,?)", row).rowcount:
                        store.execute(COUNT, row[2:3])
            for message in [message for message in batch if not message.is_acked]:
                await message.ack()  # after the commit: what was not acknowledged comes again


asyncio.run(_main())
