# SPDX-License-Identifier: Apache-2.0
"""Decides which volume mounts a pod with a device share may have.

``hami_common.pods.mounts`` judges paths, for the node agent too. Admission adds its own rules:

* The volumes that the webhook adds may be mounted only as the webhook does it, by their names.
* In a pod with a share, the containers without one may not mount over reserved paths either; they
  may mount over a directory above them, because nothing of ours is mounted below it.
* The API server evaluates the same rules as CEL (``policies``). CEL cannot normalize, so a path
  that is not written in normal form is denied.
"""

import hashlib
import re
from collections.abc import Collection
from typing import Any, Final

from hami_common.apipath import is_label
from hami_common.errors import RequestInvalid
from hami_common.pods import limits
from hami_common.pods.mounts import fault_of, normal_form, places_of
from hami_common.pods.podview import ContainerView, VolumeMountView

LIMITS_PREFIX: Final = "hami-limits-"
REGION_PREFIX: Final = "hami-region-"
PATH_BY_PREFIX: Final = {
    LIMITS_PREFIX: limits.DIRECTORY,
    REGION_PREFIX: limits.REGION_DIRECTORY,
}
"""Mount paths of the volumes with names of ours; other paths are denied."""
_OWN_PREFIXES: Final = tuple(PATH_BY_PREFIX)
VOLUME_NAME_LIMIT: Final = 63
_DIGEST_LENGTH: Final = 32
"""Hexadecimal digits; 128 bits, so that a pod's author cannot make two containers share a name."""
_NOT_IN_A_LABEL: Final = re.compile(r"[^a-z0-9]+")


def volume_name(prefix: str, container: str) -> str:
    """Return a DNS label that names our volume for a container and is different for each container.

    It is ``prefix`` and the container's name. If that is not a DNS label, the name is shortened,
    cleaned and followed by a digest. Such a part begins with ``-``, so no container has that name.
    """
    name = prefix + container
    if len(name) <= VOLUME_NAME_LIMIT and is_label(container):
        return name
    digest = hashlib.sha256(container.encode()).hexdigest()[:_DIGEST_LENGTH]
    left = VOLUME_NAME_LIMIT - len(f"{prefix}--{digest}")
    return f"{prefix}-{_NOT_IN_A_LABEL.sub('-', container.lower())[:left]}-{digest}"


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


def forbidden_mount(container: ContainerView, asking: Collection[str]) -> RequestInvalid | None:
    """Return the first mount that ``container`` may not have, as the error to deny it with.

    ``asking``: names of the pod's containers that have a share. The limits of an ephemeral
    container are those of its target.
    """
    owner = container.target_container_name or container.name
    if owner not in asking:
        owner = ""
    own = {one["name"]: one["mountPath"] for one in mounts_of(owner)} if owner else {}
    for field, path, mount in places_of(container):
        if mount is not None and mount.name.startswith(_OWN_PREFIXES):
            if own.get(mount.name) != path or mount.sub_path or mount.sub_path_expr:
                return _misused(field, mount)
            continue
        if (fault := fault_of(path)) and (owner or not fault.is_parent):
            return fault.error(field)
        if not _is_in_normal_form(path):
            return RequestInvalid(
                field=field,
                problem="is not in normal form",
                fix=f"write {normal_form(path)} in its place",
            )
    return None


def _is_in_normal_form(path: str) -> bool:
    """Return whether ``path`` is written in normal form; one slash may stand at the end."""
    plain = normal_form(path)
    return path in (plain, f"{plain.rstrip('/')}/")


def _misused(where: str, mount: VolumeMountView) -> RequestInvalid:
    return RequestInvalid(
        field=where,
        problem=f"volume {mount.name} is named like those that the webhook adds for a device share",
        fix="leave the mount out: the webhook adds its own; give a volume of yours another name",
    )
