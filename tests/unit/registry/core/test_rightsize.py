# SPDX-License-Identifier: Apache-2.0
"""Recommended requests."""

import pytest

from hami_common.model.device import Device, Profile
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.protocol import ResourceNames
from hami_registry.core.rightsize import RightSize, Use, names_for, percentile, recommend

MIB = ResourceNames(count="x/gpu", memory="x/mem", cores="x/cores")


def device(memory_mib: int = 10_000, **more: object) -> Device:
    return Device(
        uuid="A",
        vendor="nvidia",
        index=0,
        type="T",
        memory_mib=memory_mib,
        capacity_mib=memory_mib,
        **more,  # type: ignore[arg-type]  # test data
    )


def advised(
    peak_mib: int,
    core: int,
    *,
    limit: int = 50,
    throttled: bool = False,
    hours: float = 2,
    names: ResourceNames = MIB,
    **more: object,
) -> RightSize | None:
    use = Use(
        peak_mib=peak_mib,
        p95_core_pct=core,
        limit_mib=8000,
        limit_core_pct=limit,
        is_throttled=throttled,
        sampled_s=hours * 3600,
    )
    return recommend(use, device(**more), names)  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(
    ("given", "memory_mib", "core_pct"),
    [
        ({"peak_mib": 2000, "core": 20}, 2300, 23),
        ({"peak_mib": 2001, "core": 21}, 2302, 25),  # rounded up
        ({"peak_mib": 0, "core": 0}, 1, 1),  # idle, with a limit of compute
        ({"peak_mib": 9900, "core": 99}, 10_000, 100),  # at most the device
        ({"peak_mib": 2000, "core": 50, "throttled": True}, 2300, 58),
        ({"peak_mib": 2000, "core": 10, "throttled": True}, 2300, 50),  # its limit held it back
        ({"peak_mib": 2000, "core": 0, "limit": 0}, 2300, 0),
    ],
)
def test_peak_plus_margin(given: dict[str, object], memory_mib: int, core_pct: int) -> None:
    found = advised(**given)  # type: ignore[arg-type]  # test data
    assert found is not None
    assert (found.memory_mib, found.core_pct, found.margin_pct) == (memory_mib, core_pct, 15)
    assert found.hours == 2.0


def test_less_than_an_hour_recommends_nothing() -> None:
    assert advised(2000, 20, hours=0.99) is None
    assert advised(2000, 20, hours=1) is not None


@pytest.mark.parametrize(
    ("names", "memory_mib", "core_pct"),
    [
        (ResourceNames(count="x", memory_unit_mib=512), 2560, 23),
        (ResourceNames(count="x", memory_unit_mib=0), 2300, 23),
        (ResourceNames(count="x", core_units=16), 2300, 25),
    ],
)
def test_amounts_are_whole_units(names: ResourceNames, memory_mib: int, core_pct: int) -> None:
    found = advised(2000, 20, names=names)
    assert found is not None
    assert (found.memory_mib, found.core_pct) == (memory_mib, core_pct)
    whole = advised(9900, 20, names=names)
    assert whole is not None
    assert whole.memory_mib <= 10_000


def test_partitions_offer_the_smallest_that_has_both() -> None:
    partitions = (
        Profile(name="1g", memory_mib=2500, core_pct=14),
        Profile(name="1g.me", memory_mib=2500, core_pct=28, by_name_only=True),
        Profile(name="2g", memory_mib=5000, core_pct=28),
        Profile(name="7g", memory_mib=10_000, core_pct=100),
    )
    found = advised(2000, 20, partitions=partitions)
    assert found is not None
    assert (found.profile, found.memory_mib, found.core_pct) == ("2g", 5000, 28)
    huge = advised(2000, 20, partitions=partitions[:1])
    assert huge is not None
    assert (huge.profile, huge.memory_mib) == ("", 2300)


def test_percentile_by_nearest_rank() -> None:
    assert percentile([], 0.95) == 0
    assert percentile(list(range(100)), 0.95) == 95
    assert percentile([7], 0.95) == 7


def test_names_of_the_family_under_which_a_device_is_given() -> None:
    for vendor in Catalog.from_settings().vendors:
        names = names_for(vendor.families, [vendor.families[-1].count])
        assert names is not None
        assert names.count == vendor.families[-1].count
    assert names_for((MIB,), ["other"]) is None
