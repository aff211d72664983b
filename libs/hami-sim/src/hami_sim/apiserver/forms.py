# SPDX-License-Identifier: Apache-2.0
"""Forms on the wire: reading bodies, choosing the form of an answer, and writing it.

Bodies are JSON or YAML. Answers are JSON: an object, a list, a Table or bare metadata, as the
Accept header asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec
import yaml
from aiohttp import web

from hami_sim.apiserver import errors, tables
from hami_sim.apiserver.calls import Call
from hami_sim.apiserver.errors import ApiError, Obj
from hami_sim.apiserver.operations import Operations
from hami_sim.apiserver.resources import Resource
from hami_sim.apiserver.store import Stored, encode

Form: TypeAlias = Literal["", "table", "partial"]
"""Of an answer: whole objects, a Table, or PartialObjectMetadata."""

JSON: Final = "application/json"
YAML: Final = "application/yaml"
PATCH_TYPES: Final = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
)
_UNREADABLE: Final = frozenset({"application/cbor", "application/vnd.kubernetes.protobuf"})
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})


def is_true(text: str) -> bool:
    """Read a boolean of the query."""
    return text in _TRUE


def json_response(obj: object, *, code: int = 200) -> web.Response:
    """Answer with a JSON document."""
    return web.Response(body=encode(obj), status=code, content_type=JSON)


def status_response(error: ApiError) -> web.Response:
    """Answer with a failure Status."""
    response = json_response(error.to_status(), code=error.code)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def abort(request: web.Request) -> None:
    """Tear the connection of a request."""
    if request.transport is not None:
        request.transport.abort()


async def read_body(request: web.Request, *, max_bytes: int, optional: bool = False) -> object:
    """Decode the body of a request; None where it is optional and absent."""
    kind = request.content_type
    if kind in _UNREADABLE:
        raise errors.unsupported_media_type((JSON, YAML, *PATCH_TYPES))
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise errors.too_large(max_bytes) from error
    if not raw:
        if optional:
            return None
        raise errors.bad_request("the request has no body")
    try:
        if kind.endswith("yaml"):
            return msgspec.yaml.decode(raw)
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise errors.bad_request(f"couldn't get version/kind; json parse error: {error}") from error


def accepted(request: web.Request) -> Form:
    """Pick the first acceptable form of the answer."""
    header = request.headers.get("Accept", "*/*")
    for item in header.split(","):
        media, *parameters = (part.strip() for part in item.split(";"))
        if media in (JSON, "*/*", "application/*"):
            if "as=Table" in parameters and "g=meta.k8s.io" in parameters:
                return "table"
            if any(part.startswith("as=PartialObjectMetadata") for part in parameters):
                return "partial"
            if not any(part.startswith("as=") for part in parameters):
                return ""
        elif media in (YAML, "text/plain"):
            return ""
    raise errors.not_acceptable((JSON,))


class Writer:
    """Writes stored objects in the form that a request asked for."""

    def __init__(self, operations: Operations, clock: Callable[[], float]) -> None:
        self._operations = operations
        self._clock = clock

    def object_bytes(self, resource: Resource, stored: Stored) -> bytes:
        """Encode a whole object, reusing its stored encoding."""
        if resource.renames:
            return encode(self._operations.full(resource, stored.obj))
        head = f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",'
        return head.encode() + stored.body[1:]

    def one(
        self, request: web.Request, call: Call, stored: Stored, form: Form, *, code: int = 200
    ) -> web.Response:
        """Answer with one object."""
        if form:
            shown = self.shown(request, call, stored, form)
            return json_response(shown, code=code)
        body = self.object_bytes(call.resource, stored)
        return web.Response(body=body, status=code, content_type=JSON)

    def shown(
        self,
        request: web.Request,
        call: Call,
        stored: Stored,
        form: Form,
        *,
        with_columns: bool = True,
    ) -> Obj:
        """Render one object as a Table or as metadata."""
        if form == "table":
            metadata = {"resourceVersion": stored.obj["metadata"].get("resourceVersion", "")}
            return self._table(request, call, [stored], metadata, with_columns=with_columns)
        kind = "PartialObjectMetadata"
        return {
            "kind": kind,
            "apiVersion": "meta.k8s.io/v1",
            "metadata": stored.obj["metadata"],
        }

    def _table(
        self,
        request: web.Request,
        call: Call,
        found: list[Stored],
        metadata: Obj,
        *,
        with_columns: bool = True,
    ) -> Obj:
        def full(obj: Obj) -> Obj:
            return self._operations.full(call.resource, obj)

        return tables.render(
            call.key,
            [stored.obj for stored in found],
            now=self._clock(),
            metadata=metadata,
            include=request.query.get("includeObject", "Metadata"),
            full=full,
            with_columns=with_columns,
        )

    def many(
        self, request: web.Request, call: Call, found: list[Stored], metadata: Obj, form: Form
    ) -> web.Response:
        """Answer with a list."""
        if form == "table":
            return json_response(self._table(request, call, found, metadata))
        if form == "partial":
            kind = "PartialObjectMetadataList"
            return json_response(
                {
                    "kind": kind,
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": metadata,
                    "items": [self.shown(request, call, stored, form) for stored in found],
                }
            )
        resource = call.resource
        if resource.renames:
            bodies = [encode(self._without_kind(resource, stored.obj)) for stored in found]
        else:
            bodies = [stored.body for stored in found]
        head = (
            f'{{"kind":"{resource.kind}List","apiVersion":"{resource.api_version}","metadata":'
        ).encode()
        body = head + encode(metadata) + b',"items":[' + b",".join(bodies) + b"]}"
        return web.Response(body=body, content_type=JSON)

    def _without_kind(self, resource: Resource, obj: Obj) -> Obj:
        full = self._operations.full(resource, obj)
        return {key: value for key, value in full.items() if key not in ("kind", "apiVersion")}
