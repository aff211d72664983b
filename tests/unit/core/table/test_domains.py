# SPDX-License-Identifier: Apache-2.0
"""Members of a gang are placed close together: same rack before same spine before all else."""

from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, devices, held, pod, share

RACKS = {
    "a1": ("zone", "left", "r1"),
    "a2": ("zone", "left", "r1"),
    "b1": ("zone", "left", "r2"),
    "c1": ("zone", "right", "r1"),
    "far": ("other", "left", "r1"),
}
NODES = [*RACKS, "unknown"]


def table_of_racks() -> DeviceTable:
    table = DeviceTable()
    for number, node in enumerate(NODES):
        if number % 2:
            table.set_domain(node, RACKS.get(node, ()))
        table.upsert_node(devices(node, 2))
        table.set_domain(node, RACKS.get(node, ()))
    table.check()
    return table


def order(table: DeviceTable, *near: str) -> list[str]:
    scored = Verdicts(table).prioritize(pod(ask()), NODES, near=near)
    assert all(0 < score <= 100 for score in scored.scores)
    return [name for name, _ in scored.best(len(NODES))]


def test_closer_nodes_are_preferred() -> None:
    table = table_of_racks()
    assert order(table, "a1") == ["a1", "a2", "b1", "c1", "far", "unknown"]
    assert order(table, "c1")[0] == "c1"
    assert order(table, "unknown")[0] == "unknown"
    assert order(table, "gone") == order(table)


def test_the_rack_with_most_members_is_the_closest() -> None:
    table = table_of_racks()
    assert order(table, "c1", "a1", "a2")[:3] == ["a1", "a2", "c1"]
    assert order(table, "c1", "c1", "a1")[:2] == ["c1", "a1"]


def test_fill_decides_between_equally_close_nodes_and_never_more() -> None:
    table = table_of_racks()
    table.book("a2", [held(share("a2-nvidia-0", 30_000))])
    table.book("far", [held(share("far-nvidia-0", 30_000)), held(share("far-nvidia-1", 30_000))])
    assert order(table, "b1") == ["b1", "a2", "a1", "c1", "far", "unknown"]
    assert order(table)[0] == "far"


def test_node_that_does_not_fit_is_not_preferred_for_its_neighbors() -> None:
    table = table_of_racks()
    request = pod(ask(3))
    assert not Verdicts(table).prioritize(request, NODES, near=["a1"]).scores.any()


def test_network_position_follows_the_node_and_is_dropped_with_it() -> None:
    table = table_of_racks()
    table.upsert_node(devices("a1", 5))
    table.upsert_node(devices("b1", 9))
    table.remove_node("a2")
    table.check()
    assert order_of_registered(table, "b1")[:2] == ["b1", "a1"]
    table.set_domain("a1", ())
    table.check()
    assert order_of_registered(table, "b1")[:2] == ["b1", "c1"]


def order_of_registered(table: DeviceTable, *near: str) -> list[str]:
    scored = Verdicts(table).prioritize(pod(ask()), NODES, near=near)
    return [name for name, _ in scored.best(len(NODES))]


def test_unknown_level_hides_those_below_it() -> None:
    table = DeviceTable()
    for node, path in {"x": ("z", "", "r"), "y": ("z", "", "r"), "w": ("z", "s", "r")}.items():
        table.upsert_node(devices(node, 1))
        table.set_domain(node, path)
    names = ["w", "x", "y"]
    scores = Verdicts(table).prioritize(pod(ask()), names, near=["x"]).scores.tolist()
    assert scores[0] == scores[2] < scores[1]
