# SPDX-License-Identifier: Apache-2.0
"""An agent's shared objects on a temporary directory, and stand-ins for its peers."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
from prometheus_client import CollectorRegistry

from hami_common.errors import Unavailable
from hami_common.events.inventory import NodeDevices
from hami_common.runtime.clock import SystemClock
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.core.podfacts import PodFacts
from hami_nodeagent.settings import PrioritySettings, Settings
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.metrics import Metrics
from hami_nodeagent.shell.picture import Picture
from hami_nodeagent.shell.sequence import Sequence as Numbers
from hami_nodeagent.shell.site import Site
from tests.unit.nodeagent.core.builders import KUBELET, NODE, Given, device


def make_site(directory: Path, **settings: Any) -> Site:
    """A site whose picture knows four devices."""
    picture = Picture(node=NODE)
    picture.view.kubelet = KUBELET
    picture.view.lists_active_only = True
    picture.view.bus_connected = True
    picture.set_canonical(
        NodeDevices(
            node=NODE,
            vendor="nvidia",
            boot_id="",
            seq=1,
            time_s=0,
            config_generation=1,
            devices=tuple(device(number) for number in range(4)),
        )
    )
    clock = SystemClock()
    return Site(
        picture=picture,
        settings=Settings(
            node_name=NODE,
            state_dir=str(directory),
            **{
                "pod_resources_socket": str(directory / "none.sock"),
                "allocate_wait_s": 0.2,
                "outage_wait_s": 0.2,
                "enforcement": "none",
                "report_retry_s": 0.01,
                **settings,
            },
        ),
        clock=clock,
        metrics=Metrics(CollectorRegistry()),
        checkpoint=Checkpoint(directory),
        sequence=Numbers(clock),
    )


def fake_library(directory: Path, content: bytes = b"one") -> Path:
    """A file that passes for the in-container library."""
    path = directory / "libvgpu.so"
    path.write_bytes(b"\x7fELF" + content)
    return path


def enforcing(directory: Path, **more: Any) -> dict[str, Any]:
    """Settings of a node that enforces shares with such a library."""
    return {
        "enforcement": "libvgpu",
        "library": str(fake_library(directory)),
        "library_dir": str(directory / "host"),
        "priority": PrioritySettings(directory=str(directory / "priority")),
        **more,
    }


def know(site: Site, *pods: Given) -> None:
    """Let the picture know pods and their records."""
    for pod in pods:
        site.picture.pods.put(pod.facts, revision=pod.entry.sequence, now_s=0)
        site.picture.entries_by_uid[pod.uid] = pod.entry
    site.picture.note_change()


class FakeKubelet:
    """Answers ``list`` with the test's pods."""

    def __init__(self, *pods: ListedPod) -> None:
        self.pods: Sequence[ListedPod] | None = pods
        self.list_count = 0
        self.has_get = True

    async def list(self, *, timeout_s: float | None = None) -> tuple[ListedPod, ...]:
        self.list_count += 1
        if self.pods is None:
            raise Unavailable(peer="kubelet", detail="the test says so")
        return tuple(self.pods)

    async def serves_get(self, *, timeout_s: float) -> bool:
        if self.pods is None:
            raise Unavailable(peer="kubelet", detail="the test says so")
        return self.has_get


class FakePods:
    """Confirms what the test set."""

    def __init__(self) -> None:
        self.confirmed: list[str] = []
        self.is_available = True
        self.failures = 0
        """Reads that fail from now on."""
        self.version = (1, 34)
        self.versions_read = 0
        self.kind_reads: list[int] = []
        self.on_learn: Callable[[], None] = lambda: None
        self.on_confirm: Callable[[], None] = lambda: None

    async def confirm(self, facts: PodFacts) -> None:
        if not self.is_available or self.failures > 0:
            self.failures -= 1
            raise Unavailable(peer="API", detail="the test says so")
        self.confirmed.append(facts.name)
        self.on_confirm()

    async def confirm_all(self) -> None:
        self.confirmed.append("*")
        self.on_confirm()

    async def learn_list_kind(self, *, reads: int = 0) -> None:
        self.kind_reads.append(reads)
        self.on_learn()

    async def kubelet_version(self) -> tuple[int, int]:
        self.versions_read += 1
        if not self.is_available:
            raise Unavailable(peer="API", detail="the test says so")
        return self.version

    def judge_again(self) -> None:
        self.confirmed.append("judged")

    def forget(self, *, gone_before_s: float) -> None:
        pass


async def until(condition: Callable[[], bool], *, within_s: float = 3.0) -> None:
    """Wait for a condition of another task."""
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.005)


async def soon(call: Callable[[], Awaitable[bool]], *, within_s: float = 3.0) -> None:
    """Wait for an awaited condition."""
    with anyio.fail_after(within_s):
        while not await call():
            await anyio.sleep(0.005)
