# SPDX-License-Identifier: Apache-2.0
"""Allocation messages: the ledger's records and the states that follow them.

States (design D5): ``reserved → bound → prepared → running → released``; ``failed`` from any but
released; ``released`` from any. The scheduler alone writes ``AllocationRecord`` (bucket
``hami_alloc``) and the state ``bound``; the agent of the node writes ``prepared``, ``running`` and
``failed`` (bucket ``hami_state``). The state of an allocation is the join of both, see
``joined_state``.
"""

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct, field

from hami_common.bounds import (
    ATTRIBUTES_MOST,
    CONTAINERS_MOST,
    LIST_MOST,
    SHARES_MOST,
    USAGE_LABELS_MOST,
    BootId,
    Count,
    Duration,
    Label,
    MapKey,
    Name,
    Reference,
    Sequence,
    Text,
    Uid,
    UnixS,
    Vendor,
    Word,
)
from hami_common.model.placement import ContainerShares

OwnerKind = Literal["workload", "provisioningrequest", "defrag"]
"""Kinds of objects for whose pods shares are held before these exist: Kueue's Workload, the
ProvisioningRequest of ``autoscaling.x-k8s.io``, and the controller of a pod that a defragmentation
moves (there also the waiting pod itself).
"""
_OF_OWNERS: Final = tuple(f"{kind} " for kind in get_args(OwnerKind))
"""Beginnings of ``held_for`` of such shares."""
CLAIM: Final = "claim"
"""Origin of the records of ResourceClaims."""
AllocationOp = Literal["reserve", "resize", "release"]
ReportedState = Literal["bound", "prepared", "running", "failed"]
AllocationState = Literal["reserved", "bound", "prepared", "running", "failed", "released"]


class Account(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Attributes of the pod that quotas select by, besides the namespace, as of its placement."""

    queue: Word = ""
    """Queue that the pod names by label; empty: its namespace decides."""
    priority_class: Word = ""
    is_terminating: bool = False
    """The pod has a deadline (``activeDeadlineSeconds``)."""
    is_best_effort: bool = False
    """The pod's quality-of-service class is BestEffort."""
    is_spot: bool = False
    """The pod is of class spot: it always borrows."""
    resources: Annotated[
        tuple[tuple[Label, Vendor, MapKey], ...], Meta(max_length=SHARES_MOST)
    ] = ()
    """(container, vendor, count resource), for vendors that have several count resources."""


class AllocationRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the ledger.

    Value of bucket ``hami_alloc``, key ``<node>.<pod-uid>``; the scheduler is the only writer.

    A ``release`` leaves a record without containers: the tombstone keeps the node's fence from
    moving back.
    """

    op: AllocationOp
    allocation_id: Uid
    """Created once per reservation; distinguishes a lost acknowledgement from a lost race."""
    node: Name
    pod_uid: Uid
    namespace: Label
    pod: Name
    containers: Annotated[tuple[ContainerShares, ...], Meta(max_length=CONTAINERS_MOST)] = ()
    time_s: UnixS = 0.0
    lease_s: Duration = 0.0
    """Time that a reservation may stay unbound before it is examined and released."""
    writer: Word = ""
    """Replica that wrote the record."""
    reason: Text = ""
    """Reason for which a record was released or resized."""
    held_for: Reference = ""
    """Purpose of a reservation made before the bind: ``preemption``, ``gang <namespace>/<name>``,
    ``volcano <namespace>/<pod>``, ``workload <namespace>/<name>``, ``provisioningrequest
    <namespace>/<name>``, whose ``pod`` is then that object (for the last two), or ``defrag
    <namespace>/<waiting pod>``, whose ``pod`` is the moved or the waiting pod; empty for a
    reservation that a bind made or took over.
    """
    awaits: Annotated[tuple[Uid, ...], Meta(max_length=LIST_MOST)] = ()
    """Pods on the node, by uid, that own these shares until they have terminated."""
    account: Account | None = None
    """Attributes under which quotas count it, where they are more than the namespace."""
    origin: Word = ""
    """Placer of the pod: ``hami`` for one that was taken over from HAMi, empty for us. ``claim``: a
    ResourceClaim whose devices kube-scheduler chose; then ``pod_uid`` and ``pod`` are the claim's,
    and ``containers`` are its requests.
    """
    claim: Name = ""
    """ResourceClaim through which the pod gets the shares; empty: through the device plugin. Its
    allocation has the same devices and amounts.
    """
    limits: Annotated[tuple[ContainerShares, ...], Meta(max_length=CONTAINERS_MOST)] = ()
    """Shares that the limits files of a ResourceClaim are to have while it shrinks; ``containers``
    are the larger ones, which stay booked until the files have these. Empty: those.
    """
    sku: Reference = ""
    """SKU that the pod was admitted with, ``<name>@<version>``; empty: it names no SKU."""
    service_class: Word = field(default="", name="class")
    """Class of the SKU, or that the pod names: ``guaranteed``, ``burstable`` or ``spot``; empty
    without either.
    """
    labels: Annotated[tuple[tuple[MapKey, Label], ...], Meta(max_length=USAGE_LABELS_MOST)] = ()
    """Labels of the pod that the scheduler's setting ``usage_labels`` names, as of its placement,
    for sums of usage; sorted by key.
    """


class CarriedShare(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The hardware partition that carries one share, as the agent read it back."""

    container: Label
    number: Count
    """Position among the container's shares, over all vendors."""
    names: Annotated[dict[MapKey, Word], Meta(max_length=ATTRIBUTES_MOST)]
    """Names in the vendor's tools; of a MIG instance ``mig_uuid``, ``gpu_instance`` and
    ``compute_instance``.
    """


class StateRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of an allocation in its life cycle.

    Value of bucket ``hami_state``, key ``<node>.<pod-uid>``, written with compare-and-set on the
    key.
    """

    state: ReportedState
    allocation_id: Uid
    node: Name
    pod_uid: Uid
    namespace: Label
    pod: Name
    ledger_seq: Sequence
    """Stream sequence of the ledger record that this state belongs to."""
    time_s: UnixS = 0.0
    writer: Word = ""
    boot_id: BootId = ""
    seq: Sequence = 0
    code: Word = ""
    """Stable code of a failure, for example ``device-mismatch``.

    ``unprepared`` with any state of a ResourceClaim: no container of the node uses it any more.
    """
    reason: Text = ""
    containers: Annotated[tuple[Label, ...], Meta(max_length=CONTAINERS_MOST)] = ()
    """Containers that have reached this state."""
    carried: Annotated[tuple[CarriedShare, ...], Meta(max_length=LIST_MOST)] = ()
    """Shares that MIG instances carry, as of when this state was reached."""
    enforcement: Word = ""
    """Mechanism that enforces the containers' memory limits: ``libvgpu``, ``partition``, ``hami``
    (its own limiter, in pods that it placed) or ``none``.
    """


def joined_state(allocation: AllocationRecord, state: StateRecord | None) -> AllocationState:
    """State of an allocation from its ledger record and its latest state record.

    A state of another reservation is ignored.
    """
    if allocation.op == "release":
        return "released"
    if state is None or state.allocation_id != allocation.allocation_id:
        return "reserved"
    return state.state


def is_of_claim(record: AllocationRecord) -> bool:
    """Return whether a ResourceClaim holds the shares; no pod has the record's ``pod_uid``."""
    return record.origin == CLAIM


def is_by_claim(record: AllocationRecord) -> bool:
    """Return whether kube-scheduler counts the shares as those of a ResourceClaim."""
    return bool(record.claim) or is_of_claim(record)


def purpose_of(kind: OwnerKind, namespace: str, name: str) -> str:
    """Return ``held_for`` of the shares that are held for the pods of an object."""
    return f"{kind} {namespace}/{name}"


def is_of_owner(record: AllocationRecord, kind: OwnerKind | None = None) -> bool:
    """Return whether the shares are held for an object (of ``kind``) whose pods may not exist yet.

    The record's ``pod_uid`` is then made by ``hold_uid``.
    """
    beginnings = _OF_OWNERS if kind is None else (f"{kind} ",)
    return record.op != "release" and record.held_for.startswith(beginnings)


def hold_uid(owner_uid: str, pod_set: int, number: int) -> str:
    """Return the uid under which the ledger holds the shares of one pod of an object."""
    return f"{owner_uid}-{pod_set}-{number}"


def owner_of(record: AllocationRecord) -> str:
    """Return the uid of the object for which the record holds shares; empty for others."""
    return record.pod_uid.rsplit("-", 2)[0] if is_of_owner(record) else ""
