# SPDX-License-Identifier: Apache-2.0
"""Finds the pod and container of processes of this host, by their PIDs in the host's ``/proc``.

The driver reports PIDs of the host, so the agent needs the host's PID namespace (design D27).
Method ``cgroup`` reads the process's cgroup from the kernel. Method ``namespace`` serves runtimes
whose container id is the PID of the container's first process, such as the simulated kubelet: all
processes in that PID namespace belong to the container. Calls block briefly.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from msgspec import Struct

from hami_common.runtime.quarantine import sift
from hami_nodeagent.core.cgroups import OwnersBy, owner_of

_log = logging.getLogger(__name__)

ContainerName = tuple[str, str]
"""(pod uid, container)."""


class Owner(Struct, frozen=True, kw_only=True):
    """Owner of a process."""

    command: str
    """Process name, made printable."""
    pod_uid: str = ""
    """Empty for a process of the host."""
    container: str = ""
    """Empty when the status does not name the container (yet)."""


def find_owners(
    proc: Path,
    pids: Collection[int],
    container_by_id: Mapping[str, ContainerName],
    *,
    by: OwnersBy,
) -> dict[int, Owner]:
    """Owners of the processes that exist; ``container_by_id`` has ids as statuses write them."""
    known = _by_namespace(proc, container_by_id) if by == "namespace" else {}
    bare = {name.partition("://")[2]: container for name, container in container_by_id.items()}

    def owner(pid: int) -> Owner | None:
        directory = proc / str(pid)
        try:
            command = _printable((directory / "comm").read_text(errors="replace"))
            if by == "namespace":
                pod_uid, container = known.get(_namespace(directory), ("", ""))
            else:
                found = owner_of((directory / "cgroup").read_text(errors="replace"))
                pod_uid = found.pod_uid if found is not None else ""
                named = bare.get(found.container_id) if found is not None else None
                container = named[1] if named is not None and named[0] == pod_uid else ""
        except OSError:
            return None  # it has ended
        return Owner(command=command, pod_uid=pod_uid, container=container)

    handled, failed = sift(pids, owner)
    for pid, error in failed:
        _log.error("owner of a process not found", extra={"pid": pid}, exc_info=error)
    return {pid: found for pid, found in handled if found is not None}


def _by_namespace(
    proc: Path, container_by_id: Mapping[str, ContainerName]
) -> dict[str, ContainerName]:
    found: dict[str, ContainerName] = {}
    for name, container in container_by_id.items():
        pid = name.partition("://")[2].partition("/")[0]
        if pid.isascii() and pid.isdigit():
            try:
                found[_namespace(proc / pid)] = container
            except OSError:
                continue  # it has ended
    return found


def _namespace(directory: Path) -> str:
    return str((directory / "ns" / "pid").readlink())


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text.strip())
