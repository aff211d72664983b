# SPDX-License-Identifier: Apache-2.0
"""Measures a change of the scheduler's core: two checkouts in turn, call by call.

    git worktree add --detach OLD COMMIT
    python -m tests.bench.scheduler_turns OLD . [--nodes 5000] [--calls 60] [--mixes one,topology]

On a shared machine times of two runs cannot be compared: its other load changes from minute to
minute. Here each checkout has a process with the same cluster in it, both get the same calls of
``tests.bench.scheduler`` one right after the other, and the output has medians of processor time
and their ratio. Milliseconds.
"""

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

VERBS = ("filter", "prioritize")
SOURCES = (
    "services/scheduler/src",
    "libs/hami-common/src",
    "libs/hami-core/src",
    "libs/hami-sim/src",
)
READY = "ready"


# --- the measured process -------------------------------------------------------------------------


def serve(nodes: int) -> None:
    """Execute a call for each line ``mix plans verb number``; print its milliseconds."""
    # Those of the measured checkout.
    from hami_core.placement.verdicts import Verdicts  # noqa: PLC0415
    from tests.bench import scheduler  # noqa: PLC0415

    cluster = scheduler.build(nodes, seed=nodes)
    gc.collect()
    gc.freeze()
    verdicts, chance = Verdicts(cluster.table), random.Random(7)
    print(READY, flush=True)
    for line in sys.stdin:
        mix, plans, verb, number = line.split()
        calling = scheduler._Calling(  # noqa: SLF001 - the other half of that module
            cluster, verdicts, scheduler.MIXES[mix], chance, is_new=plans == "new"
        )
        call = getattr(calling, verb)(int(number))
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        call()
        cpu_end, end = time.thread_time(), time.perf_counter()
        print((end - begin) * 1e3, (cpu_end - cpu_begin) * 1e3, flush=True)


# --- the client -----------------------------------------------------------------------------------


class Checkout:
    """A process with the core of one checkout."""

    def __init__(self, root: Path, nodes: int) -> None:
        """Start it; it has the cluster when ``wait`` returns."""
        paths = [str(root), *(str(root / source) for source in SOURCES)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", "--nodes", str(nodes)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process ended")
        return line

    def wait(self) -> None:
        """Return when it is ready for calls."""
        if self._line().strip() != READY:
            raise SystemExit("a process did not start")

    def ask(self, *words: object) -> tuple[float, float]:
        """(wall, processor) milliseconds of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        wall, cpu = map(float, self._line().split())
        return wall, cpu

    def stop(self) -> None:
        """End it."""
        self._process.communicate()


def compare(old: Checkout, new: Checkout, mixes: list[str], calls: int) -> None:
    """Call both in turn, and print a line for each kind of call."""
    print("| mix | verb | shape | before | after | ratio | after, wall clock |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mix in mixes:
        for verb in VERBS:
            for plans in ("new", "kept"):
                before: list[tuple[float, float]] = []
                after: list[tuple[float, float]] = []
                for number in range(-3, calls):
                    pair = [one.ask(mix, plans, verb, number) for one in (old, new)]
                    if number >= 0:
                        before.append(pair[0])
                        after.append(pair[1])
                first, second = (statistics.median(c for _, c in some) for some in (before, after))
                wall = statistics.median(w for w, _ in after)
                print(
                    f"| {mix} | {verb} | {plans} | {first:.2f} | {second:.2f} "
                    f"| {second / first:.2f} | {wall:.2f} |",
                    flush=True,
                )


def main() -> None:
    """Ask, or be asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("old", type=Path, nargs="?", help="checkout from before the change")
    parser.add_argument("new", type=Path, nargs="?", help="checkout with the change")
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=60, help="calls of each kind")
    parser.add_argument(
        "--mixes", default="one,two_by_two,init_sidecar_app,two_vendors,topology,too_large"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.nodes)
        return
    if options.old is None or options.new is None:
        parser.error("two checkouts are compared")
    both = [Checkout(root.resolve(), options.nodes) for root in (options.old, options.new)]
    for one in both:
        one.wait()
    compare(both[0], both[1], options.mixes.split(","), options.calls)
    for one in both:
        one.stop()
    print(f"\nload average {', '.join(f'{value:.1f}' for value in os.getloadavg())}")


if __name__ == "__main__":
    main()
