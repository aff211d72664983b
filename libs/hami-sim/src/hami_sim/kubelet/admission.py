# SPDX-License-Identifier: Apache-2.0
"""Decides whether a node takes a pod: what kubelet checks again after the scheduler.

Order as in kubelet 1.34: devices are allocated *before* these checks, so a pod that is refused here
for lack of CPU has had its Allocate calls. CPU in cores, memory in bytes; messages give CPU in
thousandths, as kubelet does. Extended resources that the node does not list at all are left out of
the comparison. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

from msgspec import Struct

from hami_sim.kubelet.objects import Amounts, Obj, is_extended

UNEXPECTED = "UnexpectedAdmissionError"


class Refusal(Struct, frozen=True, kw_only=True):
    """Reason and message of the Failed status of a pod that kubelet rejects."""

    reason: str
    message: str


def allocate_failed(error: str) -> Refusal:
    """Word the refusal for an error from the device manager."""
    return Refusal(
        reason=UNEXPECTED, message=f"Allocate failed due to {error}, which is unexpected"
    )


def check_fit(
    pod: Obj,
    requests: Amounts,
    *,
    node: Obj,
    allocatable: Mapping[str, Decimal],
    others: Iterable[Amounts],
) -> Refusal | None:
    """Compare the pod's requests with what the node has left beside the other active pods."""
    used: Amounts = {}
    count = 0
    for amounts in others:
        count += 1
        for name, amount in amounts.items():
            used[name] = used.get(name, Decimal(0)) + amount
    allowed = int(allocatable.get("pods", Decimal(0)))
    if count + 1 > allowed:
        return _insufficient("pods", 1, count, allowed)
    for name, amount in sorted(requests.items(), key=lambda item: _rank(item[0])):
        if amount == 0 or (is_extended(name) and name not in allocatable):
            continue
        has = allocatable.get(name, Decimal(0))
        taken = used.get(name, Decimal(0))
        if amount > has - taken:
            scale = 1000 if name == "cpu" else 1
            return _insufficient(name, int(amount * scale), int(taken * scale), int(has * scale))
    return _check_node(pod, node)


def _rank(resource: str) -> tuple[int, str]:
    order = ("cpu", "memory", "ephemeral-storage")
    return (order.index(resource) if resource in order else len(order), resource)


def _insufficient(resource: str, requested: int, used: int, capacity: int) -> Refusal:
    return Refusal(
        reason=f"OutOf{resource}",
        message=f"Node didn't have enough resource: {resource}, "
        f"requested: {requested}, used: {used}, capacity: {capacity}",
    )


def _check_node(pod: Obj, node: Obj) -> Refusal | None:
    labels = node["metadata"].get("labels") or {}
    selector = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return Refusal(
            reason="NodeAffinity",
            message="Predicate NodeAffinity failed: "
            "node(s) didn't match Pod's node affinity/selector",
        )
    tolerations = pod["spec"].get("tolerations") or []
    for taint in node["spec"].get("taints") or []:
        if taint.get("effect") == "NoExecute" and not any(
            _tolerates(t, taint) for t in tolerations
        ):
            return Refusal(
                reason="TaintToleration",
                message="Predicate TaintToleration failed: "
                "node(s) had taints that the pod didn't tolerate",
            )
    return None


def _tolerates(toleration: Obj, taint: Obj) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")
