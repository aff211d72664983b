# SPDX-License-Identifier: Apache-2.0
"""The agent's watch over overcommitted devices of the fake GPU machine, in a process of its own."""

import os
import signal
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import anyio
from msgspec.structs import replace

from hami_common.runtime.tasks import background
from hami_nodeagent.core.thrash import ThrashRules
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.settings import UsageSettings
from hami_nodeagent.shell.breaches import BreachTeller
from hami_nodeagent.shell.gates import QUANTUM_NAME, Gates
from hami_nodeagent.shell.overcommit import OvercommitWatch
from hami_nodeagent.shell.priority import PriorityKeeper
from hami_nodeagent.shell.usage import UsageWatch
from tests.fakes.gpucontainers import GpuContainer, GpuNode
from tests.support.keeper import site_of
from tests.unit.nodeagent.core.builders import device

SAMPLE_S = 0.5


class OvercommitAgent:
    """Keeper of priorities, usage samples and quanta; ``kill`` and ``start`` at any time."""

    def __init__(
        self,
        machine: GpuNode,
        level_by_container: Mapping[GpuContainer, int],
        *,
        memory_mib: int,
        limit_mib: int,
    ) -> None:
        """Create the containers' gates."""
        self._machine = machine
        uuid = machine.uuids[0]
        self.site = site_of(
            uuid,
            level_by_container,
            memory_mib=limit_mib,
            on=device(
                0,
                uuid=uuid,
                memory_mib=memory_mib,
                capacity_mib=len(level_by_container) * limit_mib,
            ),
            agent={"usage": UsageSettings(look_s=SAMPLE_S)},
        )
        self.keys = [(f"uid-pod-{number}", "main") for number in range(len(level_by_container))]
        self.gates = Gates(PriorityKeeper(self.site).bells, QUANTUM_NAME)
        for key in self.keys:
            self.gates.create(key)
        self.pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self, **rules: Any) -> None:
        """Start the agent; ``rules`` are those of ``ThrashRules``."""
        self.site.use(replace(self.site.settings, thrash=ThrashRules(**rules)))
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.environ.update(self._machine.environment)
                anyio.run(self._serve)
            finally:
                os._exit(1)

    def kill(self) -> None:
        """SIGKILL the agent."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def is_open(self, number: int) -> bool:
        """Return whether the file of the container's gate says open, whatever its lease is."""
        return bool(self.gates.is_open(self.keys[number]))

    async def _serve(self) -> None:
        keeper = PriorityKeeper(self.site)
        library = self._machine.drivers / "libnvidia-ml.so.1"
        driver = build_driver("nvidia", {"library_path": str(library)})
        await driver.discover()
        teller = BreachTeller(
            site=self.site, events=lambda: None, publisher=lambda: None, kube=lambda: None
        )
        usage = UsageWatch(site=self.site, drivers=(driver,), teller=teller)
        watch = OvercommitWatch(
            site=self.site,
            bells=keeper.bells,
            gates=Gates(keeper.bells, QUANTUM_NAME),
            look=lambda: usage.metrics.look,
            events=lambda: None,
        )
        async with background() as group:
            for name, run in (
                ("priorities", keeper.run),
                ("usage", usage.run),
                ("overcommit", watch.run),
            ):
                group.start_soon(self.site.supervisor.keep, name, run)
            await anyio.sleep_forever()
