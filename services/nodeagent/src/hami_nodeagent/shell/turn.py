# SPDX-License-Identifier: Apache-2.0
"""Lets one agent at a time serve a node: the next one starts in advance and waits.

A rollout of the DaemonSet starts an agent's successor before it stops the agent (``maxSurge``). Two
agents would write the states of one node and serve the same sockets, so each holds an exclusive
lock (``flock``) on a file of the state directory while it serves. The kernel releases the lock when
its holder dies, however it dies. A waiting agent reports that it is ready: the rollout stops the
agent before it only then.

The plugin proxy of the agent before ends a moment after it, and kubelet drops a plugin, the new one
too, when the stream of the old one ends. Agents of earlier versions take no lock. So an agent that
is new in its pod also waits until no process accepts connections on the plugins' sockets; one that
was restarted finds its mark there, because the process is its own proxy. Seconds throughout.
"""

import fcntl
import logging
import os
from pathlib import Path
from typing import Final

import anyio

from hami_common.errors import SettingsInvalid
from hami_nodeagent.shell.agentdevices import SOCKET as DEVICES_SOCKET
from hami_nodeagent.shell.pluginproxy import PLUGIN_SOCKETS, listens

FILE_NAME: Final = "agent.lock"
MARK_NAME: Final = "served"
"""File in the directory of the agent's sockets, which exists as long as its pod."""
LOOK_S: Final = 0.1
"""Time between two attempts to take the lock."""
PROXY_MOST_S: Final = 40.0
"""Longest wait for sockets: a proxy ends with its pod, within the pod's termination period."""
REPORT_S: Final = 60.0
"""A rollout needs less; a longer wait is reported."""

_log = logging.getLogger(__name__)


class Turn:
    """The right of one agent to serve the node; until ``take`` returns, another one may have it."""

    def __init__(
        self, directory: Path, *, plugins: Path, agent_sockets: Path | None = None
    ) -> None:
        """``directory``: the state directory that all agents of the node share.

        ``plugins``: kubelet's directory of plugins; ``agent_sockets``: the directory that the agent
        shares with its proxy, ``None`` without one.
        """
        self._path = directory / FILE_NAME
        self._plugins = plugins
        self._mark = agent_sockets / MARK_NAME if agent_sockets is not None else None
        self._file: int | None = None
        self.is_awaited = False
        """Another agent serves the node."""

    async def take(self, stopping: anyio.Event) -> bool:
        """Wait for the right to serve; false if ``stopping`` was set before.

        ``SettingsInvalid`` if a directory cannot be written.
        """
        if not await self._take_lock(stopping):
            return False
        if self._mark is None:
            return True
        if not self._mark.exists():
            await self._wait_sockets(stopping)
        self.is_awaited = False
        self._mark.touch()
        return not stopping.is_set()

    async def _wait_sockets(self, stopping: anyio.Event) -> None:
        with anyio.move_on_after(PROXY_MOST_S) as limit:
            while not stopping.is_set() and await self._is_any_served():
                self.is_awaited = True
                with anyio.move_on_after(LOOK_S):
                    await stopping.wait()
        if limit.cancelled_caught:
            _log.warning("plugin of this node is served by another process")

    async def _is_any_served(self) -> bool:
        for path in self._plugins.glob(PLUGIN_SOCKETS):
            if path.name != DEVICES_SOCKET and await listens(path):
                return True
        return False

    async def _take_lock(self, stopping: anyio.Event) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsInvalid(
                field="state_dir",
                problem=f"{self._path}: {error.strerror or error}",
                fix="give a directory that the agent may write",
            ) from error
        report_at_s = anyio.current_time()
        while not stopping.is_set():
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.is_awaited = True
            else:
                self.is_awaited = False
                return True
            if anyio.current_time() >= report_at_s:
                report_at_s += REPORT_S
                _log.info("waits for the agent that serves the node", extra={"file": self._path})
            with anyio.move_on_after(LOOK_S):
                await stopping.wait()
        return False

    def end(self) -> None:
        """Give up the right, so that the next agent serves."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
