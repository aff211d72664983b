# SPDX-License-Identifier: Apache-2.0
"""Watches over HTTP: one JSON event per line for as long as the client and its timeout last.

A bookmark never overtakes an event: what is pending is written first. A watch from before the kept
history is answered with one ERROR event that holds a 410 Status. Times in seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec
from aiohttp import web

from hami_sim.apiserver import errors
from hami_sim.apiserver.auth import RequestInfo
from hami_sim.apiserver.calls import Call
from hami_sim.apiserver.errors import ApiError, Obj
from hami_sim.apiserver.faults import Match
from hami_sim.apiserver.forms import JSON, Form, Writer, abort
from hami_sim.apiserver.lists import ListOptions, read_options, read_revision
from hami_sim.apiserver.settings import Settings
from hami_sim.apiserver.store import Delivery, Store, Subscription, encode

_BOOKMARK_END: Final = "k8s.io/initial-events-end"
_GONE: Final = 410


class _OpenWatch(msgspec.Struct, frozen=True, kw_only=True):
    info: RequestInfo
    subscription: Subscription
    abort: Callable[[], None]


class Watches:
    """All watches in progress on one server."""

    def __init__(self, store: Store, writer: Writer, settings: Settings) -> None:
        self._store = store
        self._writer = writer
        self._settings = settings
        self._open: dict[int, _OpenWatch] = {}

    def __len__(self) -> int:
        """Count the watches in progress."""
        return len(self._open)

    def drop(self, match: Match, *, cut: bool) -> int:
        """End the watches that match; `cut` tears the connection instead of ending the body."""
        dropped = 0
        for watch in list(self._open.values()):
            if match(watch.info):
                dropped += 1
                if cut:
                    watch.abort()
                watch.subscription.close()
        return dropped

    async def serve(
        self,
        request: web.Request,
        call: Call,
        info: RequestInfo,
        form: Form,
        *,
        begun: Callable[[], None],
    ) -> web.StreamResponse:
        """Serve one watch until it ends; `begun` is called once it is not refused."""
        options = read_options(request, call)
        if options.initial_events and options.match != "NotOlderThan":
            raise errors.bad_request(
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            )
        text = options.resource_version
        since = None if text in ("", "0") or options.initial_events else read_revision(text)
        response = web.StreamResponse(headers={"Content-Type": JSON})
        try:
            subscription = self._store.subscribe(call.key, options.wanted, since)
        except ApiError as error:
            if error.code != _GONE:
                raise
            begun()
            await response.prepare(request)
            await response.write(_line("ERROR", encode(error.to_status())))
            return response
        async with self._opened(request, call, info, subscription):
            begun()
            await response.prepare(request)
            stream = _Stream(self._writer, request, call, response, form)
            if options.initial_events:
                await self._settle(stream, subscription, {_BOOKMARK_END: "true"})
            await self._pump(stream, subscription, options)
        return response

    @asynccontextmanager
    async def _opened(
        self, request: web.Request, call: Call, info: RequestInfo, subscription: Subscription
    ) -> AsyncIterator[None]:
        key = id(subscription)
        self._open[key] = _OpenWatch(
            info=info, subscription=subscription, abort=lambda: abort(request)
        )
        try:
            yield
        finally:
            del self._open[key]
            self._store.unsubscribe(call.key, subscription)

    async def _pump(
        self, stream: _Stream, subscription: Subscription, options: ListOptions
    ) -> None:
        end = anyio.current_time() + (options.timeout_s or self._settings.max_watch_s)
        while (left_s := end - anyio.current_time()) > 0:
            deliveries: list[Delivery] | None = None
            with anyio.move_on_after(min(left_s, self._settings.bookmark_interval_s)):
                deliveries = await subscription.drain()
            if deliveries is None:
                if options.bookmarks:
                    await self._settle(stream, subscription)
            elif deliveries:
                await stream.write(deliveries)
            else:
                return

    async def _settle(
        self, stream: _Stream, subscription: Subscription, annotations: Obj | None = None
    ) -> None:
        """Write what is pending, then the revision up to which that is everything."""
        revision, pending = self._store.revision, subscription.pending()
        await stream.write(pending)
        await stream.bookmark(revision, annotations)


class _Stream:
    """Writes the events of one watch."""

    def __init__(
        self,
        writer: Writer,
        request: web.Request,
        call: Call,
        response: web.StreamResponse,
        form: Form,
    ) -> None:
        self._writer = writer
        self._request = request
        self._call = call
        self._response = response
        self._form: Form = form
        self._first = True

    async def write(self, deliveries: list[Delivery]) -> None:
        """Write events in one piece."""
        if deliveries:
            await self._response.write(b"".join([self._encode(item) for item in deliveries]))

    def _encode(self, delivery: Delivery) -> bytes:
        """Encode one event; plain ones are encoded once for all watches."""
        resource, change = self._call.resource, delivery.change
        if self._form:
            shown = self._writer.shown(
                self._request,
                self._call,
                delivery.stored,
                self._form,
                with_columns=self._first,
            )
            self._first = False
            return _line(delivery.type, encode(shown))
        if change is None:
            return _line(delivery.type, self._writer.object_bytes(resource, delivery.stored))
        key = (resource.key, delivery.type)
        line = change.lines.get(key)
        if line is None:
            line = _line(delivery.type, self._writer.object_bytes(resource, delivery.stored))
            change.lines[key] = line
        return line

    async def bookmark(self, revision: int, annotations: Obj | None) -> None:
        """Send the revision up to which the client has received every event."""
        resource = self._call.resource
        metadata: Obj = {"resourceVersion": str(revision)}
        if annotations:
            metadata["annotations"] = annotations
        obj: Obj = {
            "kind": resource.kind,
            "apiVersion": resource.api_version,
            "metadata": metadata,
        }
        if self._form == "table":
            obj = {
                "kind": "Table",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "columnDefinitions": None,
                "rows": [],
            }
        await self._response.write(_line("BOOKMARK", encode(obj)))


def _line(type_: str, obj: bytes) -> bytes:
    return b'{"type":"' + type_.encode() + b'","object":' + obj + b"}\n"
