# SPDX-License-Identifier: Apache-2.0
"""Watches Kubernetes nodes for the devices their operators cordoned.

The annotation ``hami.io/device-cordon`` is a comma list of device UUIDs. Without an API server the
cordons known so far stay in force.
"""

import logging
from collections.abc import Iterable

import msgspec

from hami_common import annotations as keys
from hami_common.events.codec import UNDECODABLE
from hami_common.podview import MetadataView
from hami_common.ports import KubeApi, WatchEvent
from hami_registry.shell.canonical import CanonicalWriter

_log = logging.getLogger(__name__)


class _NodeView(msgspec.Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()


_decoder = msgspec.json.Decoder(_NodeView)


def parse_cordon(text: str) -> frozenset[str]:
    """UUIDs of the annotation's list."""
    return frozenset(part for piece in text.split(",") if (part := piece.strip()))


class Cordons:
    """Tells ``writer`` what each node's annotation says."""

    def __init__(self, writer: CanonicalWriter) -> None:
        self._writer = writer
        self._listed: set[str] = set()

    async def run(self, api: KubeApi) -> None:
        """Follow the nodes for ever."""
        async with api.list_watch("/api/v1/nodes") as events:
            async for event in events:
                self.take(event)

    def take(self, event: WatchEvent) -> None:
        """One change of a node."""
        if event.type == "SYNCED":
            self._forget(set(self._writer.inventory.cordoned_nodes()) - self._listed)
            return
        try:
            metadata = _decoder.decode(event.raw).metadata
        except UNDECODABLE as error:
            _log.warning("node skipped", extra={"problem": str(error)})
            return
        if event.type == "DELETED":
            self._listed.discard(metadata.name)
            self._forget([metadata.name])
            return
        self._listed.add(metadata.name)
        text = (metadata.annotations or {}).get(keys.DEVICE_CORDON, "")
        self._writer.cordon(metadata.name, parse_cordon(text))

    def _forget(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._writer.cordon(node, frozenset())
