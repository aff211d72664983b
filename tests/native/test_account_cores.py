# SPDX-License-Identifier: Apache-2.0
"""A compute limit that changes while a process launches holds from then on, both ways.

Kernels of 20 ms under a limit of one percent: a launch waits for seconds, so whoever waits must be
woken when the limit grows. The truth is the fake driver's count of served time. Takes about 8 s.
"""

import time
from collections.abc import Callable

from msgspec.structs import replace

from hami_sim.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import StartDrive

LITTLE_PCT, MUCH_PCT = 1, 80
SOON_S = 5.0
"""The target is a second; at the old limit it would take thirty."""
PATIENCE_S = 15.0


def set_cores(container: GpuContainer, core_pct: int) -> None:
    """Swap the file, as the agent does."""
    assert container.limits is not None
    devices = tuple(replace(one, core_pct=core_pct) for one in container.limits.devices)
    container.set_limits(replace(container.limits, devices=devices))


def wait_until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def test_changed_compute_limit_takes_effect_while_launches_wait(
    node: GpuNode, start_drive: StartDrive
) -> None:
    container = node.container(0, memory_mib=500, core_pct=LITTLE_PCT)
    drive = start_drive(container).begin(0)
    pid = drive.process.pid

    def served_s() -> float:
        uses = node.card.uses(node.uuids[0])
        return sum(use.served_ns for use in uses if use.pid == pid) / 1e9

    def rate() -> float:
        begin, begun_s = served_s(), time.monotonic()
        time.sleep(1.0)
        return (served_s() - begin) / (time.monotonic() - begun_s)

    drive.send("work fixed_20ms 1 60000 plain 4")
    wait_until(lambda: served_s() > 0, PATIENCE_S, "the first kernel ran")
    wait_until(lambda: rate() < 0.1, PATIENCE_S, "launches wait for their share")
    begin = served_s()
    set_cores(container, MUCH_PCT)
    wait_until(lambda: served_s() > begin + 0.3, SOON_S, "the grown limit is used")
    set_cores(container, LITTLE_PCT)
    wait_until(lambda: rate() < 0.1, PATIENCE_S, "the shrunk limit holds")
    drive.kill()
