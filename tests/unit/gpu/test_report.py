# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow from figures and their ranges alone."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from tests.gpu.registry import Measure
from tests.gpu.report import judge, table, write
from tools.gen_proof import Run

WITHIN = Measure(name="used", value=100, unit="MiB", least=50, most=100)
BEYOND = Measure(name="used", value=101, unit="MiB", most=100)
PLAIN = Measure(name="noted", value=1)


@pytest.mark.parametrize(
    ("measures", "error", "verdict", "reason"),
    [
        ([WITHIN, PLAIN], "", "pass", ""),
        ([WITHIN, BEYOND], "", "fail", "used 101 MiB (expected ..100)"),
        ([Measure(name="low", value=1, least=2)], "", "fail", "low 1 (expected 2..)"),
        ([WITHIN], "took longer than 5 s", "fail", "took longer than 5 s"),
        ([PLAIN], "", "fail", "nothing was measured"),
        ([], "", "fail", "nothing was measured"),
        ([Measure(name="ratio", value=math.nan, least=0, most=1)], "", "fail", None),
    ],
)
def test_verdict(measures: list[Measure], error: str, verdict: str, reason: str | None) -> None:
    result = judge("7", "fill", measures, seconds=1.0, error=error)
    assert result.verdict == verdict
    assert reason is None or result.reason == reason


def test_line_has_units_and_ranges() -> None:
    line = json.loads(judge("7", "fill", [WITHIN, PLAIN], seconds=1.234).line())
    assert (line["check"], line["verdict"], line["seconds"]) == ("7", "pass", 1.23)
    assert line["measured"][0] == {
        "name": "used",
        "value": 100,
        "unit": "MiB",
        "least": 50,
        "most": 100,
    }
    assert line["measured"][1] == {"name": "noted", "value": 1}


def test_table_counts_verdicts() -> None:
    results = [
        judge("7", "fill", [WITHIN], seconds=1),
        judge("8", "pool", [BEYOND], seconds=1),
    ]
    lines = table(results).splitlines()
    assert lines[0].split() == ["7", "pass", "1.0", "s", "fill"]
    assert lines[1].endswith("pool: used 101 MiB (expected ..100)")
    assert lines[-1] == "1 pass, 1 fail, 0 skipped"


def test_results_are_read_by_the_page_of_proofs(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    results = [judge("7", "fill", [WITHIN], seconds=1)]
    write(path, results, device="H200", driver="580.159", date="2026-12-01", commit="abc")
    run = msgspec.json.decode(path.read_bytes(), type=Run)
    assert (run.device, run.driver, run.date) == ("H200", "580.159", "2026-12-01")
    assert run.passes(["7"])
