# SPDX-License-Identifier: Apache-2.0
"""Pods and records in the form the scheduler's core sees them."""

from typing import Any

from hami_common.events.allocation import AllocationRecord, ReportedState, StateRecord
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods.signing import SignedPlacement
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts

CONTAINERS = (
    ContainerShares(
        name="main",
        kind="app",
        shares=(Share(vendor="nvidia", uuid="GPU-0", memory_mib=1000, core_pct=10),),
    ),
)


def pod_facts(**changes: Any) -> PodFacts:
    return PodFacts(
        **{"uid": "u1", "namespace": "ns", "name": "p", "resource_version": "1", **changes}
    )


def record(allocation_id: str, *, node: str = "n1", uid: str = "u1") -> AllocationRecord:
    return AllocationRecord(
        op="reserve",
        allocation_id=allocation_id,
        node=node,
        pod_uid=uid,
        namespace="ns",
        pod="p",
        containers=CONTAINERS,
    )


def signed(
    allocation_id: str, *, node: str = "n1", uid: str = "u1", ledger_seq: int = 1
) -> SignedPlacement:
    return SignedPlacement(
        pod_uid=uid,
        namespace="ns",
        pod="p",
        allocation_id=allocation_id,
        ledger_seq=ledger_seq,
        placement=Placement(node=node, containers=CONTAINERS),
    )


def holding(
    allocation_id: str,
    *,
    state: ReportedState | None = None,
    state_of: str = "",
    node: str = "n1",
    uid: str = "u1",
    revision: int = 1,
) -> Holding:
    return Holding(
        record=record(allocation_id, node=node, uid=uid),
        revision=revision,
        state=None
        if state is None
        else StateRecord(
            state=state,
            allocation_id=state_of or allocation_id,
            node=node,
            pod_uid=uid,
            namespace="ns",
            pod="p",
            ledger_seq=revision,
        ),
    )
