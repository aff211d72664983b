# SPDX-License-Identifier: Apache-2.0
"""The measure of packing: sums over usable devices, and free memory that requests cannot use."""

import pytest

from hami_core.planning.packing import asks_of, fill, packing, stranded
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, held, node_devices, pod, share, whole


def table_of(*devices: dict[str, object]) -> DeviceTable:
    table = DeviceTable()
    given = [device(f"d{n}", memory_mib=1000, **more) for n, more in enumerate(devices)]  # type: ignore[arg-type]  # parts of the builder's arguments
    table.upsert_node(node_devices("a", given))
    return table


def test_stranded_memory_is_what_no_more_of_the_pods_can_use() -> None:
    table = table_of({}, {})
    wanted = asks_of([pod(ask(mib=500))])
    empty = packing(table, wanted)
    assert (empty.devices_used, empty.stranded, empty.used_devices_full) == (0, 0.0, 0.0)
    table.book("a", [held(share("d0", 600))])
    some = packing(table, wanted)
    assert (some.devices, some.devices_used, some.booked_mib) == (2, 1, 600)
    assert some.used_devices_full == 0.6
    assert some.stranded == pytest.approx(400 / 1400, abs=1e-4)


def test_the_mean_is_over_requests_and_whole_devices_need_idle_ones() -> None:
    table = table_of({}, {})
    table.book("a", [held(share("d0", 100))])
    wanted = asks_of([pod(ask(mib=500)), pod(ask(mib=500)), pod(whole())])
    # A whole device needs d1: the 900 MiB of d0 are stranded for one of three requests.
    assert stranded(table, wanted) == pytest.approx(900 / (3 * 1900))


@pytest.mark.parametrize(
    "unusable", [{"healthy": False}, {"cordoned": True}], ids=["unhealthy", "cordoned"]
)
def test_unusable_devices_are_left_out(unusable: dict[str, object]) -> None:
    table = table_of({}, unusable)
    table.book("a", [held(share("d1", 300))])
    assert fill(table) == (1, 0, 1000, 0, 0)
    assert stranded(table, asks_of([pod(ask(mib=500))])) == 0.0


def test_devices_without_a_slot_of_another_vendor_or_without_compute_strand_their_memory() -> None:
    table = table_of({"slots": 1}, {})
    table.upsert_node(node_devices("b", [device("x", memory_mib=1000)], vendor="amd"))
    table.book("a", [held(share("d0", 1))])
    table.book("a", [held(share("d1", 1, 80))])
    assert stranded(table, asks_of([pod(ask(mib=1, core=50))])) == 1.0
    assert stranded(table, asks_of([pod(ask(mib=1, core=20))])) == pytest.approx(1999 / 2998)
