# SPDX-License-Identifier: Apache-2.0
"""Judges the mounts of a container with a share: our own ones, and those that would hide ours.

The node mounts the limits file, the limiter, its preload file and the page of priorities into the
container. Kubelet passes the pod's own mounts after those of device plugins, and container runtimes
order mounts by the number of path components, keeping kubelet's order among equals: a mount of the
pod at one of these paths lies on top. A volume of the pod on a *parent* lies below, but another
container that mounts the same volume can remove our mount point in it, which detaches our mount
(Linux 3.18 and later). So a path at, above or below a reserved one is refused, unless the mount is
our own.

Admission (as words and as CEL) and the node agent use the same rules. Symbolic links in images are
not known here.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from msgspec import Struct

from hami_common.errors import RequestInvalid
from hami_common.pods import annotations, limits
from hami_common.pods.podview import ContainerView, VolumeMountView, VolumeView

LIBRARY_DIRECTORY = "/usr/local/vgpu"
PRELOAD_FILE = "/etc/ld.so.preload"
PRIORITY_DIRECTORY = "/run/hami-priority"
MPS_DIRECTORY = "/run/hami-mps"

RESERVED: Final[Mapping[str, str]] = {
    limits.DIRECTORY: "the limits of the container's share",
    limits.REGION_DIRECTORY: "the usage region of the container's share",
    LIBRARY_DIRECTORY: "the limiter library",
    PRELOAD_FILE: "the file that loads the limiter library",
    PRIORITY_DIRECTORY: "the priorities of the node's devices",
    MPS_DIRECTORY: "the Multi-Process Service of the container's device",
    "/etc/vdev": "the share as Hygon's driver reads it",
    "/hami-vnpu-shmem": "the memory through which Ascend's soft shares are counted",
    "/hami-shared-region": "the accounts of Ascend's soft shares on each chip",
    "/hami-vnpu-core": "the limiter library of Ascend's soft shares",
}
"""Reserved path → its content in the container.

The paths of the library, its preload file and the priorities are in the library too
(native/libvgpu), the vendors' in ``hami_common.vendors``.
"""
DEVICE_LIST: Final = "nvidia-container-devices"
"""Directory in ``/var/run``: NVIDIA's runtime gives a container the devices that are mounted there
by name."""
_ALIASES: Final = {"/var/run": "/run"}
"""Path → where nearly every image leads it."""
MAGIC_LINKS: Final = "^(/proc/(self|thread-self|[0-9]+)/|/dev/fd/)"
"""Links of the kernel that lead a path to any other, such as ``/proc/self/root``: a regular
expression (RE2 and Python) on a path in normal form with a slash behind it."""
_MAGIC: Final = re.compile(MAGIC_LINKS)


def spellings(path: str) -> list[str]:
    """Return the ways to write ``path`` in normal form: itself, and through ``/var/run``."""
    return [path] + [
        alias + path[len(target) :]
        for alias, target in _ALIASES.items()
        if path == target or path.startswith(f"{target}/")
    ]


PARENTS: Final = tuple(
    sorted(
        {
            spelling
            for own in RESERVED
            for parent in PurePosixPath(own).parents
            for spelling in spellings(str(parent))
        }
    )
)
"""Directories above the reserved paths, in every spelling."""


class Fault(Struct, frozen=True, kw_only=True):
    """Reason for which the pod may not mount at a path, and what to write instead."""

    problem: str
    fix: str
    is_parent: bool = False
    """The path is above reserved ones: it matters only where ours are mounted, that is, in a
    container with a share.
    """

    def error(self, field: str) -> RequestInvalid:
        """Return the error about the mount at ``field``."""
        return RequestInvalid(field=field, problem=self.problem, fix=self.fix)


def normal_form(path: str) -> str:
    """Return ``path`` absolute, without empty parts, ``.``, ``..`` and a slash at the end."""
    # Two leading slashes have a meaning of their own in POSIX, not in Linux.
    return posixpath.normpath("/" + path.lstrip("/"))


def normalize(path: str) -> str:
    """Return ``path`` as the container sees it: in normal form, aliases followed.

    ``..`` is resolved by the text alone, which is wrong behind a symbolic link: ``fault_of``
    refuses such paths.
    """
    clean = normal_form(path)
    for alias, target in _ALIASES.items():
        if clean == alias or clean.startswith(f"{alias}/"):
            return target + clean[len(alias) :]
    return clean


def fault_of(path: str) -> Fault | None:
    """Return the reason for which the pod may not mount at ``path``; ``None`` when it may."""
    clean = normalize(path)
    if DEVICE_LIST in clean:
        return Fault(
            problem="NVIDIA's runtime would give the container the devices that are mounted there",
            fix="remove it and ask for a share in resources.limits",
        )
    for own, what in RESERVED.items():
        if clean == own or clean.startswith(f"{own}/"):
            return Fault(
                problem=f"would hide {what}",
                fix=f"mount it elsewhere; {', '.join(RESERVED)} are reserved",
            )
    if ".." in path.split("/"):
        return Fault(
            problem="'..' can lead to any directory, so the mount could hide the limits of a share",
            fix=f"write {normal_form(path)} in its place",
        )
    if _MAGIC.match(f"{clean}/"):
        return Fault(
            problem="this path can lead to any directory, so the mount could hide the limits of a "
            "share",
            fix="mount it elsewhere, outside /proc and /dev/fd",
        )
    if clean in PARENTS:
        own, what = next(
            one for one in RESERVED.items() if PurePosixPath(one[0]).is_relative_to(clean)
        )
        return Fault(
            problem=f"would let {what} ({own}) be removed through the volume",
            fix=f"mount a directory below {clean}",
            is_parent=True,
        )
    return None


def places_of(container: ContainerView) -> Iterator[tuple[str, str, VolumeMountView | None]]:
    """Yield field, path and mount of every volume mount, then of every block device (no mount)."""
    for mount in container.volume_mounts or []:
        path = mount.mount_path
        yield f"container {container.name}: volumeMounts[{path}]", path, mount
    for device in container.volume_devices or []:
        path = device.device_path
        yield f"container {container.name}: volumeDevices[{path}]", path, None


def limits_volume(container: ContainerView, volumes: Mapping[str, VolumeView]) -> str | None:
    """Return the volume that brings the container its own limits; ``None`` where none does.

    It counts only as admission writes it: a downwardAPI volume with the one item that projects the
    annotation of this container, mounted read-only as a whole at exactly ``/etc/hami``.
    """
    return _volume_at(limits.DIRECTORY, container, volumes)


def region_volume(container: ContainerView, volumes: Mapping[str, VolumeView]) -> str | None:
    """Return the emptyDir volume mounted as a whole at exactly ``/run/hami``; ``None``: none."""
    return _volume_at(limits.REGION_DIRECTORY, container, volumes)


def conflict_of(
    container: ContainerView, volumes: Mapping[str, VolumeView]
) -> RequestInvalid | None:
    """Return the error about the first mount or block device that would hide or detach ours.

    ``volumes``: the pod's, by name. ``None`` when there is no conflict.
    """
    for field, path, mount in places_of(container):
        if mount is not None and _is_ours(mount, container, volumes):
            continue
        if fault := fault_of(path):
            return fault.error(field)
    return None


def _volume_at(
    directory: str, container: ContainerView, volumes: Mapping[str, VolumeView]
) -> str | None:
    """The volume of our own mount at ``directory``."""
    return next(
        (
            mount.name
            for mount in container.volume_mounts or []
            if normalize(mount.mount_path) == directory and _is_ours(mount, container, volumes)
        ),
        None,
    )


def _is_ours(
    mount: VolumeMountView, container: ContainerView, volumes: Mapping[str, VolumeView]
) -> bool:
    """True when the mount is one that admission adds to this container."""
    volume = volumes.get(mount.name)
    if volume is None or mount.sub_path or mount.sub_path_expr:
        return False
    path = "/" + mount.mount_path.strip("/")
    if path == limits.REGION_DIRECTORY:
        return volume.empty_dir is not None
    if path != limits.DIRECTORY or volume.downward_api is None or not mount.read_only:
        return False
    items = volume.downward_api.items or []
    if len(items) != 1 or items[0].path != limits.FILE_NAME or items[0].field_ref is None:
        return False
    owners = {container.name, container.target_container_name or container.name}
    return items[0].field_ref.field_path in {
        f"metadata.annotations['{annotations.limits(name)}']" for name in owners
    }
