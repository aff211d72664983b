# SPDX-License-Identifier: Apache-2.0
"""List-and-watch: turns a collection into a stream of changes that always converges to the truth.

Lists in pages, then watches from the list's resourceVersion with bookmarks; a watch that ends or
breaks is resumed where it was; after 410 Gone it lists again and reports the difference to the
objects reported before. Objects are decoded no further than their metadata. Memory per object: uid,
namespace, name, resourceVersion. Outside document: Kubernetes API concepts, "efficient detection of
changes".
"""

import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import anyio
import msgspec
from msgspec import Struct

from hami_common.errors import Denied, HamiError, Unavailable
from hami_common.events.codec import UNDECODABLE
from hami_common.ports import WatchEvent
from hami_common.runtime.tasks import Backoff

WATCH_S = 300
"""Shortest life of one watch request; the server ends it then, spread over twice that time."""
IDLE_S = 120.0
"""Bookmarks come every minute: a longer silence means a dead connection."""
SHORT_S = 1.0
"""A watch that the server ends sooner counts as a failed attempt."""
GONE = 410

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Methods of a client that the reflector uses."""

    def pages(
        self, path: str, selectors: Mapping[str, str], *, page_size: int = 500
    ) -> AsyncGenerator[bytes, None]:
        """Pages of a list, one at a time."""
        ...

    def stream(
        self, path: str, query: Mapping[str, str], *, idle_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Body of a GET, piece by piece."""
        ...


class _Metadata(Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _Object(Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class _List(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    items: list[msgspec.Raw] | None = None


class _Event(Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(Struct, frozen=True):
    code: int = 0
    message: str = ""


_list_decoder = msgspec.json.Decoder(_List)
_object_decoder = msgspec.json.Decoder(_Object)
_event_decoder = msgspec.json.Decoder(_Event)
_status_decoder = msgspec.json.Decoder(_Status)
_encoder = msgspec.json.Encoder()


class _Expired(Exception):
    """The server no longer has our resourceVersion."""


@asynccontextmanager
async def reflect(
    source: Source, path: str, selectors: Mapping[str, str]
) -> AsyncIterator[AsyncIterator[WatchEvent]]:
    """Changes of the collection at ``path``, until cancelled; see ``KubeApi.list_watch``."""
    events = _Reflector(source, path, selectors).events()
    try:
        yield events
    finally:
        await events.aclose()


class _Reflector:
    def __init__(self, source: Source, path: str, selectors: Mapping[str, str]) -> None:
        self._source = source
        self._path = path
        self._selectors = selectors
        self._known: dict[str, _Metadata] = {}
        self._version = ""

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        backoff = Backoff(first_s=0.1, most_s=10.0)
        must_list = True
        is_expired = False
        while True:
            try:
                if must_list:
                    async for event in self._list():
                        yield event
                    must_list = False
                    yield WatchEvent(type="SYNCED", resource_version=self._version)
                began = anyio.current_time()
                async for event in self._watch():
                    backoff.reset()
                    is_expired = False
                    yield event
                if anyio.current_time() - began < SHORT_S:
                    await backoff.wait()  # back off when the server ends each watch at once
            except _Expired:
                must_list = True
                _log.info("watch expired, listing again", extra={"path": self._path})
                if not is_expired:
                    backoff.reset()  # the server has recovered
                is_expired = True
                await backoff.wait()
            except HamiError as error:
                level = logging.INFO if isinstance(error, Unavailable) else logging.WARNING
                _log.log(
                    level,
                    "list or watch interrupted",
                    extra={"path": self._path, "problem": str(error)},
                )
                await backoff.wait()

    async def _list(self) -> AsyncGenerator[WatchEvent, None]:
        """Yield the difference between the collection and the objects reported before."""
        left = dict(self._known)
        uid_by_name = {(m.namespace, m.name): uid for uid, m in self._known.items()}
        version = ""
        async for page in self._source.pages(self._path, self._selectors):
            try:
                view = _list_decoder.decode(page)
            except UNDECODABLE as error:
                raise Unavailable(
                    peer="the Kubernetes API", detail=f"list sent what is no list: {error}"
                ) from error
            version = view.metadata.resource_version
            for item in view.items or []:
                try:
                    metadata = _object_decoder.decode(item).metadata
                except UNDECODABLE:
                    yield WatchEvent(type="ADDED", raw=bytes(item))  # the consumer isolates it
                    continue
                old_uid = uid_by_name.get((metadata.namespace, metadata.name), metadata.uid)
                if old_uid != metadata.uid and old_uid in left:
                    yield self._vanished(left.pop(old_uid))  # before its name is used again
                before = left.pop(metadata.uid, None)
                if before is None or before.resource_version != metadata.resource_version:
                    self._known[metadata.uid] = metadata
                    yield WatchEvent(
                        type="ADDED" if before is None else "MODIFIED",
                        raw=bytes(item),
                        resource_version=metadata.resource_version,
                    )
        for metadata in left.values():
            yield self._vanished(metadata)
        self._version = version

    def _vanished(self, metadata: _Metadata) -> WatchEvent:
        del self._known[metadata.uid]
        return WatchEvent(
            type="DELETED",
            raw=_encoder.encode({"metadata": _spoken(metadata)}),
            resource_version=metadata.resource_version,
        )

    async def _watch(self) -> AsyncGenerator[WatchEvent, None]:
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            # Spread, so that thousands of watches do not end in the same second.
            "timeoutSeconds": str(int(WATCH_S * random.uniform(1.0, 2.0))),  # noqa: S311
            **self._selectors,
        }
        try:
            async with self._source.stream(self._path, query, idle_s=IDLE_S) as chunks:
                async for line in _lines(chunks):
                    event = self._take(line)
                    if event is not None:
                        yield event
        except Denied as error:
            if error.status == GONE:
                raise _Expired from error
            raise

    def _take(self, line: bytes) -> WatchEvent | None:
        try:
            event = _event_decoder.decode(line)
            if event.type == "ERROR":
                status = _status_decoder.decode(event.object)
                if status.code == GONE:
                    raise _Expired
                raise Unavailable(peer="the Kubernetes API", detail=f"watch: {status.message}")
        except UNDECODABLE as error:
            raise Unavailable(
                peer="the Kubernetes API", detail=f"watch sent what is no event: {error}"
            ) from error
        try:
            metadata = _object_decoder.decode(event.object).metadata
        except UNDECODABLE:
            # The watch continues behind it, and the consumer isolates it.
            return WatchEvent(
                type=event.type, raw=bytes(event.object), resource_version=self._version
            )
        self._version = metadata.resource_version
        if event.type == "BOOKMARK":
            return None
        if event.type == "DELETED":
            self._known.pop(metadata.uid, None)
        else:
            self._known[metadata.uid] = metadata
        return WatchEvent(
            type=event.type,
            raw=bytes(event.object),
            resource_version=metadata.resource_version,
        )


def _spoken(metadata: _Metadata) -> dict[str, str]:
    return {
        "name": metadata.name,
        "namespace": metadata.namespace,
        "uid": metadata.uid,
        "resourceVersion": metadata.resource_version,
    }


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole lines of a stream of pieces."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" not in chunk:
            continue
        *lines, tail = bytes(rest).split(b"\n")
        rest = bytearray(tail)
        for line in lines:
            if line:
                yield line
