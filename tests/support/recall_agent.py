# SPDX-License-Identifier: Apache-2.0
"""The agent's half of recall for containers of the fake GPU machine, in a process of its own."""

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from hami_common.runtime.tasks import background
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.settings import RecallSettings
from hami_nodeagent.shell.gates import Gates
from hami_nodeagent.shell.owners import Owner
from hami_nodeagent.shell.priority import PriorityKeeper
from hami_nodeagent.shell.recall import RecallWatch
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.support.keeper import site_of
from tests.unit.nodeagent.core.builders import device

DEADLINE_S = 60.0
"""Of a call into NVML: nothing here lists a device again that did not answer in time."""


class RecallAgent:
    """Keeper of priorities, recall and helper; ``kill`` and ``start`` at any time."""

    def __init__(
        self,
        machine: GpuNode,
        level_by_container: Mapping[GpuContainer, int],
        *,
        helper: Path,
        limit_mib: int,
        **settings: float,
    ) -> None:
        """Create the containers' gates; ``settings`` are those of ``RecallSettings``."""
        self._machine = machine
        uuid = machine.uuids[0]
        self.card_mib = machine.profile.model.memory_mib
        self._containers = list(level_by_container)
        root = self._containers[0].priority_directory.parents[1] / "host"
        _copy_groups(root)
        self.site = site_of(
            uuid,
            level_by_container,
            memory_mib=limit_mib,
            on=device(
                0,
                uuid=uuid,
                memory_mib=self.card_mib,
                capacity_mib=4 * self.card_mib,
                largest_mib=self.card_mib,
                overcommit="recall",
            ),
            agent={
                "recall": RecallSettings(helper=str(helper), **settings),
                "host_root": str(root),
            },
        )
        self.keys = [(f"uid-pod-{number}", "main") for number in range(len(self._containers))]
        keeper = PriorityKeeper(self.site)
        self.gates = Gates(keeper.bells)
        for key in self.keys:
            self.gates.create(key)
        self.pid = 0
        self._ends, self._end = socket.socketpair()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._ends.close()
        self._end.close()

    def start(self) -> None:
        """Start the agent."""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.environ.update(self._machine.environment)
                anyio.run(self._serve)
            finally:
                os._exit(1)

    def kill(self) -> None:
        """SIGKILL the agent; its helper ends when it sees that."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def end_pod(self, number: int) -> None:
        """Let the pod of the container end, as far as the agent knows."""
        self._end.send(bytes([number]))

    def kill_helper(self) -> bool:
        """SIGKILL the helper; false if there was none."""
        pids = [int(pid) for pid in children_of(self.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    async def _serve(self) -> None:
        keeper = PriorityKeeper(self.site)
        library = self._machine.drivers / "libnvidia-ml.so.1"
        settings = {"library_path": str(library), "call_deadline_s": DEADLINE_S}
        driver = build_driver("nvidia", settings)
        await driver.discover()
        watch = RecallWatch(
            site=self.site,
            bells=keeper.bells,
            gates=Gates(keeper.bells),
            usage=driver.usage,
            events=lambda: None,
            kube=lambda: None,
            owners=self._owners,
        )
        async with background() as group:
            group.start_soon(self.site.supervisor.keep, "priorities", keeper.run)
            group.start_soon(self.site.supervisor.keep, "recall", watch.run)
            while True:
                await anyio.wait_readable(self._ends)
                (grant,) = self.site.picture.grants.of_pod(self.keys[self._ends.recv(1)[0]][0])
                self.site.picture.grants.remove(grant)
                self.site.picture.note_change()

    def _owners(self, pids: Collection[int]) -> Mapping[int, Owner]:
        """Containers have a mount namespace of their own and no cgroup."""
        keys = dict(zip(map(_mounts, self._keepers()), self.keys, strict=True))
        found = {}
        for pid in pids:
            with suppress(OSError):
                if (key := keys.get(_mounts(pid))) is not None:
                    found[pid] = Owner(command="drive", pod_uid=key[0], container=key[1])
        return found

    def _keepers(self) -> list[int]:
        return [container.keeper_pid for container in self._containers]

    def is_open(self, number: int) -> bool:
        """Return whether the gate of the container is open."""
        return bool(self.gates.is_open(self.keys[number]))

    def open_mib(self, limit_mib: int) -> int:
        """Return the sum of the limits of the containers with an open gate."""
        return limit_mib * sum(map(self.is_open, range(len(self.keys))))


def children_of(pid: int) -> list[str]:
    """Return the pids of a process's children."""
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []


def _mounts(pid: int) -> str:
    return str((Path("/proc") / str(pid) / "ns" / "mnt").readlink())


def _copy_groups(root: Path) -> None:
    """Create this process's cgroups below ``root``, without limits."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, names, path = line.split(":", 2)
        subsystem = "memory" if "memory" in names.split(",") else ""
        (root / "sys/fs/cgroup" / subsystem / path.lstrip("/")).mkdir(parents=True, exist_ok=True)


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Poll until ``condition`` returns true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
