# SPDX-License-Identifier: Apache-2.0
"""Changes of a directory wake tasks at once; without inotify, or events, they poll."""

import errno
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from hami_common.runtime.clock import SystemClock
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.tasks import background
from hami_nodeagent.shell import inotify, pluginproxy
from hami_nodeagent.shell.inotify import DirectoryWatch
from tests.unit.nodeagent.shell.support import make_site, until

pytestmark = pytest.mark.anyio

WOKEN_WITHIN_S = 2.0
"""Less than ``SAFETY_S``, so that only an event can have woken the task."""
POLL_S = 0.01


def watch_of(*directories: Path) -> DirectoryWatch:
    return DirectoryWatch(directories, clock=SystemClock(), poll_s=POLL_S)


@asynccontextmanager
async def running(watch: DirectoryWatch) -> AsyncIterator[None]:
    """The watch runs, and reports changes of the kernel."""
    async with background() as group:
        group.start_soon(watch.run)
        await until(lambda: watch.wait_s == inotify.SAFETY_S)
        yield


async def test_created_renamed_and_removed_entries_wake_the_task(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    watch = watch_of(tmp_path)
    async with running(watch):
        for change in (first.touch, lambda: first.rename(second), second.unlink):
            changed = watch.changed
            change()
            with anyio.fail_after(WOKEN_WITHIN_S):
                await watch.wait(changed)
            assert changed.is_set()


async def test_written_file_wakes_no_waiter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    watch = watch_of(tmp_path)
    async with running(watch):
        changed = watch.changed
        path.write_text("more")
        with anyio.move_on_after(0.2):
            await changed.wait()
        assert not changed.is_set()


async def test_change_before_the_watch_began_wakes_the_task(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    changed = watch.changed
    (tmp_path / "file").touch()
    async with running(watch):
        with anyio.fail_after(WOKEN_WITHIN_S):
            await changed.wait()


async def test_other_event_or_the_limit_ends_the_wait(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    async with running(watch):
        other = anyio.Event()
        other.set()
        with anyio.fail_after(WOKEN_WITHIN_S):
            await watch.wait(watch.changed, other)
            await watch.wait(watch.changed, most_s=0.01)


async def test_directory_that_is_missing_is_polled_until_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify, "_RETRY_S", 0.01)
    directory = tmp_path / "later"
    watch = watch_of(tmp_path, directory)
    async with background() as group:
        group.start_soon(watch.run)
        await anyio.wait_all_tasks_blocked()
        assert watch.wait_s == POLL_S
        directory.mkdir()
        await until(lambda: watch.wait_s == inotify.SAFETY_S)


async def test_replaced_directory_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify, "_RETRY_S", 0.01)
    directory = tmp_path / "plugins"
    directory.mkdir()
    watch = watch_of(directory)
    async with running(watch):
        changed = watch.changed
        directory.rmdir()
        with anyio.fail_after(WOKEN_WITHIN_S):
            await changed.wait()
        directory.mkdir()
        await until(lambda: watch.wait_s == inotify.SAFETY_S)
        changed = watch.changed
        (directory / "kubelet.sock").touch()
        with anyio.fail_after(WOKEN_WITHIN_S):
            await changed.wait()


async def test_without_an_instance_tasks_poll_and_the_problem_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def refuse(mask_by_directory: Mapping[str, int]) -> tuple[int, dict[int, str]]:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(inotify, "open_inotify", refuse)
    monkeypatch.setattr(inotify, "_RETRY_S", 0.01)
    watch = watch_of(tmp_path)
    async with background() as group:
        group.start_soon(watch.run)
        await until(lambda: tries > 2)
        with anyio.fail_after(WOKEN_WITHIN_S):
            await watch.wait(watch.changed)
    assert caplog.text.count("directory not watched, it is polled") == 1


def instances() -> int:
    """Count the inotify instances of this process."""
    targets = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.append(one.readlink().name)
    return targets.count("anon_inode:inotify")


async def test_descriptor_is_closed_when_the_watch_ends(tmp_path: Path) -> None:
    before = instances()
    watch = watch_of(tmp_path)
    async with running(watch):
        assert instances() == before + 1
    assert instances() == before
    assert watch.wait_s == POLL_S


async def test_idle_proxy_does_not_read_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def sockets(directory: str) -> list[Path]:
        nonlocal reads
        reads += 1
        return []

    monkeypatch.setattr(pluginproxy, "_sockets", sockets)
    settings = pluginproxy.Settings(plugin_socket_dir=str(tmp_path), poll_s=POLL_S)
    site = make_site(tmp_path / "state")
    watch = watch_of(tmp_path)
    supervisor = Supervisor(clock=SystemClock(), registry=site.metrics.registry)
    async with running(watch), background() as group:
        group.start_soon(
            pluginproxy.find_endpoints, settings, watch, supervisor, group.start_soon, {}
        )
        with anyio.move_on_after(50 * POLL_S):
            await anyio.sleep_forever()
        assert reads == 1
        (tmp_path / "hami-nvidia.sock").touch()
        with anyio.fail_after(WOKEN_WITHIN_S):
            await until(lambda: reads == 2)
