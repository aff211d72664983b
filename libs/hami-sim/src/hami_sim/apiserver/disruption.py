# SPDX-License-Identifier: Apache-2.0
"""PodDisruptionBudgets: their status, and spending them on an eviction.

A budget's `expectedPods` is the number of pods it selects (there are no scalable owners here).
Percentages of pods round up, as in ``pkg/controller/disruption`` (Kubernetes 1.34).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from hami_sim.apiserver import errors
from hami_sim.apiserver.errors import Cause, Obj, clone
from hami_sim.apiserver.selectors import selector_from_object

if TYPE_CHECKING:
    from hami_sim.apiserver.store import Store

KEY: Final = "poddisruptionbudgets.policy"
_TEXT: Final = "Cannot evict pod as it would violate the pod's disruption budget."


def is_ready(pod: Obj) -> bool:
    """Say whether a pod counts as healthy."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def selects(budget: Obj, pod: Obj) -> bool:
    """Say whether a budget covers a pod."""
    if budget["metadata"]["namespace"] != pod["metadata"]["namespace"]:
        return False
    selector = selector_from_object((budget.get("spec") or {}).get("selector"))
    return selector is not None and selector.matches(pod["metadata"].get("labels"))


def _scaled(value: object, total: int) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return math.ceil(int(value[:-1]) * total / 100)
    return int(str(value))


def status_of(store: Store, budget: Obj) -> Obj:
    """Compute a budget's status from the pods as they are."""
    covered = [
        row.obj
        for row in store.tables["pods"].rows.values()
        if selects(budget, row.obj)
        and row.obj["status"].get("phase") not in ("Succeeded", "Failed")
    ]
    expected = len(covered)
    healthy = sum(is_ready(pod) and not pod["metadata"].get("deletionTimestamp") for pod in covered)
    spec = budget.get("spec") or {}
    if spec.get("minAvailable") is not None:
        desired = _scaled(spec["minAvailable"], expected)
    elif spec.get("maxUnavailable") is not None:
        desired = max(expected - _scaled(spec["maxUnavailable"], expected), 0)
    else:
        desired = 1
    return {
        **(budget.get("status") or {}),
        "observedGeneration": budget["metadata"].get("generation", 1),
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "disruptionsAllowed": max(healthy - desired, 0) if expected else 0,
    }


def spend(store: Store, pod: Obj, now: str, *, dry_run: bool) -> None:
    """Take one disruption from the pod's budget, or refuse the eviction."""
    table = store.tables[KEY]
    budgets = [row.obj for _, row in sorted(table.rows.items()) if selects(row.obj, pod)]
    if not budgets:
        return
    if len(budgets) > 1:
        raise errors.internal(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does "
            "not support."
        )
    budget = clone(budgets[0])
    status = status_of(store, budget)
    policy = (budget.get("spec") or {}).get("unhealthyPodEvictionPolicy")
    if not is_ready(pod):
        enough = status["currentHealthy"] >= status["desiredHealthy"] > 0
        if policy == "AlwaysAllow" or enough:
            return
    if status["disruptionsAllowed"] <= 0:
        name = budget["metadata"]["name"]
        raise errors.too_many_requests(
            _TEXT,
            causes=[
                Cause(
                    reason="DisruptionBudget",
                    message=(
                        f"The disruption budget {name} needs {status['desiredHealthy']} healthy "
                        f"pods and has {status['currentHealthy']} currently"
                    ),
                )
            ],
        )
    if not dry_run:
        status["disruptionsAllowed"] -= 1
        status.setdefault("disruptedPods", {})[pod["metadata"]["name"]] = now
        budget["status"] = status
        store.put(KEY, budget)
