# SPDX-License-Identifier: Apache-2.0
"""Conditions of activity, and its priority level."""

import pytest
from msgspec import structs

from hami_nodeagent.core.priorities import (
    NO_LEVEL,
    Activity,
    Standing,
    has_neighbours,
    key_of,
    level_of,
    rivals_of,
)
from hami_nodeagent.core.region import Work
from tests.unit.nodeagent.core.test_breach import GPU, holder

HIGH, LOW = holder("a", priority=0), holder("b", priority=5)
A, B = ("uid-a", "main"), ("uid-b", "main")
BOTH = {"highest_present": 0, "lowest_present": 5}
QUIET = Standing(**BOTH)


def works(number: int, *, is_idle: bool = False) -> Work:
    return Work(number=number, is_idle=is_idle)


def test_change_of_a_region_makes_its_container_active_for_a_while() -> None:
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)

    def note(a: int, b: int, now_s: float) -> Standing:
        activity.note([A, B], {A: works(a), B: works(b)}, now_s=now_s)
        return activity.standings([HIGH, LOW], [GPU])[GPU]

    assert note(1, 1, 0) == QUIET
    assert note(1, 2, 1) == Standing(highest_active=5, active_tenants=1, **BOTH)
    assert note(2, 3, 1.5) == Standing(highest_active=0, active_tenants=1, **BOTH)
    assert note(2, 4, 2.6).highest_active == 5
    assert note(2, 4, 9) == QUIET


def test_container_that_declares_itself_idle_is_so_at_once() -> None:
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    activity.note([A, B], {A: works(1), B: works(1)}, now_s=0)
    activity.note([A], {A: works(2)}, now_s=0)
    assert not activity.is_quiet(A)
    assert activity.standings([HIGH, LOW], [GPU])[GPU].highest_active == 0
    activity.note([A], {A: works(3, is_idle=True)}, now_s=0.1)
    assert activity.is_quiet(A)
    assert activity.standings([HIGH, LOW], [GPU]) == {GPU: QUIET}


def test_regions_that_were_not_read_keep_their_state() -> None:
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    activity.note([A, B], {A: works(1), B: works(1)}, now_s=0)
    activity.note([A], {A: works(2)}, now_s=0)
    activity.note([B], {B: works(2)}, now_s=0.5)
    assert activity.standings([HIGH, LOW], [GPU])[GPU].highest_active == 0
    activity.keep_only([B])
    assert activity.standings([HIGH, LOW], [GPU])[GPU].highest_active == 5


@pytest.mark.parametrize(
    ("levels", "tenants"), [((0, 5, 5), 1), ((5, 0, 0), 2), ((5, 5, 0), 1), ((3, 3, 3), 3)]
)
def test_tenants_are_those_of_the_highest_active_level(
    levels: tuple[int, ...], tenants: int
) -> None:
    holders = [holder(str(n), priority=level) for n, level in enumerate(levels)]
    keys = [key_of(one) for one in holders]
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    activity.note(keys, {key: works(1) for key in keys}, now_s=0, has_rung=True)
    standing = activity.standings(holders, [GPU])[GPU]
    assert (standing.highest_active, standing.active_tenants) == (min(levels), tenants)


def test_first_sight_and_loss_of_a_region_are_no_activity_unless_it_rang() -> None:
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    alone = Standing(highest_present=0)
    activity.note([A], {A: works(7)}, now_s=0)
    activity.note([A], {}, now_s=1)
    activity.note([A], {A: works(9)}, now_s=2)
    assert activity.standings([HIGH], [GPU]) == {GPU: alone}
    activity.note([A], {}, now_s=3)
    activity.note([A], {A: works(9)}, now_s=4, has_rung=True)
    assert activity.standings([HIGH], [GPU])[GPU].highest_active == 0


def test_container_that_rings_stays_active_between_rare_polls() -> None:
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    activity.note([A, B], {A: works(1), B: works(1)}, now_s=0)
    activity.note([A], {A: works(2)}, now_s=0, has_rung=True)
    activity.note([B], {B: works(2)}, now_s=0)
    assert (activity.rings(A), activity.rings(B)) == (True, False)
    activity.note([B], {B: works(2)}, now_s=2)
    assert activity.standings([LOW], [GPU])[GPU].active_tenants == 0
    assert activity.standings([HIGH], [GPU])[GPU].active_tenants == 1
    activity.note([A], {A: works(2)}, now_s=3)
    assert activity.standings([HIGH], [GPU])[GPU].active_tenants == 0


def test_only_requested_devices_and_present_holders_are_reported() -> None:
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    activity.note([A], {A: works(1)}, now_s=0)
    activity.note([A], {A: works(2)}, now_s=0)
    elsewhere = holder("a", uuid="GPU-1")
    without = Standing(highest_active=NO_LEVEL, active_tenants=0, highest_present=NO_LEVEL)
    assert activity.standings([elsewhere], [GPU]) == {GPU: without}
    assert activity.standings([], [GPU]) == {GPU: without}


def test_level_is_that_of_the_allocation() -> None:
    levels = [level_of(holder(priority=given)) for given in (None, 0, 7, 9, -1)]
    assert levels == [1, 0, 7, 7, 0]


def test_rivals_and_neighbors_share_a_device() -> None:
    apart = [HIGH, holder("b", priority=5, uuid="GPU-1")]
    same = [HIGH, holder("b", priority=0)]
    for holders, rivals, is_shared in (([HIGH, LOW], {A, B}, True), (same, set(), True)):
        assert rivals_of(holders) == rivals
        assert has_neighbours(holders) == is_shared
    assert rivals_of(apart) == set()
    assert not has_neighbours(apart)


def test_containers_that_use_one_request_of_a_claim_are_one_tenant() -> None:
    users = [
        structs.replace(holder(name, priority=3), claimed=("uid-c", "main")) for name in ("a", "b")
    ]
    key = ("uid-c", "main")
    assert {key_of(one) for one in users} == {key}
    activity = Activity(hold_s=1.0, rung_hold_s=3.0)
    activity.note([key], {key: works(1)}, now_s=0)
    activity.note([key], {key: works(2)}, now_s=0)
    assert activity.standings(users, [GPU])[GPU].active_tenants == 1
