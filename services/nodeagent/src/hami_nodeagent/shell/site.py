# SPDX-License-Identifier: Apache-2.0
"""What every part of one agent shares: the picture, the settings, the clock, counters, the disk."""

from dataclasses import dataclass, field
from functools import cached_property

from hami_common.ports import Clock
from hami_common.runtime.quarantine import Quarantine
from hami_common.runtime.supervise import Supervisor
from hami_common.runtime.telemetry import Tracing
from hami_nodeagent.settings import Settings
from hami_nodeagent.shell.checkpoint import Checkpoint
from hami_nodeagent.shell.metrics import KINDS, Metrics
from hami_nodeagent.shell.picture import Picture
from hami_nodeagent.shell.sequence import Sequence


@dataclass(kw_only=True)
class Site:
    """One agent's shared objects; made once by the composition root."""

    picture: Picture
    settings: Settings
    """Those in force: what reads one of ``Settings.HOT`` here, reads it anew each time."""
    clock: Clock
    metrics: Metrics
    checkpoint: Checkpoint
    sequence: Sequence
    tracing: Tracing = field(default_factory=lambda: Tracing(service="nodeagent"))

    @cached_property
    def quarantine(self) -> Quarantine:
        """Isolates objects whose handling fails."""
        return Quarantine(kinds=KINDS, clock=self.clock, registry=self.metrics.registry)

    @cached_property
    def supervisor(self) -> Supervisor:
        """Restarts loops that end."""
        return Supervisor(clock=self.clock, registry=self.metrics.registry)

    def use(self, settings: Settings) -> None:
        """Take over what is hot of ``settings``."""
        self.settings = settings

    @property
    def node(self) -> str:
        """Name of the node."""
        return self.picture.node
