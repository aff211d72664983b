# SPDX-License-Identifier: Apache-2.0
"""Checks hardware partitions that kube-scheduler allocated to a ResourceClaim (ADR 0040).

Size and place are the allocation's, not ours to choose. They must pass what a pod's partition must:
the card is in use and in the right mode, offers the size at this place, and everything that the
partition takes is free beside the partitions of pods and other claims.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import (
    PARTITION_MODES,
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
    PodRequest,
)
from hami_core.placement.pick import pick
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable


def refusal_of(
    table: DeviceTable,
    node: str,
    claim: tuple[str, str, str],
    containers: tuple[ContainerShares, ...],
) -> NodeRefusal | None:
    """Return why the claim (uid, namespace, name) cannot have its partitions; ``None`` if it can.

    Its other shares are left to the caller.
    """
    parts = tuple(_parts(containers))
    for share in parts:
        chosen = pick(table, _request(claim, share), node)
        if isinstance(chosen, NodeRefusal):
            code, _, fact = chosen.text.partition(": ")
            return replace(chosen, text=f"{code}: device {share.uuid}: {fact}")
        if not _is_offered(table, node, share, chosen.containers[0].shares[0]):
            text = f"the card has no {share.profile} of this size at {share.start}"
            return NodeRefusal(
                code="CardPartitionMismatch",
                text=f"CardPartitionMismatch: device {share.uuid}: {text}",
            )
    alone = ContainerShares(name="parts", kind="app", shares=parts)
    for uuid in table.shortfall(node, (alone,) if parts else ()):
        places = ", ".join(share.part for share in parts if share.uuid == uuid)
        return NodeRefusal(
            code="CardPartitionInfeasible",
            text=f"CardPartitionInfeasible: device {uuid}: {places} is not free",
        )
    return None


def _parts(containers: tuple[ContainerShares, ...]) -> Iterator[Share]:
    return (share for one in containers for share in one.shares if share.profile)


def without_parts(containers: tuple[ContainerShares, ...]) -> tuple[ContainerShares, ...]:
    """Return the shares that are no partitions."""
    return tuple(
        replace(one, shares=tuple(share for share in one.shares if not share.profile))
        for one in containers
    )


def _request(claim: tuple[str, str, str], share: Share) -> PodRequest:
    """Return the request of a pod for such a partition of this card."""
    uid, namespace, name = claim
    asked = DeviceRequest(
        vendor=share.vendor,
        count=1,
        profile=share.profile,
        kind=share.kind,
        modes=tuple(sorted(PARTITION_MODES)),
    )
    return PodRequest(
        uid=uid,
        namespace=namespace,
        name=name,
        containers=(ContainerRequest(name="part", kind="app", requests=(asked,)),),
        selectors={share.vendor: DeviceSelector(allow_uuids=(share.uuid,))},
    )


def _is_offered(table: DeviceTable, node: str, share: Share, like: Share) -> bool:
    """Return whether the card has the size, with these amounts, at the share's place.

    ``like``: the same size at a free place.
    """
    place = table.place(node)
    if place is None:
        return False
    at = place.rows[share.uuid], place.column
    division = table.divisions[int(place.block.division[at])]
    profile = division.profiles[division.by_name[share.profile]]
    return share.start in profile.starts and replace(like, start=share.start) == share
