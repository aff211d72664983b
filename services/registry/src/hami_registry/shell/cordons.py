# SPDX-License-Identifier: Apache-2.0
"""Watches Kubernetes nodes for the devices their operators cordoned.

The annotation ``hami.io/device-cordon`` is a comma list of device UUIDs. Without an API server the
cordons known so far stay in force, and so does that of a node which cannot be read.
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
    """UUIDs of the annotation's list."""
    return frozenset(part for piece in text.split(",") if (part := piece.strip()))


def _name_of(raw: bytes) -> str:
    """Name of the node, whatever else of it does not decode; empty when that does not either."""
    try:
        return _name_decoder.decode(raw).metadata.name
    except UNDECODABLE:
        return ""


class Cordons:
    """Tells ``writer`` what each node's annotation says."""

    def __init__(self, writer: CanonicalWriter, quarantine: Quarantine) -> None:
        self._writer = writer
        self._quarantine = quarantine
        self._listed: set[str] = set()

    async def run(self, api: KubeApi) -> None:
        """Follow the nodes for ever."""
        async with api.list_watch("/api/v1/nodes") as events:
            async for event in events:
                await self.take(event)

    async def take(self, event: WatchEvent) -> None:
        """Take one change of a node; one that cannot be taken is put in quarantine."""
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
