# SPDX-License-Identifier: Apache-2.0
"""A part of the agent that opens and closes the gates of fake GPU containers, in a process."""

import os
import signal
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import anyio

from hami_nodeagent.shell.gates import FILE_NAME, Gates
from hami_nodeagent.shell.priority import PriorityKeeper
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.support.closing import Closing
from tests.support.keeper import site_of
from tests.unit.nodeagent.core.builders import device


class GateAgent(Closing):
    """One device shared by containers that have a gate each; ``kill`` and ``start`` at any time."""

    def __init__(
        self,
        machine: GpuNode,
        level_by_container: Mapping[GpuContainer, int],
        *,
        limit_mib: int,
        on: Mapping[str, Any],
        agent: Mapping[str, Any],
        gate: str = FILE_NAME,
    ) -> None:
        """Create the containers' gates; ``on`` describes the device, ``agent`` are its settings."""
        self._machine = machine
        uuid = machine.uuids[0]
        self.site = site_of(
            uuid,
            level_by_container,
            memory_mib=limit_mib,
            on=device(0, uuid=uuid, **on),
            agent=agent,
        )
        self.keys = [(f"uid-pod-{number}", "main") for number in range(len(level_by_container))]
        self.gates = Gates(PriorityKeeper(self.site).bells, gate)
        for key in self.keys:
            self.gates.create(key)
        self.pid = 0

    @abstractmethod
    async def serve(self) -> None:
        """Run the agent's part until cancelled; called in the process."""

    def start(self) -> None:
        """Start the process."""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.environ.update(self._machine.environment)
                anyio.run(self.serve)
            finally:
                os._exit(1)

    def kill(self) -> None:
        """SIGKILL the process."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self) -> None:
        self.kill()

    @property
    def library(self) -> str:
        """Path of the machine's NVML."""
        return str(self._machine.drivers / "libnvidia-ml.so.1")

    def is_open(self, number: int) -> bool:
        """Return whether the file of the container's gate says open, whatever its lease is."""
        return bool(self.gates.is_open(self.keys[number]))
