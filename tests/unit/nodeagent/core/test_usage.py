# SPDX-License-Identifier: Apache-2.0
"""One row per container and device, also with partial data."""

from typing import Any

from hami_nodeagent.core.breach import Process
from hami_nodeagent.core.hardware import Instance
from hami_nodeagent.core.living import Owner
from hami_nodeagent.core.region import DeviceUse, ProcessUse, Region
from hami_nodeagent.core.usage import Counted, Counters, Part, containers_of, rows_of
from tests.unit.nodeagent.core.test_breach import GPU, holder, process

KEY = ("uid-a", "main")


def used(pid: int = 1, start_ticks: int = 1, **more: Any) -> ProcessUse:
    given: dict[str, int] = {
        "last_launch_ns": 0,
        "launches": 0,
        "refusals": 0,
        "device_time_ns": 0,
        "waited_ns": 0,
        **more,
    }
    owner = Owner(pid=pid, namespace=1, start_ticks=start_ticks)
    return ProcessUse(owner=owner, **given)


def region(*processes: ProcessUse, **devices: DeviceUse) -> Region:
    return Region(devices={GPU: devices.get("gpu", DeviceUse())}, processes=processes)


def test_region_is_shown_before_the_drivers_figure() -> None:
    use = DeviceUse(used_bytes=5, context_bytes=2, module_bytes=1, over_since_ns=9)
    seen: list[Process] = [process(used_mib=3, core_pct=40), process("b", used_mib=9)]
    (row,) = rows_of([holder()], {KEY: region(gpu=use)}, {GPU: seen})
    assert (row.used_bytes, row.context_bytes, row.module_bytes) == (5, 2, 1)
    assert (row.driver_bytes, row.core_pct, row.is_over) == (3 << 20, 40, True)


def test_whole_device_has_the_drivers_figure_and_an_idle_one_zeros() -> None:
    whole, idle = holder(is_whole=True), holder("b", uuid="GPU-1")
    first, second = rows_of([whole, idle], {}, {GPU: [process(used_mib=3)]})
    assert (first.used_bytes, first.driver_bytes) == (3 << 20, 3 << 20)
    assert (second.used_bytes, second.core_pct, second.is_over) == (0, 0, False)


def test_use_of_a_partition_belongs_to_its_container() -> None:
    mig = Instance(uuid=GPU, instance_id="MIG-a", profile="1g")
    key = (*KEY, 0)
    carried = holder(core_pct=14)
    told = Part(instance=mig, is_told=True, used_mib=7, core_pct=50)
    (row,) = rows_of([carried], {}, {GPU: [process(used_mib=3)]}, {key: told})
    assert (row.used_bytes, row.driver_bytes, row.core_pct) == (7 << 20, 7 << 20, 7)
    assert row.is_load_known
    silent = Part(instance=mig, is_told=True, used_mib=7)
    (row,) = rows_of([carried], {}, {}, {key: silent})
    assert (row.used_bytes, row.core_pct, row.is_load_known) == (7 << 20, 0, False)
    (row,) = rows_of([carried], {}, {GPU: [process(used_mib=3, core_pct=4)]}, {})
    assert (row.used_bytes, row.core_pct, row.is_load_known) == (3 << 20, 4, True)


def test_partition_of_a_claim_is_used_by_the_containers_that_use_the_claim() -> None:
    mig = Instance(uuid=GPU, instance_id="MIG-a", profile="1g")
    part = Part(instance=mig, is_told=True, used_mib=7, core_pct=50)
    user = holder(claimed=("uid-of-claim", "main"), core_pct=14)
    (row,) = rows_of([user], {}, {}, {("uid-of-claim", "main", 0): part})
    assert (row.used_bytes, row.core_pct, row.part) == (7 << 20, 7, part)


def test_two_partitions_of_one_device_have_their_own_figures() -> None:
    parts = {
        (*KEY, place): Part(
            instance=Instance(uuid=GPU, instance_id=f"MIG-{place}", profile="1g"),
            is_told=True,
            used_mib=used_mib,
            core_pct=0,
        )
        for place, used_mib in ((0, 7), (1, 9))
    }
    two = [holder(number=0, place=0), holder(number=1, place=1)]
    rows = rows_of(two, {}, {GPU: [process(used_mib=16)]}, parts)
    assert [row.used_bytes >> 20 for row in rows] == [7, 9]
    first, second = rows_of(two[::-1], {}, {}, {(*KEY, 1): parts[*KEY, 1]})
    assert (first.part, second.part) == (parts[*KEY, 1], None)


def test_counters_do_not_fall_when_processes_end_or_lie() -> None:
    counters = Counters()
    assert counters.add(KEY, None) == Counted()
    assert counters.add(KEY, region(used(1, launches=5), used(2, launches=2))).launches == 7
    assert counters.add(KEY, region(used(1, launches=6))).launches == 8
    assert counters.add(KEY, region(used(1, launches=1))).launches == 8
    assert counters.add(KEY, region(used(1, launches=4, start_ticks=2))).launches == 12
    assert counters.add(KEY, None).launches == 12
    counters.keep_only(frozenset())
    assert counters.add(KEY, None) == Counted()


def test_counters_of_an_ended_process_count_once() -> None:
    counters = Counters()
    assert counters.add(KEY, region(used(1, launches=5))).launches == 5
    dead = Region(devices={}, processes=(), ended=(used(1, launches=7),))
    assert counters.add(KEY, dead).launches == 7
    assert counters.add(KEY, dead).launches == 7


def test_container_with_several_devices_is_one() -> None:
    two = [holder(), holder(uuid="GPU-1", number=1)]
    (row,) = containers_of(
        two, {KEY: region(used(last_launch_ns=10**9), used(2))}, Counters(), now_ns=3 * 10**9
    )
    assert (row.processes, row.idle_s) == (2, 2.0)
    (unused,) = containers_of(two, {}, Counters(), now_ns=0)
    assert (unused.processes, unused.idle_s, unused.counted) == (0, None, Counted())
