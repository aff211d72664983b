# SPDX-License-Identifier: Apache-2.0
"""The table: registered devices, booked shares, and that every booking stays accounted for."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_common.model.placement import ContainerShares, Share
from hami_core.table.block import Block
from hami_core.table.table import DeviceTable, Usage
from tests.support.builders import device, devices, held, node_devices, share


def columns(table: DeviceTable) -> dict[str, bytes]:
    """Everything in the table's columns, by block and column name."""
    return {
        f"{block.width}.{name}": value[..., : block.count].tobytes()
        for block in table.blocks
        for name, value in vars(block).items()
        if isinstance(value, np.ndarray)
    }


def used(table: DeviceTable, node: str, uuid: str) -> tuple[int, int, int, int]:
    usage = table.usage(node, uuid)
    assert usage is not None
    return usage.memory_mib, usage.core_pct, usage.slots, usage.exclusive_holders


def test_devices_are_ordered_by_vendor_index_and_not_by_message() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("b", index=1), device("a", index=2), device("c")]))
    place = table.place("n")
    assert place is not None
    assert place.block.uuids[place.column] == ("c", "b", "a")
    assert place.block.width == 4
    table.check()


def test_update_of_one_vendor_leaves_the_others_devices() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 2))
    table.upsert_node(devices("n", 1, vendor="ascend"))
    table.upsert_node(devices("n", 3))
    assert {uuid for _, uuid, _ in table.usages()} == {
        *(f"n-nvidia-{i}" for i in range(3)),
        "n-ascend-0",
    }
    table.check()


def test_inventory_revision_never_decreases() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 1), revision=7)
    table.upsert_node(devices("m", 1), revision=5)
    assert table.inventory_revision == 7


def test_report_of_no_devices_makes_no_node_but_empties_one() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 0))
    assert "n" not in table
    table.upsert_node(devices("n", 1))
    table.upsert_node(devices("n", 0))
    assert "n" in table
    assert list(table.usages()) == []
    table.remove_node("n", "nvidia")
    assert "n" not in table
    table.check()


def test_booked_device_that_vanishes_stays_as_a_ghost_and_returns_booked() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 2))
    table.book("n", [held(share("n-nvidia-1", 700, 30))])
    table.upsert_node(devices("n", 1))
    assert used(table, "n", "n-nvidia-1") == (700, 30, 1, 0)
    place = table.place("n")
    assert place is not None
    assert not place.block.known[place.rows["n-nvidia-1"], place.column]
    table.check()
    table.upsert_node(devices("n", 2))
    assert used(table, "n", "n-nvidia-1") == (700, 30, 1, 0)
    table.check()


def test_ghost_is_removed_with_its_last_share_and_the_node_with_its_last_ghost() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 2))
    shares = [held(share("n-nvidia-1"))]
    table.book("n", shares)
    table.remove_node("n")
    assert [uuid for _, uuid, _ in table.usages()] == ["n-nvidia-1"]
    table.unbook("n", shares)
    assert "n" not in table
    table.check()


def test_booking_on_an_unregistered_node_is_kept_until_registration() -> None:
    table = DeviceTable()
    table.book("n", [held(share("n-nvidia-0", 500, 10, exclusive=True))])
    assert used(table, "n", "n-nvidia-0") == (500, 10, 1, 1)
    table.check()
    table.upsert_node(devices("n", 1))
    assert used(table, "n", "n-nvidia-0") == (500, 10, 1, 1)
    table.check()


def test_reserve_then_release_is_identity() -> None:
    table = DeviceTable()
    for node in ("n", "m"):
        table.upsert_node(devices(node, 3))
    table.book("n", [held(share("n-nvidia-0", 100))])
    before = columns(table)
    shares = [
        held(share("n-nvidia-0", 300, 20), kind="init"),
        held(share("n-nvidia-1", 400, 30, exclusive=True), share("n-nvidia-0", 1)),
    ]
    table.book("n", shares)
    assert columns(table) != before
    table.unbook("n", shares)
    assert columns(table) == before


def test_reserve_then_release_on_unknown_devices_leaves_no_trace() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 3))
    before = columns(table)
    shares = [held(*(share(f"other-{i}") for i in range(6)))]
    table.book("n", shares)
    table.unbook("n", shares)
    after = columns(table)
    assert {key: after[key] for key in before} == before
    table.check()


def test_node_that_grows_and_shrinks_keeps_its_bookings_and_its_neighbors() -> None:
    table = DeviceTable()
    for node in ("a", "b", "c"):
        table.upsert_node(devices(node, 2))
        table.book(node, [held(share(f"{node}-nvidia-0", 100))])
    for count in (9, 1, 3, 2):
        table.upsert_node(devices("a", count))
        table.check()
        assert all(used(table, n, f"{n}-nvidia-0") == (100, 0, 1, 0) for n in ("a", "b", "c"))


def test_many_nodes_are_added_and_removed() -> None:
    table = DeviceTable()
    for i in range(100):
        table.upsert_node(devices(f"n{i}", i % 5 + 1))
    for i in range(0, 100, 3):
        table.remove_node(f"n{i}")
    table.check()
    assert len(table) == 66
    assert table.nodes() == sorted(f"n{i}" for i in range(100) if i % 3)
    for i in range(100):
        table.remove_node(f"n{i}")
    assert len(table) == 0
    table.check()


def test_removing_an_unknown_node_changes_nothing() -> None:
    table = DeviceTable()
    table.remove_node("n")
    table.upsert_node(devices("n", 1))
    version = table.version
    table.remove_node("m")
    table.remove_node("n", "ascend")
    assert not table.set_health("n", "other", healthy=False)
    assert not table.set_health("m", "other", healthy=False)
    assert not table.set_node_alive("n", "ascend", alive=False)
    assert not table.set_node_alive("m", "nvidia", alive=False)
    assert table.version == version


def test_health_and_heartbeat_report_if_they_changed_the_table() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 1))
    assert not table.set_health("n", "n-nvidia-0", healthy=True)
    assert table.set_health("n", "n-nvidia-0", healthy=False)
    assert not table.set_health("n", "n-nvidia-0", healthy=False)
    assert not table.set_node_alive("n", "nvidia", alive=True)
    assert table.set_node_alive("n", "nvidia", alive=False)
    table.upsert_node(devices("n", 2))
    place = table.place("n")
    assert place is not None
    assert not place.block.alive[:, place.column].any(), "an update does not prove a heartbeat"


def test_one_vendor_of_several_can_leave() -> None:
    table = DeviceTable()
    for vendor in ("nvidia", "ascend"):
        table.upsert_node(devices("n", 2, vendor=vendor))
    table.book("n", [held(share("n-ascend-0", vendor="ascend"))])
    table.remove_node("n", "ascend")
    assert sorted(uuid for _, uuid, _ in table.usages()) == [
        "n-ascend-0",
        "n-nvidia-0",
        "n-nvidia-1",
    ]
    table.check()


def test_links_to_unknown_devices_and_to_itself_are_ignored() -> None:
    table = DeviceTable()
    links = (("x", "y", 5), ("x", "other", 7), ("y", "y", 9))
    table.upsert_node(node_devices("n", [device("x"), device("y", index=1)], links=links))
    place = table.place("n")
    assert place is not None
    matrix = table.link_classes[place.block.links[place.column]].matrix
    assert matrix.tolist() == [[0, 5], [5, 0]]


def test_device_named_alike_on_two_nodes_is_two_devices() -> None:
    table = DeviceTable()
    for node in ("n", "m"):
        table.upsert_node(node_devices(node, [device("same")]))
    table.book("n", [held(share("same", 10))])
    assert used(table, "n", "same")[0] == 10
    assert used(table, "m", "same")[0] == 0
    assert set(table.nodes_with("same")) == {"n", "m"}
    table.remove_node("m")
    assert table.nodes_with("same") == ("n",)
    table.check()


def test_device_that_changes_its_vendor_is_registered_once() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x")]))
    table.upsert_node(node_devices("n", [device("x", vendor="ascend")], vendor="ascend"))
    assert [uuid for _, uuid, _ in table.usages()] == ["x"]
    table.check()


@pytest.mark.parametrize(
    ("first", "second", "over"),
    [
        (share("n-nvidia-0", 40_000), share("n-nvidia-0", 1), True),
        (share("n-nvidia-0", 39_999), share("n-nvidia-0", 1), False),
        (share("n-nvidia-0", 1, 60), share("n-nvidia-0", 1, 50), True),
        (share("n-nvidia-0", 1, exclusive=True), share("n-nvidia-0", 1), True),
        (share("n-nvidia-0", 1), share("n-nvidia-0", 1, exclusive=True), True),
        (share("n-nvidia-0", 1), share("n-nvidia-1", 1, exclusive=True), False),
        (share("other", 1), share("other", 10**9), False),
    ],
)
def test_booking_returns_devices_that_are_oversubscribed(
    first: Share, second: Share, *, over: bool
) -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 2))
    assert table.book("n", [held(first)]) == ()
    assert table.book("n", [held(second)]) == ((second.uuid,) if over else ())


def test_booking_reports_when_slots_run_out() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x", slots=1)]))
    assert table.book("n", [held(share("x"))]) == ()
    assert table.book("n", [held(share("x"))]) == ("x",)


@pytest.mark.parametrize("node", ["n", "m"])
def test_unbooking_an_unknown_share_is_a_bug(node: str) -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 1))
    with pytest.raises(InvariantBroken, match="nothing booked"):
        table.unbook(node, [held(share("other"))])


def test_shortfall_names_devices_held_by_others_and_ignores_the_own_booking() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 3))
    mine = [held(share("n-nvidia-0", 30_000))]
    table.book("n", mine)
    table.book("n", [held(share("n-nvidia-1", 30_000, exclusive=True))])
    wanted = [held(*(share(f"n-nvidia-{i}", 20_000) for i in range(3)))]
    assert table.shortfall("n", wanted) == ("n-nvidia-0", "n-nvidia-1")
    assert table.shortfall("n", wanted, without=mine) == ("n-nvidia-1",)
    alone = [held(share("n-nvidia-0", 1, exclusive=True))]
    assert table.shortfall("n", alone) == ("n-nvidia-0",)
    assert table.shortfall("n", alone, without=mine) == ()


@pytest.mark.parametrize("node", ["n", "m"])
def test_unregistered_devices_are_missing_unless_believed(node: str) -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 1))
    wanted = [held(share("other"))]
    assert table.shortfall(node, wanted) == ("other",)
    assert table.shortfall(node, wanted, believe=True) == ()


def test_usage_of_an_unknown_device_is_none() -> None:
    table = DeviceTable()
    table.upsert_node(devices("n", 1))
    assert table.usage("n", "x") is None
    assert table.usage("m", "x") is None
    assert table.usage("n", "n-nvidia-0") == Usage(
        memory_mib=0, core_pct=0, slots=0, exclusive_holders=0
    )


def break_free(table: DeviceTable, block: Block) -> None:
    block.free_mib[0, 0] += 1


def break_totals(table: DeviceTable, block: Block) -> None:
    block.totals[0][0, 0] += 1


def break_place(table: DeviceTable, block: Block) -> None:
    table.codes["n"] += 1


def break_count(table: DeviceTable, block: Block) -> None:
    del table.codes["m"]


def break_index(table: DeviceTable, block: Block) -> None:
    del table._nodes_by_uuid["n-nvidia-0"]  # noqa: SLF001 - the test breaks it on purpose


def break_index_back(table: DeviceTable, block: Block) -> None:
    table._nodes_by_uuid["other"] = ("n",)  # noqa: SLF001 - the test breaks it on purpose


@pytest.mark.parametrize(
    "break_it",
    [break_free, break_totals, break_place, break_count, break_index, break_index_back],
)
def test_check_finds_inconsistencies(
    break_it: Callable[[DeviceTable, Block], None],
) -> None:
    table = DeviceTable()
    for node in ("n", "m"):
        table.upsert_node(devices(node, 2))
    table.check()
    break_it(table, table.blocks[-1])
    with pytest.raises((InvariantBroken, KeyError)):
        table.check()


def test_block_lists_changes_until_they_are_too_old() -> None:
    block = Block(1)
    for i in range(3):
        block.add(f"n{i}")
    version = block.version
    block.touch(1)
    block.touch(1)
    block.touch(2)
    changed = block.changed_since(version)
    assert changed is not None
    assert sorted(changed) == [1, 2]
    nothing = block.changed_since(block.version)
    assert nothing is not None
    assert len(nothing) == 0
    for _ in range(3000):
        block.touch(0)
    assert block.changed_since(version) is None


def test_block_keeps_derived_values_until_the_inventory_changes() -> None:
    block = Block(1)
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [block.derived("x", make), block.derived("x", make)] == [1, 1]
    block.add("n")
    assert block.derived("x", make) == 2
    for i in range(200):
        block.derived(i, make)
    assert len(made) == 202


def test_matrices_of_links_that_no_node_has_any_more_are_dropped() -> None:
    table = DeviceTable()
    two = [device("x"), device("y", index=1)]
    for score in range(1000):
        table.upsert_node(node_devices("n", two, links=(("x", "y", score),)))
        table.upsert_node(node_devices("m", two, links=(("x", "y", 7),)))
    assert len(table.link_classes) < 100
    for node, score in (("n", 999), ("m", 7)):
        place = table.place(node)
        assert place is not None
        number = int(place.block.links[place.column])
        assert table.link_classes[number].matrix.tolist() == [[0, score], [score, 0]]
    table.check()


def test_shortfall_names_a_recalled_device_smaller_than_the_share() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x", capacity_mib=80_000, largest_mib=40_000)]))
    two = [
        ContainerShares(name=name, kind="app", shares=(share("x", 40_000),)) for name in ("a", "b")
    ]
    assert table.shortfall("n", two) == ()
    assert table.shortfall("n", [replace(two[0], shares=(share("x", 40_001),))]) == ("x",)


def test_bursts_are_not_offered_except_to_their_own_pods() -> None:
    table = DeviceTable()
    small = held(share("x", 20_000))
    used = device("x", foreign_mib=4_000, bursts={"me": 6_000, "other": 8_000})
    table.upsert_node(node_devices("n", [used]))
    assert table.book("n", [small]) == (), "it is not over capacity"
    table.check()
    assert (table.bursting, table.burst_mib("n", "me"), table.burst_mib("n", "you")) == (
        {"n"},
        6_000,
        0,
    )

    def lacks(mib: int, own: str = "") -> bool:
        grown = [held(share("x", mib))]
        return table.shortfall("n", grown, without=[small], own=own) == ("x",)

    assert not lacks(22_000)
    assert lacks(22_001)
    assert not lacks(28_000, own="me")
    assert lacks(28_001, own="me")
    table.upsert_node(node_devices("n", [device("x")]))
    assert (table.bursting, table.burst_mib("n", "me")) == (set(), 0)
    table.check()


def test_lowered_bursts_are_offered_until_they_are_restored() -> None:
    table = DeviceTable()
    table.upsert_node(
        node_devices(
            "n", [device("x", bursts={"p": 6_000, "q": 1_000}), device("y", bursts={"p": 500})]
        )
    )
    place = table.place("n")
    assert place is not None

    def free() -> list[int]:
        return [int(place.block.free_mib[place.rows[uuid], place.column]) for uuid in ("x", "y")]

    before = free()
    table.lower_bursts("n", "p")
    assert free() == [before[0] + 6_000, before[1] + 500]
    table.restore_bursts("n", "p")
    table.check()
    assert free() == before == [33_000, 39_500]
    table.lower_bursts("elsewhere", "p")
    assert free() == before


def test_bursts_leave_with_the_device_and_a_refused_record_changes_none() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x", bursts={"p": 1_000})]))
    table.book("n", [held(share("x", 100))])
    with pytest.raises(ValueError, match="is outside"):
        table.upsert_node(node_devices("n", [device("x", bursts={"q": 1 << 50})]))
    table.check()
    assert (table.burst_mib("n", "p"), table.burst_mib("n", "q")) == (1_000, 0)
    table.remove_node("n")
    table.check()
    assert (table.bursting, table.usage("n", "x") is None) == (set(), False)
    table.unbook("n", [held(share("x", 100))])
    assert "n" not in table


def test_foreign_use_makes_no_booking_invalid_but_no_share_grows_into_it() -> None:
    table = DeviceTable()
    small = held(share("x", 20_000))
    table.upsert_node(node_devices("n", [device("x", foreign_mib=30_000)]))
    assert table.book("n", [small]) == (), "it is not over capacity"
    table.check()
    assert table.shortfall("n", [small], without=[small]) == ()
    assert table.shortfall("n", [held(share("x", 15_000))], without=[small]) == ()
    assert table.shortfall("n", [held(share("x", 20_001))], without=[small]) == ("x",)
    assert table.shortfall("n", [held(share("x", 20_000))], believe=True) == ()
    assert table.shortfall("n", [held(share("x", 1))]) == ("x",)
    table.upsert_node(node_devices("n", [device("x")]))
    assert table.shortfall("n", [held(share("x", 20_000))]) == ()
    table.check()
