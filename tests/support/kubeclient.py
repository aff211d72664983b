# SPDX-License-Identifier: Apache-2.0
"""A small client of the Kubernetes API that shows raw answers, for tests of servers.

It speaks to any API server, simulated or real. Objects are plain JSON; resources are named as
`plural` or `plural.group`. A failure Status becomes :class:`StatusError`. It neither caches nor
retries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from hami_sim.apiserver.errors import Obj
from hami_sim.kube import MERGE, Access, path_of

_FAILED: Final = 400
_LINE_LIMIT: Final = 2**24


class StatusError(Exception):
    """The server answered with a failure Status."""

    def __init__(self, code: int, status: Obj, headers: Mapping[str, str]) -> None:
        super().__init__(f"{code} {status.get('reason', '')}: {status.get('message', '')}")
        self.code = code
        self.status = status
        self.headers = headers

    @property
    def reason(self) -> str:
        """Return the Status reason."""
        return str(self.status.get("reason", ""))

    @property
    def message(self) -> str:
        """Return the Status message."""
        return str(self.status.get("message", ""))

    @property
    def causes(self) -> list[Obj]:
        """Return the field-level causes."""
        return list((self.status.get("details") or {}).get("causes") or ())


class Reply(msgspec.Struct, frozen=True):
    """A raw answer."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Decode the body."""
        return msgspec.json.decode(self.body)


class Watch:
    """An open watch; iterate over its events as (type, object)."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    def __aiter__(self) -> AsyncIterator[tuple[str, Obj]]:
        return self._events()

    async def _events(self) -> AsyncIterator[tuple[str, Obj]]:
        async for line in self.response.content:
            if line.strip():
                event = msgspec.json.decode(line)
                yield event["type"], event["object"]


class KubeClient:
    """A client over one connection pool; use it as an async context manager."""

    def __init__(self, access: Access, *, user_agent: str = "hami-sim") -> None:
        self.access = access
        self._agent = user_agent
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self.access.ssl_context(), limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=_LINE_LIMIT,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": self._agent}
        if self.access.token:
            headers["Authorization"] = f"Bearer {self.access.token}"
        headers.update(extra or {})
        return headers

    @property
    def session(self) -> aiohttp.ClientSession:
        """Return the open session."""
        if self._session is None:
            msg = "the client is not open; use it as an async context manager"
            raise RuntimeError(msg)
        return self._session

    async def raw(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        data: bytes | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request and read the answer, whatever its code."""
        if body is not None:
            data = msgspec.json.encode(body)
        extra = {"Content-Type": "application/json"} if data is not None else {}
        async with self.session.request(
            method,
            self.access.url + path,
            data=data,
            params=dict(query or {}),
            headers=self._headers({**extra, **(headers or {})}),
        ) as response:
            return Reply(response.status, response.headers, await response.read())

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Obj:
        """Send one request; returns the object or raises StatusError."""
        reply = await self.raw(method, path, body=body, query=query, headers=headers)
        try:
            decoded = reply.json
        except msgspec.DecodeError:
            decoded = {"message": reply.body.decode(errors="replace")}
        if reply.code >= _FAILED:
            raise StatusError(reply.code, decoded, reply.headers)
        return dict(decoded)

    # -- verbs

    async def get(self, resource: str, name: str, namespace: str = "", **query: str) -> Obj:
        """Read one object."""
        return await self.call("GET", path_of(resource, namespace, name), query=query)

    async def list(self, resource: str, namespace: str = "", **query: str) -> Obj:
        """Read a list."""
        return await self.call("GET", path_of(resource, namespace), query=query)

    async def create(self, resource: str, obj: Obj, namespace: str = "", **query: str) -> Obj:
        """Create an object; its own namespace counts if none is given."""
        namespace = namespace or obj.get("metadata", {}).get("namespace", "")
        return await self.call("POST", path_of(resource, namespace), body=obj, query=query)

    async def replace(self, resource: str, obj: Obj, *, subresource: str = "", **query: str) -> Obj:
        """Replace an object under its own name."""
        metadata = obj["metadata"]
        path = path_of(resource, metadata.get("namespace", ""), metadata["name"], subresource)
        return await self.call("PUT", path, body=obj, query=query)

    async def patch(
        self,
        resource: str,
        name: str,
        patch: object,
        *,
        namespace: str = "",
        kind: str = MERGE,
        subresource: str = "",
        **query: str,
    ) -> Obj:
        """Patch an object."""
        path = path_of(resource, namespace, name, subresource)
        return await self.call(
            "PATCH", path, body=patch, query=query, headers={"Content-Type": kind}
        )

    async def delete(
        self,
        resource: str,
        name: str,
        namespace: str = "",
        *,
        body: Obj | None = None,
        **query: str,
    ) -> Obj:
        """Delete an object."""
        path = path_of(resource, namespace, name)
        return await self.call("DELETE", path, body=body, query=query)

    async def act(
        self, resource: str, name: str, action: str, body: Obj, namespace: str = "", **query: str
    ) -> Obj:
        """POST to a subresource."""
        path = path_of(resource, namespace, name, action)
        return await self.call("POST", path, body=body, query=query)

    async def bind(
        self,
        name: str,
        node: str,
        *,
        namespace: str = "default",
        uid: str = "",
        resource_version: str = "",
        annotations: Mapping[str, str] | None = None,
    ) -> Obj:
        """Bind a pod to a node."""
        metadata: Obj = {"name": name, "namespace": namespace}
        if uid:
            metadata["uid"] = uid
        if resource_version:
            metadata["resourceVersion"] = resource_version
        if annotations:
            metadata["annotations"] = dict(annotations)
        binding = {
            "kind": "Binding",
            "apiVersion": "v1",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        return await self.act("pods", name, "binding", binding, namespace)

    @asynccontextmanager
    async def watch(
        self,
        resource: str,
        namespace: str = "",
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Watch]:
        """Open a watch; a refusal raises StatusError."""
        async with self.session.get(
            self.access.url + path_of(resource, namespace),
            params={"watch": "1", **(query or {})},
            headers=self._headers(headers),
        ) as response:
            if response.status >= _FAILED:
                raise StatusError(
                    response.status, msgspec.json.decode(await response.read()), response.headers
                )
            yield Watch(response)
