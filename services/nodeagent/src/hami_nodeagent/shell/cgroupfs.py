# SPDX-License-Identifier: Apache-2.0
"""Finds the cgroups of containers below the mount of the host's cgroup file system (version 2).

Kubelet's groups lie below one whose name contains ``kube``: ``kubepods`` (cgroupfs driver),
``kubepods.slice`` (systemd driver), or either of them in another such group. crun puts a
container's processes into the group ``container`` below the one that it creates for the container.
Calls block for reads of small directories.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from hami_nodeagent.core.cgroups import container_of, pod_of

_KUBELET = "kube"
_CRUN = "container"
_PROCESSES = "cgroup.procs"


def groups_of(root: Path, container_ids: Collection[str]) -> dict[str, Path]:
    """Return the group with the processes of each container that has one, by id."""
    return {found: group for found, group in _containers(root) if found in container_ids}


def own_group(root: Path, proc: Path) -> Path | None:
    """Return the group of this process; ``None`` if it is not below ``root``.

    ``proc``: the host's ``/proc``. In a cgroup namespace of its own, a process does not learn its
    path from there; the groups of containers are then searched for its PID.
    """
    pid = str(os.getpid())
    try:
        lines = (proc / "self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = [root / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    for group in (*named, *(group for _, group in _containers(root))):
        try:
            if pid in (group / _PROCESSES).read_text().split():
                return group
        except OSError:
            continue  # it has ended
    return None


def _containers(root: Path) -> Iterator[tuple[str, Path]]:
    for pod in _pods(root, is_kubelets=False):
        for group in _below(pod):
            if found := container_of(group.name):
                inner = group / _CRUN
                yield found, inner if inner.is_dir() else group


def _pods(group: Path, *, is_kubelets: bool) -> Iterator[Path]:
    for below in _below(group):
        if pod_of(below.name):
            yield below
        elif is_kubelets or _KUBELET in below.name:
            yield from _pods(below, is_kubelets=True)


def _below(group: Path) -> list[Path]:
    try:
        with os.scandir(group) as entries:
            return [Path(one.path) for one in entries if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # it has ended
