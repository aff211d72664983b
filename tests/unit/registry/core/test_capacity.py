# SPDX-License-Identifier: Apache-2.0
"""Capacity of devices: largest shares, stranded memory, its causes and namespaces."""

from typing import Any

import pytest

from hami_common.model.device import Burst, Device, Profile
from hami_common.model.placement import Booked
from hami_registry.core.capacity import (
    ByNamespace,
    Measured,
    Share,
    Stranded,
    fitting,
    measure,
    offer_of,
)

SLICES = tuple(
    Profile(
        name=name,
        memory_mib=memory_mib,
        core_pct=core_pct,
        size=size,
        starts=starts,
        resources={"slices": slices},
        kind="mig",
    )
    for name, memory_mib, core_pct, size, starts, slices in (
        ("1g.10gb", 10_000, 14, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        ("3g.40gb", 40_000, 42, 4, (0, 4), 3),
        ("7g.80gb", 80_000, 100, 8, (0,), 7),
    )
)


def device(**more: Any) -> Device:
    return Device(
        **{
            "uuid": "g",
            "vendor": "nvidia",
            "index": 0,
            "type": "H200",
            "memory_mib": 1000,
            "capacity_mib": 1000,
            "slots": 4,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("facts", "booked", "foreign_mib", "offer"),
    [
        ({}, Booked(), 0, (1000, 100, "")),
        ({}, Booked(memory_mib=300, core_pct=60, slots=1), 0, (700, 40, "")),
        ({}, Booked(memory_mib=300, core_pct=60, slots=1), 200, (500, 40, "")),
        ({}, Booked(memory_mib=300, core_pct=60, slots=1), 700, (0, 0, "foreign")),
        ({}, Booked(memory_mib=300, core_pct=100, slots=1), 700, (0, 0, "compute")),
        ({}, Booked(memory_mib=300, slots=4), 0, (0, 0, "slots")),
        ({}, Booked(memory_mib=300, slots=1, exclusive=True), 0, (0, 0, "exclusive")),
        ({"cordoned": True}, Booked(slots=4), 0, (0, 0, "cordoned")),
        ({"healthy": False, "cordoned": True}, Booked(), 0, (0, 0, "unhealthy")),
        ({}, Booked(memory_mib=1000, core_pct=100, slots=4), 0, (0, 0, "")),
        ({"healthy": False}, Booked(memory_mib=1000), 0, (0, 0, "")),
        ({"capacity_core_pct": 0}, Booked(memory_mib=1), 0, (999, 0, "")),
        (
            {"capacity_mib": 2000, "largest_mib": 800, "overcommit": "recall"},
            Booked(),
            0,
            (800, 100, ""),
        ),
        (
            {"capacity_mib": 2000, "largest_mib": 800, "overcommit": "recall"},
            Booked(),
            300,
            (500, 100, ""),
        ),
        ({"capacity_mib": 2000}, Booked(memory_mib=1500), 100, (400, 100, "")),
    ],
)
def test_offer_is_the_largest_share_or_names_the_cause(
    facts: dict[str, Any], booked: Booked, foreign_mib: int, offer: tuple[int, int, str]
) -> None:
    assert offer_of(device(foreign_mib=foreign_mib, **facts), booked)[:3] == offer


@pytest.mark.parametrize(
    ("foreign_mib", "bursts", "offer"),
    [
        (0, (100, 50), (550, 100, "")),
        (100, (200,), (400, 100, "")),
        (100, (600,), (0, 0, "burst")),
        (700, (100,), (0, 0, "foreign")),
    ],
)
def test_bursts_lower_the_offer(
    foreign_mib: int, bursts: tuple[int, ...], offer: tuple[int, int, str]
) -> None:
    used = tuple(Burst(pod_uid=f"p{n}", memory_mib=mib) for n, mib in enumerate(bursts))
    one, booked = device(foreign_mib=foreign_mib, bursts=used), Booked(memory_mib=300, slots=1)
    found = offer_of(one, booked)
    assert found[:3] == offer
    count = max(0, 700 - foreign_mib - sum(bursts)) // 100
    assert fitting(one, booked, found, memory_mib=100, core_pct=0) == min(3, count)


def divided(**more: Any) -> Device:
    return device(
        memory_mib=80_000,
        capacity_mib=80_000,
        slots=7,
        partitions=SLICES,
        resources={"slices": 7},
        mode="mig",
        **more,
    )


@pytest.mark.parametrize(
    ("parts", "mib", "offer", "ones", "threes"),
    [
        ({}, 0, (80_000, 100, ""), 7, 2),
        ({"3g.40gb@0": 1}, 40_000, (40_000, 42, ""), 3, 1),
        ({"1g.10gb@5": 1}, 10_000, (40_000, 42, ""), 6, 1),
        ({"1g.10gb@1": 1, "1g.10gb@5": 1}, 20_000, (10_000, 14, ""), 5, 0),
        ({"3g.40gb@0": 1, "3g.40gb@4": 1}, 79_000, (0, 0, "mode"), 0, 0),
        ({"gone@0": 1}, 10_000, (0, 0, "mode"), 0, 0),
    ],
)
def test_divided_device_offers_its_largest_partition(
    parts: dict[str, int], mib: int, offer: tuple[int, int, str], ones: int, threes: int
) -> None:
    booked = Booked(memory_mib=mib, core_pct=14, slots=len(parts), parts=parts)
    found = offer_of(divided(), booked)
    assert found[:3] == offer
    for memory_mib, count in ((10_000, ones), (40_000, threes)):
        assert fitting(divided(), booked, found, memory_mib=memory_mib, core_pct=1) == count, (
            memory_mib
        )


@pytest.mark.parametrize(
    ("memory_mib", "core_pct", "count"),
    [(100, 0, 3), (100, 20, 2), (100, 41, 0), (350, 10, 2), (701, 0, 0), (700, 40, 1)],
)
def test_shares_of_a_size_are_bounded_by_memory_compute_and_slots(
    memory_mib: int, core_pct: int, count: int
) -> None:
    booked = Booked(memory_mib=300, core_pct=60, slots=1)
    found = offer_of(device(), booked)
    assert fitting(device(), booked, found, memory_mib=memory_mib, core_pct=core_pct) == count


def measured(
    node: str,
    booked: Booked,
    *shares: Share,
    is_silent: bool = False,
    **facts: Any,
) -> Measured:
    one = device(**facts)
    offer = offer_of(one, booked)
    return Measured(node, is_silent, one, booked, offer, shares)


CLUSTER = (
    measured("n1", Booked(memory_mib=300, core_pct=60, slots=1)),
    measured("n2", Booked(memory_mib=400, core_pct=90, slots=1), foreign_mib=50),
    measured("n3", Booked(), is_silent=True),
    measured(
        "n4",
        Booked(memory_mib=300, core_pct=100, slots=2),
        Share("team-a", 75, 1, exclusive=False),
        Share("team-b", 25, 1, exclusive=False),
    ),
    measured(
        "n5", Booked(memory_mib=100, slots=1, exclusive=True), Share("team-b", 0, 1, exclusive=True)
    ),
    measured("n6", Booked(), cordoned=True),
    measured("n7", Booked(), type="A100", memory_mib=500, capacity_mib=500),
)
BURST = (Burst(pod_uid="p", memory_mib=30),)


def test_capacity_is_summed_by_model() -> None:
    small, large = measure(CLUSTER, asked=(100, 30)).items
    assert (small.model, small.largest_mib, small.largest_on) == ("A100", 500, "n7")
    assert (large.devices, large.devices_offering) == (6, 2)
    assert (large.largest_mib, large.largest_core_pct, large.largest_on) == (700, 40, "n1")
    assert (large.free_mib, large.foreign_mib) == (700 + 600 + 1000 + 700 + 900 + 1000, 50)
    counts = {fit.size: (fit.memory_mib, fit.core_pct, fit.count) for fit in large.fits}
    assert counts == {
        "1/4": (250, 25, 1),
        "1/2": (500, 50, 0),
        "1": (1000, 100, 0),
        "asked": (100, 30, 1),
    }
    assert large.stranded == (
        Stranded(cause="silent", devices=1, memory_mib=1000),
        Stranded(cause="cordoned", devices=1, memory_mib=1000),
        Stranded(cause="exclusive", devices=1, memory_mib=900),
        Stranded(cause="compute", devices=1, memory_mib=700),
        Stranded(cause="foreign", devices=1, memory_mib=50),
    )


def test_memory_of_bursts_is_a_cause_beside_foreign_use() -> None:
    (found,) = measure([measured("n2", Booked(), foreign_mib=50, bursts=BURST)]).items
    assert (found.free_mib, found.burst_mib, found.largest_mib) == (1000, 30, 920)
    assert found.stranded == (
        Stranded(cause="foreign", devices=1, memory_mib=50),
        Stranded(cause="burst", devices=1, memory_mib=30),
    )


def test_stranded_memory_is_divided_by_what_each_namespace_holds() -> None:
    (large,) = measure(CLUSTER[:6]).items
    assert large.stranded_by == (
        ByNamespace(namespace="team-b", memory_mib=900 + 175),
        ByNamespace(namespace="team-a", memory_mib=525),
    )


def test_tenant_sees_other_namespaces_as_one_amount() -> None:
    (large,) = measure(CLUSTER[:6], namespace="team-a").items
    assert large.stranded_by == (
        ByNamespace(namespace="team-a", memory_mib=525),
        ByNamespace(namespace="", memory_mib=900 + 175),
    )


def test_many_namespaces_are_listed_up_to_the_largest() -> None:
    several = [
        measured(
            f"n{number}",
            Booked(memory_mib=number, core_pct=100, slots=1),
            Share(f"team-{number}", 100, 1, exclusive=False),
        )
        for number in range(7)
    ]
    (found,) = measure(several).items
    assert [one.namespace for one in found.stranded_by] == [
        "team-0",
        "team-1",
        "team-2",
        "team-3",
        "team-4",
        "",
    ]
    assert sum(one.memory_mib for one in found.stranded_by) == found.free_mib


def test_nothing_is_measured_of_nothing() -> None:
    assert measure(()).items == ()
