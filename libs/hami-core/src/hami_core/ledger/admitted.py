# SPDX-License-Identifier: Apache-2.0
"""Require the marks of admission on a pod that requests devices.

The webhook labels each such pod, which is how the scheduler watches it, and mounts the limits of
each container with a share, which is how they are enforced. A pod without them was created past the
webhook: it would use an untracked device without limits. The contents of the volume are checked on
the node, which mounts limits of its own where necessary.
"""

from hami_common.dra.podclaims import POD_CLAIM, claim_of, is_claimed, requests_of, uses_of
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
    if is_claimed(pod):
        _require_claims(pod, request)
        return
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


def _require_claims(pod: PodView, request: PodRequest) -> None:
    """Raise ``NotAdmitted`` unless each container with a share names its requests of the claim."""
    if not claim_of(pod):
        raise NotAdmitted(
            field=f"spec.resourceClaims[{POD_CLAIM}]",
            problem="is missing: HAMi's webhook did not prepare the pod, so it would get no device",
            fix=_FIX,
        )
    requests = requests_of(request)
    for _, container in pod.containers_in_order():
        named = (container.resources.claims if container.resources else None) or ()
        lacking = [use for use in uses_of(requests, container.name) if use not in named]
        if lacking:
            raise NotAdmitted(
                field=f"container {container.name}: resources.claims",
                problem=f"lacks request {lacking[0].request} of claim {POD_CLAIM}: HAMi's webhook"
                " did not prepare the pod, so it would get no device",
                fix=_FIX,
            )
