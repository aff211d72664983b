# SPDX-License-Identifier: Apache-2.0
"""Decides which volume mounts a pod with a device share may have.

The limiter is what the node puts into the container: its library, the file that loads it, the
limits, the page of priorities. A mount over one of them, or over a directory that holds them, would
take the limiter away or replace its limits. The volumes that the webhook adds may be mounted only
as the webhook does it. Paths are compared after normalization, and ``/var/run`` is ``/run``, which
it links to in most images. A mount at ``/run`` is allowed: deeper paths are mounted later, and what
lies below it is the container's own already. The API server evaluates the same rules as CEL
(``policies``); it cannot normalize, so a path that is not written in normal form is denied.
"""

import hashlib
import posixpath
from collections.abc import Collection
from typing import Any, Final

from hami_common import limits
from hami_common.errors import RequestInvalid
from hami_common.podview import ContainerView, VolumeMountView

PRELOAD_FILE: Final = "/etc/ld.so.preload"
RESERVED_PATHS: Final = (
    limits.DIRECTORY,
    limits.REGION_DIRECTORY,
    "/run/hami-priority",
    "/usr/local/vgpu",
    PRELOAD_FILE,
)
"""Paths that belong to the webhook and the node agent, with all that lies below them."""
PARENT_PATHS: Final = ("/", "/etc", "/usr", "/usr/local", "/var/run")
"""Directories above them. A volume there could hold links in place of the reserved paths, which the
container could change while it runs; ``/var/run`` would be mounted over ``/run``."""
DEVICE_LIST: Final = "nvidia-container-devices"
"""Directory in ``/var/run``: NVIDIA's runtime gives a container the devices that are mounted there
by name."""
LIMITS_PREFIX: Final = "hami-limits-"
REGION_PREFIX: Final = "hami-region-"
PATH_BY_PREFIX: Final = {
    LIMITS_PREFIX: limits.DIRECTORY,
    REGION_PREFIX: limits.REGION_DIRECTORY,
}
"""Where volumes with names of ours are mounted, and nowhere else."""
_OWN_PREFIXES: Final = tuple(PATH_BY_PREFIX)
_RESERVED_PREFIXES: Final = tuple(f"{path}/" for path in RESERVED_PATHS)
_RUN_ALIAS: Final = "/var/run"
VOLUME_NAME_LIMIT: Final = 63
_DIGEST_LENGTH: Final = 10


def volume_name(prefix: str, container: str) -> str:
    """Return the name of our volume for a container, at most 63 characters (DNS label)."""
    name = prefix + container
    if len(name) <= VOLUME_NAME_LIMIT:
        return name
    digest = hashlib.sha256(container.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{name[: VOLUME_NAME_LIMIT - _DIGEST_LENGTH - 1].rstrip('-')}-{digest}"


def mounts_of(container: str) -> list[dict[str, Any]]:
    """Return our volume mounts in ``container``: the limits read-only, the region writable."""
    return [
        {
            "name": volume_name(LIMITS_PREFIX, container),
            "mountPath": limits.DIRECTORY,
            "readOnly": True,
        },
        {"name": volume_name(REGION_PREFIX, container), "mountPath": limits.REGION_DIRECTORY},
    ]


def normalized(path: str) -> str:
    """Return ``path`` absolute, without empty parts, ``.``, ``..`` and a slash at the end."""
    # Two leading slashes have a meaning of their own in POSIX, not in Linux.
    return posixpath.normpath("/" + path.lstrip("/"))


def forbidden_mount(container: ContainerView, asking: Collection[str]) -> RequestInvalid | None:
    """Return the first mount that ``container`` may not have, as the error to deny it with.

    ``asking``: names of the pod's containers that have a share. An ephemeral container is under the
    limits of its target.
    """
    owner = container.target_container_name or container.name
    if owner not in asking:
        owner = ""
    own = {one["name"]: one["mountPath"] for one in mounts_of(owner)} if owner else {}
    for mount in container.volume_mounts or []:
        where = f"container {container.name}: volumeMounts[{mount.mount_path}]"
        if mount.name.startswith(_OWN_PREFIXES):
            if own.get(mount.name) != mount.mount_path or mount.sub_path or mount.sub_path_expr:
                return _misused(where, mount)
            continue
        if error := _of_path(mount.mount_path, where, has_share=bool(owner)):
            return error
    for device in container.volume_devices or []:
        where = f"container {container.name}: volumeDevices[{device.device_path}]"
        if error := _of_path(device.device_path, where, has_share=bool(owner)):
            return error
    return None


def _misused(where: str, mount: VolumeMountView) -> RequestInvalid:
    return RequestInvalid(
        field=where,
        problem=f"volume {mount.name} is named like those that the webhook adds for a device share",
        fix="leave the mount out: the webhook adds its own; give a volume of yours another name",
    )


def _of_path(path: str, where: str, *, has_share: bool) -> RequestInvalid | None:
    plain = normalized(path)
    if DEVICE_LIST in plain:
        return RequestInvalid(
            field=where,
            problem="NVIDIA's runtime would give the container the devices that are mounted there",
            fix="remove it and ask for a share in resources.limits",
        )
    place = plain
    if plain.startswith(f"{_RUN_ALIAS}/"):
        place = plain.removeprefix("/var")
    if f"{place}/".startswith(_RESERVED_PREFIXES):
        return RequestInvalid(
            field=where,
            problem="would hide the limits of the container's device share",
            fix=f"mount it elsewhere; {', '.join(RESERVED_PATHS)} are reserved",
        )
    if has_share and plain in PARENT_PATHS:
        return RequestInvalid(
            field=where,
            problem="could replace the limits of the container's device share, which lie below it",
            fix=f"mount a directory below {plain}" + _instead(plain),
        )
    if path.rstrip("/") != plain.rstrip("/") or path.endswith("//"):
        return RequestInvalid(
            field=where, problem="is not in normal form", fix=f"write {plain} in its place"
        )
    return None


def _instead(path: str) -> str:
    return ", or /run itself" if path == _RUN_ALIAS else ""
