# SPDX-License-Identifier: Apache-2.0
"""Lower priorities yield to higher ones by the agent's page, and use what is free again.

The page is written by the agent's own writer; the tests set the activity.
"""

import gc
import time
from collections.abc import Callable, Iterator

import pytest

from hami_nodeagent.core.priorities import NOBODY, Standing
from hami_nodeagent.shell.priority import PriorityPage
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.support.drive import Drive

StartDrive = Callable[..., Drive]
WritePage = Callable[..., None]

pytestmark = pytest.mark.alone

LEASE_S = 30.0
HAND_OVER_S = 0.1
SLACK_S = 0.4
"""Delay that a machine busy with other things may add to any wait."""


@pytest.fixture
def low(node: GpuNode) -> GpuContainer:
    return node.container(0, priority=3)


@pytest.fixture
def write_page(node: GpuNode, low: GpuContainer) -> Iterator[WritePage]:
    pages = [PriorityPage(low.priority_directory / "page-1")]

    def write(highest: int, tenants: int = 2, lease_s: float = LEASE_S) -> None:
        standing = Standing(highest_active=highest, active_tenants=tenants)
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
    write_page(NOBODY)
    drive = begin(start_drive(low))
    drive.send("work fixed_1ms 1000 2500 plain 1000")
    time.sleep(0.5)
    write_page(0)
    time.sleep(HAND_OVER_S + SLACK_S)
    before = served_ms(node)
    time.sleep(0.8)
    assert served_ms(node) == before
    write_page(NOBODY)
    deadline = time.monotonic() + HAND_OVER_S + SLACK_S
    while served_ms(node) == before:
        assert time.monotonic() < deadline
    drive.answer("work")


def test_little_is_queued_ahead_of_a_hand_over(
    node: GpuNode, low: GpuContainer, start_drive: StartDrive, write_page: WritePage
) -> None:
    write_page(NOBODY)
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
    write_page(NOBODY)
    drive = begin(start_drive(low))
    write_page(0, lease_s=0.5)
    began = time.monotonic()
    drive.send("launch fixed_1ms 1000 1")
    drive.answer("launch")
    waited = time.monotonic() - began
    assert 0.4 < waited < 0.5 + HAND_OVER_S + SLACK_S


@pytest.mark.parametrize("highest", [3, 7, NOBODY])
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
