# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of docs/gpu.md: the checks of ``tests.gpu``, and the results of runs.

The results are the files ``docs/gpu/*.json`` that ``./dev gpu --json`` writes. ``--check`` only
compares.
"""

import sys
from collections.abc import Sequence

from tests.gpu import runner
from tests.gpu.registry import Check, order
from tools.gen_proof import ROOT, RUNS, Run, read_runs

PAGE = ROOT / "docs/gpu.md"
END = "<!-- end of generated part -->"
NO_RUN = "No results yet: nothing has been run on a GPU."


def checks(found: Sequence[Check]) -> str:
    """One row per check."""
    rows = ["| check | subject | on the fake driver |", "| --- | --- | --- |"]
    for one in sorted(found, key=order):
        fake = f"no: {one.fault}" if isinstance(one.fault, str) else "yes"
        rows.append(f"| {one.id} | {one.name} | {fake} |")
    return "\n".join(rows)


def results(runs: Sequence[Run]) -> str:
    """One section per run: counts, and each check that did not pass."""
    if not runs:
        return NO_RUN
    sections = []
    for run in runs:
        counts = ", ".join(
            f"{sum(one.verdict == verdict for one in run.checks)} {verdict}"
            for verdict in ("pass", "fail", "skipped")
        )
        rows = [f"### {run.device}, driver {run.driver}, {run.date}", "", f"Verdicts: {counts}."]
        others = [one for one in run.checks if one.verdict != "pass"]
        if others:
            rows += ["", "| check | verdict | reason |", "| --- | --- | --- |"]
            rows += [f"| {one.check} | {one.verdict} | {_cell(one.reason)} |" for one in others]
        sections.append("\n".join(rows))
    return "\n\n".join(sections)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def page(text: str, found: Sequence[Check], runs: Sequence[Run]) -> str:
    """The page with fresh parts; ``ValueError`` if it lacks a marker."""
    for name, part in (("checks", checks(found)), ("results", results(runs))):
        begin = f"<!-- generated: {name} -->"
        head, marker, rest = text.partition(begin)
        _, end, tail = rest.partition(END)
        if not marker or not end:
            message = f"{PAGE.name} lacks the markers {begin} and {END}"
            raise ValueError(message)
        text = f"{head}{begin}\n\n{part}\n\n{END}{tail}"
    return text


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text, runner.all_checks(), read_runs(ROOT / RUNS))
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text else 1
    if wanted != text:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
