# SPDX-License-Identifier: Apache-2.0
"""Resolves CDI device names to what they bring into a container, as a container runtime does.

Reads the JSON and YAML files of the spec directories (Container Device Interface 0.8), later
directories before earlier ones where two define the same device; two files of one directory that
define the same device make it unresolvable. Hooks are programs of the host for a runtime and are
not run here. Knows nothing of pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from hami_sim.kubelet.objects import Obj


class CdiError(Exception):
    """A device cannot be injected; worded as containerd does."""


class Edits(Struct, frozen=True, kw_only=True):
    """Edits that devices apply to a container."""

    envs: Mapping[str, str] = {}
    devices: tuple[tuple[str, str, str], ...] = ()
    """(container path, host path, permissions)."""
    mounts: tuple[tuple[str, str, bool], ...] = ()
    """(container path, host path, read-only)."""


def resolve(names: Sequence[str], directories: Iterable[Path]) -> Edits:
    """Combine the edits of all named devices, each file's common edits once and first."""
    known = _load(directories)
    missing = [name for name in names if known.get(name) is None]
    if missing:
        raise CdiError(
            f"CDI device injection failed: unresolvable CDI devices {', '.join(missing)}"
        )
    edits: list[Obj] = []
    for name in names:
        found = known[name]
        if found is not None:
            common, own = found
            edits += [part for part in (common, own) if not any(part is seen for seen in edits)]
    return _combined(edits)


def _load(directories: Iterable[Path]) -> dict[str, tuple[Obj, Obj] | None]:
    """Map each device name to (common edits of its file, its own edits), None when ambiguous."""
    known: dict[str, tuple[Obj, Obj] | None] = {}
    for directory in directories:
        level: dict[str, tuple[Obj, Obj] | None] = {}
        paths = directory.iterdir() if directory.is_dir() else ()
        for path in sorted(paths):
            if path.suffix not in (".json", ".yaml", ".yml"):
                continue
            decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
            try:
                spec = decode(path.read_bytes(), type=dict)
                common = spec.get("containerEdits") or {}
                for device in spec["devices"]:
                    name = f"{spec['kind']}={device['name']}"
                    own = device.get("containerEdits") or {}
                    level[name] = None if name in level else (common, own)
            except (msgspec.DecodeError, KeyError, TypeError):
                continue  # a runtime goes on without a broken file; its devices are unresolvable
        known |= level
    return known


def _combined(edits: Iterable[Obj]) -> Edits:
    envs: dict[str, str] = {}
    devices: dict[str, tuple[str, str, str]] = {}
    mounts: dict[str, tuple[str, str, bool]] = {}
    for part in edits:
        for text in part.get("env") or ():
            key, _, value = str(text).partition("=")
            envs[key] = value
        for node in part.get("deviceNodes") or ():
            path = str(node["path"])
            devices[path] = (path, node.get("hostPath") or path, node.get("permissions") or "rwm")
        for mount in part.get("mounts") or ():
            path = str(mount["containerPath"])
            mounts[path] = (path, str(mount["hostPath"]), "ro" in (mount.get("options") or ()))
    return Edits(envs=envs, devices=tuple(devices.values()), mounts=tuple(mounts.values()))
