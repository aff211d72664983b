# SPDX-License-Identifier: Apache-2.0
"""A container that did not load the library is reported once, and its pod evicted where allowed."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hami_nodeagent.shell.loaders import MOST_LOOKS
from tests.unit.nodeagent.core.builders import Given
from tests.unit.nodeagent.core.test_loaders import GLIBC, HEAP, LIMITER, MUSL
from tests.unit.nodeagent.shell.test_usage import PID, Desk

pytestmark = pytest.mark.anyio


def desk_with(tmp_path: Path, maps: str, **usage: Any) -> tuple[Desk, Given]:
    """A pod whose container was given the library and runs one process."""
    desk = Desk(tmp_path, **usage)
    pod = desk.run_pod()
    (grant,) = desk.site.picture.grants.of_pod(pod.uid)
    desk.site.picture.grants.add(replace(grant, library="libvgpu-1.so"))
    show(desk, maps)
    return desk, pod


def show(desk: Desk, maps: str) -> None:
    (desk.directory / "proc" / str(PID) / "maps").write_text(maps)


async def test_musl_is_named_in_an_event_and_counted_once(tmp_path: Path) -> None:
    desk, pod = desk_with(tmp_path, MUSL)
    await desk.look(5)
    (event,) = desk.peers.of_kind("Event")
    assert (event["reason"], event["involvedObject"]["uid"]) == ("ShareNotHeld", pod.uid)
    assert "container main: its C library is musl" in event["message"]
    assert "use an image with glibc 2.17 or newer" in event["message"]
    assert desk.metrics()['hami_nodeagent_unheld_pods_total{vendor="nvidia"}'] == 1
    assert pod.uid in desk.site.picture.unlimited_by_uid
    assert desk.peers.of_kind("Eviction") == []


async def test_pod_with_musl_is_evicted_where_breaches_are(tmp_path: Path) -> None:
    desk, pod = desk_with(tmp_path, MUSL, action="evict")
    await desk.look(4)
    (eviction,) = desk.peers.of_kind("Eviction")
    assert eviction["deleteOptions"]["preconditions"]["uid"] == pod.uid


@pytest.mark.parametrize("maps", [GLIBC + LIMITER, HEAP])
async def test_limited_and_static_processes_are_not_reported(tmp_path: Path, maps: str) -> None:
    desk, pod = desk_with(tmp_path, maps)
    await desk.look(3)
    assert desk.peers.created == []
    assert pod.uid not in desk.site.picture.unlimited_by_uid


async def test_judged_container_is_not_looked_at_again(tmp_path: Path) -> None:
    desk, _ = desk_with(tmp_path, GLIBC + LIMITER)
    await desk.look(1)
    show(desk, MUSL)
    await desk.look(3)
    assert desk.peers.created == []


async def test_container_without_dynamic_programs_is_given_up(tmp_path: Path) -> None:
    desk, _ = desk_with(tmp_path, HEAP)
    await desk.look(MOST_LOOKS)
    show(desk, MUSL)
    await desk.look(3)
    assert desk.peers.created == []


async def test_container_without_the_library_by_setting_is_not_judged(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run_pod()
    show(desk, MUSL)
    await desk.look(3)
    assert desk.peers.created == []
