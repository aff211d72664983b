# SPDX-License-Identifier: Apache-2.0
"""Measures the hand-over between task priorities, on the fake driver.

    ./dev bench handover [--json FILE|-] [--edges 1000] [--kernel fixed_100us] [--library FILE]

A container of level 5 launches without a pause; one of level 0 works 10 ms, waits for the device
and rests 20 to 40 ms. The agent's keeper of priorities runs in a process of its own. Of each edge:
``block_ms`` from the first launch of the high one until the last launch of the low one, ``page_ms``
until the agent writes the page, ``resume_ms`` from the end of the high one's work until the low one
launches again. All times but the page's come from the driver, so that the benchmark sleeps
meanwhile and takes no processor from its processes.

``queued_ms`` is the time that the threads of the three processes waited for a processor (schedstat)
from 1 ms before the edge until the low one launches again. ``undisturbed`` has the figures of the
edges in which that was less than ``DISTURBED_MS``: on a machine that is busy with other things the
rest shows mostly how long processes waited for a processor. ``agent_pct`` and ``high_thread_pct``
are processor time in percent of one core: of the keeper, and of the limiter's thread in the high
process.

With ``--flood`` a third container sends datagrams without a pause. ``--kills N`` also kills the
high process N times while it works and measures ``freed_ms`` until the low one launches.
``--share S`` also measures ``share_pct``, the part of the device that the low one gets in S seconds
beside a high one that never pauses. ``--library`` measures that build of the limiter.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hami_nodeagent.shell import page, priority
from hami_nodeagent.shell.doorbell import SOCKET_NAME
from tests.fakes.gpucontainers import GpuContainer, GpuNode, gpu_node, why_not
from tests.support.drive import Drive
from tests.support.keeper import keeper_process, site_of
from tools import build_native, build_native_fakes

HIGH, LOW = 0, 5
DISTURBED_MS = 0.3
MISSING_MS = 1e6
RESUME_MOST_S = 2.0
WORK_MS = 10
STARVED_S = 3.0
"""Until the guard grants its parts regularly."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LONG = struct.Struct("<Q")
_FLOOD = """
import socket, sys
bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while True:
    try:
        bell.sendto(b"a", sys.argv[1])
    except OSError:
        pass
"""


def cpu_s(pid: int, thread: str = "") -> float:
    """Processor time of a process, or of its thread of this name."""
    root = Path(f"/proc/{pid}/task") if thread else Path(f"/proc/{pid}")
    paths = list(root.iterdir()) if thread else [root]
    for path in paths:
        name, _, rest = (path / "stat").read_text().partition(") ")
        if not thread or name.endswith(thread):
            words = rest.split()
            return (int(words[11]) + int(words[12])) / _TICKS_PER_S
    return 0.0


def queued_ns(pids: Sequence[int]) -> int:
    """Time that the threads of these processes have waited for a processor."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[1]) for file in files)


def figures(values: Sequence[float]) -> dict[str, float]:
    """Median, higher percentiles and longest."""
    ordered = sorted(values)
    parts = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(part * last)], 2) for name, part in parts.items()}


def summary(edges: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The figures of these edges."""
    if not edges:
        return {"edges": 0}
    names = ("block_ms", "page_ms", "resume_ms", "queued_ms")
    columns = zip(*edges, strict=True)
    return {"edges": len(edges)} | {
        name: figures(column) for name, column in zip(names, columns, strict=True)
    }


class Page:
    """The first device of the agent's page."""

    def __init__(self, path: Path, lease_s: float) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._lease_ns = int(lease_s * 1e9)

    @property
    def level(self) -> int:
        """The highest active level."""
        return self._map[page.HEADER_BYTES + priority.HIGHEST_AT]

    @property
    def written_ns(self) -> int:
        """Time at which the agent wrote it, as the lease shows."""
        at = page.HEADER_BYTES + page.LEASE_AT
        return int(_LONG.unpack_from(self._map, at)[0]) - self._lease_ns


class Rivals:
    """The two processes, and what the driver knows about them."""

    def __init__(self, node: GpuNode, high: Drive, low: Drive) -> None:
        self._node = node
        self._uuid = node.uuids[0]
        self.high, self.low = high, low

    def launched_ns(self, drive: Drive) -> tuple[int, ...]:
        """Times at which this process launched its last kernels."""
        return self._node.card.launched_ns(self._uuid, drive.process.pid)

    def served_ns(self, drive: Drive) -> int:
        """Device time that this process has had."""
        uses = self._node.card.uses(self._uuid)
        return next((use.served_ns for use in uses if use.pid == drive.process.pid), 0)

    def work(self) -> None:
        """Let the high one begin to work."""
        self.high.send(f"launch fixed_1ms 1000 {WORK_MS}")

    def done_ns(self) -> int:
        """Wait until the high one has worked; return when the device had done it."""
        self.high.answer("launch")
        self.high.ask("sync")
        return self._node.card.served_until_ns(self._uuid, self.high.process.pid)

    def resumed_ns(self, ended_ns: int) -> int:
        """Wait until the low one launches after this time; return when it did."""
        deadline = time.monotonic() + RESUME_MOST_S
        while time.monotonic() < deadline:
            if after := [one for one in self.launched_ns(self.low) if one > ended_ns]:
                return after[0]
            time.sleep(0.001)
        return ended_ns + int(RESUME_MOST_S * 1e9)


def edge(rivals: Rivals, page: Page, waited_ns: Callable[[], int]) -> tuple[float, ...]:
    """One edge: block, page, resume and waiting for processors, in ms."""
    before_ns, queued = time.monotonic_ns(), waited_ns()
    rivals.work()
    shown_ns = 0
    while not shown_ns and time.monotonic_ns() - before_ns < 3 * WORK_MS * 1e6:
        time.sleep(0.001)
        written_ns = page.written_ns
        shown_ns = written_ns if page.level == HIGH else 0
    ended_ns = rivals.done_ns()
    resumed_ns = rivals.resumed_ns(ended_ns)
    queued = waited_ns() - queued
    began_ns = next(one for one in rivals.launched_ns(rivals.high) if one > before_ns)
    inside = [one for one in rivals.launched_ns(rivals.low) if began_ns < one < ended_ns]
    return (
        (inside[-1] - began_ns) / 1e6 if inside else 0.0,
        (shown_ns - began_ns) / 1e6 if shown_ns else MISSING_MS,
        (resumed_ns - ended_ns) / 1e6,
        queued / 1e6,
    )


def kill(rivals: Rivals) -> float:
    """Kill the high process while it works; return the ms until the low one launches."""
    rivals.high.send("work fixed_1ms 1000 20000 plain 20")
    time.sleep(random.uniform(0.1, 0.2))
    killed_ns = time.monotonic_ns()
    rivals.high.process.kill()
    return (rivals.resumed_ns(killed_ns) - killed_ns) / 1e6


def least_share(rivals: Rivals, seconds: float) -> list[float]:
    """Part of the device that the low one gets in each tenth of so many seconds, in percent."""
    rivals.high.send(f"work fixed_1ms 1000 {int((seconds + STARVED_S + 1) * 1000)} plain 20")
    time.sleep(STARVED_S)
    shares = []
    for _ in range(10):
        began_s, before_ns = time.monotonic(), rivals.served_ns(rivals.low)
        time.sleep(seconds / 10)
        took_s = time.monotonic() - began_s
        shares.append((rivals.served_ns(rivals.low) - before_ns) / took_s / 1e7)
    rivals.high.answer("work")
    return shares


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The hand-over between task priorities.")
    parser.add_argument("--json", default="", help="write the document to a file, - for stdout")
    parser.add_argument("--edges", type=int, default=1000)
    parser.add_argument("--kernel", default="fixed_100us", help="of the low one")
    parser.add_argument("--flood", action="store_true", help="beside a flood of datagrams")
    parser.add_argument("--kills", type=int, default=0, help="kill the high one so often")
    parser.add_argument("--share", type=float, default=0, help="seconds beside a busy high one")
    parser.add_argument("--library", type=Path, help="build of the limiter to measure")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Run the containers and return the document."""
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    library = arguments.library or build_native.build("release")
    node = stack.enter_context(gpu_node("1xRTX-PRO-6000", drivers, library=library))
    high, low, other = (node.container(0, memory_mib=500, priority=p) for p in (HIGH, LOW, LOW))
    site = site_of(node.uuids[0], {high: HIGH, low: LOW, other: LOW})
    agent = stack.enter_context(keeper_process(site))

    def start(container: GpuContainer) -> Drive:
        drive = stack.enter_context(Drive(drivers / "drive", container=container)).begin()
        drive.ask("launch fixed_1ms 1000 3")
        drive.ask("sync")
        return drive

    rivals = Rivals(node, start(high), start(low))
    work_s = arguments.edges * 0.1 + arguments.kills * 2 + arguments.share + 30
    rivals.low.send(f"work {arguments.kernel} 1000 {int(work_s * 1000)} plain 1000")
    if arguments.flood:
        inside = f"/run/hami-priority/bells/{SOCKET_NAME}"
        flood = other.start([sys.executable, "-c", _FLOOD, inside])
        stack.callback(flood.wait)
        stack.callback(flood.kill)
    time.sleep(2)
    settings = site.settings.priority
    page = Page(Path(settings.directory) / priority.FILE_NAME, settings.lease_s)
    of_high = rivals.high.process.pid
    pids = (agent, of_high, rivals.low.process.pid)
    spent_s, thread_s = cpu_s(agent), cpu_s(of_high, "hami-watch")
    begun_s = time.monotonic()
    found = []
    for _ in range(arguments.edges):
        time.sleep(random.uniform(0.02, 0.04))
        found.append(edge(rivals, page, lambda: queued_ns(pids)))
    took_s = time.monotonic() - begun_s
    document = {
        "edges": arguments.edges,
        "kernel": arguments.kernel,
        "machine": f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}",
        "all": summary(found),
        "undisturbed": summary([one for one in found if one[3] < DISTURBED_MS]),
        "agent_pct": round((cpu_s(agent) - spent_s) / took_s * 100, 2),
        "high_thread_pct": round((cpu_s(of_high, "hami-watch") - thread_s) / took_s * 100, 2),
    }
    if arguments.share:
        shares = least_share(rivals, arguments.share)
        document["share_pct"] = round(statistics.fmean(shares), 3)
        document["share_pct_of_tenths"] = [round(min(shares), 3), round(max(shares), 3)]
    if arguments.kills:
        freed = []
        for _ in range(arguments.kills):
            freed.append(kill(rivals))
            rivals.high = start(high)
        document["freed_ms"] = figures(freed)
    rivals.low.process.kill()
    return document


def main() -> int:
    """Measure and report."""
    arguments = arguments_of()
    if reason := why_not():
        print(f"bench handover: {reason}", file=sys.stderr)
        return 3
    with ExitStack() as stack:
        document = measure(arguments, stack)
    text = json.dumps(document, indent=1)
    if arguments.json not in ("", "-"):
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
