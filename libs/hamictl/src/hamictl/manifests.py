# SPDX-License-Identifier: Apache-2.0
"""Reads pods from manifest files: pods, lists, and the pods of workloads' templates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hami_common import documents
from hami_common.errors import SettingsInvalid
from hami_common.events.codec import UNDECODABLE, problem_of
from hami_common.pods.podview import PodView
from hami_common.units import shown
from hami_core.replay.tenants import Running, is_tied
from hamictl.errors import InputRefused
from hamictl.inputs import read

T = TypeVar("T")

_REPLICAS_BY_KIND = {
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
    "Job": "parallelism",
}

_REPLICAS_MOST = 100_000
_SIZE_MOST = 256 << 20
"""Fits the pods of a large cluster as kubectl prints them."""


class Manifest(NamedTuple):
    """A pod of a manifest file."""

    document: dict[str, Any]
    view: PodView


def read_pods(path: Path) -> list[PodView]:
    """Read the pods of a YAML or JSON file, one per replica; other kinds are skipped."""
    return [manifest.view for manifest in read_manifests(path)]


def read_manifests(path: Path) -> list[Manifest]:
    """Read the pods of a file with their manifests, as ``read_pods``."""
    return [
        Manifest(pod, _view(pod, path))
        for document in _documents(path)
        for pod in _pods(document, path)
    ]


def read_running(path: Path) -> list[Running]:
    """Read the pods of a file such as ``kubectl get pods -A -o json`` prints."""
    found: list[Running] = []
    for document in _documents(path):
        if not isinstance(document, dict):
            message = f"{path}: a document is a {type(document).__name__}, not a Kubernetes object"
            raise InputRefused(message)
        items = document.get("items")
        found += [
            running_pod(item, path)
            for item in (items if isinstance(items, list) else [document])
            if isinstance(item, dict) and item.get("kind", "Pod") == "Pod"
        ]
    return found


def running_pod(document: dict[str, Any], origin: Path | str) -> Running:
    """Read one pod; ``origin`` names the source in errors."""
    return Running(_view(document, origin), is_tied(document))


def read_as(path: Path, kind: type[T]) -> T:
    """Read a file with one document of this type."""
    try:
        (document,) = _documents(path)
        return msgspec.convert(document, kind, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        message = f"{path}: {error}"
        raise InputRefused(message) from error


def read_objects(path: Path, kind: str) -> list[dict[str, Any]]:
    """Read the objects of one kind from a YAML or JSON file, lists expanded."""
    found: list[dict[str, Any]] = []
    for document in _documents(path):
        if document is None:
            continue
        if not isinstance(document, dict):
            message = f"{path}: a document is a {type(document).__name__}, not a Kubernetes object"
            raise InputRefused(message)
        items = document.get("items")
        some = items if isinstance(items, list) else [document]
        found += [item for item in some if isinstance(item, dict) and item.get("kind") == kind]
    return found


def _documents(path: Path) -> list[Any]:
    """Parse a YAML or JSON file."""
    content = read(path)
    try:
        if content.startswith(b"{"):
            return [msgspec.json.decode(content)]
        return documents.yaml_all(content, field=str(path), size_most=_SIZE_MOST)
    except SettingsInvalid as error:
        message = f"{path}: {error.problem}; {error.fix}"
        raise InputRefused(message) from error
    except UNDECODABLE as error:
        message = f"{path}: not JSON: {problem_of(error)}"
        raise InputRefused(message) from error


def _pods(document: Any, path: Path) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - YAML may hold anything
    if document is None:
        return
    if not isinstance(document, dict):
        message = f"{path}: a document is a {type(document).__name__}, not a Kubernetes object"
        raise InputRefused(message)
    kind = document.get("kind", "")
    if isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _pods(item, path)
    elif kind == "Pod":
        yield document
    elif kind in _REPLICAS_BY_KIND:
        yield from _of_workload(document, _REPLICAS_BY_KIND[kind], path)


def _of_workload(document: dict[str, Any], field: str, path: Path) -> Iterator[dict[str, Any]]:
    metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
    template = spec.get("template") or {}
    name, count = str(metadata.get("name", "")), spec.get(field)
    count = 1 if count is None else count
    if not isinstance(count, int) or not 0 <= count <= _REPLICAS_MOST:
        message = (
            f"{path}: {name}: spec.{field} is {shown(str(count))}, "
            f"write a whole number up to {_REPLICAS_MOST}"
        )
        raise InputRefused(message)
    for number in range(count):
        own = {**(template.get("metadata") or {}), "name": f"{name}-{number}"}
        own.setdefault("namespace", metadata.get("namespace", "default"))
        yield {**template, "metadata": own}


def _view(document: dict[str, Any], path: Path | str) -> PodView:
    metadata = dict(document.get("metadata") or {})
    name = metadata.get("name", "")
    namespace = metadata.setdefault("namespace", "default")
    metadata.setdefault("uid", f"{namespace}/{name}")
    try:
        return msgspec.convert({**document, "metadata": metadata}, PodView, strict=False)
    except msgspec.ValidationError as error:
        message = f"{path}: pod {name}: {error}"
        raise InputRefused(message) from error
