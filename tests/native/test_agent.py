# SPDX-License-Identifier: Apache-2.0
"""The agent's readers and pages against the real library: both interpret every byte alike."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.placement import Share
from hami_common.runtime.tasks import background
from hami_nodeagent.core.region import DeviceUse, Region
from hami_nodeagent.settings import PrioritySettings
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.priority import FILE_NAME, PriorityKeeper
from hami_nodeagent.shell.regions import read_activity, read_region, region_path
from hami_nodeagent.shell.site import Site
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.native.conftest import MakeNode, StartDrive
from tests.unit.nodeagent.core.builders import NODE, Given, device
from tests.unit.nodeagent.shell.support import know, make_site

MIB = 1 << 20
HIGH, LOW = 0, 5
RECLAIMED_S = 10.0
"""A watcher finds an ended process within a second; here on a loaded machine."""


def region_of(container: GpuContainer) -> Region:
    found = read_region(container.region_directory / "region-1")
    assert isinstance(found, Region), found
    return found


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
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert before != after
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


def tenant(site: Site, container: GpuContainer, name: str, uuid: str, priority: int) -> None:
    """Let the picture of the agent contain the container as a pod with a share of the device."""
    pod = Given(name, region_volumes={"main": "region"})
    shares = replace(
        pod.record.containers[0],
        shares=(Share(vendor="nvidia", uuid=uuid, memory_mib=500),),
        priority=priority,
    )
    pod.entry = replace(pod.entry, record=replace(pod.record, containers=(shares,)))
    know(site, pod)
    site.picture.grants.add(pod.grant("main", name))
    path = region_path(Path(site.settings.pods_dir), pod.uid, "region")
    path.parent.parent.mkdir(parents=True)
    path.parent.symlink_to(container.region_directory)


@pytest.mark.anyio
async def test_low_priority_gives_way_while_a_high_one_is_active(
    make_node: MakeNode, start_drive: StartDrive, tmp_path: Path, containers_work: None
) -> None:
    machine = make_node("1xRTX-PRO-6000")
    uuid = machine.uuids[0]
    high = machine.container(0, memory_mib=500, priority=HIGH)
    low = machine.container(0, memory_mib=500, priority=LOW)
    page_directory = high.priority_directory
    site = make_site(
        tmp_path / "state",
        pods_dir=str(tmp_path / "pods"),
        priority=PrioritySettings(directory=str(page_directory)),
    )
    known = NodeDevices(
        node=NODE,
        vendor="nvidia",
        boot_id="",
        seq=2,
        time_s=0,
        config_generation=1,
        devices=(device(0, uuid=uuid),),
    )
    site.picture.set_canonical(known)
    tenant(site, high, "high", uuid, HIGH)
    tenant(site, low, "low", uuid, LOW)

    def served_s(pid: int) -> float:
        uses = {use.pid: use.served_ns for use in machine.card.uses(uuid)}
        return uses.get(pid, 0) / 1e9

    async def rate(pid: int, window_s: float) -> float:
        begin, begun_s = served_s(pid), time.monotonic()
        await anyio.sleep(window_s)
        return (served_s(pid) - begin) / (time.monotonic() - begun_s)

    keeper = PriorityKeeper(site)
    await anyio.to_thread.run_sync(keeper.ensure)
    os.link(page_directory / FILE_NAME, low.priority_directory / FILE_NAME)
    async with background() as group:
        group.start_soon(keeper.run)
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
