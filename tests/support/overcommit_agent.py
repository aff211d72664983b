# SPDX-License-Identifier: Apache-2.0
"""The agent's watch over overcommitted devices of the fake GPU machine, in a process of its own."""

from collections.abc import Mapping
from typing import Any

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
from tests.support.gateagent import GateAgent

SAMPLE_S = 0.5


class OvercommitAgent(GateAgent):
    """Keeper of priorities, usage samples and quanta."""

    def __init__(
        self,
        machine: GpuNode,
        level_by_container: Mapping[GpuContainer, int],
        *,
        memory_mib: int,
        limit_mib: int,
    ) -> None:
        """Create the containers' gates."""
        super().__init__(
            machine,
            level_by_container,
            limit_mib=limit_mib,
            on={"memory_mib": memory_mib, "capacity_mib": len(level_by_container) * limit_mib},
            agent={"usage": UsageSettings(look_s=SAMPLE_S)},
            gate=QUANTUM_NAME,
        )

    def start_with(self, **rules: Any) -> None:
        """Start the agent; ``rules`` are those of ``ThrashRules``."""
        self.site.use(replace(self.site.settings, thrash=ThrashRules(**rules)))
        self.start()

    async def serve(self) -> None:
        keeper = PriorityKeeper(self.site)
        driver = build_driver("nvidia", {"library_path": self.library})
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
