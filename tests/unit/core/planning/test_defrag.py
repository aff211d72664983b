# SPDX-License-Identifier: Apache-2.0
"""Plans of moves on small clusters that can be verified by hand."""

from msgspec.structs import replace

from hami_common.model.request import Choice, DeviceSelector, PodRequest, options
from hami_core.planning.defrag import DefragPlan, Tenant, places_of, plan_moves
from hami_core.table.table import DeviceTable
from tests.support import builders
from tests.support.builders import ask, pod


def tenant(name: str, uuid: str, mib: int, **more: object) -> Tenant:
    selector = DeviceSelector(**more)  # type: ignore[arg-type]  # fields by name
    return Tenant(
        request=pod(ask(mib=mib), uid=name, name=name, selector=selector),
        node=uuid.partition("-")[0],
        containers=(builders.held(builders.share(uuid, mib)),),
    )


def table(devices: dict[str, int], *tenants: Tenant) -> DeviceTable:
    """Nodes with one device each, of so much memory."""
    found = DeviceTable()
    for node, mib in devices.items():
        found.upsert_node(
            builders.node_devices(node, [builders.device(f"{node}-0", memory_mib=mib)])
        )
    for one in tenants:
        found.book(one.node, one.containers)
    return found


def plan(
    devices: dict[str, int], tenants: list[Tenant], wanted: PodRequest, *, trials: int = 100_000
) -> DefragPlan:
    return plan_moves(table(devices, *tenants), wanted, tenants, most_trials=trials)


def moves(found: DefragPlan) -> list[tuple[str, str, str]]:
    return [(move.pod, move.source, move.target) for move in found.moves]


def test_moves_can_depend_on_other_moves() -> None:
    tenants = [
        tenant("p", "a-0", 6, allow_uuids=("a-0", "b-0")),
        tenant("q", "b-0", 5, allow_uuids=("b-0", "c-0")),
    ]
    found = plan({"a": 10, "b": 10, "c": 5}, tenants, pod(ask(mib=9), uid="w"))
    assert moves(found) == [("q", "b", "c")]
    only_a = pod(ask(mib=9), uid="w", selector=DeviceSelector(allow_uuids=("a-0",)))
    found = plan({"a": 10, "b": 10, "c": 5}, tenants, only_a)
    assert moves(found) == [("q", "b", "c"), ("p", "a", "b")]
    assert (found.node, found.memory_mib, found.is_least_memory) == ("a", 11, True)


def test_swapping_two_pods_needs_a_third_place() -> None:
    tenants = [
        tenant("p", "a-0", 7, allow_uuids=("a-0", "b-0")),
        tenant("q", "b-0", 6, allow_uuids=("a-0", "b-0", "c-0")),
    ]
    wanted = pod(ask(mib=4), uid="w", selector=DeviceSelector(allow_uuids=("a-0",)))
    found = plan({"a": 10, "b": 7, "c": 6}, tenants, wanted)
    assert moves(found) == [("q", "b", "c"), ("p", "a", "b")]


def test_of_equally_many_moves_the_least_memory_is_moved() -> None:
    tenants = [tenant("p", "a-0", 6), tenant("q", "b-0", 5)]
    found = plan({"a": 10, "b": 10, "c": 6}, tenants, pod(ask(mib=9), uid="w"))
    assert moves(found) == [("q", "b", "c")]


def test_cordoned_devices_and_devices_of_silent_agents_receive_no_pods() -> None:
    tenants = [tenant("p", "a-0", 6)]
    known = table({"a": 10, "b": 10}, *tenants)
    known.set_node_alive("b", "nvidia", alive=False)
    found = plan_moves(known, pod(ask(mib=9), uid="w"), tenants)
    assert found.outcome == "none"
    assert found.moves_searched == 4


def test_trials_end_honestly_and_leave_the_table_as_it_was() -> None:
    tenants = [tenant(f"p{n}", f"n{n}-0", 6) for n in range(6)]
    devices = {f"n{n}": 10 for n in range(6)}
    known = table(devices, *tenants)
    before = list(known.usages())
    found = plan_moves(known, pod(ask(mib=9), uid="w"), tenants, most_trials=10)
    assert (found.outcome, found.moves_searched) == ("not-found", 0)
    assert list(known.usages()) == before
    known.check()


def test_places_of_pods_with_alternatives_are_the_planned_devices() -> None:
    other = Choice(containers=pod(ask(mib=5)).containers, selectors={})
    mover = tenant("p", "a-0", 6)
    mover = replace(mover, request=replace(mover.request, others=(other,)))
    wanted = pod(ask(mib=9), uid="w", selector=DeviceSelector(allow_uuids=("a-0",)))
    found = plan({"a": 10, "b": 6, "c": 9}, [mover], wanted)
    assert moves(found) == [("p", "a", "b")]
    first, last = places_of(found, wanted, [mover])
    assert [one.selectors["nvidia"].allow_uuids for one in options(first.request)] == [
        ("b-0",),
        ("b-0",),
    ]
    assert last.request.selectors["nvidia"].allow_uuids == ("a-0",)
