# SPDX-License-Identifier: Apache-2.0
"""Measures what the registry costs when many viewers show a large fleet.

Run as ``./dev bench console --nodes 5000 --viewers 50 --rate 50 --json -``. The registry is a
process of its own on a real nats-server; devices and allocations are written to the buckets as its
peers write them, and viewers are HTTP clients that load the snapshot and read events. The document
has ``nodes``, ``devices``, ``shares``, ``snapshot_bytes`` and ``snapshot_gzip_bytes``,
``snapshot_first_s`` (with all nodes to pack) and ``snapshot_next_s`` (median), ``viewers``,
``changes_per_s`` as written, ``idle_cpu`` (same changes, no viewer) and ``cpu`` (with viewers) as
parts of one CPU, ``memory_mib``, ``events``, ``event_bytes`` per viewer and second, and ``delay_s``
(median and worst, from the write to the viewer). ``bundle_bytes`` and ``browser`` are of the map in
Chromium (``tests.bench.console_browser``), while changes go on. Exit code 1 when the compressed
snapshot passes 1 MB, or a viewer was cut or misses a change.
"""

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from hami_common.bus import subjects
from hami_common.events import codec
from hami_common.events.allocation import Account, AllocationRecord, StateRecord
from hami_common.events.inventory import Heartbeat, NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.ports import Write
from hami_common.runtime.natsio import Bus, NatsBucket, NatsPublisher, connect, ensure_bus
from hami_sim.natsd import run_nats_server
from tests.bench import console_browser
from tests.support.fleet import FleetClient, next_event
from tools import build_console

LIMIT_BYTES = 1_000_000
DEVICES = 8
_MODELS = (("NVIDIA H200", 143_771), ("NVIDIA A100-SXM4-80GB", 81_920), ("NVIDIA L40S", 46_068))
_TICK = os.sysconf("SC_CLK_TCK")


def node_name(number: int) -> str:
    """Name of a node."""
    return f"gpu-{number:05d}.rack-{number // 32:03d}.example"


def node_devices(number: int, seq: int = 1) -> NodeDevices:
    """Canonical devices of a node; some are cordoned or unhealthy."""
    model, mib = _MODELS[number % len(_MODELS)]
    return NodeDevices(
        node=node_name(number),
        vendor="nvidia",
        boot_id="1763683200000-1a2b3c4d",
        seq=seq,
        time_s=1763683200.0,
        config_generation=1,
        devices=tuple(
            Device(
                uuid=f"GPU-{uuid.UUID(int=number * DEVICES + index)}",
                vendor="nvidia",
                index=index,
                type=model,
                memory_mib=mib,
                capacity_mib=mib,
                numa=index // 4,
                minor=index,
                bus_id=f"0000:{index:02x}:00.0",
                healthy=(number * DEVICES + index) % 997 != 0,
                cordoned=(number * DEVICES + index) % 499 == 0,
            )
            for index in range(DEVICES)
        ),
        driver_version="570.124.06",
    )


class Writer:
    """Writes allocations as the scheduler and the agents do."""

    def __init__(self, bus: Bus, chance: random.Random, nodes: int) -> None:
        self.ledger = NatsBucket(bus, subjects.ALLOC_BUCKET)
        self.states = NatsBucket(bus, subjects.STATE_BUCKET)
        self._chance = chance
        self._nodes = nodes
        self.written: dict[str, float] = {}
        """Time of the write by name of the pod, of pods since the measurement began."""

    def word(self, length: int) -> str:
        """A random suffix as Kubernetes makes it."""
        return "".join(self._chance.choices("bcdfghjklmnpqrstvwxz2456789", k=length))

    def record(self, number: int, index: int) -> AllocationRecord:
        """A share of a device."""
        chance = self._chance
        return AllocationRecord(
            op="reserve",
            allocation_id=self.word(16),
            node=node_name(number),
            pod_uid=str(uuid.UUID(int=chance.getrandbits(128))),
            namespace=f"team-{chance.randrange(200)}",
            pod=f"{chance.choice(('train', 'serve', 'notebook'))}-{self.word(9)}-{self.word(5)}",
            time_s=1763683200.0 + chance.randrange(1_000_000),
            account=Account(queue=f"queue-{chance.randrange(40)}", priority_class="batch"),
            containers=(
                ContainerShares(
                    name="main",
                    kind="app",
                    shares=(
                        Share(
                            vendor="nvidia",
                            uuid=f"GPU-{uuid.UUID(int=number * DEVICES + index)}",
                            memory_mib=chance.randrange(1, 40) * 1024,
                            core_pct=chance.choice((0, 10, 25, 50)),
                        ),
                    ),
                ),
            ),
        )

    async def fill(self, shares: int) -> None:
        """Store one share per device until there are ``shares``."""
        records = [
            self.record(number % self._nodes, number // self._nodes % DEVICES)
            for number in range(shares)
        ]
        for start in range(0, len(records), 500):
            some = records[start : start + 500]
            await self.ledger.append_all(
                [
                    Write(
                        key=subjects.allocation_key(one.node, one.pod_uid), value=codec.encode(one)
                    )
                    for one in some
                ]
            )
            await self.states.append_all([_state(one, "running") for one in some])

    async def change(self, rate: float, until_s: float) -> int:
        """Reserve and start pods and release them, ``rate`` messages per second; their number."""
        count, begin = 0, time.monotonic()
        live: list[AllocationRecord] = []
        while (now := time.monotonic()) < until_s:
            due = int((now - begin) * rate)
            while count < due:
                if len(live) < 20 or self._chance.random() < 0.5:
                    one = self.record(
                        self._chance.randrange(self._nodes), self._chance.randrange(DEVICES)
                    )
                    key = subjects.allocation_key(one.node, one.pod_uid)
                    self.written[one.pod] = time.monotonic()
                    await self.ledger.append(key, codec.encode(one))
                    state = _state(one, "bound")
                    await self.states.append(state.key, state.value)
                    live.append(one)
                    count += 2
                else:
                    one = live.pop(self._chance.randrange(len(live)))
                    gone = AllocationRecord(
                        op="release",
                        allocation_id=one.allocation_id,
                        node=one.node,
                        pod_uid=one.pod_uid,
                        namespace=one.namespace,
                        pod=one.pod,
                    )
                    key = subjects.allocation_key(one.node, one.pod_uid)
                    await self.ledger.append(key, codec.encode(gone))
                    count += 1
            await anyio.sleep(0.01)
        return count


def _state(record: AllocationRecord, word: str) -> Write:
    state = StateRecord(
        state=word,  # type: ignore[arg-type]  # one of the states
        allocation_id=record.allocation_id,
        node=record.node,
        pod_uid=record.pod_uid,
        namespace=record.namespace,
        pod=record.pod,
        ledger_seq=1,
    )
    key = subjects.allocation_key(record.node, record.pod_uid)
    return Write(key=key, value=codec.encode(state))


class Registry:
    """A registry in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def cpu_s(self) -> float:
        """CPU time that it used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def memory_mib(self) -> int:
        """Resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", text)
        return int(found[1]) // 1024 if found else 0


@contextlib.asynccontextmanager
async def running(nats_url: str, log: Path, *settings: str) -> AsyncIterator[Registry]:
    """Start a registry and wait until it answers."""
    pairs = [f"nats_urls={nats_url}", "watch_nodes=false", "http_port=0", *settings]
    flags = [part for pair in pairs for part in ("--set", pair)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hami_registry", *flags], stderr=output, stdout=output
        )
    try:
        with anyio.fail_after(300):
            url = await _ready(log)
        yield Registry(process, url)
    finally:
        process.terminate()
        process.wait()


async def _ready(log: Path) -> str:
    """Wait until the registry that writes this log has read everything; its address."""
    while True:
        await anyio.sleep(0.1)
        found = re.search(r'"port": ?(\d+)|port=(\d+)', log.read_text())
        if found is None:
            continue
        url = f"http://127.0.0.1:{found[1] or found[2]}"
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"{url}/readyz") as answer:
                if answer.status == 200:
                    return url


async def beat(publisher: NatsPublisher, nodes: int) -> None:
    """Send heartbeats of all nodes, each every 5 s."""
    seq = 0
    while True:
        seq += 1
        for number in range(nodes):
            name = node_name(number)
            one = Heartbeat(node=name, boot_id="1", seq=seq, time_s=0.0, vendors=("nvidia",))
            await publisher.publish(subjects.heartbeat(name), codec.encode(one))
            if number % (nodes // 50 or 1) == 0:
                await anyio.sleep(0.1)


class Viewer:
    """Reads events; one of them also applies them."""

    def __init__(self) -> None:
        self.events = 0
        self.size = 0
        self.delays: list[float] = []
        self.ended = False

    async def read(
        self, registry: Registry, since: str, client: FleetClient | None, written: dict[str, float]
    ) -> None:
        """Read until cancelled or cut."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22) as http,
            http.get(f"{registry.url}/v1/fleet/events", params={"since": since}) as answer,
        ):
            while True:
                if client is None:
                    chunk = await answer.content.readany()
                    self.events += chunk.count(b"event: fleet\n")
                    self.size += len(chunk)
                    if not chunk or b"event: end\n" in chunk:
                        self.ended = True
                        return
                    continue
                event = await next_event(answer.content)
                if event.name != "fleet":
                    self.ended = True
                    return
                now = time.monotonic()
                client.apply(event.data)
                for pod in event.data["allocations"]["pod"]:
                    if (at := written.pop(pod, None)) is not None:
                        self.delays.append(now - at)


async def shown(
    writer: Writer, registry: Registry, flags: argparse.Namespace
) -> dict[str, Any] | None:
    """Measure the map in a browser while changes are written; None without runs."""
    if not flags.browser_runs:
        return None
    async with anyio.create_task_group() as changing:
        changing.start_soon(writer.change, flags.rate, time.monotonic() + 3600)
        found = await console_browser.measure(registry.url, flags.browser_runs)
        changing.cancel_scope.cancel()
    return found


async def measure(
    flags: argparse.Namespace, folder: Path, console: Path
) -> tuple[dict[str, Any], bool]:
    """Run the measurement; the document, and whether all conditions hold."""
    chance = random.Random(flags.seed)
    log = folder / "registry.log"
    async with (
        run_nats_server(folder / "nats") as nats,
        connect([nats.url], name="bench") as bus,
        anyio.create_task_group() as group,
        aiohttp.ClientSession(auto_decompress=False) as http,
    ):
        await ensure_bus(bus)
        writer = Writer(bus, chance, flags.nodes)
        devices = NatsBucket(bus, subjects.DEVICES_BUCKET)
        for start in range(0, flags.nodes, 500):
            await devices.append_all(
                [
                    Write(
                        key=subjects.devices_key(node_name(number), "nvidia"),
                        value=codec.encode(node_devices(number)),
                    )
                    for number in range(start, min(start + 500, flags.nodes))
                ]
            )
        await writer.fill(flags.shares)
        settings = (
            "listener_limit_per_caller=200",
            "listener_limit=400",
            f"console_dir={console}",
        )
        async with running(nats.url, log, *settings) as registry:
            group.start_soon(beat, NatsPublisher(bus), flags.nodes)

            async def load(accept: str) -> tuple[bytes, float]:
                begin = time.perf_counter()
                headers = {"Accept-Encoding": accept}
                async with http.get(f"{registry.url}/v1/fleet", headers=headers) as answer:
                    body = await answer.read()
                    assert answer.status == 200, body
                return body, time.perf_counter() - begin

            plain, first_s = await load("identity")
            small, _ = await load("gzip")
            await anyio.sleep(6)  # heartbeats of all nodes
            times = []
            for _ in range(5):
                await anyio.sleep(1.2)  # longer than an encoded snapshot is reused
                times.append((await load("gzip"))[1])

            async def share_of_cpu(seconds: float) -> tuple[float, int]:
                before = registry.cpu_s()
                begin = time.monotonic()
                count = await writer.change(flags.rate, begin + seconds)
                return (registry.cpu_s() - before) / (time.monotonic() - begin), count

            idle_cpu, _ = await share_of_cpu(flags.seconds)
            body, _ = await load("identity")
            client = FleetClient(json.loads(body))
            since, writer.written = client.id, {}
            viewers = [Viewer() for _ in range(flags.viewers)]
            async with anyio.create_task_group() as viewing:
                for number, viewer in enumerate(viewers):
                    own = client if number == 0 else None
                    viewing.start_soon(viewer.read, registry, since, own, writer.written)
                await anyio.sleep(2)
                cpu, count = await share_of_cpu(flags.seconds)
                memory_mib = registry.memory_mib()
                await anyio.sleep(2)
                cut = sum(viewer.ended for viewer in viewers)
                viewing.cancel_scope.cancel()
            await anyio.sleep(1.2)
            later = FleetClient(json.loads((await load("identity"))[0]))
            browser = await shown(writer, registry, flags)
        group.cancel_scope.cancel()
    others = viewers[1:] or viewers
    delays = viewers[0].delays
    is_equal = client.shown() == later.shown()
    document = {
        "nodes": flags.nodes,
        "devices": flags.nodes * DEVICES,
        "shares": flags.shares,
        "snapshot_bytes": len(plain),
        "snapshot_gzip_bytes": len(small),
        "snapshot_first_s": round(first_s, 3),
        "snapshot_next_s": round(statistics.median(times), 3),
        "viewers": flags.viewers,
        "changes_per_s": round(count / flags.seconds, 1),
        "idle_cpu": round(idle_cpu, 3),
        "cpu": round(cpu, 3),
        "memory_mib": memory_mib,
        "events": statistics.median(viewer.events for viewer in others),
        "event_bytes": round(
            statistics.median(viewer.size for viewer in others) / (flags.seconds + 4)
        ),
        "delay_s": {
            "median": round(statistics.median(delays), 3) if delays else None,
            "worst": round(max(delays), 3) if delays else None,
        },
        "viewers_cut": cut,
        "equals_later_snapshot": is_equal,
        "bundle_bytes": console_browser.bundle_bytes(console),
        "browser": browser,
    }
    return document, is_equal and not cut and len(small) <= LIMIT_BYTES


def main(argv: Sequence[str]) -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(prog="./dev bench console", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--shares", type=int, default=40_000)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--rate", type=float, default=50.0, help="messages per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--browser-runs", type=int, default=5, help="0: without a browser")
    parser.add_argument("--json", default="-", help="file, or - for standard output")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        document, is_good = anyio.run(measure, flags, Path(name), build_console.build())
    text = json.dumps(document, indent=2) + "\n"
    if flags.json == "-":
        sys.stdout.write(text)
    else:
        Path(flags.json).write_text(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
