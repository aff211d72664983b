# SPDX-License-Identifier: Apache-2.0
"""Traffic of a device is attributed to its containers, and heavy ones are found."""

import random

import pytest

from hami_nodeagent.core.traffic import HIGH_S, REPEAT_S, Heavy, Seen, TrafficBook

GPU = "GPU-0"
A, B = ("uid-a", "main"), ("uid-b", "main")
LOOK_S = 3.0


class Node:
    """A device with two containers that use parts of its time."""

    def __init__(self) -> None:
        self.book = TrafficBook()
        self.now_s = 100.0
        self.ns = {A: 0, B: 0}
        self.uuids: dict[tuple[str, str], tuple[str, ...]] = {A: (GPU,), B: (GPU,)}

    def look(
        self, a: float, b: float, dram_pct: float | None, pcie_mib_s: float | None = None
    ) -> tuple[Heavy, ...]:
        """The containers used these parts of the time since the last sample."""
        self.now_s += LOOK_S
        self.ns[A] += round(a * LOOK_S * 1e9)
        self.ns[B] += round(b * LOOK_S * 1e9)
        seen = {GPU: Seen(dram_pct=dram_pct, pcie_mib_s=pcie_mib_s)}
        return self.book.look(seen, self.ns, self.uuids, now_s=self.now_s)

    def dram(self) -> tuple[float, float]:
        a, b = self.book.of(GPU, A), self.book.of(GPU, B)
        assert a is not None
        assert b is not None
        assert a.dram_pct is not None
        assert b.dram_pct is not None
        return a.dram_pct, b.dram_pct


@pytest.fixture
def node() -> Node:
    made = Node()
    made.look(0, 0, None)
    return made


def test_first_samples_attribute_traffic_by_device_time(node: Node) -> None:
    node.look(0.6, 0.2, 40.0)
    assert node.dram() == pytest.approx((30.0, 10.0), rel=0.05)


def test_containers_of_different_rates_are_distinguished_once_their_times_vary(node: Node) -> None:
    chance = random.Random(15)
    for _ in range(60):
        a, b = chance.uniform(0, 0.5), chance.uniform(0, 0.5)
        node.look(a, b, 100 * a + 10 * b)
    node.look(0.4, 0.4, 44.0)
    a, b = node.dram()
    assert a == pytest.approx(40.0, rel=0.1)
    assert b == pytest.approx(4.0, abs=2.0)


def test_estimates_never_exceed_the_device_and_are_never_negative(node: Node) -> None:
    chance = random.Random(7)
    for _ in range(200):
        dram_pct = chance.uniform(0, 100)
        node.look(chance.choice((0, 0.3)), chance.choice((0, 0.9)), dram_pct)
        a, b = node.dram()
        assert min(a, b) >= 0
        assert a + b <= dram_pct * 1.000001


def test_traffic_without_running_containers_has_no_estimate(node: Node) -> None:
    node.look(0, 0, 55.0)
    assert node.dram() == (0.0, 0.0)


def test_figures_that_the_driver_does_not_report_have_no_estimate(node: Node) -> None:
    node.look(0.5, 0.5, None, 8.0)
    found = node.book.of(GPU, A)
    assert found is not None
    assert found.dram_pct is None
    assert found.pcie_mib_s == pytest.approx(4.0)
    assert node.book.of("GPU-1", A) is None
    node.book.look({}, node.ns, node.uuids, now_s=node.now_s + 1)
    assert node.book.of(GPU, A) is None


def test_device_time_of_several_devices_counts_in_equal_parts(node: Node) -> None:
    node.uuids[A] = (GPU, "GPU-1")
    node.look(0.8, 0.4, 60.0)
    assert node.dram() == pytest.approx((30.0, 30.0), rel=0.05)


def test_counter_that_starts_again_adds_nothing(node: Node) -> None:
    node.look(0.5, 0.5, 50.0)
    node.ns[A] = 0
    node.look(0, 0.5, 50.0)
    assert node.dram()[0] == 0.0


def test_heavy_container_is_reported_after_a_while_and_again_later(node: Node) -> None:
    reported_s = [node.now_s for _ in range(250) for _ in node.look(0.7, 0.2, 90.0)]
    assert reported_s[0] - 103.0 == pytest.approx(HIGH_S, abs=2 * LOOK_S)
    assert reported_s[1] - reported_s[0] == pytest.approx(REPEAT_S, abs=2 * LOOK_S)
    heavy: tuple[Heavy, ...] = ()
    while not heavy:
        heavy = node.look(0.7, 0.2, 90.0)
    (one,) = heavy
    assert (one.container, one.device_pct) == (A, 90.0)
    assert one.text.startswith("container main uses an estimated 70 % of the memory bandwidth")


@pytest.mark.parametrize(("b", "dram_pct"), [(0.0, 95.0), (0.3, 70.0)])
def test_lone_containers_and_devices_with_bandwidth_left_are_not_reported(
    node: Node, b: float, dram_pct: float
) -> None:
    assert [one for _ in range(60) for one in node.look(0.6, b, dram_pct)] == []


def test_pause_starts_the_time_again(node: Node) -> None:
    for _ in range(40):
        assert node.look(0.5, 0.4, 90.0) == ()
        node.look(0.5, 0.4, 90.0)
        node.look(0.5, 0.4, 20.0)


def test_unknown_device_has_no_estimate() -> None:
    assert TrafficBook().of(GPU, A) is None
