# SPDX-License-Identifier: Apache-2.0
"""Many pods one after another: even spread, devices with many sharers, exact amounts."""

from hami_common.model.placement import Placement
from hami_common.model.request import PodRequest
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable, Usage
from tests.support.builders import ask, device, devices, node_devices, pod


def place(table: DeviceTable, request: PodRequest) -> Placement:
    """Book the pod on its best node."""
    names = table.nodes()
    verdicts = Verdicts(table)
    ((best, _),) = verdicts.prioritize(request, names).best(1)
    found = pick(table, request, best)
    assert isinstance(found, Placement), found
    assert not table.book(best, found.containers)
    return found


def test_thousand_equal_pods_load_all_devices_alike() -> None:
    table = DeviceTable()
    for number in range(40):
        table.upsert_node(devices(f"n{number:02d}", 8))
    for _ in range(1000):
        place(table, pod(ask(mib=2000), node="spread", device=["spread"]))
    loads = [usage.slots for _, _, usage in table.usages()]
    assert sum(loads) == 1000
    assert max(loads) - min(loads) <= 1


def test_sixty_four_containers_share_one_device() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x", memory_mib=80_000, slots=64)]))
    request = pod(ask(mib=1000, core=1))
    for _ in range(64):
        place(table, request)
    assert table.usage("n", "x") == Usage(
        memory_mib=64_000, core_pct=64, slots=64, exclusive_holders=0
    )
    refused = pick(table, request, "n")
    assert isinstance(refused, NodeRefusal)
    assert refused.code == "CardTimeSlicingExhausted"


def test_every_amount_of_memory_and_compute_is_booked_exactly() -> None:
    table = DeviceTable()
    table.upsert_node(node_devices("n", [device("x", memory_mib=81_559)]))
    for mib in range(1, 81_560, 89):
        core = mib % 100 + 1
        found = place(table, pod(ask(mib=mib, core=core)))
        used = table.usage("n", "x")
        assert used is not None
        assert (used.memory_mib, used.core_pct) == (mib, core)
        table.unbook("n", found.containers)
