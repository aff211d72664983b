# SPDX-License-Identifier: Apache-2.0
"""Pods of manifest files: pods themselves, lists, and the pods that workloads would make."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hami_common.podview import PodView
from hamictl.errors import InputRefused

_REPLICAS_BY_KIND = {
    "Deployment": "replicas",
    "ReplicaSet": "replicas",
    "StatefulSet": "replicas",
    "Job": "parallelism",
}


def read_pods(path: Path) -> list[PodView]:
    """The pods of a YAML or JSON file, replicas spelled out; other kinds are passed over."""
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise InputRefused(message) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{path}: not YAML: {error}"
        raise InputRefused(message) from error
    return [pod for document in documents for pod in _pods(document, path)]


def _pods(document: Any, path: Path) -> Iterator[PodView]:  # noqa: ANN401 - YAML may hold anything
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
        yield _view(document, path)
    elif kind in _REPLICAS_BY_KIND:
        yield from _of_workload(document, _REPLICAS_BY_KIND[kind], path)


def _of_workload(document: dict[str, Any], field: str, path: Path) -> Iterator[PodView]:
    metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
    template = spec.get("template") or {}
    name, count = str(metadata.get("name", "")), spec.get(field)
    count = 1 if count is None else count
    if not isinstance(count, int) or count < 0:
        message = f"{path}: {name}: spec.{field} is {count!r}, write a whole number"
        raise InputRefused(message)
    for number in range(count):
        own = {**(template.get("metadata") or {}), "name": f"{name}-{number}"}
        own.setdefault("namespace", metadata.get("namespace", "default"))
        yield _view({**template, "metadata": own}, path)


def _view(document: dict[str, Any], path: Path) -> PodView:
    metadata = dict(document.get("metadata") or {})
    name = metadata.get("name", "")
    namespace = metadata.setdefault("namespace", "default")
    metadata.setdefault("uid", f"{namespace}/{name}")
    try:
        return msgspec.convert({**document, "metadata": metadata}, PodView, strict=False)
    except msgspec.ValidationError as error:
        message = f"{path}: pod {name}: {error}"
        raise InputRefused(message) from error
