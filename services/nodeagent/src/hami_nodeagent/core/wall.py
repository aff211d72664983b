# SPDX-License-Identifier: Apache-2.0
"""Decides the memory limit that the driver itself enforces per container and device (ADR 27).

The limit is the outer wall around the in-container library: the share, or its memory limit above
the request, and the margin that breach detection allows, for what the driver takes by itself. It
counts contexts, code and heaps, and it also holds processes that the library does not reach. It
applies to shares of devices with ``Device.memory_cap``, except whole devices and pods that HAMi
placed. Memory in MiB.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from hami_common.model.device import Device
from hami_nodeagent.core.breach import BreachRules
from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.holders import Holder, is_of_hami
from hami_nodeagent.core.podbook import PodBook


class Wall(Struct, frozen=True, kw_only=True):
    """The limit of one running container on one device."""

    holder: Holder
    container_id: str
    """Without the runtime's scheme."""
    limit_mib: int | None
    """``None``: none, because share and margin are as large as the device."""


def walls_of(
    holders: Collection[Holder],
    pods: PodBook,
    entries_by_uid: Mapping[str, Entry],
    devices_by_uuid: Mapping[str, Device],
    rules: BreachRules,
) -> tuple[Wall, ...]:
    """Return the limits of all containers that the pods' statuses name."""
    found: list[Wall] = []
    for holder in holders:
        device, pod = devices_by_uuid.get(holder.uuid), pods.find(holder.pod_uid)
        if device is None or not device.memory_cap or pod is None or holder.is_whole:
            continue
        if is_of_hami(entries_by_uid[holder.owner[0]].record):
            continue
        limit_mib = holder.most_mib + rules.margin_mib(holder.most_mib)
        found.extend(
            Wall(
                holder=holder,
                container_id=name.partition("://")[2],
                limit_mib=limit_mib if limit_mib < device.memory_mib else None,
            )
            for name, container in pod.container_by_id.items()
            if container == holder.container
        )
    return tuple(found)
