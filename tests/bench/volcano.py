# SPDX-License-Identifier: Apache-2.0
"""Calls of Volcano's extender plugin: time by the number of pods on the node.

Run as ``./dev bench volcano [--pods 0,50,110,250] [--calls 400] [--nodes 20] [--json -]``. The
scheduler runs in a process of its own with its server, handlers and state; bus and API server are
in memory, because predicate talks to neither. One client calls one node after another, each with
all its pods, which are as large as those of operators.

One row per number of pods: ``body_kb`` (10^3 bytes); ``least_ms``, ``p50_ms`` and ``p99_ms`` from
request to answer over HTTP; ``cpu_p50_ms`` and ``cpu_p99_ms``, processor time of the handler alone,
which other load hardly changes. ``is_met`` is true when 110 pods take less than ``MOST_MS`` at the
99th percentile over HTTP.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry

from hami_common.runtime.httpd import HttpApp, Request, serve
from hami_common.runtime.telemetry import configure_logging
from hami_scheduler.shell.volcano import PREFIX, VolcanoExtender
from hami_sim.ports import free_port
from hami_sim.process import Process
from tests.support import volcano_bodies as bodies
from tests.unit.scheduler.shell import builders
from tests.unit.scheduler.shell.world import World

HOST = "127.0.0.1"
MOST_MS = 5.0
MEASURED_PODS = 110
START_S = 30.0
WARM_CALLS = 20


class Row(Struct, frozen=True, kw_only=True):
    """Calls with one number of pods."""

    pods: int
    body_kb: int
    calls: int
    least_ms: float
    p50_ms: float
    p99_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float


def pod_of(name: str) -> bodies.Obj:
    """A pod of an operator with a share."""
    return bodies.as_operators_write(builders.pod(name, mem_mib=100, cores=1))


@asynccontextmanager
async def scheduler(nodes: int) -> AsyncIterator[VolcanoExtender]:
    """The extender of a scheduler with these nodes and one waiting pod."""
    world = World()
    for number in range(nodes):
        await world.add_devices(builders.devices(f"node-{number}", count=8, memory_mib=80_000))
    world.add_pod(builders.pod("asking"))
    async with world.scheduler() as running:
        yield running.scheduler.volcano


async def serve_scheduler(port: int, nodes: int) -> None:
    """Run a scheduler with these nodes; for a process of its own."""
    configure_logging(service="bench", level="WARNING")
    async with scheduler(nodes) as volcano, anyio.create_task_group() as group:
        app = HttpApp(
            volcano.routes(),
            registry=CollectorRegistry(),
            ready=lambda: True,
            body_limit=32 << 20,
        )
        await group.start(serve, app, HOST, port, None, 1.0)
        await anyio.sleep_forever()


async def measure(counts: Sequence[int], *, calls: int, nodes: int) -> list[Row]:
    """One row for each number of pods."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.volcano", "--serve", str(port), str(nodes)]
    with tempfile.TemporaryDirectory() as name:
        process = Process("scheduler", command, log=Path(name) / "log")
        process.start()
        try:
            async with aiohttp.ClientSession() as http:
                url = f"http://{HOST}:{port}{PREFIX}/predicate"
                await _until_served(http, url)
                return [await _row(http, url, count, calls=calls, nodes=nodes) for count in counts]
        finally:
            await process.stop()


async def _until_served(http: aiohttp.ClientSession, url: str) -> None:
    with anyio.fail_after(START_S):
        while True:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientConnectionError:
                await anyio.sleep(0.1)


async def _row(http: aiohttp.ClientSession, url: str, count: int, *, calls: int, nodes: int) -> Row:
    pods = [pod_of(f"pod-{number}") for number in range(count)]
    asking = pod_of("asking")
    sent = [bodies.predicate(asking, f"node-{number}", pods) for number in range(nodes)]
    took_s: list[float] = []
    for number in range(WARM_CALLS + calls):
        body = sent[number % nodes]
        begun_s = anyio.current_time()
        async with http.post(url, data=body) as answer:
            told = await answer.json()
        took_s.append(anyio.current_time() - begun_s)
        assert told == {"status": "", "code": 0}, told
    took_s = sorted(took_s[WARM_CALLS:])
    cpu_s = await _processor_times(sent, calls=calls)
    return Row(
        pods=count,
        body_kb=len(sent[0]) // 1000,
        calls=calls,
        least_ms=round(1000 * took_s[0], 2),
        p50_ms=round(1000 * took_s[calls // 2], 2),
        p99_ms=round(1000 * took_s[int(calls * 0.99)], 2),
        cpu_p50_ms=round(1000 * cpu_s[calls // 2], 2),
        cpu_p99_ms=round(1000 * cpu_s[int(calls * 0.99)], 2),
    )


async def _processor_times(sent: Sequence[bytes], *, calls: int) -> list[float]:
    """Processor time of the handler for each call in seconds, in order of size."""
    took_s: list[float] = []
    async with scheduler(len(sent)) as volcano:
        handler = volcano.routes()["POST", f"{PREFIX}/predicate"]
        for number in range(WARM_CALLS + calls):
            request = Request(
                method="POST",
                path=PREFIX,
                query={},
                headers={},
                body=sent[number % len(sent)],
                params={},
            )
            begun_s = time.process_time()
            await handler(request)
            took_s.append(time.process_time() - begun_s)
    return sorted(took_s[WARM_CALLS:])


def main(arguments: Sequence[str]) -> int:
    """Print the table or the document."""
    if arguments[:1] == ["--serve"]:
        anyio.run(serve_scheduler, int(arguments[1]), int(arguments[2]))
        return 0
    parser = argparse.ArgumentParser(prog="./dev bench volcano")
    parser.add_argument("--pods", default=f"0,50,{MEASURED_PODS},250")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args(arguments)
    counts = [int(word) for word in chosen.pods.split(",")]
    rows = anyio.run(lambda: measure(counts, calls=chosen.calls, nodes=chosen.nodes))
    is_met = all(row.p99_ms < MOST_MS for row in rows if row.pods == MEASURED_PODS)
    document = {"nodes": chosen.nodes, "rows": msgspec.to_builtins(rows), "is_met": is_met}
    text = json.dumps(document, indent=2)
    if chosen.json and chosen.json != "-":
        Path(chosen.json).write_text(f"{text}\n", encoding="utf-8")
    elif chosen.json:
        print(text)
    if chosen.json != "-":
        print(
            f"{'pods':>5} {'body kB':>8} {'least ms':>9} {'p50 ms':>8} {'p99 ms':>8}"
            f" {'cpu p50':>8} {'cpu p99':>8}"
        )
        for row in rows:
            print(
                f"{row.pods:>5} {row.body_kb:>8} {row.least_ms:>9} {row.p50_ms:>8} {row.p99_ms:>8}"
                f" {row.cpu_p50_ms:>8} {row.cpu_p99_ms:>8}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
