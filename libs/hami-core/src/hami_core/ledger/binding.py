# SPDX-License-Identifier: Apache-2.0
"""Documents of a commit, and the outcome of a bind attempt as the pod's state shows it.

The commit is one Kubernetes write: a Binding whose annotations the API server merges into the pod
in the transaction that sets ``spec.nodeName`` (design D4; Kubernetes API v1 ``Binding``). ``uid``
and ``resourceVersion`` in its metadata are preconditions, so a Binding that was prepared before the
pod was last written can never take effect. Builds and judges; sends nothing.
"""

from typing import Literal

import msgspec

from hami_common.events.allocation import AllocationRecord
from hami_common.model.placement import Placement
from hami_common.pods import annotations as keys
from hami_common.pods import limits
from hami_common.pods.signing import SignedPlacement, Signer
from hami_core.ledger.podfacts import PodFacts, pod_path

Fate = Literal[
    "free", "ours", "same-node", "unreadable", "elsewhere", "deleting", "finished", "gone"
]
"""``free``: a Binding could still succeed.

``ours``: this very allocation is committed. ``same-node``: assigned to the node in question with
another valid allocation, or without an allocation where the pod needs none. ``unreadable``:
assigned to it with an allocation whose signature our keys do not verify, perhaps this one. All
others: this allocation can never be committed.
"""

_encoder = msgspec.json.Encoder()


def fate_of(pod: PodFacts | None, *, uid: str, node: str, allocation_id: str = "") -> Fate:
    """Return the outcome of the attempt to bind pod ``uid`` to ``node`` as ``allocation_id``.

    ``pod`` is the API server's answer for the pod's name, ``None`` when there is no such pod.
    """
    if pod is None or pod.uid != uid:
        return "gone"
    if pod.is_finished:
        return "finished"
    if not pod.node:
        return "deleting" if pod.is_deleting else "free"
    if pod.node != node:
        return "elsewhere"
    if pod.signed is None:
        if pod.mistrust:
            return "unreadable"
        return "elsewhere" if allocation_id else "same-node"
    return "ours" if pod.signed.allocation_id == allocation_id else "same-node"


def binding_path(namespace: str, name: str) -> str:
    """Return the path to which a Binding is posted."""
    return f"{pod_path(namespace, name)}/binding"


def binding_document(
    *,
    pod: PodFacts,
    node: str,
    annotations: dict[str, str] | None = None,
) -> bytes:
    """Return a Binding that takes effect only on exactly this version of the pod."""
    metadata: dict[str, object] = {
        "name": pod.name,
        "namespace": pod.namespace,
        "uid": pod.uid,
        "resourceVersion": pod.resource_version,
    }
    if annotations:
        metadata["annotations"] = annotations
    return _encoder.encode(
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
    )


def signed_placement(record: AllocationRecord, *, ledger_seq: int) -> SignedPlacement:
    """Return the fields of an allocation that are signed."""
    return SignedPlacement(
        pod_uid=record.pod_uid,
        namespace=record.namespace,
        pod=record.pod,
        allocation_id=record.allocation_id,
        ledger_seq=ledger_seq,
        placement=Placement(node=record.node, containers=record.containers),
        origin=record.origin,
        claim=record.claim,
    )


def allocation_annotations(
    record: AllocationRecord, *, ledger_seq: int, signer: Signer, core_policy: str = ""
) -> dict[str, str]:
    """Return the annotations with the signed allocation and each container's limits file.

    A container whose share another limiter enforces gets no limits file.
    """
    annotations = {keys.ALLOCATION: signer.sign(signed_placement(record, ledger_seq=ledger_seq))}
    if record.origin:
        return annotations
    for container in record.containers:
        annotations[keys.limits(container.name)] = limits.encode(
            limits.limits_of(container, allocation_id=record.allocation_id, core_policy=core_policy)
        )
    return annotations


def fence_document(*, uid: str, allocation_id: str, ledger_seq: int) -> bytes:
    """Return a merge patch that changes the pod's resourceVersion and has no other effect.

    The value includes the ledger sequence, so that it changes when the same allocation is fenced
    under a newer record: a patch that changes nothing would leave the resourceVersion as it is.
    """
    return _encoder.encode(
        {
            "metadata": {
                "uid": uid,
                "annotations": {keys.FENCE: f"{allocation_id}/{ledger_seq}"},
            }
        }
    )


def label_document(*, uid: str) -> bytes:
    """Return a merge patch that restores our label on a pod, which returns it to our watch."""
    return _encoder.encode({"metadata": {"uid": uid, "labels": {keys.MANAGED_LABEL: "true"}}})


def touch_document(*, stamp: str) -> bytes:
    """Return a merge patch of a node that wakes kube-scheduler's queue (design D16)."""
    return _encoder.encode({"metadata": {"annotations": {keys.CAPACITY_RETURNED: stamp}}})
