# SPDX-License-Identifier: Apache-2.0
"""Each rule of budget, estimates and priority page holds alone, in virtual time."""

import subprocess
from pathlib import Path

import pytest

from tests.support import compute

RULES = (
    "share_is_kept",
    "burst_is_fixed",
    "later_draws_start_later",
    "new_limit_rescales_the_debt",
    "hostile_words_neither_block_nor_free",
    "lent_time_is_not_owed",
    "debt_is_no_more_than_the_device_can_do",
    "refund_undoes_a_draw",
    "slices_do_not_count",
    "varying_work_counts_in_full_when_alone",
    "varying_work_cannot_hide_behind_its_shortest",
    "rare_clean_runs_are_remembered",
    "change_is_followed",
    "unknown_work_grows_dear_and_is_settled",
    "forgotten_functions_start_anew",
    "endless_functions_take_bounded_memory",
    "shapes_are_told_apart",
    "samples_are_irregular_and_as_many_as_planned",
    "processes_are_counted_by_round",
    "little_is_queued_until_the_device_is_seen_to_begin",
    "little_is_queued_beside_a_higher_priority",
    "implausible_answers_are_not_used",
    "slice_is_learned_from_late_answers",
    "work_whose_events_fail_costs_the_mean",
    "hold_follows_the_gaps",
    "page_holds_while_its_lease_runs",
    "foreign_pages_are_not_read",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compute.build("rules", tmp_path_factory.mktemp("rules"), *compute.SANITIZERS)


def test_every_rule_is_listed_here(program: Path) -> None:
    names = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert tuple(names) == RULES


@pytest.mark.parametrize("rule", RULES)
def test_rule(program: Path, rule: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [program, rule, tmp_path / "page"], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
