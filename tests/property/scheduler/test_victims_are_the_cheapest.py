# SPDX-License-Identifier: Apache-2.0
"""Victims of a preemption compared with every possible set of pods, on small nodes."""

from collections.abc import Collection, Iterable
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.planning.victims import (
    Cost,
    Leaving,
    Pod,
    Unit,
    Victims,
    cost_of,
    find_victims,
    run,
)
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, held, node_devices, pod, share, whole

NODE = "n"
MIB = 1000

Bursts = list[dict[str, int]]


@st.composite
def holdings(draw: st.DrawFn, devices: int) -> tuple[ContainerShares, ...]:
    """Holdings of one pod: shares of one or two devices."""
    on = draw(st.lists(st.integers(0, devices - 1), min_size=1, max_size=2, unique=True))
    mib = draw(st.sampled_from([100, 300, 500, 900]))
    return (held(*(share(f"d{number}", mib, draw(st.sampled_from([0, 30]))) for number in on)),)


@st.composite
def units(draw: st.DrawFn, devices: int) -> list[Unit]:
    """Single pods and small gangs: a member may be on another node, or offer its burst only."""
    found = []
    for number in range(draw(st.integers(0, 5))):
        here = draw(st.lists(holdings(devices), min_size=1, max_size=2))
        away = draw(st.integers(0, 1))
        kept = draw(st.sampled_from([0, 0, 1]))
        found.append(
            Unit(
                pods=tuple(
                    Pod(
                        uid=f"u{number}-{member}",
                        priority=draw(st.integers(-2, 2)),
                        start_s=draw(st.integers(1, 4)),
                        budgets=draw(st.sampled_from([(), (), ("a",), ("b",)])),
                        uses=draw(st.sampled_from([(), (), (("queue q", 300),)])),
                    )
                    for member in range(len(here) + away)
                ),
                here=tuple(here[kept:]),
                kept=tuple(here[:kept]),
            )
        )
    return found


@st.composite
def requests(draw: st.DrawFn) -> PodRequest:
    count = draw(st.integers(1, 2))
    if draw(st.booleans()):
        return pod(ask(count, mib=draw(st.sampled_from([200, 600, 1000]))), uid="me")
    return pod(whole(count), uid="me")


@st.composite
def bursts_of(draw: st.DrawFn, uids: list[str], devices: int) -> Bursts:
    """Memory of each device that pods use beyond their requests, by uid."""
    mib = st.sampled_from([0, 0, 100, 400])
    return [{uid: used for uid in uids if (used := draw(mib))} for _ in range(devices)]


def table_with(
    devices: int,
    booked: list[tuple[ContainerShares, ...]],
    bursts: Bursts | None = None,
    gone: Collection[str] = (),
) -> DeviceTable:
    table = DeviceTable()
    used = [
        {uid: mib for uid, mib in some.items() if uid not in gone}
        for some in bursts or [{}] * devices
    ]
    table.upsert_node(
        node_devices(
            NODE,
            [
                device(f"d{n}", index=n, memory_mib=MIB, slots=4, bursts=used[n])
                for n in range(devices)
            ],
        )
    )
    for containers in booked:
        table.book(NODE, containers)
    return table


def booked_without(offered: list[Unit], gone: Iterable[Unit]) -> list[tuple[ContainerShares, ...]]:
    """Return the shares that stay booked without some of the units."""
    gone = list(gone)
    left = [shares for unit in offered if unit not in gone for shares in unit.here]
    return [*left, *(shares for unit in offered for shares in unit.kept)]


def gone_with(units: Iterable[Unit], leaving: list[Leaving]) -> set[str]:
    """Return the pods that are gone without these units."""
    return {*(pod.uid for unit in units for pod in unit.pods), *(one.uid for one in leaving)}


def cheapest(
    devices: int,
    request: PodRequest,
    offered: list[Unit],
    leaving: list[Leaving],
    staying: list[tuple[ContainerShares, ...]],
    allowed: dict[str, int],
    bursts: Bursts,
) -> Cost | None:
    """Return the cheapest set by trying every set on a new table each time."""
    costs = []
    for size in range(len(offered) + 1):
        for some in combinations(offered, size):
            booked = [*staying, *booked_without(offered, some)]
            left = table_with(devices, booked, bursts, gone_with(some, leaving))
            if not isinstance(pick(left, request, NODE), NodeRefusal):
                costs.append(cost_of(some, allowed))
    return min(costs, default=None)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), devices=st.integers(1, 3), request=requests())
def test_victims_are_the_cheapest_of_all_sets_and_the_table_is_as_before(
    data: st.DataObject, devices: int, request: PodRequest
) -> None:
    offered = data.draw(units(devices))
    leaving = [
        Leaving(f"leaving-{number}", shares)
        for number, shares in enumerate(data.draw(st.lists(holdings(devices), max_size=2)))
    ]
    staying = data.draw(st.lists(holdings(devices), max_size=2))
    allowed = {"a": data.draw(st.integers(0, 2)), "b": 1, "queue q": 500}
    booked = [
        *(one.shares for one in leaving),
        *staying,
        *booked_without(offered, ()),
    ]
    uids = ["other", *sorted(gone_with(offered, leaving))]
    bursts = data.draw(bursts_of(uids, devices))
    table = table_with(devices, booked, bursts)
    before = list(table.usages())
    found = run(find_victims(table, request, NODE, offered, leaving=leaving, allowed=allowed))
    assert list(table.usages()) == before
    table.check()
    wanted = cheapest(devices, request, offered, leaving, staying, allowed, bursts)
    assert (None if found is None else found.cost) == wanted
    if found is not None:
        assert found.is_exact
        assert cost_of(found.units, allowed) == found.cost
        rest = table_with(
            devices,
            [*staying, *booked_without(offered, found.units)],
            bursts,
            gone_with(found.units, leaving),
        )
        assert not isinstance(pick(rest, request, NODE), NodeRefusal)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), devices=st.integers(1, 3), request=requests())
def test_beyond_its_bound_the_answer_makes_room_and_no_victim_could_stay(
    data: st.DataObject, devices: int, request: PodRequest
) -> None:
    offered = data.draw(units(devices))
    table = table_with(devices, booked_without(offered, ()))
    found = run(find_victims(table, request, NODE, offered, tests=1))
    if found is None:
        return
    assert not found.is_exact
    for kept in (None, *found.units):
        gone = [unit for unit in found.units if unit is not kept]
        rest = booked_without(offered, gone)
        fits = not isinstance(pick(table_with(devices, rest), request, NODE), NodeRefusal)
        assert fits == (kept is None)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), devices=st.integers(1, 3), request=requests())
def test_only_an_answer_below_the_given_cost_is_found(
    data: st.DataObject, devices: int, request: PodRequest
) -> None:
    offered = data.draw(units(devices))
    table = table_with(devices, booked_without(offered, ()))

    def below(cost: Cost | None) -> Victims | None:
        return run(find_victims(table, request, NODE, offered, below=cost))

    found = below(None)
    if found is not None and found.units:
        assert below(found.cost) is None
        assert below(found.cost._replace(newest=found.cost.newest + 1)) == found
