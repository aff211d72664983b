# SPDX-License-Identifier: Apache-2.0
"""Builds what the checks need, runs them one after the other, and reports."""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.gpu import report
from tests.gpu.bench import HERE, ROOT_OF_TENANT, Bench, DeadlineExceeded, scratch_directory
from tests.gpu.checks import (
    agent,
    compute,
    frameworks,
    handover,
    late,
    memory,
    symbols,
)
from tests.gpu.checks import (
    tools as tool_checks,
)
from tests.gpu.machine import Machine, fake_machine, real_machine
from tests.gpu.registry import CHECKS, Check, Fault, Measure, Skipped, order
from tools import build_native

SUBJECTS = (symbols, memory, frameworks, compute, handover, tool_checks, agent, late)
"""Modules whose import registers the checks."""
BUDGET_S = 520.0
"""Time for all checks; those that would begin later are skipped."""
PROBES = HERE / "probes"
_FAKE_SLOWDOWN = 3
"""Machines with the fake driver run other tests at the same time."""
_CC = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def main(words: Sequence[str]) -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(prog="gpu", description="Validate the limiter on a GPU.")
    parser.add_argument("ids", nargs="*", metavar="ID", help="only run these checks")
    parser.add_argument("--fake", action="store_true", help="use the fake driver of the tests")
    parser.add_argument(
        "--fault",
        action="store_true",
        help="inject what each check has to detect (with --fake)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument("--list", action="store_true", help="list the checks")
    options = parser.parse_args(words)
    if options.list:
        return _list()
    if unknown := [id_ for id_ in options.ids if id_ not in CHECKS]:
        parser.error(f"no check {', '.join(unknown)}")
    if options.fault and not options.fake:
        parser.error("--fault needs --fake")
    chosen = [one for one in all_checks() if not options.ids or one.id in options.ids]
    try:
        with fake_machine() if options.fake else real_machine() as machine:
            results = _run_all(machine, chosen, is_faulty=options.fault)
            if options.json:
                _write(options.json, machine, results)
    except Skipped as reason:
        print(reason, file=sys.stderr)
        return 1
    print(report.table(results))
    return 1 if any(one.verdict == "fail" for one in results) else 0


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which they run."""
    return tuple(sorted(CHECKS.values(), key=order))


def _list() -> int:
    for one in all_checks():
        where = "real only" if isinstance(one.fault, str) else "real and fake"
        print(f"{one.id:>10}  {where:<13}  {one.name}")
    return 0


def _run_all(machine: Machine, chosen: Sequence[Check], *, is_faulty: bool) -> list[report.Result]:
    results = []
    end_s = time.monotonic() + BUDGET_S
    with scratch_directory() as scratch:
        bench = make_bench(machine, scratch)
        for one in chosen:
            result = run_check(bench, one, is_faulty=is_faulty, left_s=end_s - time.monotonic())
            print(result.line(), flush=True)
            results.append(result)
    return results


def make_bench(machine: Machine, scratch: Path) -> Bench:
    """Build the limiter for tenants of the bench, and the probes."""
    libraries = {}
    for name in ("probe", "slow"):
        libraries[name] = scratch / f"lib{name}.so"
        sources = [str(PROBES / f"{name}.c"), "-o", str(libraries[name]), "-ldl"]
        subprocess.run([*build_native.compiler(), *_CC, *sources], check=True)
    image = scratch / "kernels.ptx"
    shutil.copy(PROBES / "kernels.ptx", image)
    return Bench(
        machine,
        limiter=build_native.build("release", build_native.DEFAULT_OUT, ROOT_OF_TENANT),
        probe=libraries["probe"],
        slow=libraries["slow"],
        image=image,
        scratch=scratch,
    )


def run_check(bench: Bench, one: Check, *, is_faulty: bool, left_s: float) -> report.Result:
    """Run one check to its verdict; never raises what a check raises."""
    skipped = report.Result(check=one.id, name=one.name, verdict="skipped", seconds=0.0)
    if bench.is_fake and isinstance(one.fault, str):
        return replace(skipped, reason=one.fault)
    if left_s < one.deadline_s:
        return replace(skipped, reason="the time for all checks is used up")
    fault = one.fault if is_faulty and isinstance(one.fault, Fault) else Fault()
    measured: list[Measure] = []
    error = ""
    began = time.monotonic()
    try:
        with bench.checking(one.deadline_s * bench.on(fake=_FAKE_SLOWDOWN, real=1), fault):
            for figure in one.run(bench):
                measured.append(figure)  # noqa: PERF402 - kept if a later one fails
    except Skipped as reason:
        if all(figure.is_within for figure in measured):
            seconds = time.monotonic() - began
            return replace(skipped, reason=str(reason), seconds=seconds, measured=tuple(measured))
        error = str(reason)
    except DeadlineExceeded as expired:
        error = str(expired)
    except Exception as failure:  # noqa: BLE001 - the other checks run in any case
        error = f"{type(failure).__name__}: {failure}"
    return report.judge(one.id, one.name, measured, seconds=time.monotonic() - began, error=error)


def _write(path: Path, machine: Machine, results: Sequence[report.Result]) -> None:
    git = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    report.write(
        path,
        results,
        device=machine.device,
        driver=machine.driver,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=found.stdout.strip() or "unknown",
    )
