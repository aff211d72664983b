# SPDX-License-Identifier: Apache-2.0
"""Counts per tier are those of the JUnit file, and every failure is counted."""

from pathlib import Path

import pytest

from tools.run_tests import ROOT, SCHEDULERS, Outcome, causes, count, gate_names, main, merge


def report(tmp_path: Path, *cases: str) -> Path:
    path = tmp_path / "tier.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.unit.x" name="{name}">{inside}</testcase>'


def test_each_verdict_is_counted(tmp_path: Path) -> None:
    path = report(
        tmp_path,
        case("a"),
        case("b"),
        case("c", '<failure message="no"/>'),
        case("d", '<error message="setup"/>'),
        case("e", '<skipped message="no GPU"/>'),
        case("f", '<skipped message="no GPU"/>'),
    )
    outcome = count("unit", path)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (2, 2, 2)
    assert outcome.skip_reasons == {"no GPU": 2}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_test_that_passed_but_broke_its_teardown_failed_once(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    cases = (case("a"), case("a", '<error message="left behind"/>'))
    outcome = count("integration", report(tmp_path, *(cases[index] for index in order)))
    assert (outcome.passed, outcome.failed) == (0, 1)


def test_skip_without_reason_is_counted_as_such(tmp_path: Path) -> None:
    outcome = count("e2e", report(tmp_path, case("a", "<skipped/>")))
    assert outcome.skip_reasons == {"no reason given": 1}


def test_every_gate_of_the_style_is_a_recipe() -> None:
    assert {"fmt-check", "lint", "types", "imports", "gen-check", "pins-check"} <= set(gate_names())


def test_recorded_properties_are_kept(tmp_path: Path) -> None:
    told = '<properties><property name="burst" value="3.8 s"/></properties>'
    outcome = count("e2e", report(tmp_path, case("a", told)))
    assert outcome.measured == {"burst": "3.8 s"}
    assert outcome.passed == 1


def failing(*names: str, passed: int = 0) -> Outcome:
    return Outcome(name="e2e", passed=passed, failed=len(names), failed_names=list(names))


def test_test_that_passes_alone_is_counted_as_passed_and_named_as_flaked() -> None:
    outcome = merge(failing("x::a", "x::b", passed=7), failing("x::b", passed=1))
    assert (outcome.passed, outcome.failed) == (8, 1)
    assert outcome.flaked == ["x::a"]
    assert outcome.failed_names == ["x::b"]


def test_incomplete_second_run_excuses_no_failure() -> None:
    outcome = merge(failing("x::a", "x::b"), failing(passed=1))
    assert (outcome.failed, outcome.flaked) == (2, [])


def test_failures_of_one_file_are_one_cause_if_they_are_many() -> None:
    shared = [f"tests.contract.dra.test_real.TestObjects::test_{number}" for number in range(12)]
    assert causes(shared) == 1
    assert causes([*shared, "tests.contract.dra.test_real.TestScheduling::test_a"]) == 1
    assert causes([*shared, "tests.contract.dra.test_simulated.TestObjects::test_1"]) == 13
    assert causes(shared[:3]) == 3
    assert causes([]) == 0


def test_failed_tests_are_named(tmp_path: Path) -> None:
    outcome = count("unit", report(tmp_path, case("a"), case("b", '<failure message="no"/>')))
    assert outcome.failed_names == ["tests.unit.x::b"]
    assert outcome.problems == {"tests.unit.x::b": "no"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["unit", "--scheduler", "volcano"],
        ["e2e", "--scheduler", "volcano", "--plane", "sim"],
        ["tests/e2e/test_volcano.py", "--scheduler", "volcano"],
        ["e2e", "--scheduler", "another"],
    ],
)
def test_scheduler_has_its_own_tests_on_the_real_plane(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "--scheduler" in capsys.readouterr().err


def test_marker_of_each_scheduler_is_that_of_the_files_that_run_it() -> None:
    files = {path: path.read_text() for path in (ROOT / "tests" / "e2e").glob("test_*.py")}
    for name in SCHEDULERS:
        marked = {path for path, text in files.items() if f"pytest.mark.{name}," in text}
        assert marked == {path for path, text in files.items() if f" {name}_or_skip" in text}
        assert marked
