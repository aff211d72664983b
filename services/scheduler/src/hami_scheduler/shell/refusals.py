# SPDX-License-Identifier: Apache-2.0
"""Remembers the last refusal of each waiting pod, of the decisions made here.

A refusal is published with the number of consecutive refusals and the pod's creation time, so that
readers of decisions need not count. When a refused pod is deleted, or ends, before it was placed,
that is published too: no further decision would show it. Times in Unix seconds.
"""

from collections import OrderedDict
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.decision import DecisionRecord, RefusalClass
from hami_common.model.waiting import main_refusal
from hami_core.ledger.podfacts import PodFacts

REFUSED_MOST: Final = 20_000
"""Pods of which the last refusal is remembered; beyond, the oldest are dropped."""


UNSEEN_S: Final = 30.0
"""Time after which a refused pod counts as deleted if the watch does not deliver it: its deletion
was delivered before the refusal. A pod that does wait is listed again at its next refusal.
"""


class Refused(Struct, frozen=True, kw_only=True):
    """The last refusal of a pod."""

    namespace: str
    pod: str
    time_s: float
    attempts: int
    """Consecutive refusals here."""
    created_s: float
    """Creation time of the pod; 0: not known."""
    is_known: bool
    """The watch had delivered the pod."""
    reason: RefusalClass | None
    """Refusal to act on first; ``None``: the attempt failed with an error."""


class Pods(Protocol):
    """The known pods, see ``state.Pods``."""

    def get(self, uid: str) -> PodFacts | None:
        """Return the facts of the pod with this uid."""

    def is_waiting(self, uid: str) -> bool:
        """Return whether the pod requests devices and has no node yet."""


class Refusals:
    """Last refusals of the pods that wait, by uid."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, Refused] = OrderedDict()
        """The oldest first."""

    def get(self, uid: str) -> Refused | None:
        """Return the last refusal of the pod, ``None`` when no decision here refused it."""
        return self._refused.get(uid)

    def noted(self, record: DecisionRecord, pod: PodFacts | None) -> DecisionRecord:
        """Remember the refusal of a filter; returns the record with what is known about it.

        ``pod``: as the watch delivered it, ``None`` if it has not yet.
        """
        if (record.verb, record.verdict) != ("filter", "refused"):
            return record
        known = self._refused.pop(record.pod_uid, None)
        number = main_refusal(one.code for one in record.refusals)
        refused = self._refused[record.pod_uid] = Refused(
            namespace=record.namespace,
            pod=record.pod,
            time_s=record.time_s,
            attempts=1 if known is None else known.attempts + 1,
            created_s=0.0 if pod is None else pod.created_s,
            is_known=pod is not None or (known is not None and known.is_known),
            reason=record.refusals[number] if number >= 0 else None,
        )
        while len(self._refused) > REFUSED_MOST:
            self._refused.popitem(last=False)
        return replace(record, created_s=refused.created_s, attempts=refused.attempts)

    def placed(self, uid: str) -> None:
        """Drop the pod: it has its devices."""
        self._refused.pop(uid, None)

    def ended(self, pods: Pods, *, now_s: float) -> dict[str, Refused]:
        """Drop the pods that do not wait any more; returns those that were not placed."""
        settled = {
            uid: one
            for uid, one in self._refused.items()
            if (one.is_known or pods.get(uid) or now_s - one.time_s >= UNSEEN_S)
            and not pods.is_waiting(uid)
        }
        for uid in settled:
            del self._refused[uid]
        return {
            uid: one
            for uid, one in settled.items()
            if (pod := pods.get(uid)) is None or not pod.node
        }
