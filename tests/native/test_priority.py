# SPDX-License-Identifier: Apache-2.0
"""Lower priorities yield to higher ones by the agent's page, and use what is free again.

The page is written by the agent's own writer; the tests set the activity.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from msgspec.structs import replace

from hami_nodeagent.core.priorities import NO_LEVEL, Activity, Standing, key_of
from hami_nodeagent.core.region import Region, Work
from hami_nodeagent.shell.priority import PriorityPage
from hami_nodeagent.shell.regions import read_region
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import MakeNode
from tests.support.drive import Drive
from tests.support.room import set_limits_above
from tests.unit.nodeagent.core.test_breach import holder

StartDrive = Callable[..., Drive]
WritePage = Callable[..., None]

pytestmark = pytest.mark.alone

LEASE_S = 30.0
HAND_OVER_S = 0.1
SLACK_S = 0.4
"""Delay that a machine busy with other things may add to any wait."""
WAITING_ROUNDS = 6
LAUNCHING_NS = 2_000_000
"""A launch that went before the page changed reaches the driver within this time, mostly."""


@pytest.fixture
def low(node: GpuNode) -> GpuContainer:
    return node.container(0, priority=3)


@pytest.fixture
def write_page(node: GpuNode, low: GpuContainer) -> Iterator[WritePage]:
    pages = [PriorityPage(low.priority_directory / "page-1")]

    def write(
        highest: int, tenants: int = 2, lease_s: float = LEASE_S, highest_present: int = NO_LEVEL
    ) -> None:
        standing = Standing(
            highest_active=highest, active_tenants=tenants, highest_present=highest_present
        )
        until_ns = time.monotonic_ns() + int(lease_s * 1e9)
        pages[0].write({node.uuids[0]: standing}, lease_until_ns=until_ns)

    yield write
    pages.pop().close()
    gc.collect()  # the mapping ends with the page's last view


def begin(drive: Drive) -> Drive:
    for command in ("init", "device 0", "launch fixed_1ms 1000 8", "sync"):
        drive.send(command)
        drive.answer(command)
    return drive


def served_ms(node: GpuNode) -> float:
    return node.card.served_ns(node.uuids[0]) / 1e6


def test_lower_level_waits_while_a_higher_one_is_active(
    node: GpuNode, low: GpuContainer, start_drive: StartDrive, write_page: WritePage
) -> None:
    write_page(NO_LEVEL)
    drive = begin(start_drive(low))
    drive.send("work fixed_1ms 1000 2500 plain 1000")
    time.sleep(0.5)
    write_page(0)
    time.sleep(HAND_OVER_S + SLACK_S)
    before = served_ms(node)
    time.sleep(0.8)
    assert served_ms(node) == before
    write_page(NO_LEVEL)
    deadline = time.monotonic() + HAND_OVER_S + SLACK_S
    while served_ms(node) == before:
        assert time.monotonic() < deadline
    drive.answer("work")


def test_little_is_queued_ahead_of_a_hand_over(
    node: GpuNode, low: GpuContainer, start_drive: StartDrive, write_page: WritePage
) -> None:
    write_page(NO_LEVEL)
    drive = begin(start_drive(low))
    drive.send("work fixed_1ms 1000 1500 plain 1000")
    time.sleep(1)
    (use,) = node.card.uses(node.uuids[0])
    assert (use.wanted_ns - use.served_ns) / 1e9 < HAND_OVER_S
    assert served_ms(node) > 500
    drive.answer("work")


def test_an_expired_lease_blocks_no_process(
    node: GpuNode, low: GpuContainer, start_drive: StartDrive, write_page: WritePage
) -> None:
    write_page(NO_LEVEL)
    drive = begin(start_drive(low))
    write_page(0, lease_s=0.5)
    began = time.monotonic()
    drive.send("launch fixed_1ms 1000 1")
    drive.answer("launch")
    waited = time.monotonic() - began
    assert 0.4 < waited < 0.5 + HAND_OVER_S + SLACK_S


@pytest.mark.parametrize("highest", [3, 7, NO_LEVEL])
def test_the_same_or_a_lower_level_blocks_no_process(
    low: GpuContainer, start_drive: StartDrive, write_page: WritePage, highest: int
) -> None:
    write_page(highest)
    drive = begin(start_drive(low))
    began = time.monotonic()
    drive.send("launch fixed_1ms 1000 1")
    drive.answer("launch")
    assert time.monotonic() - began < SLACK_S


def test_a_lone_container_may_have_the_whole_device(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, core_pct=20, priority=0)
    page = PriorityPage(container.priority_directory / "page-1")

    def tell(tenants: int) -> None:
        standing = Standing(highest_active=0, active_tenants=tenants)
        until_ns = time.monotonic_ns() + int(LEASE_S * 1e9)
        page.write({node.uuids[0]: standing}, lease_until_ns=until_ns)

    tell(1)
    drive = begin(start_drive(container))
    drive.send("work fixed_1ms 1000 4000 plain 64")
    time.sleep(0.5)
    began, first = time.monotonic(), served_ms(node)
    time.sleep(1)
    lent = (served_ms(node) - first) / (time.monotonic() - began) / 10
    tell(2)
    time.sleep(0.5)
    began, first = time.monotonic(), served_ms(node)
    time.sleep(1.5)
    held = (served_ms(node) - first) / (time.monotonic() - began) / 10
    drive.answer("work")
    page.close()
    assert lent > 80
    assert held == pytest.approx(20, abs=5)


def test_lone_container_has_at_most_its_compute_limit(
    node: GpuNode, start_drive: StartDrive
) -> None:
    """20 percent requested, 50 as the limit: while it is alone, unless the policy says force."""
    container = node.container(0, core_pct=20, priority=0)
    set_limits_above(container, core_limit_pct=50)
    page = PriorityPage(container.priority_directory / "page-1")

    def tell(tenants: int, lease_s: float = LEASE_S) -> None:
        standing = Standing(highest_active=0, active_tenants=tenants)
        until_ns = time.monotonic_ns() + int(lease_s * 1e9)
        page.write({node.uuids[0]: standing}, lease_until_ns=until_ns)

    def share() -> float:
        time.sleep(0.7)
        began, first = time.monotonic(), served_ms(node)
        time.sleep(1)
        return (served_ms(node) - first) / (time.monotonic() - began) / 10

    tell(1)
    drive = begin(start_drive(container))
    drive.send("work fixed_1ms 1000 30000 plain 64")
    found = {"alone": share()}
    tell(2)
    found["beside a neighbor"] = share()
    tell(1)
    found["alone again"] = share()
    tell(1, lease_s=0)
    found["without a lease"] = share()
    tell(1)
    set_limits_above(container, core_limit_pct=80)
    found["limit raised"] = share()
    assert container.limits is not None
    container.set_limits(replace(container.limits, core_policy="force"))
    found["policy force"] = share()
    drive.process.kill()
    page.close()
    assert found == {
        "alone": pytest.approx(50, abs=7),
        "beside a neighbor": pytest.approx(20, abs=7),
        "alone again": pytest.approx(50, abs=7),
        "without a lease": pytest.approx(20, abs=7),
        "limit raised": pytest.approx(80, abs=20),  # a busy machine launches late
        "policy force": pytest.approx(20, abs=7),
    }


@pytest.mark.parametrize(
    ("policy", "caps"),
    [
        ("default", {"none": 100, "same": 30, "lower": 100, "same and lower": 30, "higher": 0}),
        ("force", {"none": 30, "same": 30, "lower": 30, "same and lower": 30, "higher": 0}),
        ("disable", {"none": 100, "same": 100, "lower": 100, "same and lower": 100, "higher": 0}),
    ],
)
@pytest.mark.parametrize("level", [0, 3])
def test_cap_by_priority_sharers_and_policy(
    node: GpuNode, start_drive: StartDrive, policy: str, caps: dict[str, int], level: int
) -> None:
    """A container with 30 percent beside active containers of these levels, by the agent's rules.

    Only a container of the same level limits it, and a higher one blocks it whatever the policy.
    """
    others = {"none": (), "same": (level,), "lower": (7,), "same and lower": (level, 7)}
    if level > 0:
        others["higher"] = (0,)
    uuid = node.uuids[0]
    container = node.container(0, core_pct=30, priority=level)
    assert container.limits is not None
    word = "" if policy == "default" else policy
    container.set_limits(replace(container.limits, core_policy=word))
    page = PriorityPage(container.priority_directory / "page-1")

    def tell(levels: Iterable[int]) -> None:
        holders = [holder(str(n), priority=one, uuid=uuid) for n, one in enumerate(levels)]
        keys = [key_of(one) for one in holders]
        activity = Activity(hold_s=LEASE_S, rung_hold_s=LEASE_S)
        activity.note(keys, {key: Work(number=1) for key in keys}, now_s=0, has_rung=True)
        until_ns = time.monotonic_ns() + int(LEASE_S * 1e9)
        page.write(activity.standings(holders, [uuid]), lease_until_ns=until_ns)

    tell((level,))
    drive = begin(start_drive(container))
    drive.send("work fixed_1ms 1000 15000 plain 64")
    found = {}
    for name, levels in others.items():
        tell((level, *levels))
        time.sleep(1)
        began, first = time.monotonic(), served_ms(node)
        time.sleep(1)
        found[name] = (served_ms(node) - first) / (time.monotonic() - began) / 10
    drive.process.kill()
    page.close()
    for name, measured in found.items():
        slack = 45 if caps[name] == 100 else 7  # a busy machine launches late
        assert measured == pytest.approx(caps[name], abs=slack), name


def test_launch_that_waits_for_its_part_gives_way(
    node: GpuNode, low: GpuContainer, start_drive: StartDrive, write_page: WritePage
) -> None:
    """The next kernel waits until the device is near the end of the queue when the page changes."""
    write_page(NO_LEVEL, highest_present=0)
    drive = begin(start_drive(low))
    drive.send("work fixed_20ms 1000 8000 plain 1000")
    late = 0
    for _ in range(WAITING_ROUNDS):
        write_page(NO_LEVEL, highest_present=0)
        time.sleep(0.3)
        write_page(0, highest_present=0)
        blocked_ns = time.monotonic_ns()
        time.sleep(HAND_OVER_S + SLACK_S)
        late += sum(
            one > blocked_ns + LAUNCHING_NS
            for one in node.card.launched_ns(node.uuids[0], drive.process.pid)
        )
    drive.process.kill()
    assert late <= WAITING_ROUNDS // 2


@pytest.mark.parametrize(
    ("kernel", "neighbor"),
    [("fixed_100us", ""), ("fixed_1ms", "fixed_1ms"), ("fixed_5ms", "fixed_1ms")],
)
def test_blocked_container_gets_its_least_share(
    make_node: MakeNode,
    start_drive: StartDrive,
    containers_work: None,
    kernel: str,
    neighbor: str,
) -> None:
    """After a second, 5 percent in parts of 2 ms; the seconds beyond the first are counted."""
    node = make_node("1xRTX-PRO-6000")
    low = node.container(0, memory_mib=500, priority=3)
    page = PriorityPage(low.priority_directory / "page-1")
    page.set_min_share(5.0)

    def tell(highest: int) -> None:
        standing = Standing(highest_active=highest, active_tenants=1, highest_present=0)
        until_ns = time.monotonic_ns() + int(LEASE_S * 1e9)
        page.write({node.uuids[0]: standing}, lease_until_ns=until_ns)

    tell(NO_LEVEL)
    drive = start_drive(low).begin()
    drive.ask(f"launch {kernel} 1000 30")
    drive.ask("sync")
    tell(0)
    high = start_drive(node.container(0, memory_mib=500, priority=0)).begin()
    if neighbor:
        high.send(f"work {neighbor} 1000 15000 plain 20")

    def served_by_low_ms() -> float:
        uses = node.card.uses(node.uuids[0])
        return sum(use.served_ns for use in uses if use.pid == drive.process.pid) / 1e6

    before = served_by_low_ms()
    drive.send(f"work {kernel} 1000 15000 plain 1000")
    time.sleep(0.9)
    assert served_by_low_ms() == before
    time.sleep(0.5)
    began, first = time.monotonic(), served_by_low_ms()
    time.sleep(6)
    share = (served_by_low_ms() - first) / (time.monotonic() - began) / 10
    drive.process.kill()
    high.process.kill()
    page.close()
    region = read_region(low.region_directory / "region-1")
    assert isinstance(region, Region)
    assert share == pytest.approx(5, abs=1)
    assert region.devices[node.uuids[0]].starved_ns / 1e9 == pytest.approx(6.4, abs=1)
