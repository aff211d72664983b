# SPDX-License-Identifier: Apache-2.0
"""Measures what the limiter adds to each driver call, on the fake driver.

    ./dev bench limiter [--json FILE|-] [--rounds 15] [--live 1,100,10000] [--processes 1,16,64]
        [--against FILE]

A row is ``{op, live, procs, native_ns, added_ns, least_added_ns, spread_ns, kept}``. Two groups of
processes stand ready, one without and one with the limiter, and take turns: a round of the one, a
round of the other, many short ones (programs/bench.c). Nanoseconds are of processor time per call,
because 64 processes on two cores share them and waiting for a core is no cost of the limiter;
batches in which the processor was taken away or was slow do not count, nor do pairs of rounds with
hardly any other, as long as there are enough. ``native_ns`` is the median of the rounds without,
``added_ns`` the median of the differences of neighboring rounds, ``spread_ns`` the distance
between the quartiles of these differences, ``least_added_ns`` the difference of the least batches,
and ``kept`` the part of the batches that counted. ``init`` is the wall time from the start signal
until 300 processes have a context, a module and an allocation; its figures are for all together.

With ``--against`` the group without the limiter has another build of it, so that ``added_ns`` is
what this build costs more than that one; there are no targets then.

Targets (docs/adr/0008-limiter.md): ``targets`` says for each whether it was met, by ``added_ns``.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from tests.fakes.gpucontainers import GpuContainer, GpuNode, gpu_node, why_not
from tools import build_native, build_native_fakes

OPS = {
    "alloc+free": ("alloc", 0),
    "async alloc+free": ("pool", 0),
    "launch": ("launch", 0),
    "launch, compute limit": ("launch", 50),
    "memory info": ("info", 0),
}
"""Program's word and compute limit in percent, by row name."""
MOST_NS = {
    "alloc+free": 50,
    "async alloc+free": 60,
    "launch": 8,
    "launch, compute limit": 16,
    "memory info": 60,
}
INIT_PROCESSES = 300
INIT_MOST_S = 2.0
FLAT_RATIO = 1.2
MANY_RATIO = 1.5
INIT_RUNS = 5
QUIET_PART = 0.2
ROW_S = 5.0
"""A pair of rounds counts if this part of the batches of both was undisturbed; where the machine is
so busy that too few do within this time, those that were disturbed least."""
_BATCHES = {1: 60, 16: 20, 64: 10}
"""In one round of each process, by the number of processes."""
_MEMORY_MIB = 60_000


class Row(Struct, frozen=True, kw_only=True):
    """One measurement."""

    op: str
    live: int
    procs: int
    native_ns: float
    added_ns: float
    least_added_ns: float
    spread_ns: float
    kept: float


class Target(Struct, frozen=True, kw_only=True):
    """One target and its measurement."""

    what: str
    limit: float
    measured: float
    is_met: bool


class Round(Struct, frozen=True, kw_only=True):
    """Result of one group in one turn."""

    median_ns: float
    least_ns: float
    kept: int
    """Batches that counted."""


class Group:
    """Processes that stand ready to repeat their calls."""

    reference_ns = 0.0
    """Best speed of the processor in any group so far; 0: not measured yet."""

    def __init__(self, container: GpuContainer, program: Path, words: list[str]) -> None:
        """Start them and wait until all are ready."""
        self._words = words
        self._process = container.start([program, *words])
        self._expect("ready")

    def __enter__(self) -> Self:
        """Usable as a context, ended with it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def round(self) -> Round:
        """Return nanoseconds per call, and the number of batches that counted."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{Group.reference_ns}\n")
        self._process.stdin.flush()
        median_ns, least_ns, kept, reference_ns = self._expect().split()
        if float(reference_ns) > 0:
            Group.reference_ns = float(reference_ns)
        return Round(median_ns=float(median_ns), least_ns=float(least_ns), kept=int(kept))

    def _expect(self, word: str = "") -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line or (word and line != word):
            self._process.kill()
            _, stderr = self._process.communicate()
            msg = f"bench {' '.join(self._words)} failed: {stderr[:500]}"
            raise RuntimeError(msg)
        return line


@contextmanager
def groups(
    native: GpuContainer, limited: GpuContainer, program: Path, words: list[str]
) -> Iterator[tuple[Group, Group]]:
    """The same processes without and with the limiter."""
    with ExitStack() as stack:
        yield (
            stack.enter_context(Group(native, program, words)),
            stack.enter_context(Group(limited, program, words)),
        )


def measure(
    native: GpuContainer,
    limited: GpuContainer,
    program: Path,
    row: tuple[str, int, int, str],
    rounds: int,
) -> Row:
    """One row: name, live allocations, processes and the program's word for the call."""
    op, live, procs, word = row
    batches = _BATCHES.get(procs, 10)
    words = [word, str(live), str(procs), str(batches)]
    with groups(native, limited, program, words) as (without, with_it):
        for group in (without, with_it):
            group.round()  # warm up caches and leases
        enough = procs * batches * QUIET_PART
        tried: list[tuple[Round, Round]] = []
        pairs: list[tuple[Round, Round]] = []
        deadline = time.monotonic() + ROW_S
        while len(pairs) < rounds and (len(tried) < rounds or time.monotonic() < deadline):
            pair = (without.round(), with_it.round())
            tried.append(pair)
            if min(pair[0].kept, pair[1].kept) >= enough:
                pairs.append(pair)
    if len(pairs) < rounds:
        pairs = sorted(tried, key=lambda pair: -min(pair[0].kept, pair[1].kept))[:rounds]
    differences = [after.median_ns - before.median_ns for before, after in pairs]
    lower, middle, upper = statistics.quantiles(differences, n=4)
    counted = sum(before.kept + after.kept for before, after in tried)
    return Row(
        op=op,
        live=live,
        procs=procs,
        native_ns=statistics.median(before.median_ns for before, _ in pairs),
        added_ns=middle,
        least_added_ns=min(after.least_ns for _, after in pairs)
        - min(before.least_ns for before, _ in pairs),
        spread_ns=upper - lower,
        kept=counted / (2 * len(tried) * procs * batches),
    )


def measure_init(native: GpuContainer, limited: GpuContainer, program: Path) -> Row:
    """Wall time until 300 processes have initialized, the only ones on their device."""
    words = ["init", "0", str(INIT_PROCESSES), "1"]
    pairs = []
    for _ in range(INIT_RUNS):
        with Group(native, program, words) as without:
            before_ns = without.round().median_ns
        with Group(limited, program, words) as with_it:
            pairs.append((before_ns, with_it.round().median_ns))
    differences = [after - before for before, after in pairs]
    lower, middle, upper = statistics.quantiles(differences, n=4)
    return Row(
        op="init",
        live=0,
        procs=INIT_PROCESSES,
        native_ns=statistics.median(before for before, _ in pairs),
        added_ns=middle,
        least_added_ns=min(differences),
        spread_ns=upper - lower,
        kept=1.0,
    )


def containers_by_core(node: GpuNode, *, library: Path | None) -> dict[int, GpuContainer]:
    """A container per compute limit of the rows, with this build of the limiter or without one."""
    node.library = library
    return {
        core_pct: node.container(0, memory_mib=_MEMORY_MIB, core_pct=core_pct)
        for core_pct in {core for _, core in OPS.values()}
    }


def measure_all(
    node: GpuNode,
    libraries: tuple[Path | None, Path],
    program: Path,
    arguments: argparse.Namespace,
) -> list[Row]:
    """All rows; the libraries are that of the first group, if any, and that of the second one."""
    lives, processes, rounds = arguments.live, arguments.processes, arguments.rounds
    without, by_core = (containers_by_core(node, library=one) for one in libraries)
    rows = []
    for op, (word, core_pct) in OPS.items():
        for procs in processes:
            for live in lives:
                native, limited = without[core_pct], by_core[core_pct]
                row = measure(native, limited, program, (op, live, procs, word), rounds)
                rows.append(row)
                print(
                    f"{op:<22} live {live:>6} procs {procs:>3}: native {row.native_ns:7.1f} ns,"
                    f" added {row.added_ns:7.1f} ns (quartiles {row.spread_ns:.1f} apart,"
                    f" least {row.least_added_ns:.1f}, {row.kept:.0%} of batches)",
                    file=sys.stderr,
                )
    rows.append(measure_init(without[0], by_core[0], program))
    return rows


def judge(rows: list[Row]) -> list[Target]:
    """Judge each target that these rows cover."""
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
    parser.add_argument("--rounds", type=int, default=15, help="per row, with and without each")
    parser.add_argument("--live", type=numbers, default=[1, 10, 100, 10_000, 100_000])
    parser.add_argument("--processes", type=numbers, default=[1, 16, 64])
    parser.add_argument("--against", type=Path, help="another build of the limiter")
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"bench limiter: {reason}", file=sys.stderr)
        return 3
    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    library = build_native.build("release")
    with gpu_node("8xH100", drivers, library=library) as node:
        rows = measure_all(node, (arguments.against, library), drivers / "bench", arguments)
    targets = [] if arguments.against else judge(rows)
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
