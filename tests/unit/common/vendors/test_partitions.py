# SPDX-License-Identifier: Apache-2.0
"""The size that a request gets, and its place on a grid."""

import numpy as np
import pytest

from hami_common.bounds import RESOURCE_MOST
from hami_common.model.device import Profile
from hami_common.model.request import DeviceRequest
from hami_common.vendors.partitions import NO_START, Division, assign_starts, choose_start
from tests.support import builders

ONE = Profile(name="1g", memory_mib=10, core_pct=14, size=1, starts=(0, 1, 2, 3, 4, 5, 6))
TWO = Profile(name="2g", memory_mib=20, core_pct=28, size=2, starts=(0, 2, 4))
THREE = Profile(name="3g", memory_mib=40, core_pct=42, size=4, starts=(0, 4))
MEDIA = Profile(
    name="1g+me", memory_mib=10, core_pct=14, size=1, starts=(0,), limit=1, by_name_only=True
)
GRID = Division((ONE, TWO, THREE, MEDIA), {})
TEMPLATES = Division(
    (
        Profile(name="small", memory_mib=8, core_pct=12, resources={"core": 3, "cpu": 1}),
        Profile(name="large", memory_mib=32, core_pct=50, resources={"core": 12, "cpu": 3}),
        Profile(name="", memory_mib=64, core_pct=100, resources={"core": 24, "cpu": 6}),
    ),
    {"core": 24, "cpu": 6},
)


def granted(division: Division, request: DeviceRequest) -> str | None:
    grant = division.grant(request)
    return None if grant is None else division.profiles[grant.profile].name


@pytest.mark.parametrize(
    ("division", "request_", "name"),
    [
        (GRID, builders.ask(mib=10), "1g"),
        (GRID, builders.ask(mib=11), "2g"),
        (GRID, builders.ask(mib=10, core=20), "2g"),
        (GRID, builders.ask(pct=50), "2g"),
        (GRID, builders.ask(mib=41), None),
        (GRID, DeviceRequest(vendor="v", count=1, profile="1g+me"), "1g+me"),
        (GRID, DeviceRequest(vendor="v", count=1, profile="7g"), None),
        (TEMPLATES, builders.ask(mib=8), "small"),
        (TEMPLATES, builders.ask(mib=33), ""),
        (TEMPLATES, builders.whole(), ""),
        (TEMPLATES, DeviceRequest(vendor="v", count=1, exact=(("core", 12),)), "large"),
        (TEMPLATES, DeviceRequest(vendor="v", count=1, exact=(("core", 13),)), None),
    ],
)
def test_smallest_size_that_holds_the_request_is_granted(
    division: Division, request_: DeviceRequest, name: str | None
) -> None:
    assert granted(division, request_) == name


def test_the_whole_device_is_granted_exclusively() -> None:
    grant = TEMPLATES.grant(builders.ask(mib=40))
    assert grant is not None
    assert (grant.memory_mib, grant.core_pct, grant.exclusive) == (64, 100, True)


def test_every_state_of_a_grid_has_the_place_that_the_rule_says() -> None:
    for number, profile in enumerate(GRID.profiles):
        table = GRID.starts(number)
        assert len(table) == 1 << GRID.positions
        for taken in range(len(table)):
            assert table[taken] == choose_start(profile, taken, GRID.profiles)


def test_small_partition_leaves_capacity_for_large_ones() -> None:
    assert choose_start(ONE, 0, GRID.profiles) == 6
    assert choose_start(THREE, 1 << 6, GRID.profiles) == 0
    assert choose_start(THREE, 1 << 6 | 1, GRID.profiles) == NO_START


def test_a_pods_partitions_get_places_beside_each_other() -> None:
    by_name = GRID.by_name
    found = assign_starts(GRID, 0, [by_name["1g"], by_name["3g"], by_name["2g"]])
    assert found is not None
    assert GRID.is_over({f"1g@{found[0]}": 1, f"3g@{found[1]}": 1, f"2g@{found[2]}": 1}) is False
    assert assign_starts(GRID, 0, [by_name["3g"]] * 3) is None


def test_amounts_and_places_are_counted() -> None:
    taken, amounts = TEMPLATES.spent({"small": 2, "large": 1, "unknown": 1})
    assert taken == 0
    assert dict(zip(TEMPLATES.names, amounts.tolist(), strict=False)) == {"core": 18, "cpu": 5}
    assert GRID.spent({"2g@2": 1, "1g@6": 1})[0] == 0b1001100
    assert TEMPLATES.is_over({"small": 7})
    assert not TEMPLATES.is_over({"small": 6})
    assert GRID.is_over({"2g@2": 1, "1g@3": 1})
    assert GRID.is_over({"1g+me@0": 2})


@pytest.mark.parametrize(
    ("profiles", "totals", "word"),
    [
        ((Profile(name="a", memory_mib=1, size=1, starts=(16,)),), {}, "17 positions"),
        ((Profile(name="a", memory_mib=1), Profile(name="a", memory_mib=2)), {}, "one name"),
        ((Profile(name="a", memory_mib=1, resources={"x": 1}),), {}, "takes x"),
        ((Profile(name="a", memory_mib=1, size=1),), {}, "no possible size"),
        ((Profile(name="a", memory_mib=1),), {str(i): 1 for i in range(13)}, "13 resources"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(
    profiles: tuple[Profile, ...], totals: dict[str, int], word: str
) -> None:
    with np.errstate(all="raise"):
        assert word in Division.check(profiles, totals)
    assert Division.check(TEMPLATES.profiles, {"core": 24, "cpu": 6}) == ""


@pytest.mark.parametrize("count", [2, 5, 40_000])
def test_amounts_beyond_16_bits_stay_beyond_the_capacity(count: int) -> None:
    most = Profile(name="most", memory_mib=1, resources={"core": RESOURCE_MOST})
    division = Division((most,), {"core": RESOURCE_MOST})
    assert not division.is_over({"most": 1})
    assert division.is_over({"most": count})
    _, spent = division.spent({"most": count})
    assert int(spent[0]) + RESOURCE_MOST <= np.iinfo(np.int16).max
