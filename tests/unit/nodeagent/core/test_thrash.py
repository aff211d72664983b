# SPDX-License-Identifier: Apache-2.0
"""Detection of containers that move each other's pages, and their exclusive quanta."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from hami_nodeagent.core.thrash import LEASE_S, QUANTUM_MOST, SetGate, Thrash, ThrashRules
from tests.property.nodeagent.paging_model import LINK_MIB_S, MEMORY_MIB, STEP_S, Box, World

GPU = "gpu-0"
RULES = ThrashRules(quanta=True)
MINUTE_S = 60.0


def two(used_mib: int = 60_000, *, levels: Sequence[int] = (1, 1)) -> list[Box]:
    return [
        Box(f"pod-{number}", [GPU], used_mib, level=level) for number, level in enumerate(levels)
    ]


def is_thrashing(world: World) -> bool:
    return world.thrash.signals()["thrashing", GPU].holds


def has_quanta(world: World) -> bool:
    return world.thrash.has_quanta


def test_two_containers_that_exceed_the_device_together_thrash() -> None:
    world = World(*two(), rules=ThrashRules())
    world.run(RULES.after_s)
    assert not is_thrashing(world), "one moment of traffic is no proof"
    world.run(MINUTE_S)
    assert is_thrashing(world)
    text = world.thrash.signals()["thrashing", GPU].text
    assert "120000 MiB of its 80000 MiB" in text
    assert "20000 MiB/s" in text
    assert "slow each other down" in text
    assert not world.held(), "without quanta no container is held back"


@pytest.mark.parametrize(
    "case", ["fits", "one works", "little traffic", "unknown traffic", "moves outweigh"]
)
def test_other_traffic_is_not_thrashing(case: str) -> None:
    first, second = boxes = two()
    world = World(*boxes)
    if case == "fits":
        first.used_mib = second.used_mib = MEMORY_MIB // 2
        world.other_mib_s = LINK_MIB_S
    elif case == "one works":
        second.works = False
        world.other_mib_s = LINK_MIB_S
    elif case == "little traffic":
        world.rules = replace(RULES, traffic_mib_s=LINK_MIB_S * 2)
    elif case == "unknown traffic":
        world.has_traffic = False
    else:
        world.rules = replace(RULES, quantum_s=1.0)
    world.run(3 * MINUTE_S)
    assert not is_thrashing(world)
    assert not world.held()


def test_quanta_restore_the_throughput_and_share_it_equally() -> None:
    free, fair = World(*two(), rules=ThrashRules()), World(*two())
    for world in (free, fair):
        world.run(20 * MINUTE_S)
    thrashing_s = sum(box.progress_s for box in free.boxes)
    quanta_s = sum(box.progress_s for box in fair.boxes)
    serial_s = 20 * MINUTE_S
    assert thrashing_s < 0.1 * serial_s
    assert quanta_s > 0.8 * serial_s
    least, most = sorted(box.progress_s for box in fair.boxes)
    assert least > 0.9 * most
    assert is_thrashing(fair)
    assert "one at a time, for 40 s" in fair.thrash.signals()["thrashing", GPU].text


def test_quantum_is_long_enough_for_the_memory_that_moves() -> None:
    """Ten times as long as the excess needs out and in, at most four times the setting."""
    world = World(*two(MEMORY_MIB - 1), rules=replace(RULES, quantum_s=30.0))
    world.run(MINUTE_S)
    assert "for 80 s" in world.thrash.signals()["thrashing", GPU].text
    small = World(*two(40_500))
    small.run(MINUTE_S)
    assert "for 30 s" in small.thrash.signals()["thrashing", GPU].text
    large = World(*two(MEMORY_MIB - 1), link_mib_s=8000.0)
    large.run(MINUTE_S)
    assert f"for {QUANTUM_MOST * 30} s" in large.thrash.signals()["thrashing", GPU].text


def test_holder_that_makes_no_calls_gives_way_and_keeps_the_device_without_rivals() -> None:
    first, second = boxes = two()
    world = World(*boxes)
    world.run(MINUTE_S)
    holder = first if world.thrash.holders[GPU] == first.key else second
    other = second if holder is first else first
    holder.works = False
    world.run(3.0)
    assert world.thrash.holders[GPU] == other.key
    world.run(50.0)
    assert world.thrash.holders[GPU] == other.key, "no container waits, so there is no next one"


def test_quanta_end_when_containers_no_longer_compete() -> None:
    first, second = boxes = two()
    world = World(*boxes)
    world.run(MINUTE_S)
    assert has_quanta(world)
    first.works = False
    world.run(RULES.calm_s + 10)
    assert not has_quanta(world)
    assert not is_thrashing(world)
    assert not world.held()
    first.works = True
    world.run(MINUTE_S)
    assert has_quanta(world)
    second.used_mib = 10_000
    world.run(3.0)
    assert not has_quanta(world), "the device has room for both"
    assert not world.held()


def test_quanta_that_do_not_help_end_for_a_while() -> None:
    world = World(*two())
    world.other_mib_s = LINK_MIB_S * 9
    world.run(10 * MINUTE_S)
    assert not has_quanta(world)
    assert is_thrashing(world)
    assert not world.held()
    world.other_mib_s = 0.0
    world.run(RULES.retry_s)
    assert has_quanta(world)


def test_higher_level_goes_first_and_takes_over_within_a_quantum() -> None:
    low, high = boxes = two(levels=(5, 0))
    world = World(*boxes)
    world.run(MINUTE_S)
    assert world.thrash.holders[GPU] == high.key
    high.works = False
    world.run(3.0)
    assert world.thrash.holders[GPU] == low.key
    high.works = True
    world.run(1.0)
    assert world.thrash.holders[GPU] == high.key
    progress_s = low.progress_s
    world.run(2 * MINUTE_S)
    assert low.progress_s == progress_s


def test_containers_without_a_gate_prevent_quanta() -> None:
    boxes = two()
    boxes[0].has_gate = False
    world = World(*boxes)
    world.run(2 * MINUTE_S)
    assert is_thrashing(world)
    assert not has_quanta(world)
    assert not world.held()


def test_devices_with_a_common_container_have_one_holder() -> None:
    """Two containers of two devices could otherwise hold one each, and wait for the other."""
    boxes = [Box(f"pod-{number}", ["gpu-0", "gpu-1"], 60_000) for number in range(2)]
    boxes.append(Box("pod-2", ["gpu-1"], 60_000))
    world = World(*boxes)
    world.run(MINUTE_S)
    assert len(set(world.thrash.holders.values())) == 1
    assert set(world.thrash.holders) == {"gpu-0", "gpu-1"}
    for _ in range(1000):
        world.step()
        assert len(world.held()) == 2
    least, *_, most = sorted(box.progress_s for box in boxes)
    assert least > 0.7 * most


def test_setting_is_obeyed_at_once() -> None:
    world = World(*two())
    world.run(MINUTE_S)
    assert world.held()
    world.rules = ThrashRules()
    world.step()
    assert not world.held()
    assert all(box.closed_until_s is None for box in world.boxes)


def test_containers_go_on_when_the_agent_stops_and_after_its_restart() -> None:
    world = World(*two())
    world.run(MINUTE_S)
    assert world.held()
    world.is_watched = False
    world.run(LEASE_S + STEP_S)
    assert not world.held()
    world.is_watched, world.thrash = True, Thrash()
    world.step()
    assert all(box.closed_until_s is None for box in world.boxes), "closed gates are opened"


def test_device_that_is_not_sampled_holds_no_container_back() -> None:
    world = World(*two())
    world.run(MINUTE_S)
    assert world.held()
    facts = world.facts()
    gates: tuple[SetGate, ...] = ()
    for second in range(70):
        later = replace(facts, now_s=facts.now_s + second)
        later = replace(
            later, tenants=tuple(replace(one, waits_s=later.now_s) for one in facts.tenants)
        )
        gates = world.thrash.look(later, world.rules)
    assert not has_quanta(world)
    assert all(one.closed_until_s is None for one in gates)


def test_changes_are_counted_once() -> None:
    world = World(*two())
    world.run(5 * MINUTE_S)
    changes = world.thrash.take_changes()
    assert changes[GPU] == pytest.approx(5 * MINUTE_S / 40, abs=2)
    assert world.thrash.take_changes() == {}
