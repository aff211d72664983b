# SPDX-License-Identifier: Apache-2.0
"""Maps a process's cgroup to its pod and container.

The text is that of ``/proc/<pid>/cgroup`` on the host (cgroups(7)): one line per hierarchy for
version 1, one line ``0::<path>`` for version 2. Kubelet names the pod's group ``pod<uid>``
(cgroupfs driver) or ``kubepods-…-pod<uid with _>.slice`` (systemd driver); the runtime's group for
the container is its direct child. A reader in a separate cgroup namespace sees paths that begin
with ``..``. The first pod group on the path counts, because the tenant may have created groups
below it.
"""

import re
from typing import Literal

from msgspec import Struct

OwnersBy = Literal["cgroup", "namespace"]
"""Source of a process's container; see ``shell.owners``."""

_POD = re.compile(
    r"(?:.*-)?pod(?P<uid>[0-9a-fA-F]{8}(?:[-_][0-9a-fA-F]{4}){3}[-_][0-9a-fA-F]{12}|[0-9a-f]{32})"
    r"(?:\.slice)?"
)
_CONTAINER = re.compile(r"(?:[a-z0-9-]+-)?(?P<id>[0-9a-f]{32,64})(?:\.scope)?")


class CgroupOwner(Struct, frozen=True, kw_only=True):
    """A pod and one of its containers."""

    pod_uid: str
    container_id: str = ""
    """Without the runtime's scheme; empty when the group is the pod's own."""


def owner_of(text: str) -> CgroupOwner | None:
    """Return the owner of the process; ``None`` for processes of the host."""
    for line in text.splitlines():
        parts = line.split(":", 2)
        owner = _owner_on(parts[-1]) if len(parts) == 3 else None  # noqa: PLR2004 - id:names:path
        if owner is not None:
            return owner
    return None


def pod_of(group: str) -> str:
    """Return the UID of the pod whose group has this name; empty for other groups."""
    pod = _POD.fullmatch(group)
    return pod["uid"].replace("_", "-").lower() if pod is not None else ""


def container_of(group: str) -> str:
    """Return the id of the container whose group in a pod's has this name; empty for others."""
    container = _CONTAINER.fullmatch(group)
    return container["id"] if container is not None else ""


def _owner_on(path: str) -> CgroupOwner | None:
    groups = path.split("/")
    for number, group in enumerate(groups):
        pod_uid = pod_of(group)
        if not pod_uid:
            continue
        below = groups[number + 1] if number + 1 < len(groups) else ""
        return CgroupOwner(pod_uid=pod_uid, container_id=container_of(below))
    return None
