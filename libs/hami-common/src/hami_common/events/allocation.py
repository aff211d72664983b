# SPDX-License-Identifier: Apache-2.0
"""Allocation messages: the ledger's records and the states that follow them.

State list (design D5): ``reserved → bound → prepared → running → released``; ``failed`` from any
but released; ``released`` from any. Who writes what: the scheduler alone writes
``AllocationRecord`` (bucket ``hami_alloc``) and the state ``bound``; the agent of the node writes
``prepared``, ``running`` and ``failed`` (bucket ``hami_state``). The state of an allocation is the
join of both, see ``joined_state``.
"""

from typing import Literal

from msgspec import Struct

from hami_common.model.placement import ContainerShares

AllocationOp = Literal["reserve", "resize", "release"]
ReportedState = Literal["bound", "prepared", "running", "failed"]
AllocationState = Literal["reserved", "bound", "prepared", "running", "failed", "released"]


class Account(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What quotas look at besides the namespace, as the pod said when it was placed."""

    queue: str = ""
    """Queue that the pod names by label; empty: its namespace decides."""
    priority_class: str = ""
    is_terminating: bool = False
    """The pod has a deadline (``activeDeadlineSeconds``)."""
    is_best_effort: bool = False
    """The pod's quality-of-service class is BestEffort."""
    resources: tuple[tuple[str, str, str], ...] = ()
    """(container, vendor, count resource), for vendors that have several count resources."""


class AllocationRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the ledger.

    Value of bucket ``hami_alloc``, key ``<node>.<pod-uid>``; the scheduler is the only writer.

    A ``release`` leaves a record without containers: the tombstone keeps the node's fence from
    moving back.
    """

    op: AllocationOp
    allocation_id: str
    """Made once per reservation; tells a lost acknowledgement from a lost race."""
    node: str
    pod_uid: str
    namespace: str
    pod: str
    containers: tuple[ContainerShares, ...] = ()
    time_s: float = 0.0
    lease_s: float = 0.0
    """How long a reservation may stay unbound before it is examined and released."""
    writer: str = ""
    """Replica that wrote the record."""
    reason: str = ""
    """Why a record was released or resized."""
    held_for: str = ""
    """What the share is held for before a node is asked to bind its pod: ``preemption`` or
    ``gang <namespace>/<name>``; empty for a reservation that a bind made."""
    awaits: tuple[str, ...] = ()
    """Pods on the node, by uid, whose shares these are until they have left."""
    account: Account | None = None
    """What quotas count it under, where that is more than the namespace."""
    origin: str = ""
    """Who placed the pod: ``hami`` for one that was taken over from HAMi, empty for us."""


class CarriedShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hardware partition that carries one share, as the agent read it back."""

    container: str
    number: int
    """Place among the container's shares, over all vendors."""
    names: dict[str, str]
    """What the vendor's tools call it; of a MIG instance ``mig_uuid``, ``gpu_instance`` and
    ``compute_instance``."""


class StateRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an allocation has come.

    Value of bucket ``hami_state``, key ``<node>.<pod-uid>``, written with compare-and-set on the
    key.
    """

    state: ReportedState
    allocation_id: str
    node: str
    pod_uid: str
    namespace: str
    pod: str
    ledger_seq: int
    """Stream sequence of the ledger record that this state belongs to."""
    time_s: float = 0.0
    writer: str = ""
    boot_id: str = ""
    seq: int = 0
    code: str = ""
    """Stable code of a failure, for example ``device-mismatch``."""
    reason: str = ""
    containers: tuple[str, ...] = ()
    """Containers that have reached this state."""
    carried: tuple[CarriedShare, ...] = ()
    """Shares that MIG instances carry, as they were when this state was reached."""
    enforcement: str = ""
    """Who holds the containers to their memory share: ``libvgpu``, ``partition``, ``hami`` (its own
    limiter, in pods that it placed) or ``none``."""


def joined_state(allocation: AllocationRecord, state: StateRecord | None) -> AllocationState:
    """State of an allocation from its ledger record and its latest state record.

    A state of another reservation is ignored.
    """
    if allocation.op == "release":
        return "released"
    if state is None or state.allocation_id != allocation.allocation_id:
        return "reserved"
    return state.state
