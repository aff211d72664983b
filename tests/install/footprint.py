# SPDX-License-Identifier: Apache-2.0
"""Records what a site consists of, to compare it before and after an installation.

A ``Footprint`` has every object of the API server, the node's labels, annotations, taints and
capacity, and every file of the node outside of containers with a digest of its content. Left out is
what changes by itself: Events, Leases, statuses, resource versions, data of containerd and of pods.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import anyio
from msgspec import Struct

from tests.cluster.site.site import Site

TRANSIENT: Final = frozenset(
    {
        *("events", "events.events.k8s.io", "leases.coordination.k8s.io"),
        # Addresses of pods, which are others after a reboot.
        *("endpoints", "endpointslices.discovery.k8s.io"),
    }
)
ROOTS: Final = (Path("/etc"), Path("/var/lib"), Path("/run"))
"""Directories of a node's own; the rest of its root file system is read-only."""
SKIPPED: Final = (
    Path("/var/lib/containerd"),
    Path("/run/containerd"),
    Path("/var/lib/kubelet/pods"),
    Path("/var/lib/nvidia/state"),
)
_KEPT_OF_NODE = ("labels", "annotations")
_HELD = ("spec", "data", "rules", "roleRef", "subjects", "webhooks", "parameters", "provisioner")
_OWNED_BY_SERVERS = ("clusterIP", "clusterIPs", "nodeName", "volumeName", "claimRef")


class Footprint(Struct, frozen=True, kw_only=True):
    """State of a site at one time."""

    objects: dict[str, str]
    """Digest of labels, annotations and content by ``resource namespace/name``."""
    node: dict[str, Any]
    """Labels, annotations, taints, capacity and allocatable of the node."""
    files: dict[str, str]
    """Kind, mode and digest by path on the node."""


async def take(site: Site) -> Footprint:
    """Record the site as it is now."""
    kinds = await site.kubectl("api-resources", "--verbs=list", "--output=name")
    names = sorted(set(kinds.stdout.split()) - TRANSIENT)
    listed = await site.kubectl("get", ",".join(names), "--all-namespaces", "--output=json")
    documents = json.loads(listed.stdout)["items"]
    [node] = [one for one in documents if one["kind"] == "Node"]
    return Footprint(
        objects={_key(one): _digest(_content(one)) for one in documents},
        node={
            **{key: node["metadata"].get(key, {}) for key in _KEPT_OF_NODE},
            "taints": node["spec"].get("taints", []),
            **{key: node["status"][key] for key in ("capacity", "allocatable")},
        },
        files=await anyio.to_thread.run_sync(lambda: dict(_files(site))),
    )


def differences(before: Footprint, after: Footprint) -> list[str]:
    """Return what was added, removed and changed, one line each, sorted."""
    lines = [
        *_compared("object", before.objects, after.objects),
        *_compared("file", before.files, after.files),
    ]
    for part in before.node.keys() | after.node.keys():
        old, new = before.node.get(part), after.node.get(part)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _compared(f"node {part}", old, new)
        elif old != new:
            lines.append(f"node {part}: {old} became {new}")
    return sorted(lines)


def _compared(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        *(f"{what} {key} was added" for key in new.keys() - old.keys()),
        *(f"{what} {key} was removed" for key in old.keys() - new.keys()),
        *(f"{what} {key} changed" for key in old.keys() & new.keys() if old[key] != new[key]),
    ]


def _key(document: Mapping[str, Any]) -> str:
    metadata = document["metadata"]
    where = f"{metadata['namespace']}/" if "namespace" in metadata else ""
    return f"{document['apiVersion']} {document['kind']} {where}{metadata['name']}"


def _content(document: Mapping[str, Any]) -> dict[str, Any]:
    if document["kind"] == "Node":
        return {}  # compared by its parts
    metadata = document["metadata"]
    content = {key: document[key] for key in _HELD if key in document}
    if isinstance(spec := content.get("spec"), dict):
        content["spec"] = {k: v for k, v in spec.items() if k not in _OWNED_BY_SERVERS}
    return {**content, **{key: metadata.get(key) for key in _KEPT_OF_NODE}}


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _files(site: Site) -> Iterator[tuple[str, str]]:
    for root in ROOTS:
        own = site.node.space.seen(root)
        for directory, names, files in os.walk(own):
            here = root / Path(directory).relative_to(own)
            names[:] = [name for name in names if here / name not in SKIPPED]
            for name in (*names, *files):
                try:
                    yield str(here / name), _described(Path(directory) / name)
                except FileNotFoundError:
                    continue


def _described(path: Path) -> str:
    status = path.lstat()
    kind = stat.filemode(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return f"{kind} {path.readlink()}"
    if stat.S_ISREG(status.st_mode):
        return f"{kind} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    return kind
