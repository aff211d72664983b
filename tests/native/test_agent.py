# SPDX-License-Identifier: Apache-2.0
"""The agent's readers and pages against the real library: both interpret every byte alike."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from hami_common.model.placement import Share
from hami_common.runtime.tasks import background
from hami_nodeagent.core.region import DeviceUse, Region, Work
from hami_nodeagent.shell.bursts import BurstKeeper
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.priority import PriorityKeeper
from hami_nodeagent.shell.regions import read_activity, read_region
from hami_nodeagent.shell.usagemetrics import Look
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import MakeNode, StartDrive
from tests.support.drive import OUT_OF_MEMORY, Drive
from tests.support.keeper import keeper_process, site_of
from tests.support.room import set_limits_above
from tests.unit.nodeagent.core.builders import Given, device
from tests.unit.nodeagent.shell.support import know

MIB = 1 << 20
HIGH, LOW = 0, 5
SLACK_S = 0.4
"""Delay that a machine busy with other things may add."""
KILLS = 4
FREED_S = 0.1
RECLAIMED_S = 10.0
"""A watcher finds an ended process within a second; here on a loaded machine."""


def region_at(path: Path) -> Region:
    found = read_region(path)
    assert isinstance(found, Region), found
    return found


def region_of(container: GpuContainer) -> Region:
    return region_at(container.region_directory / "region-1")


def test_region_matches_the_driver(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, 1, memory_mib=2000)
    first = start_drive(container).begin(0)
    second = start_drive(container).begin(1)
    first.ask("alloc 300M")
    first.ask("alloc 12345")
    second.ask("alloc 7M")
    shown = region_of(container)
    for index in (0, 1):
        uuid = node.uuids[index]
        assert shown.devices[uuid].used_bytes == node.card.used_bytes(uuid)
    assert shown.devices[node.uuids[0]].context_bytes > 0
    own = {first.process.pid, second.process.pid}
    assert {one.owner.pid for one in shown.processes} == own
    first.close()
    deadline = time.monotonic() + RECLAIMED_S
    ended = region_of(container)
    while {one.owner.pid for one in ended.processes} != {second.process.pid}:
        assert time.monotonic() < deadline, "nobody found that the process has ended"
        ended = region_of(container)
    assert ended.devices[node.uuids[0]].used_bytes == 0


def test_last_process_that_is_killed_uses_nothing_at_the_next_reading(
    node: GpuNode, start_drive: StartDrive
) -> None:
    """No process is left in the container to reclaim the slot of the killed one."""
    container = node.container(0, memory_mib=2000)
    path = container.region_directory / "region-1"
    living = Living(Path("/proc"))
    drive = start_drive(container).begin(0)
    drive.ask("alloc 300M")
    drive.ask("launch nop 1 3")
    alive = read_region(path, living.dead_of)
    assert isinstance(alive, Region)
    assert alive.devices[node.uuids[0]].used_bytes > 300 * MIB
    drive.kill()
    drive.process.wait()
    dead = read_region(path, living.dead_of)
    assert isinstance(dead, Region)
    assert dead.devices[node.uuids[0]] == DeviceUse()
    assert dead.processes == ()
    assert [one.launches for one in dead.ended] == [one.launches for one in alive.processes]
    assert region_of(container).devices[node.uuids[0]].used_bytes > 300 * MIB, "still in the file"


def test_region_counts_launches_and_refusals(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, memory_mib=500, core_pct=50)
    drive = start_drive(container).begin(0)
    path = container.region_directory / "region-1"
    before = read_activity(path)
    drive.ask("launch nop 1 25")
    drive.ask("sync")
    after = read_activity(path)
    assert isinstance(before, Work)
    assert isinstance(after, Work)
    assert before.number != after.number
    assert (before.is_idle, after.is_idle) == (True, False)
    assert drive.code("alloc 600M") == 2
    (process,) = region_of(container).processes
    assert process.launches == 25
    assert process.refusals == 1


def test_lowered_limit_shows_as_over(node: GpuNode, start_drive: StartDrive) -> None:
    container = node.container(0, memory_mib=900)
    drive = start_drive(container).begin(0)
    drive.ask("alloc 700M")
    container.set_memory_mib(400)
    deadline_s = time.monotonic() + 10

    def is_over() -> bool:
        return region_of(container).devices[node.uuids[0]].over_since_ns > 0

    while not is_over() and time.monotonic() < deadline_s:
        assert drive.code("alloc 1M") in {0, 2}
        time.sleep(0.1)
    assert is_over()


async def until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.02)


@pytest.mark.anyio
async def test_low_priority_gives_way_while_a_high_one_is_active(
    make_node: MakeNode, start_drive: StartDrive, containers_work: None
) -> None:
    machine = make_node("1xRTX-PRO-6000")
    uuid = machine.uuids[0]
    high = machine.container(0, memory_mib=500, priority=HIGH)
    low = machine.container(0, memory_mib=500, priority=LOW)
    site = site_of(uuid, {high: HIGH, low: LOW}, min_share_pct=0)

    def served_s(pid: int) -> float:
        uses = {use.pid: use.served_ns for use in machine.card.uses(uuid)}
        return uses.get(pid, 0) / 1e9

    async def rate(pid: int, window_s: float) -> float:
        begin, begun_s = served_s(pid), time.monotonic()
        await anyio.sleep(window_s)
        return (served_s(pid) - begin) / (time.monotonic() - begun_s)

    async with background() as group:
        group.start_soon(PriorityKeeper(site).run)
        busy = await anyio.to_thread.run_sync(lambda: start_drive(low).begin(0))
        urgent = await anyio.to_thread.run_sync(lambda: start_drive(high).begin(0))
        busy.send("work fixed_1ms 1 20000")
        pid = busy.process.pid
        await until(lambda: served_s(pid) > 0.2)
        alone = await rate(pid, 0.5)
        urgent.send("work fixed_1ms 1 3000")
        await until(lambda: served_s(urgent.process.pid) > 0.02)
        await anyio.sleep(0.3)
        beside = await rate(pid, 1.5)
        await anyio.to_thread.run_sync(urgent.answer)
        at = served_s(pid)
        await until(lambda: served_s(pid) > at + 0.3)
        busy.kill()
    assert alone > 0.5
    assert beside < 0.2, f"{beside:.2f} of the device beside a higher priority, {alone:.2f} alone"


@pytest.mark.anyio
async def test_container_grows_into_memory_that_no_share_books(
    make_node: MakeNode, start_drive: StartDrive, containers_work: None
) -> None:
    """The library follows the agent's bounds, the agent the library's account."""
    machine = make_node("1xRTX-PRO-6000")
    uuid = machine.uuids[0]
    containers = [machine.container(0, memory_mib=1000) for _ in range(2)]
    for one in containers:
        set_limits_above(one, memory_limit_mib=3500)
    site = site_of(
        uuid,
        dict.fromkeys(containers, 1),
        memory_mib=1000,
        memory_limit_mib=3500,
        on=device(0, uuid=uuid, memory_mib=4000, capacity_mib=4000),
    )
    picture = site.picture
    picture.ledger_known = picture.pods_known = True
    keeper = BurstKeeper(
        site=site,
        bells=PriorityKeeper(site).bells,
        look=Look,
        report=lambda: None,
        events=lambda: None,
    )
    first, second = (start_drive(one).begin(0) for one in containers)

    async def takes(drive: Drive, mib: int, *, within_s: float = 10.0) -> None:
        """Wait until the allocation succeeds."""
        with anyio.fail_after(within_s):
            while await anyio.to_thread.run_sync(drive.code, f"alloc {mib}M"):
                await anyio.sleep(0.05)

    async def refuses(drive: Drive) -> None:
        """Wait until an allocation fails: leased memory may be used for one more period."""
        with anyio.fail_after(10.0):
            while await anyio.to_thread.run_sync(drive.code, "alloc 1M") != OUT_OF_MEMORY:
                await anyio.sleep(0.05)

    def bursting() -> set[str]:
        """Return the pods with a report of what they use above their request."""
        return {one.pod_uid for one in picture.bursts(uuid) if 800 < one.memory_mib <= 1024}

    async with background() as group:
        group.start_soon(keeper.run)
        await takes(first, 1800)
        assert first.code("alloc 300M") == OUT_OF_MEMORY, "the other half of the rest"
        await takes(second, 1800)
        await until(lambda: bursting() == {"uid-pod-0", "uid-pod-1"})
        other = Given("other")
        share = Share(vendor="nvidia", uuid=uuid, memory_mib=1900)
        containers_of = (replace(other.record.containers[0], shares=(share,)),)
        other.entry = replace(other.entry, record=replace(other.record, containers=containers_of))
        know(site, other)
        await until(lambda: set(picture.bounds_mib.values()) == {1000})
        await refuses(first)
        await refuses(second)
        assert machine.card.used_bytes(uuid) > 3600 * MIB, "memory in use stays"
        second.kill()
        await until(lambda: bursting() == {"uid-pod-0"})
        other.entry = replace(other.entry, record=replace(other.record, op="release"))
        picture.pods.end("uid-pod-1", now_s=0)
        know(site, other)
        await takes(first, 900)
        await anyio.sleep(0.5)
        assert first.code("alloc 1M") == 0
    await anyio.sleep(site.settings.priority.lease_s)
    await refuses(first)  # without the agent the bound is the request
    first.kill()


@dataclass
class Rivals:
    """A process of high priority that works on command, and one of low priority that is busy."""

    node: GpuNode
    high: GpuContainer
    urgent: Drive
    busy: Drive
    low: GpuContainer

    def launches(self) -> int:
        """Launches of the low one, by its region."""
        (process,) = region_at(self.low.region_directory / "region-1").processes
        return process.launches

    def launched_after(self, time_ns: int) -> int:
        """Wait until the driver gets a launch of the low one after this time; return when."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            launched_ns = self.node.card.launched_ns(self.node.uuids[0], self.busy.process.pid)
            if after := [one for one in launched_ns if one > time_ns]:
                return after[0]
            time.sleep(0.001)
        pytest.fail("not handed over")


@pytest.fixture
def rivals(
    make_node: MakeNode,
    start_drive: StartDrive,
    containers_work: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Rivals]:
    """Start the two processes, and a keeper that aborts when it searches the host's processes.

    The polls are so rare that only doorbells and deaths can hand the device over in time.
    """
    machine = make_node("1xRTX-PRO-6000")
    high = machine.container(0, memory_mib=500, priority=HIGH)
    low = machine.container(0, memory_mib=500, priority=LOW)
    monkeypatch.setattr(Living, "_walk", lambda _: os.abort())
    rare: dict[str, Any] = {"rivals_s": 5.0, "neighbours_s": 5.0, "lease_s": 20.0, "hold_s": 10.0}
    site = site_of(machine.uuids[0], {high: HIGH, low: LOW}, min_share_pct=0, **rare)
    with keeper_process(site):
        urgent, busy = start_drive(high).begin(), start_drive(low).begin()
        busy.send("work fixed_100us 1000 25000 plain 1000")
        both = Rivals(machine, high, urgent, busy, low)
        settle(both.launches, grows=True)
        time.sleep(0.5)  # the library looks at the page four times a second
        yield both
        busy.kill()


def settle(launches: Callable[[], int], *, grows: bool) -> float:
    """Wait until the launches of 40 ms are some or none; return when those 40 ms began."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        began, before = time.monotonic(), launches()
        time.sleep(0.04)
        if (launches() > before) == grows:
            return began
    pytest.fail("not handed over")


def test_device_is_handed_over_by_the_doorbell(rivals: Rivals) -> None:
    urgent, launches = rivals.urgent, rivals.launches
    for _ in range(3):
        began = time.monotonic()
        urgent.send("launch fixed_1ms 1000 200")
        blocked = settle(launches, grows=False)
        urgent.answer()
        assert blocked - began < SLACK_S
        urgent.ask("sync")
        ended = time.monotonic()
        assert settle(launches, grows=True) - ended < SLACK_S


def test_process_that_waits_for_the_device_keeps_its_priority(rivals: Rivals) -> None:
    urgent, launches = rivals.urgent, rivals.launches
    urgent.send("launch fixed_100ms 1 9")
    settle(launches, grows=False)
    before = launches()
    time.sleep(0.6)  # it launches nothing more, for longer than an idle process stays active
    assert launches() == before
    urgent.answer()
    settle(launches, grows=True)


def test_killed_process_frees_the_lower_priorities(rivals: Rivals, start_drive: StartDrive) -> None:
    """Within 100 ms; the fastest of several counts, since other work delays the rest.

    The keeper must not search all processes of the host: they may be thousands.
    """
    took_s = []
    for _ in range(KILLS):
        rivals.urgent.send("work fixed_1ms 1000 20000 plain 20")
        settle(rivals.launches, grows=False)
        killed_ns = time.monotonic_ns()
        rivals.urgent.process.kill()
        took_s.append((rivals.launched_after(killed_ns) - killed_ns) / 1e9)
        rivals.urgent = start_drive(rivals.high).begin()
    assert max(took_s) < FREED_S + SLACK_S
    assert min(took_s) < FREED_S
