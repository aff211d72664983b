# SPDX-License-Identifier: Apache-2.0
"""Learns whether kubelet's list omits refused pods, before the first decision that depends on it.

Kubelet lists active pods only since Kubernetes 1.34. Until that is known of the present run, a
listed pod that the API server does not show, such as a static pod whose mirror was refused, blocks
every call (``core.claims``), and kubelet never retries a pod. Two sources must agree: the version
in the node's status, which an exchanged kubelet writes some time after its start, and the answer of
the running kubelet to PodResources ``Get``, which is enabled by default since the same release.
Seconds throughout.
"""

import logging
from typing import Protocol

from hami_common.errors import HamiError
from hami_nodeagent.shell.picture import Picture

_FIRST_ACTIVE_ONLY = (1, 34)
READS = 3
"""Reads of the version in one run that may still say that kubelet is older than it is."""

_log = logging.getLogger(__name__)


class VersionReads(Protocol):
    """Reads of kubelet's version; ``shell.pods.PodSource``."""

    async def kubelet_version(self) -> tuple[int, int]: ...


class GetProbe(Protocol):
    """Probe of the running kubelet; ``shell.podresources.PodResources``."""

    async def serves_get(self, *, timeout_s: float) -> bool: ...


class ListKind:
    """Keeps ``lists_active_only`` of the picture's view true to the running kubelet."""

    def __init__(self, *, picture: Picture, kubelet: GetProbe) -> None:
        self._picture = picture
        self._kubelet = kubelet
        self._run = ""
        self._reads = 0

    async def learn(self, pods: VersionReads, *, timeout_s: float, reads: int) -> None:
        """Learn it unless it is known, or was read ``reads`` times in this run.

        A source that does not answer leaves it unknown.
        """
        view = self._picture.view
        if self._run != view.kubelet:
            self._run, self._reads = view.kubelet, 0
        if view.lists_active_only or self._reads >= reads:
            return
        try:
            version = await pods.kubelet_version()
            has_get = await self._kubelet.serves_get(timeout_s=timeout_s)
        except HamiError as error:
            _log.debug("kind of kubelet's list not learned", extra={"problem": str(error)})
            return
        if self._run != view.kubelet:
            return  # kubelet restarted in between
        self._reads += 1
        view.lists_active_only = has_get and version >= _FIRST_ACTIVE_ONLY
        _log.info(
            "kubelet version read",
            extra={
                "version": ".".join(str(number) for number in version),
                "active_only": view.lists_active_only,
            },
        )
