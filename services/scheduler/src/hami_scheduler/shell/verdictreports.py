# SPDX-License-Identifier: Apache-2.0
"""Reports each verdict about a pod's nodes: span, log, and the recorded decision.

Common to the calls of kube-scheduler and of Volcano. kube-scheduler retries a pending pod often:
its refusals are recorded with details of devices once in ``DETAILS_S``. Milliseconds only in names
that end in ``_ms``, else seconds.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from time import perf_counter
from typing import Literal

from msgspec.structs import replace

from hami_common.events.decision import DecisionRecord, NodeScore
from hami_common.runtime.telemetry import current_span, current_traceparent
from hami_core.placement.comparison import Comparison
from hami_core.placement.details import Details
from hami_core.placement.verdicts import Scored
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.state import State

BEST_LISTED = 16
"""Number of nodes that a recorded prioritize names: the caller takes one of the first."""
DETAILS_S = 30.0
"""Shortest time between two records of a pod with details."""
SETTLED_S = 2.0
"""Interval at which refused pods are checked for their end."""
DETAILED_MOST = 4096
"""Pods of which the time of the last details is remembered."""

_log = logging.getLogger(__name__)


class VerdictReports:
    """Makes and publishes the records of verdicts."""

    def __init__(self, *, state: State, decisions: Decisions) -> None:
        """Publish through ``decisions``."""
        self._state = state
        self._decisions = decisions
        self._detailed: OrderedDict[str, float] = OrderedDict()
        """By uid: the time of the last record with details, the oldest first."""

    def record(
        self, verb: Literal["filter", "prioritize"], uid: str, namespace: str, name: str
    ) -> DecisionRecord:
        """Return the record of a pod's verdict, as yet an error."""
        return DecisionRecord(
            verb=verb,
            namespace=namespace,
            pod=name,
            pod_uid=uid,
            time_s=self._state.clock.now_s(),
            verdict="error",
            snapshot_id=self._state.ledger.snapshot_id,
            writer=self._decisions.writer,
        )

    def decided(
        self,
        record: DecisionRecord,
        begin: float,
        *,
        look: Callable[[], Details] | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        """Report a verdict that took from ``begin`` (``perf_counter``) until now.

        ``look`` returns the details of a refusal; it is called if they are due. ``comparison``: of
        a prioritize.
        """
        details = look() if look is not None and self._is_due(record.pod_uid) else None
        record = replace(record, duration_ms=round((perf_counter() - begin) * 1000, 3))
        record = self._state.refusals.noted(record, self._state.pods.get(record.pod_uid))
        span = current_span()
        if span.is_recording():
            span.set_attributes(
                {
                    "hami.verdict": record.verdict,
                    "hami.snapshot": record.snapshot_id,
                    "hami.nodes.considered": record.nodes_considered,
                    "hami.nodes.feasible": record.nodes_feasible,
                    "hami.nodes.best": [f"{one.node}={one.score:g}" for one in record.feasible],
                    "hami.refusals": [
                        f"{refused.code}={refused.count}: {refused.text}"
                        for refused in record.refusals
                    ],
                }
            )
        _log.info(
            record.verb,
            extra={
                "verdict": record.verdict,
                "nodes_considered": record.nodes_considered,
                "nodes_feasible": record.nodes_feasible,
                "refusals": {refused.code: refused.count for refused in record.refusals},
                "error": record.error,
                "duration_ms": record.duration_ms,
            },
        )
        self._decisions.add(
            record, details=details, comparison=comparison, traceparent=current_traceparent()
        )

    async def watch(self) -> None:
        """Publish which refused pods ended before they were placed, indefinitely."""
        while True:
            await self._state.clock.sleep(SETTLED_S)
            now_s = self._state.clock.now_s()
            ended = self._state.refusals.ended(self._state.pods, now_s=now_s)
            for uid, refused in ended.items():
                record = self.record("filter", uid, refused.namespace, refused.pod)
                text = "the pod ended before it was placed"
                self._decisions.add(replace(record, error=text, ended=True))

    def _is_due(self, pod_uid: str) -> bool:
        """Return whether a refusal of the pod is to be recorded with details now."""
        now_s = self._state.clock.monotonic_s()
        last_s = self._detailed.get(pod_uid)
        if last_s is not None and now_s - last_s < DETAILS_S:
            return False
        self._detailed[pod_uid] = now_s
        self._detailed.move_to_end(pod_uid)
        if len(self._detailed) > DETAILED_MOST:
            self._detailed.popitem(last=False)
        return True


def best_of(scored: Scored) -> tuple[NodeScore, ...]:
    """Return the best nodes as a record has them."""
    return tuple(
        NodeScore(node=node, score=round(score, 3)) for node, score in scored.best(BEST_LISTED)
    )
