# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document: committed, complete, and every reference resolves."""

import json
import re
from pathlib import Path

from hami_registry.shell import api, historyapi, meteringapi, openapi
from hami_registry.shell.api import Api
from hami_registry.shell.gateway import FORWARDED
from hami_registry.shell.historyapi import HistoryApi
from hami_registry.shell.meteringapi import MeteringApi
from hami_registry.shell.openapi import OPERATIONS

FOLDER = Path(__file__).parents[4] / "docs/openapi"
COMMITTED = FOLDER / "registry.json"
UNPUBLISHED = "/v1/snapshot"
"""Route of the scheduler for simulation and replay, which no browser needs."""


def test_committed_document_is_current() -> None:
    assert COMMITTED.read_bytes() == openapi.encoded()


def test_every_reference_resolves() -> None:
    document = openapi.document()
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names == set(document["components"]["schemas"])


def test_every_path_parameter_is_described() -> None:
    for operation in OPERATIONS:
        in_path = set(re.findall(r"\{(\w+)\}", operation.path))
        described = {p.name for p in operation.parameters if p.place == "path"}
        assert described == in_path, operation.path


def test_every_operation_has_a_handler_of_its_own() -> None:
    for handlers, operations in (
        (Api, api.OPERATIONS),
        (HistoryApi, historyapi.OPERATIONS),
        (MeteringApi, meteringapi.OPERATIONS),
    ):
        assert all(callable(getattr(handlers, operation.name)) for operation in operations)
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_forwarded_routes_are_those_of_the_scheduler() -> None:
    offered = json.loads((FOLDER / "scheduler.json").read_text())["paths"]
    routes = {(method.upper(), path) for path, item in offered.items() for method in item}
    assert routes - {("GET", UNPUBLISHED)} <= set(FORWARDED)
    paths = openapi.document()["paths"]
    for _, path in FORWARDED:
        pointer = path.replace("/", "~1")
        assert paths[path]["$ref"] == f"scheduler.json#/paths/{pointer}"
