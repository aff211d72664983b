# SPDX-License-Identifier: Apache-2.0
"""Measures what the limiter adds to each driver call, on the fake driver.

    ./dev bench limiter [--json FILE|-] [--runs 5] [--live 1,100,10000] [--processes 1,16,64]

Rows ``{op, live, procs, native_ns, added_ns}``: processor time per call (programs/bench.c), medians
over runs that alternate between without and with the limiter; ``added_ns`` is the median of the
differences of neighbouring runs. Processor time, because 64 processes on two cores share them:
waiting for a core is no cost of the limiter. ``init`` is the wall time from the start signal until
300 processes have a context and an allocation; its figures are for all of them together.

Targets (issue text and docs/adr/0008-limiter.md): ``targets`` says for each whether it was met.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from hami_sim.gpucontainers import GpuContainer, GpuNode, gpu_node, why_not
from tools import build_native, build_native_fakes

OPS = {
    "alloc+free": ("alloc", 0),
    "launch": ("launch", 0),
    "launch, compute limit": ("launch", 50),
    "memory info": ("info", 0),
}
"""Program's word and compute limit in percent, by row name."""
MOST_NS = {"alloc+free": 60, "launch": 10, "launch, compute limit": 30, "memory info": 60}
INIT_PROCESSES = 300
INIT_MOST_S = 2.0
FLAT_RATIO = 1.2
MANY_RATIO = 1.5
_BATCHES = {1: 200, 16: 60, 64: 25}
_MEMORY_MIB = 60_000


class Row(Struct, frozen=True, kw_only=True):
    """One measurement."""

    op: str
    live: int
    procs: int
    native_ns: float
    added_ns: float


class Target(Struct, frozen=True, kw_only=True):
    """One promise and what was measured."""

    what: str
    limit: float
    measured: float
    is_met: bool


def run_once(container: GpuContainer, program: Path, words: list[str]) -> tuple[float, float]:
    """One run of the program: nanoseconds per call, seconds in all."""
    done = container.run([program, *words], limit_s=300)
    if done.returncode != 0:
        msg = f"bench {' '.join(words)} failed: {done.stderr[:500]}"
        raise RuntimeError(msg)
    ns, seconds = done.stdout.split()
    return float(ns), float(seconds)


def measure(
    native: GpuContainer, limited: GpuContainer, program: Path, words: list[str], runs: int
) -> tuple[float, float]:
    """Median without the limiter, and median of what it adds."""
    natives, added = [], []
    for _ in range(runs):
        before = run_once(native, program, words)[0]
        natives.append(before)
        added.append(run_once(limited, program, words)[0] - before)
    return statistics.median(natives), statistics.median(added)


def measure_init(native: GpuContainer, limited: GpuContainer, program: Path, runs: int) -> Row:
    """Wall time until 300 processes have initialised."""
    words = ["init", "0", str(INIT_PROCESSES), "1"]
    without = [run_once(native, program, words)[1] * 1e9 for _ in range(runs)]
    with_it = [run_once(limited, program, words)[1] * 1e9 for _ in range(runs)]
    base = statistics.median(without)
    return Row(
        op="init",
        live=0,
        procs=INIT_PROCESSES,
        native_ns=base,
        added_ns=statistics.median(with_it) - base,
    )


def measure_all(
    node: GpuNode, program: Path, lives: list[int], processes: list[int], runs: int
) -> list[Row]:
    """All rows."""
    native = node.container(0, memory_mib=_MEMORY_MIB, is_preloaded=False)
    by_core = {
        core_pct: node.container(0, memory_mib=_MEMORY_MIB, core_pct=core_pct)
        for core_pct in {core for _, core in OPS.values()}
    }
    rows = []
    for op, (word, core_pct) in OPS.items():
        for procs in processes:
            for live in lives:
                words = [word, str(live), str(procs), str(_BATCHES.get(procs, 50))]
                base, added = measure(native, by_core[core_pct], program, words, runs)
                row = Row(op=op, live=live, procs=procs, native_ns=base, added_ns=added)
                rows.append(row)
                print(
                    f"{op:<22} live {live:>6} procs {procs:>3}: native {base:7.1f} ns,"
                    f" added {added:7.1f} ns",
                    file=sys.stderr,
                )
    rows.append(measure_init(native, by_core[0], program, runs))
    return rows


def judge(rows: list[Row]) -> list[Target]:
    """Each promise that these rows can speak of."""
    targets = []

    def add(what: str, limit: float, measured: float) -> None:
        targets.append(
            Target(what=what, limit=limit, measured=round(measured, 3), is_met=measured <= limit)
        )

    for op, most_ns in MOST_NS.items():
        alone = {row.live: row.added_ns for row in rows if row.op == op and row.procs == 1}
        if alone:
            add(f"{op}: ns added, one process", most_ns, max(alone.values()))
    pairs = {(row.live, row.procs): row for row in rows if row.op == "alloc+free"}
    totals = {key: row.native_ns + row.added_ns for key, row in pairs.items()}
    flat = [total for (live, procs), total in totals.items() if procs == 1 and live >= 10]
    if len(flat) > 1:
        add(
            "alloc+free: slowest over fastest, from 10 live on",
            FLAT_RATIO,
            max(flat) / min(flat),
        )
    for live, procs in pairs:
        if procs > 1 and (live, 1) in totals:
            ratio = totals[live, procs] / totals[live, 1]
            add(f"alloc+free: {procs} processes over one, {live} live", MANY_RATIO, ratio)
    for row in rows:
        if row.op == "init":
            total_s = (row.native_ns + row.added_ns) / 1e9
            add(f"{row.procs} processes initialise: seconds", INIT_MOST_S, total_s)
    return targets


def numbers(text: str) -> list[int]:
    """A comma list of numbers."""
    return [int(word) for word in text.split(",")]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="What the limiter adds to each driver call.")
    parser.add_argument("--json", default="", help="write the document to a file, - for stdout")
    parser.add_argument("--runs", type=int, default=5, help="runs per row, with and without each")
    parser.add_argument("--live", type=numbers, default=[1, 10, 100, 10_000, 100_000])
    parser.add_argument("--processes", type=numbers, default=[1, 16, 64])
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"bench limiter: {reason}", file=sys.stderr)
        return 3
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    library = build_native.build("release")
    with gpu_node("8xH100", drivers, library=library) as node:
        rows = measure_all(
            node, drivers / "bench", arguments.live, arguments.processes, arguments.runs
        )
    targets = judge(rows)
    document = {
        "clock": "processor time per call; init: wall time of all processes",
        "machine": f"{os.cpu_count()} processors, {platform.machine()}, {platform.release()}",
        "rows": msgspec.to_builtins(rows),
        "targets": msgspec.to_builtins(targets),
    }
    text = json.dumps(document, indent=1)
    if arguments.json == "-":
        print(text)
    elif arguments.json:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    for target in targets:
        verdict = "met" if target.is_met else "MISSED"
        print(f"{target.what}: {target.measured} of {target.limit}, {verdict}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
