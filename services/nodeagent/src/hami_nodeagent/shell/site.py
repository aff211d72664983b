# SPDX-License-Identifier: Apache-2.0
"""Objects that all parts of one agent share: state, settings, clock, metrics, checkpoint."""

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
    """One agent's shared objects; created once by the composition root."""

    picture: Picture
    settings: Settings
    """Current settings; read those of ``Settings.HOT`` at each use: a reload changes them."""
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
        """Restarts loops that fail."""
        return Supervisor(clock=self.clock, registry=self.metrics.registry)

    def use(self, settings: Settings) -> None:
        """Replace the settings; the caller changes only those of ``Settings.HOT``."""
        self.settings = settings

    @property
    def node(self) -> str:
        """Name of the node."""
        return self.picture.node
