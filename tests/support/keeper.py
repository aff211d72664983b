# SPDX-License-Identifier: Apache-2.0
"""The agent's keeper of priorities for containers of the fake GPU machine."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
from msgspec.structs import replace

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import Share
from hami_common.runtime.footprint import settle
from hami_nodeagent.settings import PrioritySettings
from hami_nodeagent.shell.doorbell import DIRECTORY_NAME
from hami_nodeagent.shell.page import HEADER_BYTES
from hami_nodeagent.shell.priority import FILE_NAME, PriorityKeeper, ensure_page
from hami_nodeagent.shell.regions import region_path
from hami_nodeagent.shell.site import Site
from tests.fakes.gpucontainers import GpuContainer
from tests.unit.nodeagent.core.builders import NODE, Given, device
from tests.unit.nodeagent.shell.support import know, make_site


def site_of(
    uuid: str,
    level_by_container: Mapping[GpuContainer, int],
    *,
    memory_mib: int = 500,
    memory_limit_mib: int = 0,
    on: Device | None = None,
    agent: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Site:
    """An agent that knows these containers as pods with a share of the device.

    ``on``: the device as the registry publishes it. ``agent``: settings of the agent; ``settings``:
    of ``PrioritySettings``. All containers see one page, so it lies beside them.
    """
    directory = next(iter(level_by_container)).priority_directory.parents[1] / "agent"
    pages = directory / "pages"
    site = make_site(
        directory / "state",
        pods_dir=str(directory / "pods"),
        priority=PrioritySettings(directory=str(pages), **settings),
        **agent,
    )
    site.picture.set_canonical(
        NodeDevices(
            node=NODE,
            vendor="nvidia",
            boot_id="",
            seq=2,
            time_s=0,
            config_generation=1,
            devices=(on or device(0, uuid=uuid),),
        )
    )
    ensure_page(pages / FILE_NAME)
    (pages / DIRECTORY_NAME).mkdir()
    for number, (container, level) in enumerate(level_by_container.items()):
        (container.priority_directory / FILE_NAME).unlink(missing_ok=True)
        os.link(pages / FILE_NAME, container.priority_directory / FILE_NAME)
        pod = Given(f"pod-{number}", region_volumes={"main": "region"})
        share = Share(
            vendor="nvidia", uuid=uuid, memory_mib=memory_mib, memory_limit_mib=memory_limit_mib
        )
        shares = replace(pod.record.containers[0], shares=(share,), priority=level)
        pod.entry = replace(pod.entry, record=replace(pod.record, containers=(shares,)))
        know(site, pod)
        site.picture.grants.add(pod.grant("main", f"pod-{number}"))
        path = region_path(directory / "pods", pod.uid, "region")
        path.parent.parent.mkdir(parents=True)
        path.parent.symlink_to(container.region_directory)
        (pages / DIRECTORY_NAME / f"{pod.uid}_main").symlink_to(container.bell_directory)
    return site


@contextmanager
def keeper_process(site: Site) -> Iterator[int]:
    """Run the keeper in a process of its own; yields its pid once the device is in the page.

    As in the agent, garbage collections leave out what the start has made.
    """
    pid = os.fork()
    if pid == 0:
        try:
            settle()
            anyio.run(PriorityKeeper(site).run)
        finally:
            os._exit(1)
    page = Path(site.settings.priority.directory) / FILE_NAME
    try:
        while not page.read_bytes()[HEADER_BYTES]:
            time.sleep(0.01)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
