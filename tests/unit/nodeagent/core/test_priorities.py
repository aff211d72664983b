# SPDX-License-Identifier: Apache-2.0
"""Conditions of activity, and its priority level."""

from hami_nodeagent.core.priorities import (
    NOBODY,
    Activity,
    Standing,
    has_neighbours,
    has_rivals,
    level_of,
)
from tests.unit.nodeagent.core.test_breach import GPU, holder

HIGH, LOW = holder("a", priority=0), holder("b", priority=5)
A, B = ("uid-a", "main"), ("uid-b", "main")
QUIET = Standing(highest_active=NOBODY, active_tenants=0)


def test_change_of_a_region_makes_its_container_active_for_a_while() -> None:
    activity = Activity(hold_s=1.0)
    activity.note({A: 1, B: 1}, now_s=0)
    assert activity.standings([HIGH, LOW], [GPU]) == {GPU: QUIET}
    activity.note({A: 1, B: 2}, now_s=1)
    assert activity.standings([HIGH, LOW], [GPU])[GPU] == Standing(
        highest_active=5, active_tenants=1
    )
    activity.note({A: 2, B: 3}, now_s=1.5)
    assert activity.standings([HIGH, LOW], [GPU])[GPU] == Standing(
        highest_active=0, active_tenants=2
    )
    activity.note({A: 2, B: 4}, now_s=2.6)
    assert activity.standings([HIGH, LOW], [GPU])[GPU].highest_active == 5
    activity.note({A: 2, B: 4}, now_s=9)
    assert activity.standings([HIGH, LOW], [GPU]) == {GPU: QUIET}


def test_first_sight_and_loss_of_a_region_are_no_activity() -> None:
    activity = Activity(hold_s=1.0)
    activity.note({A: 7}, now_s=0)
    activity.note({}, now_s=1)
    activity.note({A: 9}, now_s=2)
    assert activity.standings([HIGH], [GPU]) == {GPU: QUIET}


def test_only_requested_devices_and_present_holders_are_reported() -> None:
    activity = Activity(hold_s=1.0)
    activity.note({A: 1}, now_s=0)
    activity.note({A: 2}, now_s=0)
    elsewhere = holder("a", uuid="GPU-1")
    assert activity.standings([elsewhere], [GPU]) == {GPU: QUIET}
    assert activity.standings([], [GPU]) == {GPU: QUIET}


def test_level_is_that_of_the_allocation() -> None:
    levels = [level_of(holder(priority=given)) for given in (None, 0, 7, 9, -1)]
    assert levels == [1, 0, 7, 7, 0]


def test_rivals_and_neighbors_share_a_device() -> None:
    apart = [HIGH, holder("b", priority=5, uuid="GPU-1")]
    same = [HIGH, holder("b", priority=0)]
    assert (has_rivals([HIGH, LOW]), has_neighbours([HIGH, LOW])) == (True, True)
    assert (has_rivals(same), has_neighbours(same)) == (False, True)
    assert (has_rivals(apart), has_neighbours(apart)) == (False, False)
