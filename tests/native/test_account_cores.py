# SPDX-License-Identifier: Apache-2.0
"""A compute limit that changes while a process launches holds a second later, both ways.

Kernels of 20 ms under a limit of one percent: a launch waits for seconds, so the limiter must wake
the waiting thread when the limit grows; and at eighty percent much is under way when it shrinks.
The reference is the fake driver's count of served time. Takes about 8 s.
"""

import statistics
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import StartDrive

pytestmark = pytest.mark.alone

LITTLE_PCT, MUCH_PCT = 1, 80
SOON_S = 1.0
"""The guarantee. A machine busy with other things may break it once, so the median counts."""
PATIENCE_S = 15.0
CHANGES = 3
WINDOW_S = 0.5


def set_cores(container: GpuContainer, core_pct: int) -> None:
    """Swap the file, as the agent does."""
    assert container.limits is not None
    devices = tuple(replace(one, core_pct=core_pct) for one in container.limits.devices)
    container.set_limits(replace(container.limits, devices=devices))


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until the condition was met."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + PATIENCE_S, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - begin


def test_changed_compute_limit_holds_a_second_later(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, memory_mib=500, core_pct=LITTLE_PCT)
    drive = start_drive(container).begin(0)
    pid = drive.process.pid

    def served_s() -> float:
        uses = node.card.uses(node.uuids[0])
        return sum(use.served_ns for use in uses if use.pid == pid) / 1e9

    def rate() -> float:
        begin, begun_s = served_s(), time.monotonic()
        time.sleep(WINDOW_S)
        return (served_s() - begin) / (time.monotonic() - begun_s)

    drive.send("work fixed_20ms 1 60000 plain 4")
    wait_until(lambda: served_s() > 0, "the first kernel ran")
    wait_until(lambda: rate() < 0.1, "launches wait for their share")
    grown_s, shrunk = [], []
    for _ in range(CHANGES):
        begin = served_s()
        set_cores(container, MUCH_PCT)
        # Five kernels: at the old limit they would take ten seconds.
        grown_s.append(wait_until(lambda: served_s() > begin + 0.1, "the grown limit is used"))  # noqa: B023 - asked at once
        set_cores(container, LITTLE_PCT)
        time.sleep(SOON_S)
        shrunk.append(rate())
    assert statistics.median(grown_s) < SOON_S
    assert statistics.median(shrunk) < 0.1
    drive.kill()
