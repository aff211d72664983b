# SPDX-License-Identifier: Apache-2.0
"""Wakes pods that wait for capacity: touches a node, so that kube-scheduler retries them (D16)."""

import logging
from functools import partial

import anyio

from hami_common.apipath import api_path
from hami_common.errors import Conflict, Denied, NotFound, Unavailable
from hami_common.ports import KubeApi
from hami_core.ledger import binding
from hami_scheduler.settings import Settings
from hami_scheduler.shell.bounded import answer_within
from hami_scheduler.shell.isolation import WAKE
from hami_scheduler.shell.state import State

_log = logging.getLogger(__name__)


class Waker:
    """Touches a node after capacity was released, at most once per interval."""

    def __init__(self, kube: KubeApi, *, state: State, settings: Settings) -> None:
        """Touch nodes through ``kube`` while ``state`` has pods that wait."""
        self._kube = kube
        self._state = state
        self._settings = settings
        self._node = ""
        self._wake = anyio.Event()

    def wake(self, node: str) -> None:
        """Touch ``node`` at the next opportunity; calls in between are coalesced."""
        self._node = node
        self._wake.set()

    async def work(self) -> None:
        """Touch a node when capacity was released while pods wait; runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            if not self._state.pods.has_waiting():
                continue
            node = self._node
            await self._state.quarantine.run(WAKE, node, partial(self._touch, node))
            await self._state.clock.sleep(self._settings.capacity_touch_s)

    async def _touch(self, node: str) -> None:
        try:
            with answer_within(self._settings.api_timeout_s, peer="API server"):
                await self._kube.patch(
                    api_path("api", "v1", "nodes", node),
                    binding.touch_document(stamp=f"{self._state.clock.now_s():.3f}"),
                )
        except (Unavailable, NotFound, Conflict, Denied) as error:
            _log.warning("node not touched", extra={"problem": str(error)})
