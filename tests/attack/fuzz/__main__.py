# SPDX-License-Identifier: Apache-2.0
"""Runs the fuzzers from the command line.

    ./dev fuzz                                  every target at full size, fixed seed
    ./dev fuzz admission extender --count 5000  these, with so many cases each
    ./dev fuzz --fresh                          a new seed, which is printed
    ./dev fuzz admission --seed 1f3a --first 4117 --count 1   the same case again
    ./dev fuzz --replay .cache/fuzz/FILE        one saved input again

Every failing input is saved in ``.cache/fuzz``, made as small as possible. The exit code is 1 when
a law was broken; see ``tests.attack.fuzz.laws``.
"""

import argparse
import json
import logging
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from tests.attack.fuzz.laws import Report
from tests.attack.fuzz.runner import SEED, alone, attack, saved, shown
from tests.attack.fuzz.targets import TARGETS


def main(arguments: Sequence[str]) -> int:
    """Run the targets in ``arguments``; returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.getLogger().addHandler(logging.NullHandler())
    if options.replay:
        return _replay(Path(options.replay))
    seed = secrets.token_hex(6) if options.fresh else options.seed
    print(f"seed {seed}", flush=True)
    reports = []
    for name in options.targets or TARGETS:
        report = anyio.run(attack, TARGETS[name], seed, options.count, options.first)
        print(shown(report), flush=True)
        reports.append(report)
    if options.json:
        text = json.dumps([_plain(report) for report in reports], indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
    return 1 if any(report.faults for report in reports) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev fuzz", description="Attack services at random.")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET")
    parser.add_argument("--seed", default=SEED, help="text that the cases are made from")
    parser.add_argument("--fresh", action="store_true", help="choose a new seed and print it")
    parser.add_argument("--count", type=int, default=0, help="cases per target; 0: full size")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--json", default="", metavar="FILE", help="write figures; - is stdout")
    parser.add_argument("--replay", default="", metavar="FILE", help="repeat a saved input")
    return parser


def _replay(path: Path) -> int:
    name, case = saved(path)
    report = anyio.run(alone, TARGETS[name], case)
    print(shown(report))
    return 1 if report.faults else 0


def _plain(report: Report) -> dict[str, Any]:
    return {
        "target": report.target,
        "seed": report.seed,
        "cases": report.count,
        "seconds": round(report.seconds, 1),
        "slowest_processor_s": round(report.slowest_s, 3),
        "memory_growth_mib": round(report.growth_mib, 1),
        "outcomes": report.outcomes,
        "faults": [
            {"problem": f.problem, "number": f.number, "count": f.count} for f in report.faults
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
