# SPDX-License-Identifier: Apache-2.0
"""Watches Kubernetes nodes for the devices that their operators cordoned.

The annotation ``hami.io/device-cordon`` is a comma-separated list of device UUIDs. Without an API
server the known cordons stay in effect, and so does that of a node which cannot be read.
"""

from collections.abc import Iterable
from functools import partial

import msgspec

from hami_common.errors import WireInvalid
from hami_common.events.codec import UNDECODABLE
from hami_common.pods import annotations as keys
from hami_common.pods.podview import MetadataView
from hami_common.ports import KubeApi, WatchEvent
from hami_common.runtime.quarantine import Quarantine
from hami_registry.shell.canonical import CanonicalWriter


class _NodeView(msgspec.Struct, frozen=True, kw_only=True):
    metadata: MetadataView = MetadataView()


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _NamedView(msgspec.Struct, frozen=True):
    metadata: _Named = _Named()


_decoder = msgspec.json.Decoder(_NodeView)
_name_decoder = msgspec.json.Decoder(_NamedView)


def parse_cordon(text: str) -> frozenset[str]:
    """Return the UUIDs of the annotation's list."""
    return frozenset(part for piece in text.split(",") if (part := piece.strip()))


def _name_of(raw: bytes) -> str:
    """Return the name of a node whose document does not decode; empty without a readable name."""
    try:
        return _name_decoder.decode(raw).metadata.name
    except UNDECODABLE:
        return ""


class Cordons:
    """Passes the cordons of each node's annotation to ``writer``."""

    def __init__(self, writer: CanonicalWriter, quarantine: Quarantine) -> None:
        self._writer = writer
        self._quarantine = quarantine
        self._listed: set[str] = set()

    async def run(self, api: KubeApi) -> None:
        """Follow the nodes indefinitely."""
        async with api.list_watch("/api/v1/nodes") as events:
            async for event in events:
                await self.take(event)

    async def take(self, event: WatchEvent) -> None:
        """Apply one change of a node; quarantine one that fails."""
        if event.type == "SYNCED":
            for node in set(self._writer.inventory.cordoned_nodes()) - self._listed:
                await self._quarantine.run("node", node, partial(self._forget, [node]))
            return
        name = _name_of(event.raw)
        self._listed.add(name)
        await self._quarantine.run("node", name, partial(self._take, event), name=("", name))

    def _take(self, event: WatchEvent) -> None:
        try:
            metadata = _decoder.decode(event.raw).metadata
        except UNDECODABLE as error:
            raise WireInvalid(what="node", problem=str(error)) from error
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
