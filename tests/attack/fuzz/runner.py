# SPDX-License-Identifier: Apache-2.0
"""Runs a fuzzer, makes what failed small, and saves it so that it can be repeated."""

import base64
import json
from pathlib import Path

from tests.attack.fuzz.laws import Case, Fault, Report, Target, run
from tests.attack.fuzz.shrink import smaller

SEED = "20261123"
"""The seed of the tier ``attack``, and of runs without ``--seed`` or ``--fresh``."""
SAVED = Path(__file__).resolve().parents[3] / ".cache" / "fuzz"
SHOWN = 400
"""Bytes of an input that are printed."""


async def attack(
    target: Target, seed: str, count: int = 0, first: int = 0, *, is_shrunk: bool = True
) -> Report:
    """Run one target and save its failing inputs, made small; 0 cases mean full size."""
    report = await run(target, seed=seed, count=count or target.full, first=first)
    if is_shrunk and target.is_shrunk:
        report.faults = [await _shrunk(target, fault) for fault in report.faults]
    for fault in report.faults:
        _save(report, fault)
    return report


async def _shrunk(target: Target, fault: Fault) -> Fault:
    async def still(body: bytes) -> bool:
        again = await alone(target, Case(kind=fault.case.kind, body=body, before=fault.case.before))
        return any(other.law == fault.law for other in again.faults)

    if not await still(fault.case.body):
        return fault  # it takes what came before
    return Fault(
        problem=fault.problem,
        case=fault.case,
        number=fault.number,
        count=fault.count,
        minimal=await smaller(fault.case.body, still),
    )


async def alone(target: Target, case: Case) -> Report:
    """Feed one case to a fresh service."""
    return await run(_One(target, case), seed="", count=1)


class _One:
    """A target that has a single case."""

    def __init__(self, target: Target, case: Case) -> None:
        self.name = target.name
        self.full = self.few = 1
        self.is_shrunk = target.is_shrunk
        self._case = case
        self.service = target.service

    def make(self, seed: str, number: int) -> Case:
        """Return the case."""
        del seed, number
        return self._case


def path_of(report: Report, fault: Fault) -> Path:
    """Return where the input of a fault is saved."""
    return SAVED / f"{report.target}-{report.seed}-{fault.number}.json"


def _save(report: Report, fault: Fault) -> None:
    SAVED.mkdir(parents=True, exist_ok=True)
    saved = {
        "target": report.target,
        "seed": report.seed,
        "number": fault.number,
        "problem": fault.problem,
        "kind": fault.case.kind,
        "body": base64.b64encode(fault.minimal or fault.case.body).decode(),
        "before": base64.b64encode(fault.case.before).decode(),
    }
    path_of(report, fault).write_text(f"{json.dumps(saved)}\n", encoding="utf-8")


def saved(path: Path) -> tuple[str, Case]:
    """Return the target's name and the case of a saved input."""
    found = json.loads(path.read_text(encoding="utf-8"))
    case = Case(
        kind=found["kind"],
        body=base64.b64decode(found["body"]),
        before=base64.b64decode(found["before"]),
    )
    return found["target"], case


def shown(report: Report) -> str:
    """Return the figures of a run and its faults as lines of text."""
    summary = (
        f"{report.target}: {report.count} cases in {report.seconds:.0f} s, slowest"
        f" {report.slowest_s:.3f} s of processor time, memory {report.growth_mib:+.1f} MiB,"
        f" {len(report.faults)} faults"
    )
    lines = [summary]
    for fault in report.faults:
        body = fault.minimal or fault.case.body
        text = body[:SHOWN].decode("utf-8", "replace") + ("…" if len(body) > SHOWN else "")
        size = "minimal " if fault.minimal else ""
        lines += [
            f"  {fault.problem}",
            f"    {fault.count} times, first at {fault.number}; {size}{fault.case.kind} {text!r}",
            f"    ./dev fuzz --replay {path_of(report, fault)}",
        ]
    return "\n".join(lines)
