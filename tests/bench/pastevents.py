# SPDX-License-Identifier: Apache-2.0
"""Measures the scheduler's filter while a comparison of policies reads and decodes past events.

Run as ``./dev bench pastevents --events 100000``. One event loop filters a pod over ``--nodes``
nodes every 5 ms: alone, while ``past_events`` reads from a real nats-server, and while a thread
decodes the events. Each line has the phase, its seconds, and percentiles of the time from the
moment at which a request was due to its answer, in ms.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from hami_common.bus import subjects
from hami_common.events.allocation import AllocationRecord
from hami_common.events.codec import encode
from hami_common.runtime.clock import SystemClock
from hami_common.runtime.natsio import Bus, connect, ensure_bus
from hami_common.runtime.natsio.history import Bounds, Event, History
from hami_core.placement.verdicts import Verdicts
from hami_scheduler.app import GARBAGE, SWITCH_S
from hami_scheduler.shell.pastevents import decoded, past_events
from hami_sim.natsd import run_nats_server
from tests.bench.scheduler import Cluster, build, named, names_text, one
from tests.bench.scheduler_cluster import booking
from tests.support.oracle import Oracle

EVERY_S = 0.005
ALONE_S = 3.0


async def store(bus: Bus, count: int, seconds: float) -> None:
    """Store reservations in the ledger until the event stream has copied them all."""
    history = History(bus, bounds=Bounds(messages=1, mib=1, time_s=1), clock=SystemClock())
    for number in range(count):
        record = AllocationRecord(
            op="reserve",
            allocation_id=f"{number:010x}",
            node=f"gpu-{number % 500:03d}",
            pod_uid=f"0f3b9c1a-6d2e-4a57-9a55-{number:012x}",
            namespace="team-a",
            pod=f"train-{number}",
            containers=booking("nvidia", f"GPU-{number % 4000}", 3000),
            time_s=SystemClock().now_s(),
        )
        key = subjects.allocation_key(record.node, record.pod_uid)
        await bus.publish(subjects.kv_subject(subjects.ALLOC_BUCKET, key), encode(record))
        if number % 500 == 0:
            await anyio.sleep(0.02)  # the server stores each message before it reads on
    with anyio.fail_after(seconds):
        while (await history.extent())[1] < count:
            await anyio.sleep(0.2)


async def answers(cluster: Cluster, ended: anyio.Event) -> list[float]:
    """Filter every 5 ms until ``ended``; return the delay of each answer in ms."""
    verdicts, request = Verdicts(cluster.table), one(1)
    text = names_text(cluster.names, random.Random(7))
    found: list[float] = []
    due_s = time.perf_counter() + EVERY_S
    while not ended.is_set():
        await anyio.sleep(max(0.0, due_s - time.perf_counter()))
        verdicts.filter(request, named(text).names)
        found.append((time.perf_counter() - due_s) * 1e3)
        due_s = max(due_s, time.perf_counter()) + EVERY_S
    return found


async def during(cluster: Cluster, phase: str, work: Callable[[], Awaitable[object]]) -> None:
    """Print the delays of answers while ``work`` runs."""
    ended, begin = anyio.Event(), time.perf_counter()
    delays: list[float] = []

    async def filter_meanwhile() -> None:
        delays.extend(await answers(cluster, ended))

    async with anyio.create_task_group() as group:
        group.start_soon(filter_meanwhile)
        await work()
        ended.set()
    delays.sort()
    line: dict[str, object] = {"phase": phase, "s": round(time.perf_counter() - begin, 2)}
    for name, part in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99)):
        line[name] = round(delays[int(len(delays) * part)], 2)
    line |= {"longest_ms": round(delays[-1], 2), "answers": len(delays)}
    print(json.dumps(line), flush=True)


async def run(events: int, nodes: int) -> None:
    """Print one line for each phase."""
    cluster = build(nodes, 1)
    cluster.oracle = Oracle()  # the collector would visit its objects
    gc.set_threshold(*GARBAGE)
    with tempfile.TemporaryDirectory() as name:
        async with (
            run_nats_server(Path(name)) as server,
            connect([server.url], name="bench") as bus,
        ):
            await ensure_bus(bus)
            await store(bus, events, 300.0)
            await during(cluster, "alone", partial(anyio.sleep, ALONE_S))
            found: list[Event] = []

            async def read() -> None:
                found.extend(await past_events(bus, SystemClock(), 0.0, 60.0))

            await during(cluster, "reading", read)
            await during(cluster, "decoding", partial(anyio.to_thread.run_sync, decoded, found))


def main(argv: Sequence[str]) -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(prog="./dev bench pastevents", description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--switch-s", type=float, default=SWITCH_S, help="longest turn of a thread")
    flags = parser.parse_args(argv)
    sys.setswitchinterval(flags.switch_s)
    anyio.run(run, flags.events, flags.nodes)


if __name__ == "__main__":
    main(sys.argv[1:])
