# SPDX-License-Identifier: Apache-2.0
"""Bounds the size of a pod that admission processes, before any other work on it.

Time and memory of one admission grow with the numbers of containers, mounts, volumes and variables.
The bounds are far above real pods. Each list may have ``MOST_ENTRIES`` of the user's plus the
entries that admission adds per container, so that a pod within the bounds stays within them. The
API server evaluates them as CEL, with the additions of admission to the largest pod:
``configuration.size_bounds``.
"""

from typing import Final, NamedTuple

from hami_common.errors import RequestInvalid
from hami_common.pods.podview import ContainerView, PodView

MOST_CONTAINERS: Final = 200
"""Init, application and ephemeral containers together."""
MOST_ENTRIES: Final = 1000
"""Volumes of a pod; volume mounts and environment variables of all its containers together."""
ADDED_VOLUMES: Final = 3
"""Volumes and mounts that admission adds for a container: two of ours, the service account's."""
ADDED_VARIABLES: Final = 12
"""Maximum variables that the webhook sets in a container."""


class Bound(NamedTuple):
    """Bound of one list."""

    field: str
    """List in a container, or ``volumes`` of the pod."""
    words: str
    added: int
    """Entries that admission adds for a container."""

    def most(self, containers: int) -> int:
        """Return the maximum entries in a pod of so many containers."""
        return MOST_ENTRIES + self.added * containers


VOLUMES: Final = Bound("volumes", "volumes", ADDED_VOLUMES)
BY_CONTAINER: Final = (
    Bound("volumeMounts", "volume mounts", ADDED_VOLUMES),
    Bound("env", "environment variables", ADDED_VARIABLES),
)
"""Lists that are counted over all containers."""
RESOURCES: Final = Bound("resources", "device resources", 2)
"""Names of ours in limits and requests, each once per container.

Each named vendor reads the container, which is the largest factor in the time of an admission.
"""


def all_containers(view: PodView) -> list[ContainerView]:
    """Return the containers of every kind."""
    return [
        *(view.spec.init_containers or []),
        *view.spec.containers,
        *(view.spec.ephemeral_containers or []),
    ]


def excess(view: PodView, resource_names: frozenset[str]) -> RequestInvalid | None:
    """Return the first bound that the pod exceeds, as the error to deny it with.

    ``resource_names``: of all vendors.
    """
    containers = all_containers(view)
    count = len(containers)
    if count > MOST_CONTAINERS:
        return RequestInvalid(
            field="spec.containers",
            problem=f"{count} containers, init and ephemeral ones included",
            fix=f"write at most {MOST_CONTAINERS} in a pod that asks for devices",
        )
    found = {
        VOLUMES: len(view.spec.volumes or []),
        BY_CONTAINER[0]: sum(len(one.volume_mounts or []) for one in containers),
        BY_CONTAINER[1]: sum(len(one.env or []) for one in containers),
        RESOURCES: sum(len(_named(one) & resource_names) for one in containers),
    }
    for bound, entries in found.items():
        if entries > bound.most(count):
            where = "spec" if bound is VOLUMES else "spec.containers[*]"
            return RequestInvalid(
                field=f"{where}.{bound.field}",
                problem=f"{entries} {bound.words}",
                fix=f"write at most {MOST_ENTRIES} in a pod that asks for devices",
            )
    return None


def _named(container: ContainerView) -> set[str]:
    resources = container.resources
    if resources is None:
        return set()
    return (resources.limits or {}).keys() | (resources.requests or {}).keys()
