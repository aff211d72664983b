# SPDX-License-Identifier: Apache-2.0
"""Keeps schedulers from a vendor's devices until the node's status shows them as allocatable.

Kubelet admits pods by the node status that it wrote last, which it writes every 10 s by default.
After a device plugin was absent the status may say that the node has no such device, and kubelet
then rejects for good (``OutOf<resource>``) a pod beside one that is ending. So a vendor is offered
(``Picture.offered``) when its plugin is registered and the status has its resource. Seconds
throughout.
"""

import logging
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from hami_common.apipath import api_path
from hami_common.errors import HamiError, WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.skus.expansion import ACCELERATORS
from hami_common.units import parse_quantity
from hami_nodeagent.shell.site import Site

LOOK_S: Final = 1.0
"""Time between two reads of the status."""
WAIT_MOST_S: Final = 30.0
"""A vendor is offered after so long whatever the status shows: it may be unreadable for good."""

_log = logging.getLogger(__name__)


class ObjectReads(Protocol):
    """Reads of the API server; ``KubeApi``."""

    async def get(self, path: str) -> bytes: ...


class NodeInfo(Struct, frozen=True, rename="camel"):
    """``status.nodeInfo`` of a Node; what is read of it."""

    kubelet_version: str = ""


class NodeStatus(Struct, frozen=True, rename="camel"):
    """``status`` of a Node; what is read of it."""

    node_info: NodeInfo = NodeInfo()
    allocatable: dict[str, str] = {}

    def has(self, resource: str) -> bool:
        """Return true if a pod could be admitted with one of ``resource``."""
        return (parse_quantity(self.allocatable.get(resource, "0")) or 0) > 0


class _Node(Struct, frozen=True):
    status: NodeStatus = NodeStatus()


_decoder = msgspec.json.Decoder(_Node)


async def read_node_status(kube: ObjectReads, node: str) -> NodeStatus:
    """Read the status of a node; ``WireInvalid`` if it is unreadable."""
    raw = await kube.get(api_path("api", "v1", "nodes", node))
    try:
        return _decoder.decode(raw).status
    except UNDECODABLE as error:
        raise WireInvalid(what="node", problem=str(error)) from error


class StatusWatch:
    """Reads the status while a vendor is registered with kubelet that it does not show yet."""

    def __init__(
        self, *, site: Site, kube: ObjectReads, vendor_by_resource: Mapping[str, str]
    ) -> None:
        self._picture = site.picture
        self._clock = site.clock
        self._kube = kube
        self._vendor_by_resource = vendor_by_resource
        self._since_s: dict[str, float] = {}
        """Registration time of each vendor that is looked for, by vendor."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            changed = self._picture.changed
            missing = self._picture.served - self._picture.in_status
            if not missing:
                self._since_s.clear()
                await changed.wait()
                continue
            await self._look(missing)
            if self._picture.served - self._picture.in_status:
                await self._clock.sleep(LOOK_S)

    def _has_neutral(self, status: NodeStatus) -> bool:
        """Return whether pods that ask without a vendor find their resource, too."""
        return ACCELERATORS not in self._vendor_by_resource or status.has(ACCELERATORS)

    async def _look(self, missing: frozenset[str]) -> None:
        now_s = self._clock.monotonic_s()
        self._since_s = {vendor: self._since_s.get(vendor, now_s) for vendor in missing}
        try:
            status = await read_node_status(self._kube, self._picture.node)
        except HamiError as error:
            _log.debug("status of the node not read", extra={"problem": str(error)})
            status = NodeStatus()
        for resource, vendor in self._vendor_by_resource.items():
            if vendor in missing and status.has(resource) and self._has_neutral(status):
                self._picture.note_in_status(vendor)
        for vendor, since_s in self._since_s.items():
            if vendor not in self._picture.in_status and now_s - since_s >= WAIT_MOST_S:
                _log.warning(
                    "status of the node does not show the devices",
                    extra={"vendor": vendor, "node": self._picture.node},
                )
                self._picture.note_in_status(vendor)
