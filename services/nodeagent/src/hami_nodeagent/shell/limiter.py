# SPDX-License-Identifier: Apache-2.0
"""Installs the in-container library for ``Allocate``; removes versions that are no longer used.

With ``enforcement = "libvgpu"`` a share is allocated only together with the library: if it cannot
be installed, ``Allocate`` is refused with the reason, because a share without the library would be
a whole device. With ``enforcement = "none"`` the operator disables limits on this node.
"""

import logging
from pathlib import Path

import anyio.to_thread

from hami_common.vendors.protocol import BindMount
from hami_nodeagent.core.grants import Grant
from hami_nodeagent.shell.gates import QUANTUM_NAME, Gates
from hami_nodeagent.shell.install import Installed, Installer, InstallFailed
from hami_nodeagent.shell.priority import PriorityKeeper
from hami_nodeagent.shell.site import Site

COLLECT_S = 60.0
"""Interval between searches for unused versions in seconds; each reads all processes' maps."""

_log = logging.getLogger(__name__)


class Limiter:
    """The in-container library on this node."""

    def __init__(self, site: Site) -> None:
        settings = site.settings
        self.priorities = PriorityKeeper(site)
        self.gates = Gates(self.priorities.bells)
        self.quanta = Gates(self.priorities.bells, QUANTUM_NAME)
        self._site = site
        self._installer = Installer(
            Path(settings.library), Path(settings.library_dir), proc=Path(settings.host_proc)
        )
        self._installed: Installed | None = None
        self._collected_s: float | None = None
        self.problem = ""
        """Reason for which no share can be allocated now; empty if there is none."""

    @property
    def is_wanted(self) -> bool:
        """True if shares are enforced on this node."""
        return self._site.settings.enforcement == "libvgpu"

    async def current(self) -> Installed | None:
        """The version for containers that start now; ``None``, with ``problem``, without one."""
        if not self.is_wanted:
            return None
        try:
            self._installed = await anyio.to_thread.run_sync(self._ensure)
        except InstallFailed as error:
            if self.problem != error.problem:
                _log.error("limiter not installed", extra={"problem": error.problem})
            self._installed = None
            self.problem = error.problem
        else:
            self.problem = ""
        self._site.metrics.limiter_installed.set(self._installed is not None)
        return self._installed

    def mounts(
        self,
        installed: Installed | None,
        pod_uid: str,
        container: str,
        *,
        is_recalled: bool,
        may_thrash: bool,
    ) -> tuple[BindMount, ...]:
        """Return a limited container's mounts: library, preload file, priorities.

        One that ``is_recalled`` gets a gate, as does one that ``may_thrash`` where the settings
        allow quanta. ``OSError`` if the directory of its doorbell cannot be created.
        """
        if installed is None:
            return ()
        if is_recalled:
            self.gates.create((pod_uid, container))
        if may_thrash and self._site.settings.thrash.quanta:
            self.quanta.create((pod_uid, container))
        return (*installed.mounts, *self.priorities.mounts(pod_uid, container))

    async def collect(self) -> None:
        """Remove versions that no grant, no process and no new container needs."""
        now_s = self._site.clock.monotonic_s()
        if self._collected_s is not None and now_s - self._collected_s < COLLECT_S:
            return
        self._collected_s = now_s
        current = await self.current()
        grants = tuple(self._site.picture.grants)
        if current is None or any(_is_unknown(grant) for grant in grants):
            return
        keep = {current.library.name, *(grant.library for grant in grants)}
        unused_for_s, time_s = self._site.settings.library_keep_s, self._site.clock.now_s()
        removed = await anyio.to_thread.run_sync(
            lambda: self._installer.collect(keep=keep, unused_for_s=unused_for_s, now_s=time_s)
        )
        for name in removed:
            _log.info("limiter version removed", extra={"file": name})

    def _ensure(self) -> Installed:
        try:
            self.priorities.ensure()
        except OSError as error:
            raise InstallFailed(
                problem=f"{self._site.settings.priority.directory} is not writable on this node: "
                f"{error.strerror or error}; mount it into the agent, or set priority.directory"
            ) from error
        if self._installed is not None and self._installer.is_there(self._installed):
            return self._installed
        return self._installer.install()


def _is_unknown(grant: Grant) -> bool:
    """Kubelet may repeat an answer of which we do not know which version it named."""
    return grant.adopted and not grant.library
