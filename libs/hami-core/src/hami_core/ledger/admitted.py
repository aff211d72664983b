# SPDX-License-Identifier: Apache-2.0
"""Require the marks of admission on a pod that requests devices.

The webhook labels each such pod, which is how the scheduler watches it, and mounts the limits of
each container with a share, which is how they are enforced. A pod without them was created past the
webhook: it would use an untracked device without limits. The contents of the volume are checked on
the node, which mounts limits of its own where necessary.
"""

from hami_common.errors import RequestInvalid
from hami_common.model.request import PodRequest
from hami_common.pods import annotations, limits
from hami_common.pods.podview import PodView

CODE = "PodNotAdmitted"
"""Begins the text of the refusal; one of ``RefusalCode``."""
_FIX = (
    "create the pod again in a namespace without the label"
    f" {annotations.WEBHOOK_LABEL}={annotations.WEBHOOK_IGNORE}, with HAMi's webhook installed"
)


class NotAdmitted(RequestInvalid):
    """The pod was created past admission. The text begins with ``CODE``."""

    def __str__(self) -> str:
        return f"{CODE}: {super().__str__()}"


def require_admitted(pod: PodView, request: PodRequest) -> None:
    """Raise ``NotAdmitted`` unless the pod has the label and every share's limits are mounted."""
    if pod.labels().get(annotations.MANAGED_LABEL) != "true":
        raise NotAdmitted(
            field=f"metadata.labels[{annotations.MANAGED_LABEL}]",
            problem="is missing: HAMi's webhook did not prepare the pod, so its share would not be"
            " tracked",
            fix=_FIX,
        )
    volumes = {volume.name for volume in pod.spec.volumes or []}
    asking = {container.name for container in request.containers}
    for _, container in pod.containers_in_order():
        if container.name not in asking:
            continue
        mounted = any(
            mount.name in volumes and mount.mount_path.rstrip("/") == limits.DIRECTORY
            for mount in container.volume_mounts or []
        )
        if not mounted:
            raise NotAdmitted(
                field=f"container {container.name}: volumeMounts[{limits.DIRECTORY}]",
                problem="is missing: HAMi's webhook did not prepare the pod, so its share would not"
                " be limited",
                fix=_FIX,
            )
