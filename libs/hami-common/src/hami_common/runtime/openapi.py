# SPDX-License-Identifier: Apache-2.0
"""Describes an HTTP API as an OpenAPI 3.1 document, from a table of operations and their Structs.

Obeys https://spec.openapis.org/oas/v3.1.0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

API_VERSION = "1"
_REF = "#/components/schemas/{name}"
_JSON = "application/json"


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Description of an error."""

    code: str
    """Stable word."""
    message: str


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """Body of every answer with a status of 400 or more."""

    error: ErrorBody


class Parameter(Struct, frozen=True, kw_only=True):
    """One parameter of an operation."""

    name: str
    place: str
    """``path`` or ``query``."""
    text: str
    values: tuple[str, ...] = ()
    """Closed set of values; empty: any text."""


class Operation(Struct, frozen=True, kw_only=True):
    """One operation of an API."""

    path: str
    name: str
    """Name of the operation, and of the method that implements it."""
    text: str
    method: str = "get"
    body: type[Struct] | None = None
    answer: type[Struct] | None = None
    """``None``: a stream of server-sent events."""
    parameters: tuple[Parameter, ...] = ()
    errors: Mapping[int, str] = msgspec.field(default_factory=dict)


def document(
    operations: Sequence[Operation],
    *,
    title: str,
    text: str,
    errors: Mapping[int, str],
    headers: Mapping[str, str],
    forwarded: Sequence[str] = (),
    answered_by: str = "",
) -> dict[str, Any]:
    """Return the whole document.

    ``errors`` are those of every operation, ``headers`` integers of every JSON answer. The paths
    ``forwarded`` refer to the document of the service ``answered_by``.
    """
    types = [kind for op in operations for kind in (op.body, op.answer) if kind is not None]
    _, components = msgspec.json.schema_components([*types, ErrorAnswer], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method] = _operation(op, errors, headers)
    for path in forwarded:
        # A JSON pointer (RFC 6901) writes "/" as "~1".
        pointer = path.replace("~", "~0").replace("/", "~1")
        paths[path] = {
            "$ref": f"{answered_by}.json#/paths/{pointer}",
            "description": f"Forwarded: the {answered_by} authorizes the caller and answers.",
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": API_VERSION,
            "description": text,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
    }


def encoded(described: dict[str, Any]) -> bytes:
    """Return a document as it is committed and served."""
    return msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n"


def _operation(
    operation: Operation, errors: Mapping[int, str], headers: Mapping[str, str]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "description": operation.text,
        "responses": {
            "200": _success(operation, headers),
            **_failures({**errors, **operation.errors}),
        },
    }
    if operation.parameters:
        described["parameters"] = [_parameter(p) for p in operation.parameters]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    return described


def _content(kind: type[Struct]) -> dict[str, Any]:
    return {_JSON: {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _success(operation: Operation, headers: Mapping[str, str]) -> dict[str, Any]:
    if operation.answer is None:
        return {
            "description": "Server-sent events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    described: dict[str, Any] = {
        "description": (operation.answer.__doc__ or "").strip().partition("\n")[0]
    }
    if headers:
        described["headers"] = {
            name: {"description": text, "schema": {"type": "integer"}}
            for name, text in headers.items()
        }
    return {**described, "content": _content(operation.answer)}


def _failures(texts: Mapping[int, str]) -> dict[str, Any]:
    return {
        str(status): {"description": text, "content": _content(ErrorAnswer)}
        for status, text in sorted(texts.items())
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if parameter.values:
        schema["enum"] = list(parameter.values)
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "description": parameter.text,
        "schema": schema,
    }
