# SPDX-License-Identifier: Apache-2.0
"""Read model of the pods that wait, folded from the scheduler's decisions.

The registry does not watch pods, so it learns in three ways that a pod waits no more: a bind that
placed it, or a ledger record that gives it devices; a decision that is marked ``ended``, which the
scheduler publishes when a refused pod was deleted; and silence. kube-scheduler tries each pending
pod at least every five minutes, so a pod without a decision for ``SILENT_S`` is dropped: its
scheduler replica ended together with the pod. Times in Unix seconds.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Literal

from msgspec import Struct

from hami_common.events.decision import DecisionRecord, RefusalClass
from hami_common.model.waiting import WaitClass, class_of, main_refusal

SILENT_S: Final = 600.0
FEASIBLE_S: Final = 30.0
"""Age from which a decision that found nodes, without a bind since, counts as waiting."""
WAITING_MOST: Final = 20_000
"""Pods that are remembered; beyond, those with the oldest decisions are dropped."""
REFUSALS_SHOWN: Final = 6


class Waiting(Struct, frozen=True, kw_only=True):
    """A pod that waits, with its last refusal."""

    namespace: str
    pod: str
    pod_uid: str
    since_s: float
    """Creation time of the pod; the first refusal that is known where the scheduler does not know
    it.
    """
    decided_s: float
    """Time of the last decision."""
    attempts: int
    """Consecutive refusals by the replica that decided last."""
    reason: WaitClass | Literal["kube-scheduler", "error"]
    """Class of the refusal to act on first. ``kube-scheduler``: nodes have the devices, and
    kube-scheduler has not bound the pod, for reasons of its own such as CPU; ``error``: the attempt
    failed.
    """
    code: str
    text: str
    nodes_considered: int
    nodes_feasible: int
    refusals: tuple[RefusalClass, ...]
    """At most ``REFUSALS_SHOWN``, without the names of nodes."""
    writer: str
    """Scheduler replica that decided."""


class WaitingPods:
    """Pods that wait, by namespace and name."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[str, str], Waiting] = OrderedDict()
        """The oldest decision first."""

    def decision_seen(self, decision: DecisionRecord) -> None:
        """Fold the decisions of one message."""
        for one in decision.unfolded():
            self._fold(one)

    def _fold(self, one: DecisionRecord) -> None:
        key = (one.namespace, one.pod)
        known = self._waiting.get(key)
        if known is not None and known.decided_s > one.time_s:
            return
        if one.ended or one.verdict == "placed":
            if known is not None and known.pod_uid == one.pod_uid:
                del self._waiting[key]
            return
        if one.verb == "prioritize":
            return
        if known is not None and known.pod_uid != one.pod_uid:
            known = None
        if known is not None and one.verb != "filter" and not one.refusals and not one.error:
            return
        self._waiting[key] = _waiting(one, known)
        self._waiting.move_to_end(key)
        while len(self._waiting) > WAITING_MOST:
            self._waiting.popitem(last=False)

    def rows(
        self, *, namespace: str | None, placed: Collection[str], now_s: float
    ) -> list[Waiting]:
        """Return the pods that wait, the longest first.

        ``placed``: uids of the pods to which the ledger gives devices.
        """
        while self._waiting:
            key, oldest = next(iter(self._waiting.items()))
            if oldest.decided_s >= now_s - SILENT_S:
                break
            del self._waiting[key]
        found = [
            one
            for one in self._waiting.values()
            if namespace in (None, one.namespace)
            and one.pod_uid not in placed
            and (one.reason != "kube-scheduler" or one.decided_s < now_s - FEASIBLE_S)
        ]
        return sorted(found, key=lambda one: (one.since_s, one.namespace, one.pod))


def _waiting(one: DecisionRecord, known: Waiting | None) -> Waiting:
    number = main_refusal(refusal.code for refusal in one.refusals)
    code = text = ""
    reason: WaitClass | Literal["kube-scheduler", "error"]
    if one.verdict == "feasible":
        reason = "kube-scheduler"
    elif number >= 0:
        code, text = one.refusals[number].code, one.refusals[number].text
        reason = class_of(code)
    else:
        reason, text = "error", one.error
    counted = 1 if one.verdict == "refused" else 0
    return Waiting(
        namespace=one.namespace,
        pod=one.pod,
        pod_uid=one.pod_uid,
        since_s=one.created_s or (one.time_s if known is None else known.since_s),
        decided_s=one.time_s,
        attempts=one.attempts or (0 if known is None else known.attempts) + counted,
        reason=reason,
        code=code,
        text=text,
        nodes_considered=one.nodes_considered,
        nodes_feasible=one.nodes_feasible,
        refusals=tuple(
            RefusalClass(code=refusal.code, text=refusal.text, count=refusal.count)
            for refusal in one.refusals[:REFUSALS_SHOWN]
        ),
        writer=one.writer,
    )
