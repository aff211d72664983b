# SPDX-License-Identifier: Apache-2.0
"""Judge the mounts of a container with a share: which are ours, which would hide or unhook ours.

The node mounts the limits file, the limiter, its preload file and the page of priorities into the
container. Kubelet passes the pod's own mounts after those of device plugins, and container runtimes
order mounts by the number of path components, keeping kubelet's order among equals: a mount of the
pod at one of these paths lies on top. A volume of the pod on a *parent* lies below, but whoever
else mounts that volume can remove our mount point in it, which detaches our mount (Linux 3.18 and
later). So a path at, above or below a reserved one is refused, unless the mount is our own.

Admission and the node agent use the same judgement. Symbolic links in images are not known here.
"""

import posixpath
import re
from collections.abc import Mapping

from hami_common import annotations, limits
from hami_common.errors import RequestInvalid
from hami_common.podview import ContainerView, VolumeMountView, VolumeView

LIBRARY_DIRECTORY = "/usr/local/vgpu"
PRELOAD_FILE = "/etc/ld.so.preload"
PRIORITY_DIRECTORY = "/run/hami-priority"

RESERVED: Mapping[str, str] = {
    limits.DIRECTORY: "the limits of the container's share",
    limits.REGION_DIRECTORY: "the usage region of the container's share",
    LIBRARY_DIRECTORY: "the limiter library",
    PRELOAD_FILE: "the file that loads the limiter library",
    PRIORITY_DIRECTORY: "the priorities of the node's devices",
    "/run/nvidia-container-devices": "the devices that NVIDIA's toolkit gives by volume mounts",
    "/etc/vdev": "the share as Hygon's driver reads it",
    "/hami-vnpu-shmem": "the memory through which Ascend's soft shares are counted",
}
"""Reserved path → what the container finds there. The paths of the library, its preload file and
the priorities are in the library too (native/libvgpu), the vendors' in ``hami_common.vendors``."""
_ALIASES = {"/var/run": "/run"}
"""Path → where nearly every image leads it."""
_MAGIC = re.compile(r"/proc/(self|thread-self|[0-9]+)/|/dev/fd/")
"""Links of the kernel that lead a path to any other, such as ``/proc/self/root``."""


def normalize(path: str) -> str:
    """Return ``path`` as the container sees it: absolute, no ``//`` or ``.``, aliases followed.

    ``..`` is resolved by the text alone, which is wrong behind a symbolic link: ``conflict_of``
    refuses such paths.
    """
    clean = posixpath.normpath("/" + path.lstrip("/"))
    for alias, target in _ALIASES.items():
        if clean == alias or clean.startswith(f"{alias}/"):
            return target + clean[len(alias) :]
    return clean


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
    """Return the first mount or block device that would hide or unhook ours, as the error to give.

    ``volumes``: the pod's, by name. ``None`` when nothing is in the way.
    """
    places = [
        *((mount.mount_path, mount) for mount in container.volume_mounts or []),
        *((device.device_path, None) for device in container.volume_devices or []),
    ]
    for path, mount in places:
        if mount is not None and _is_ours(mount, container, volumes):
            continue
        problem = _problem_of(path)
        if problem:
            kind = "volumeDevices" if mount is None else "volumeMounts"
            return RequestInvalid(
                field=f"container {container.name}: {kind}[{path}]",
                problem=problem,
                fix=f"mount it elsewhere; {', '.join(RESERVED)} and the directories above "
                "them are reserved in containers with a device share",
            )
    return None


def _problem_of(path: str) -> str:
    """Why nothing of the pod may be mounted at ``path``; empty when it may."""
    if ".." in path.split("/"):
        return "'..' can lead to any directory, so the mount could hide the limits of the share"
    clean = normalize(path)
    if _MAGIC.match(clean):
        return "this path can lead to any directory, so the mount could hide the limits"
    below = clean if clean.endswith("/") else f"{clean}/"
    for own, what in RESERVED.items():
        if clean == own or clean.startswith(f"{own}/"):
            return f"would hide {what}"
        if own.startswith(below):
            return f"would let {what} ({own}) be removed through the volume"
    return ""


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
    """Whether the mount is one that admission adds to this container."""
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
