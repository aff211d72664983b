# SPDX-License-Identifier: Apache-2.0
"""Pressure of overcommitted memory: thresholds, hysteresis, limits of reports."""

import pytest

from hami_nodeagent.core.pressure import (
    BEGINS_S,
    ENDS_S,
    NODE,
    REPEAT_S,
    Change,
    ConditionKey,
    DeviceMemory,
    HostMemory,
    PressureBook,
    Signal,
    signals_of,
)

GPU = "gpu-0"
MEMORY_MIB = 10_000


def device(used_mib: int, promised_mib: int = 20_000) -> DeviceMemory:
    return DeviceMemory(
        uuid=GPU, memory_mib=MEMORY_MIB, promised_mib=promised_mib, used_mib=used_mib
    )


class Clock:
    """A book that takes one sample a second."""

    def __init__(self) -> None:
        self.book = PressureBook()
        self.now_s = 1000.0

    def run(
        self, for_s: float, *devices: DeviceMemory, host: HostMemory | None = None
    ) -> list[Change]:
        changes: list[Change] = []
        for _ in range(int(for_s)):
            self.now_s += 1
            changes += self.book.look(signals_of(devices, host), now_s=self.now_s)
        return changes


def test_memory_beyond_the_device_is_in_the_host() -> None:
    assert device(9000).spilled_mib == 0
    assert device(12_500).spilled_mib == 2500
    assert device(12_500).owed_mib == 7500
    assert device(9000, promised_mib=9000).owed_mib == 0


def test_condition_begins_after_a_while_and_ends_below_a_lower_threshold() -> None:
    clock = Clock()
    assert clock.run(BEGINS_S, device(10_499)) == []
    assert clock.run(BEGINS_S, device(10_500)) == []
    (begin,) = clock.run(2, device(10_500))
    assert (begin.kind, begin.uuid, begin.is_begin) == ("spilled", GPU, True)
    assert "10500 MiB of its 10000 MiB, so at least 500 MiB" in begin.text
    assert clock.book.going == {("spilled", GPU)}
    assert clock.run(10 * ENDS_S, device(10_201)) == [], "between both thresholds nothing changes"
    assert clock.run(ENDS_S, device(10_200)) == []
    (end,) = clock.run(2, device(10_200))
    assert (end.kind, end.is_begin) == ("spilled", False)
    assert "fits the device again" in end.text
    assert not clock.book.going


def test_moments_are_not_reported() -> None:
    clock = Clock()
    for _ in range(20):
        assert clock.run(BEGINS_S - 1, device(20_000)) == []
        assert clock.run(1, device(0)) == []


def test_condition_that_returns_is_reported_once_in_a_while() -> None:
    clock = Clock()
    reports = []
    for _ in range(12):
        reports += clock.run(BEGINS_S + 2, device(20_000))
        reports += clock.run(ENDS_S + 2, device(0))
    assert [one.is_begin for one in reports] == [True, False] * (len(reports) // 2)
    assert len(reports) // 2 == 12 * (BEGINS_S + ENDS_S + 4) // REPEAT_S + 1


def test_device_that_is_gone_has_no_pressure() -> None:
    clock = Clock()
    clock.run(BEGINS_S + 2, device(20_000))
    (end,) = clock.run(1)
    assert not end.is_begin
    clock.run(REPEAT_S + 1)
    assert clock.book.going == frozenset()


def test_host_memory_must_hold_what_devices_may_still_move_there() -> None:
    """20000 promised, 12000 used: 2000 are in the host, 8000 may follow."""
    clock = Clock()
    enough = HostMemory(total_mib=64_000, available_mib=8000)
    short = HostMemory(total_mib=64_000, available_mib=7999)
    better = HostMemory(total_mib=64_000, available_mib=11_199)
    well = HostMemory(total_mib=64_000, available_mib=11_200)
    one = device(12_000)
    assert enough.headroom_mib([one]) == 0
    assert [c.kind for c in clock.run(60, one, host=enough)] == ["spilled"]
    (begin,) = clock.run(BEGINS_S + 2, one, host=short)
    assert (begin.kind, begin.uuid, begin.is_begin) == ("host-memory", NODE, True)
    assert "another 8000 MiB to the memory of the host, of which 7999 MiB" in begin.text
    assert clock.run(60, one, host=better) == []
    (end,) = clock.run(ENDS_S + 2, one, host=well)
    assert (end.kind, end.is_begin) == ("host-memory", False)


@pytest.mark.parametrize("host", [None, HostMemory(total_mib=1, available_mib=0)])
def test_nodes_without_overcommitted_devices_have_no_conditions(host: HostMemory | None) -> None:
    assert signals_of([], host) == {}


def test_settled_signals_count_at_once() -> None:
    book = PressureBook()
    key: ConditionKey = ("thrashing", GPU)
    (begin,) = book.look({key: Signal(holds=True, is_settled=True, text="slow")}, now_s=1.0)
    assert begin == Change(kind="thrashing", uuid=GPU, is_begin=True, text="slow")
    (end,) = book.look({key: Signal(is_over=True, is_settled=True)}, now_s=2.0)
    assert not end.is_begin
