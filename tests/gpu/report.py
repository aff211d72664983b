# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines, as a table of verdicts, and as the file that ``docs/gpu`` keeps.

``tools/gen_proof.py`` and ``tools/gen_gpu.py`` read that file.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.gpu.registry import Measure

Verdict = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of one check."""

    check: str
    name: str
    verdict: Verdict
    seconds: float
    reason: str = ""
    measured: tuple[Measure, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The result as JSON values; figures without a bound lack ``least`` and ``most``."""
        plain = asdict(self)
        plain["seconds"] = round(self.seconds, 2)
        plain["measured"] = [
            {key: value for key, value in asdict(one).items() if value is not None and value != ""}
            for one in self.measured
        ]
        return plain

    def line(self) -> str:
        """One JSON line."""
        return json.dumps(self.fields(), ensure_ascii=True)


def judge(
    id_: str, name: str, measured: Sequence[Measure], *, seconds: float, error: str = ""
) -> Result:
    """Derive the verdict from the figures; ``error``: why the check ended early."""
    reasons = [error] if error else []
    reasons += [one.text for one in measured if not one.is_within]
    if not reasons and not any(one.is_bounded for one in measured):
        reasons.append("nothing was measured")
    return Result(
        check=id_,
        name=name,
        verdict="fail" if reasons else "pass",
        seconds=seconds,
        reason="; ".join(reasons),
        measured=tuple(measured),
    )


def table(results: Sequence[Result]) -> str:
    """One row per check, and the counts."""
    rows = [
        f"{one.check:>10}  {one.verdict:<7}  {one.seconds:6.1f} s  {one.name}"
        + (f": {one.reason}" if one.reason else "")
        for one in results
    ]
    counts = ", ".join(
        f"{sum(one.verdict == verdict for one in results)} {verdict}"
        for verdict in ("pass", "fail", "skipped")
    )
    return "\n".join([*rows, counts])


def write(
    path: Path, results: Sequence[Result], *, device: str, driver: str, date: str, commit: str
) -> None:
    """Write the results of one machine."""
    run = {
        "device": device,
        "driver": driver,
        "date": date,
        "commit": commit,
        "checks": [one.fields() for one in results],
    }
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
