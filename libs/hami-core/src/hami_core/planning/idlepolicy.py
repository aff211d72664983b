# SPDX-License-Identifier: Apache-2.0
"""Chooses the policy for an idle allocation, and the memory to which it shrinks.

Memory in MiB of each device of a container, times in Unix seconds.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from hami_common.events.allocation import AllocationRecord
from hami_common.events.idle import IdlePolicy
from hami_common.model.placement import ContainerShares


class IdleRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy for the idle allocations that it selects; an empty selection is all of them."""

    policy: IdlePolicy = "report"
    """``report``: an Event on the pod. ``shrink``: lower the memory limits. ``recall``: move the
    device memory to the host. ``evict``: evict the pod.
    """
    namespaces: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    """Queues, also those that the namespace of a pod decides."""
    classes: tuple[str, ...] = ()
    """Classes of the allocation's SKU."""
    after_s: float = 0.0
    """Idle time after which the policy applies; at least ``idle_after_s`` of the registry."""
    factor: float = 1.2
    """``shrink``: the new limit, as a multiple of the peak of the container's use."""

    def selects(self, record: AllocationRecord, queue: str) -> bool:
        """Return whether the rule is about an allocation, whose queue is ``queue``."""
        return (
            (not self.namespaces or record.namespace in self.namespaces)
            and (not self.queues or queue in self.queues)
            and (not self.classes or record.service_class in self.classes)
        )


REPORT = IdleRule()
"""Rule for allocations that no other rule selects."""


def rule_for(rules: Sequence[IdleRule], record: AllocationRecord, queue: str) -> IdleRule:
    """Return the first rule that selects the allocation."""
    return next((rule for rule in rules if rule.selects(record, queue)), REPORT)


def shrunk_mib(
    container: ContainerShares,
    peak_mib: Mapping[tuple[str, str], int],
    *,
    factor: float,
    least_mib: int,
) -> int | None:
    """Return the lower memory limit of a container; ``None``: it keeps what it has.

    ``peak_mib``: peak of its use by container and UUID. The limit is the same on each device, and
    grows on none.
    """
    now_mib = min((share.memory_mib for share in container.shares), default=0)
    peak = max((peak_mib[container.name, one.uuid] for one in container.shares), default=0)
    wanted_mib = max(least_mib, math.ceil(peak * factor))
    return wanted_mib if wanted_mib < now_mib else None
