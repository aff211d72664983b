# SPDX-License-Identifier: Apache-2.0
"""The page of validations claims only what the committed results contain."""

import pytest

from tests.gpu.registry import Check, Fault
from tools.gen_gpu import NO_RUN, parts, results
from tools.gen_proof import Check as Outcome
from tools.gen_proof import Run
from tools.generated import replaced

TEXT = """# Page
<!-- generated: checks -->
old
<!-- end of generated part -->
between
<!-- generated: results -->
old
<!-- end of generated part -->
"""


def check(id_: str, fault: Fault | str) -> Check:
    return Check(
        id=id_,
        name=f"subject {id_}",
        run=lambda _: iter(()),
        deadline_s=1,
        fault=fault,
        is_last=False,
    )


def test_page_lists_checks_in_order_and_says_that_nothing_has_run() -> None:
    fresh = parts([check("10", "no local memory"), check("2", Fault())], [])
    made = replaced(TEXT, fresh)
    rows = [line for line in made.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["| 2 | subject 2 | yes |", "| 10 | subject 10 | no: no local memory |"]
    assert NO_RUN in made
    assert "old" not in made
    assert replaced(made, fresh) == made


def test_run_is_listed_with_what_did_not_pass() -> None:
    run = Run(
        device="H200",
        driver="580.159",
        date="2026-12-01",
        checks=(
            Outcome(check="1", verdict="pass"),
            Outcome(check="5", verdict="fail", reason="growth 2 | more"),
            Outcome(check="9", verdict="skipped", reason="torch is not installed"),
        ),
    )
    made = results([run])
    assert "### H200, driver 580.159, 2026-12-01" in made
    assert "Verdicts: 1 pass, 1 fail, 1 skipped." in made
    assert "| 5 | fail | growth 2 / more |" in made
    assert "| 9 | skipped | torch is not installed |" in made
    assert "| 1 |" not in made


def test_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        replaced("# Page\n", parts([], []))
