# SPDX-License-Identifier: Apache-2.0
"""The agent's half of recall for containers of the fake GPU machine, in a process of its own."""

import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
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
from tests.support.gateagent import GateAgent

DEADLINE_S = 60.0
"""Of a call into NVML: nothing here lists a device again that did not answer in time."""


class RecallAgent(GateAgent):
    """Keeper of priorities, recall and helper; the helper ends when the agent is killed."""

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
        self.card_mib = machine.profile.model.memory_mib
        self._containers = list(level_by_container)
        root = self._containers[0].priority_directory.parents[1] / "host"
        _copy_groups(root)
        super().__init__(
            machine,
            level_by_container,
            limit_mib=limit_mib,
            on={
                "memory_mib": self.card_mib,
                "capacity_mib": 4 * self.card_mib,
                "largest_mib": self.card_mib,
                "overcommit": "recall",
            },
            agent={
                "recall": RecallSettings(helper=str(helper), **settings),
                "host_root": str(root),
            },
        )
        self._ends, self._end = socket.socketpair()

    def __enter__(self) -> Self:
        self.start()
        return self

    def close(self) -> None:
        super().close()
        self._ends.close()
        self._end.close()

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

    async def serve(self) -> None:
        keeper = PriorityKeeper(self.site)
        settings = {"library_path": self.library, "call_deadline_s": DEADLINE_S}
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
