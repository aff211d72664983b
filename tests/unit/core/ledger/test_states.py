# SPDX-License-Identifier: Apache-2.0
"""The states of an allocation, as a table."""

from itertools import product
from typing import get_args

import pytest

from hami_common.events.allocation import AllocationState
from hami_core.ledger.states import TRANSITIONS, may_follow

STATES: tuple[AllocationState, ...] = get_args(AllocationState)
CHAIN: tuple[AllocationState, ...] = ("reserved", "bound", "prepared", "running")


def reachable(start: AllocationState) -> set[AllocationState]:
    """States that single transitions lead to, not through an end."""
    found, left = {start}, [start]
    while left:
        here = left.pop()
        for before, after in TRANSITIONS:
            if before == here and after not in found and before != "released":
                found.add(after)
                left.append(after)
    return found


def test_every_state_is_in_the_table() -> None:
    assert {state for pair in TRANSITIONS for state in pair} == set(STATES)


@pytest.mark.parametrize("state", [state for state in STATES if state != "released"])
def test_every_state_can_be_released(state: AllocationState) -> None:
    assert (state, "released") in TRANSITIONS


@pytest.mark.parametrize("state", CHAIN)
def test_every_live_state_can_fail(state: AllocationState) -> None:
    assert (state, "failed") in TRANSITIONS


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
def test_a_reader_may_skip_states_but_never_see_one_undone(
    before: AllocationState, after: AllocationState
) -> None:
    want = after in reachable(before) or (before, after) in TRANSITIONS
    assert may_follow(before, after) == want


def test_shares_change_only_while_the_pod_has_them() -> None:
    same = {before for before, after in TRANSITIONS if before == after}
    assert same == {"bound", "prepared", "running"}
