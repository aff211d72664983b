# SPDX-License-Identifier: Apache-2.0
"""Describes the API as an OpenAPI 3.1 document, from the table of operations and their Structs.

The committed copy is docs/openapi/registry.json (tools/gen_openapi.py). Obeys
https://spec.openapis.org/oas/v3.1.0.
"""

from typing import Any

import msgspec

from hami_registry.shell.api import (
    DEVICES_SEQ,
    LEDGER_SEQ,
    OPERATIONS,
    STATE_SEQ,
    ErrorAnswer,
    Operation,
    Parameter,
)

API_VERSION = "1"
_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_FRESHNESS = {
    LEDGER_SEQ: "Newest ledger record that the answer includes.",
    STATE_SEQ: "Newest state record that the answer includes.",
    DEVICES_SEQ: "Newest canonical devices that the answer includes.",
}


def document() -> dict[str, Any]:
    """Return the whole document."""
    types = [op.answer for op in OPERATIONS if op.answer is not None]
    _, components = msgspec.json.schema_components([*types, ErrorAnswer], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "HAMi registry",
            "version": API_VERSION,
            "description": "Devices, who holds them and why. Memory in MiB, compute in percent of "
            "one device, times in Unix seconds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {op.path: {"get": _operation(op)} for op in OPERATIONS},
        "components": {"schemas": dict(sorted(components.items()))},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "description": operation.text,
        "responses": {"200": _success(operation), **_failures(operation)},
    }
    if operation.parameters:
        described["parameters"] = [_parameter(p) for p in operation.parameters]
    return described


def _success(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {
            "description": "Server-sent events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    return {
        "description": (operation.answer.__doc__ or "").strip().partition("\n")[0],
        "headers": {
            name: {"description": text, "schema": {"type": "integer"}}
            for name, text in _FRESHNESS.items()
        },
        "content": {_JSON: {"schema": {"$ref": _REF.format(name=operation.answer.__name__)}}},
    }


def _failures(operation: Operation) -> dict[str, Any]:
    texts = {
        400: "A parameter is not known, or has a value that makes no sense.",
        **operation.errors,
        503: "The replica cannot answer yet, or not any more.",
    }
    schema = {"$ref": _REF.format(name=ErrorAnswer.__name__)}
    return {
        str(status): {"description": text, "content": {_JSON: {"schema": schema}}}
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


def encoded() -> bytes:
    """Return the document as it is committed and served."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=2) + b"\n"
