# SPDX-License-Identifier: Apache-2.0
"""The page that shows containers the active priorities: its layout, and its round trip."""

import socket
import subprocess
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from hami_common.runtime.tasks import background
from hami_nodeagent.core.holders import holders_of
from hami_nodeagent.core.priorities import NO_LEVEL, Standing
from hami_nodeagent.core.region import Work
from hami_nodeagent.settings import PrioritySettings
from hami_nodeagent.shell import doorbell, priority
from hami_nodeagent.shell import page as pages
from hami_nodeagent.shell.priority import PriorityKeeper, PriorityPage
from hami_nodeagent.shell.regions import region_path
from tests.support.regions import Built, Process, Used
from tests.unit.nodeagent.core.builders import Given
from tests.unit.nodeagent.shell.support import know, make_site

NATIVE = Path(__file__).parents[4] / "native" / "libvgpu" / "src"

LAYOUT = """
#include <stdio.h>
#include "bell.h"
#include "priority.h"
int main(void) {
    printf("%llu %u %u %u %u %zu %zu %zu %zu %zu %zu %s\\n", 0ULL + PRIORITY_MAGIC, PRIORITY_LAYOUT,
           PRIORITY_DEVICES, PRIORITY_UUID, PRIORITY_NO_LEVEL, sizeof(struct priority_device),
           offsetof(struct priority_page, devices), offsetof(struct priority_device, sequence),
           offsetof(struct priority_device, highest_active),
           offsetof(struct priority_device, lease_until_ns),
           offsetof(struct priority_device, active_tenants), PRIORITY_PATH);
    printf("%zu %zu %zu\\n", sizeof(struct priority_page), offsetof(struct priority_page, layout),
           offsetof(struct priority_page, device_count));
    printf("%zu %zu %zu\\n", offsetof(struct priority_device, highest_present),
           offsetof(struct priority_device, lowest_present),
           offsetof(struct priority_page, min_share_ppm));
    printf("%s\\n", BELL_PATH);
    return 0;
}
"""

# Prints "level tenants" of one device, then waits for the next change and prints it again.
READER = """
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "priority.h"
int main(int argc, char **argv) {
    const struct priority_page *page = argc == 4 ? priority_open(argv[1]) : NULL;
    const struct priority_device *device = page ? priority_device(page, argv[2]) : NULL;
    if (!device) return 1;
    for (int i = 0; i < argv[3][0] - '0'; i++) {
        struct priority_view view;
        int told = priority_read(device, 5, &view);
        printf("%d %u %u\\n", told, view.highest_active, view.active_tenants);
        fflush(stdout);
        if (i + 1 < argv[3][0] - '0')
            syscall(SYS_futex, &device->sequence, FUTEX_WAIT, view.sequence, NULL, NULL, 0);
    }
    priority_close(page);
    return 0;
}
"""


def compiled(directory: Path, text: str, *more: str) -> Path:
    source, program = directory / "program.c", directory / "program"
    source.write_text(text)
    sources = [source, *(NATIVE / name for name in more)]
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", f"-I{NATIVE}", "-o", str(program)]
    subprocess.run([*command, *map(str, sources)], check=True)
    return program


def test_layout_is_that_of_the_c_header(tmp_path: Path) -> None:
    program = compiled(tmp_path, LAYOUT)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    first, second, third, bell = printed.splitlines()
    assert first.split() == [
        *map(str, (priority.MAGIC, pages.LAYOUT, pages.DEVICES_MAX, pages.UUID_BYTES)),
        *map(str, (NO_LEVEL, pages.DEVICE_BYTES, pages.HEADER_BYTES, pages.SEQUENCE_AT)),
        *map(str, (priority.HIGHEST_AT, pages.LEASE_AT, priority.TENANTS_AT)),
        f"{priority.CONTAINER_DIRECTORY}/{priority.FILE_NAME}",
    ]
    assert second.split() == [str(pages.SIZE), "8", "16"]
    present = (priority.HIGHEST_PRESENT_AT, priority.LOWEST_PRESENT_AT)
    assert third.split() == [*map(str, present), str(priority.MIN_SHARE_AT)]
    names = (priority.CONTAINER_DIRECTORY, doorbell.DIRECTORY_NAME, doorbell.SOCKET_NAME)
    assert bell == "/".join(names)


def test_the_library_reads_the_page_and_is_woken(tmp_path: Path) -> None:
    program = compiled(tmp_path, READER, "priority.c", "platform.c")
    page = PriorityPage(tmp_path / "dir" / "page-1")
    page.write({"GPU-a": Standing(), "GPU-b": Standing(highest_active=3)}, lease_until_ns=10)
    reader = subprocess.Popen(
        [program, tmp_path / "dir" / "page-1", "GPU-b", "3"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "1 3 0\n"
        page.write({"GPU-b": Standing(highest_active=0, active_tenants=2)}, lease_until_ns=10)
        assert reader.stdout.readline() == "1 0 2\n"
        page.write({"GPU-b": Standing(highest_active=1, active_tenants=1)}, lease_until_ns=5)
        assert reader.stdout.readline() == "0 1 1\n"
        assert reader.wait(10) == 0
    finally:
        reader.kill()
        reader.communicate()
        page.close()


def test_page_is_kept_over_restarts_and_replaced_when_invalid(tmp_path: Path) -> None:
    path = tmp_path / "page-1"
    first = PriorityPage(path)
    first.write({"GPU-a": Standing()}, lease_until_ns=1)
    first.close()
    inode = path.stat().st_ino
    again = PriorityPage(path)
    again.write({"GPU-b": Standing(), "GPU-a": Standing()}, lease_until_ns=1)
    again.close()
    assert path.stat().st_ino == inode
    data = path.read_bytes()
    names = [data[64 + n * 128 :].partition(b"\0")[0] for n in range(3)]
    assert names == [b"GPU-a", b"GPU-b", b""]
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_bytes(b"something else")
    PriorityPage(path).close()
    assert path.stat().st_size == pages.SIZE
    assert path.stat().st_ino != inode


def test_devices_beyond_the_capacity_of_the_page_are_left_out(tmp_path: Path) -> None:
    page = PriorityPage(tmp_path / "page-1")
    standings = {f"GPU-{n}": Standing() for n in range(pages.DEVICES_MAX + 2)}
    page.write({**standings, "x" * 64: Standing(), "": Standing()}, lease_until_ns=1)
    assert page.is_current()
    page.close()
    (tmp_path / "page-1").rename(tmp_path / "moved")
    assert not page.is_current()
    data = (tmp_path / "moved").read_bytes()
    assert data[-128:].startswith(b"GPU-63\0")


@pytest.mark.anyio
async def test_launches_of_a_pod_reach_the_page(tmp_path: Path) -> None:
    site = make_site(
        tmp_path / "state",
        pods_dir=str(tmp_path / "pods"),
        priority=PrioritySettings(directory=str(tmp_path / "page"), idle_s=0.01, hold_s=30.0),
    )
    pod = Given("pod", region_volumes={"main": "region"})
    record = replace(pod.record, containers=(replace(pod.record.containers[0], priority=4),))
    pod.entry = replace(pod.entry, record=record)
    know(site, pod)
    site.picture.grants.add(pod.grant("main", "a"))
    path = region_path(tmp_path / "pods", pod.uid, "region")
    path.parent.mkdir(parents=True)
    keeper = PriorityKeeper(site)
    paths = [mount.container_path for mount in keeper.mounts(pod.uid, "main")]
    assert paths == ["/run/hami-priority", "/run/hami-priority/bells"]
    page = tmp_path / "page" / "page-1"
    launches = 0

    def is_told() -> bool:
        if not page.exists() or page.stat().st_size < pages.SIZE:
            return False
        data = page.read_bytes()
        at = pages.HEADER_BYTES
        assert data[at : at + 9] in (b"nvidia-0\0", bytes(9))
        level = data[at + priority.HIGHEST_AT]
        return (level, data[at + priority.TENANTS_AT]) == (4, 1)

    async with background() as group:
        group.start_soon(keeper.run)
        with anyio.fail_after(3):
            while not is_told():
                launches += 1
                built = Built(processes=(Process(1, (Used(1),), launches=launches),))
                path.with_name("fresh").write_bytes(built.data())
                path.with_name("fresh").replace(path)
                await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_doorbells_are_answered_after_a_run_that_was_broken_off(tmp_path: Path) -> None:
    site = make_site(
        tmp_path / "state",
        pods_dir=str(tmp_path / "pods"),
        priority=PrioritySettings(directory=str(tmp_path / "page")),
    )
    pod = Given("pod", region_volumes={"main": "region"})
    know(site, pod)
    site.picture.grants.add(pod.grant("main", "a"))
    path = region_path(tmp_path / "pods", pod.uid, "region")
    path.parent.mkdir(parents=True)
    path.write_bytes(Built(processes=(Process(1, (Used(1),), launches=5),)).data())
    keeper = PriorityKeeper(site)
    bell = tmp_path / "page" / doorbell.DIRECTORY_NAME / f"{pod.uid}_main" / doorbell.SOCKET_NAME
    page = tmp_path / "page" / "page-1"
    at = pages.HEADER_BYTES + priority.TENANTS_AT
    for launches in (6, 7):
        built = Built(processes=(Process(1, (Used(1),), launches=launches),))
        async with background() as group:
            group.start_soon(keeper.run)
            with anyio.fail_after(3):
                while not page.exists() or not bell.exists() or page.read_bytes()[at]:
                    await anyio.sleep(0.01)
                await anyio.sleep(0.1)
                path.write_bytes(built.data())
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"a", str(bell))
                while not page.read_bytes()[at]:
                    await anyio.sleep(0.01)
                path.write_bytes(Built().data())
                while page.read_bytes()[at]:
                    await anyio.sleep(0.01)


class Hurried:
    """A clock whose sleepers wake at once, until ``limit_s`` is over; counts the sleeps."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.elapsed_s = 0.0
        self.sleeps = 0
        self.over = anyio.Event()

    def now_s(self) -> float:
        return self.elapsed_s

    def monotonic_s(self) -> float:
        return self.elapsed_s

    async def sleep(self, delay_s: float) -> None:
        self.elapsed_s += delay_s
        self.sleeps += 1
        if self.elapsed_s >= self.limit_s:
            self.over.set()
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("numbers", "is_idle", "sleeps"),
    [
        pytest.param(repeat(7), True, range(5, 7), id="idle: once in ten seconds"),
        pytest.param(repeat(7), False, range(100, 102), id="an older library: twice a second"),
        pytest.param(count(), False, range(495, 503), id="launching: ten times a second"),
    ],
)
async def test_regions_of_one_priority_are_read_often_only_while_a_container_launches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: Iterator[int],
    *,
    is_idle: bool,
    sleeps: range,
) -> None:
    site = make_site(
        tmp_path / "state",
        pods_dir=str(tmp_path / "pods"),
        priority=PrioritySettings(directory=str(tmp_path / "page")),
    )
    site.clock = clock = Hurried(50.0)
    for name in ("one", "two"):
        pod = Given(name, region_volumes={"main": "region"})
        know(site, pod)
        site.picture.grants.add(pod.grant("main", "a"))
    monkeypatch.setattr(
        priority, "read_activity", lambda *_: Work(number=next(numbers), is_idle=is_idle)
    )
    async with background() as group:
        group.start_soon(PriorityKeeper(site).run)
        with anyio.fail_after(10):
            await clock.over.wait()
    assert clock.sleeps in sleeps


@pytest.mark.anyio
async def test_holders_are_collected_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make_site(
        tmp_path / "state", priority=PrioritySettings(directory=str(tmp_path / "page"))
    )
    site.clock = clock = Hurried(50.0)
    collected = 0
    real = holders_of

    def counted(*facts: Any) -> Any:
        nonlocal collected
        collected += 1
        if collected == 1:
            site.picture.note_change()
        return real(*facts)

    monkeypatch.setattr(priority, "holders_of", counted)
    async with background() as group:
        group.start_soon(PriorityKeeper(site).run)
        with anyio.fail_after(10):
            await clock.over.wait()
    assert collected == 2
