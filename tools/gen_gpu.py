# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of docs/gpu.md: the checks of ``tests.gpu``, and the results of runs.

The results are the files ``docs/gpu/*.json`` that ``./dev gpu --json`` writes. ``--check`` only
compares.
"""

import sys
from collections.abc import Mapping, Sequence

from tests.gpu import runner
from tests.gpu.registry import Check, order
from tools.gen_proof import RUNS, Run, read_runs
from tools.generated import DOCS, ROOT, write_parts

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


def parts(found: Sequence[Check], runs: Sequence[Run]) -> Mapping[str, str]:
    """The generated parts of the page."""
    return {"checks": checks(found), "results": results(runs)}


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    made = parts(runner.all_checks(), read_runs(ROOT / RUNS))
    return write_parts(DOCS / "gpu.md", made)


if __name__ == "__main__":
    sys.exit(main())
