# SPDX-License-Identifier: Apache-2.0
"""Placements of gangs against every assignment of members to nodes, on small clusters."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.model.placement import Placement
from hami_core.placement.pick import pick
from hami_core.planning.gangs import Assignment, Member, place_together
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, held, node_devices, pod, share, whole

MIB = 1000
NODES = ("n1", "n2", "n3")


@st.composite
def tables(draw: st.DrawFn) -> DeviceTable:
    """Up to three nodes with one or two devices, partly used, in one or two racks."""
    table = DeviceTable()
    for node in NODES[: draw(st.integers(1, 3))]:
        count = draw(st.integers(1, 2))
        table.upsert_node(
            node_devices(
                node,
                [
                    device(f"{node}-{n}", index=n, memory_mib=MIB, slots=draw(st.integers(1, 3)))
                    for n in range(count)
                ],
            )
        )
        for number in range(count):
            if draw(st.booleans()):
                table.book(node, (held(share(f"{node}-{number}", draw(st.integers(1, 900)))),))
        table.set_domain(node, ("zone", draw(st.sampled_from(["rack-a", "rack-b", ""]))))
    return table


@st.composite
def members(draw: st.DrawFn, table: DeviceTable, *, alike: bool) -> list[Member]:
    nodes = table.nodes()
    asks = st.sampled_from([ask(mib=200), ask(mib=500), ask(mib=900), ask(2, mib=100), whole()])
    first = draw(asks)
    return [
        Member(
            request=pod(first if alike else draw(asks), uid=f"u{number}"),
            nodes=frozenset(nodes if alike else draw(st.lists(st.sampled_from(nodes), min_size=1))),
        )
        for number in range(draw(st.integers(1, 4)))
    ]


def together(
    table: DeviceTable, gang: Sequence[Member], near: Sequence[str] = ()
) -> Assignment | None:
    search = place_together(table, gang, near=near)
    while True:
        try:
            next(search)
        except StopIteration as end:
            found: Assignment | None = end.value
            return found


def is_possible(table: DeviceTable, gang: list[Member]) -> bool:
    """Return True when some assignment works: members in each order that matters, as bind would
    pick.
    """
    ordered = sorted(gang, key=_size, reverse=True)
    for nodes in product(*(sorted(member.nodes) for member in ordered)):
        taken: list[Placement] = []
        for member, node in zip(ordered, nodes, strict=True):
            chosen = pick(table, member.request, node)
            if not isinstance(chosen, Placement):
                break
            table.book(node, chosen.containers)
            taken.append(chosen)
        for placement in taken:
            table.unbook(placement.node, placement.containers)
        if len(taken) == len(gang):
            return True
    return False


def _size(member: Member) -> tuple[int, int, int]:
    (asked,) = member.request.containers[0].requests
    memory = asked.count * (asked.memory_mib or asked.memory_pct << 20)
    return memory, asked.count * asked.core_pct, asked.count


@settings(max_examples=60, deadline=None)
@given(data=st.data(), table=tables(), alike=st.booleans())
def test_gang_is_placed_exactly_when_some_assignment_holds_it(
    data: st.DataObject, table: DeviceTable, *, alike: bool
) -> None:
    gang = data.draw(members(table, alike=alike))
    before = list(table.usages())
    found = together(table, gang)
    assert list(table.usages()) == before
    table.check()
    assert (found is not None) == is_possible(table, gang)
    if found is None:
        return
    assert found.keys() == {member.request.uid for member in gang}
    for member in gang:
        placement = found[member.request.uid]
        assert placement.node in member.nodes
        assert not table.book(placement.node, placement.containers), "a device is over-booked"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), table=tables())
def test_gang_that_fits_in_a_rack_stays_in_one(data: st.DataObject, table: DeviceTable) -> None:
    gang = data.draw(members(table, alike=True))
    domains = table.domains
    racks = {
        path: [node for node in table.nodes() if domains.paths[domains.of(node)] == path]
        for path in domains.paths
        if len(path) == len(("zone", "rack"))
    }
    fitting = [
        path
        for path, nodes in racks.items()
        if nodes
        and is_possible(table, [Member(request=m.request, nodes=frozenset(nodes)) for m in gang])
    ]
    found = together(table, gang)
    if fitting:
        assert found is not None
        used = {table.domains.paths[table.domains.of(p.node)] for p in found.values()}
        assert len(used) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_gang_is_placed_in_the_narrowest_domain_that_holds_it(data: st.DataObject) -> None:
    """Twelve nodes of one slot each in 2 zones, 4 spines and 8 racks, some of them in use."""
    table = DeviceTable()
    paths = [
        (f"zone-{rack // 4}", f"spine-{rack // 2}", f"rack-{rack}")
        for rack in (0, 0, 1, 2, 3, 3, 4, 5, 5, 6, 6, 7)
    ]
    free: dict[str, tuple[str, ...]] = {}
    for number, path in enumerate(paths):
        node = f"n{number:02d}"
        table.upsert_node(node_devices(node, [device(f"{node}-0", memory_mib=MIB, slots=1)]))
        table.set_domain(node, path)
        if data.draw(st.booleans()):
            table.book(node, (held(share(f"{node}-0", MIB)),))
        else:
            free[node] = path
    count = data.draw(st.integers(2, 4))
    gang = [
        Member(request=pod(ask(mib=MIB), uid=f"u{n}"), nodes=frozenset(table.nodes()))
        for n in range(count)
    ]
    found = together(table, gang)
    assert (found is not None) == (len(free) >= count)
    if found is None:
        return
    shared = [free[placement.node] for placement in found.values()]
    width = max((n for n in range(4) if len({path[:n] for path in shared}) == 1), default=0)
    narrower = Counter(path[: width + 1] for path in free.values())
    assert width == 3 or max(narrower.values()) < count
