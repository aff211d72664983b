# SPDX-License-Identifier: Apache-2.0
"""``hamictl scenario``: traces that can be verified by hand, checks, and mistakes in a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hamictl.cli import main

HEAD = """
name = "x"
purpose = "p"
kind = "trace"
hours = 24.0
[card]
memory_mib = 10
slots = 4
"""
TASKS = """
[[groups]]
name = "task"
memory_mib = [5]
core_pct = 50
count = 4
hours = [1.0]
"""
CASES = """
[[cases]]
name = "shared"
cards = 1
[[cases]]
name = "exclusive"
cards = 1
whole_cards = true
"""
CHECK = """
[[checks]]
text = "makespan"
value = "shared.makespan_h"
of = "exclusive.makespan_h"
most = 0.5
"""


def run(tmp_path: Path, text: str, *words: str) -> Result:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return CliRunner().invoke(main, ["scenario", str(path), *words])


def figures(tmp_path: Path, text: str) -> dict[str, Any]:
    result = run(tmp_path, text, "-o", "json")
    found: dict[str, Any] = json.loads(result.stdout)["figures"]
    return found


def test_shared_and_whole_cards_are_compared(tmp_path: Path) -> None:
    result = run(tmp_path, HEAD + TASKS + CASES + CHECK)
    assert result.exit_code == 0, result.output
    assert "ok: makespan: 0.5 (at most 0.5)" in result.output
    found = figures(tmp_path, HEAD + TASKS + CASES + CHECK)
    assert (found["shared"]["makespan_h"], found["exclusive"]["makespan_h"]) == (2.0, 4.0)
    assert (found["shared"]["placed_at_once"], found["exclusive"]["placed_at_once"]) == (2, 1)
    assert found["shared"]["wait_total_h"] == 2.0
    assert found["shared"]["booked_mean"] == pytest.approx(2 / 24, abs=1e-4)


def test_failed_check_is_reported_by_the_exit_code(tmp_path: Path) -> None:
    result = run(tmp_path, HEAD + TASKS + CASES + CHECK.replace("0.5", "0.4"))
    assert result.exit_code == 1
    assert "FAILED: makespan: 0.5 (at most 0.4)" in result.output


def test_waiting_replicas_lose_requests_and_jobs_are_late(tmp_path: Path) -> None:
    service = """
[[groups]]
name = "service"
memory_mib = [10]
by_day = [1, 2]
requests_per_s = 1.0
[[groups]]
name = "job"
memory_mib = [10]
count = 1
from_h = 0.0
hours = [2.0]
deadline_h = 3.0
[[cases]]
name = "one"
cards = 1
[[cases]]
name = "own"
cards = 3
cards_of = { job = 1 }
[[checks]]
text = "served"
value = "own.served"
least = 1.0
"""
    found = figures(tmp_path, HEAD + service)
    # The job has the card for two of the first 24 hours; the second replica (12 h) never starts.
    assert found["one"]["served"] == pytest.approx(1 - (2 + 12) / 36, abs=1e-3)
    assert (found["own"]["served"], found["own"]["late"]) == (1.0, 0)
    assert found["one"]["late"] == 0


def test_same_file_gives_the_same_trace(tmp_path: Path) -> None:
    text = HEAD.replace("hours", "seed = 5\nhours", 1) + CASES + CHECK
    text += TASKS.replace("count = 4", "per_hour = 2.0\nto_h = 12.0")
    first, second = figures(tmp_path, text), figures(tmp_path, text)
    assert first == second
    assert first["shared"]["arrivals"] > 10
    assert figures(tmp_path, text.replace("seed = 5", "seed = 6")) != first


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("cards = 1", "cards = 0"), "cards"),
        (("core_pct", "cores"), "cores"),
        (("shared.makespan_h", "shared.speed"), "shared.speed"),
        (("exclusive.makespan_h", "other.makespan_h"), "other.makespan_h"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], named: str) -> None:
    result = run(tmp_path, (HEAD + TASKS + CASES + CHECK).replace(*change))
    assert result.exit_code == 2
    assert named in result.output


def test_missing_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["scenario", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml" in result.output
