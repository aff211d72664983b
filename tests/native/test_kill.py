# SPDX-License-Identifier: Apache-2.0
"""No process waits for one that was killed or stopped, and nothing stays charged to the dead.

The programs say in their heads what they do; here they are built and run.
"""

from pathlib import Path

import pytest

from tests.support.accounting import EXPLORED, STEPS, build, run

LEAST_KILLS = 100


def test_kill_and_stop_before_each_store_to_shared_memory(tmp_path: Path) -> None:
    said = run(build("kill/kill_everywhere", STEPS), str(tmp_path), "1000")
    kills = [int(line.split(": ")[1].split()[0]) for line in said.splitlines() if "kills" in line]
    assert sum(kills) >= 1000 + LEAST_KILLS, said
    assert all(kills), said


@pytest.mark.parametrize(
    "scenario",
    [
        *("two want most", "slack of the other", "toggling", "three at the limit"),
        *("three undisturbed by death", "use moves", "heir", "two heirs", "come and go"),
        *("revoker", "threads"),
    ],
)
def test_every_state_of_small_scenarios_keeps_the_invariants(scenario: str) -> None:
    program = build("unit/explore_lease", EXPLORED, ("account_lease", "slot"))
    said = run(program, scenario)
    assert said.startswith(f"{scenario}: "), said
    states = int(said.split(": ")[1].split()[0])
    assert states > 10_000, said
