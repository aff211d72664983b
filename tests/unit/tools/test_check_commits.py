# SPDX-License-Identifier: Apache-2.0
"""The check of commits accepts imperatives and names what is wrong with other subjects."""

import pytest

from tools.check_commits import LENGTH_MOST, problem_of


@pytest.mark.parametrize(
    "subject",
    [
        "scheduler: release reservations whose lease has expired",
        "common, nodeagent: process reports in order",
        "agent and native: embed the table",
        "hami-core: re-express the verdicts",
        "tests: bring the fuzzers up to date",
        f"a: fix {'x' * (LENGTH_MOST - 7)}",
    ],
)
def test_imperative_summary_is_accepted(subject: str) -> None:
    assert problem_of(subject) == ""


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("release reservations", "not of the form"),
        ("Scheduler: release reservations", "not of the form"),
        ("scheduler: ", "not of the form"),
        ("scheduler: released reservations", "'released' is not an imperative"),
        ("scheduler: releases reservations", "'releases' is not an imperative"),
        ("scheduler: releasing reservations", "'releasing' is not an imperative"),
        ("scheduler: a lease expires", "'a' is not an imperative"),
        ("scheduler: Release reservations", "'Release' is not an imperative"),
        (f"a: fix {'x' * (LENGTH_MOST - 6)}", "73 characters, more than 72"),
    ],
)
def test_other_subjects_are_refused_with_the_reason(subject: str, problem: str) -> None:
    assert problem in problem_of(subject)
