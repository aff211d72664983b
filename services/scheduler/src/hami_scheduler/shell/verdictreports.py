# SPDX-License-Identifier: Apache-2.0
"""Reports each verdict about a pod's nodes: span, log, and the recorded decision.

Common to the calls of kube-scheduler and of Volcano. Milliseconds only in names that end in
``_ms``.
"""

import logging
from time import perf_counter
from typing import Literal

from msgspec.structs import replace

from hami_common.events.decision import DecisionRecord, NodeScore
from hami_common.runtime.telemetry import current_span, current_traceparent
from hami_core.placement.verdicts import Scored
from hami_scheduler.shell.decisions import Decisions
from hami_scheduler.shell.state import State

BEST_LISTED = 16
"""Number of nodes that a recorded prioritize names: the caller takes one of the first."""

_log = logging.getLogger(__name__)


class VerdictReports:
    """Makes and publishes the records of verdicts."""

    def __init__(self, *, state: State, decisions: Decisions) -> None:
        """Publish through ``decisions``."""
        self._state = state
        self._decisions = decisions

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

    def decided(self, record: DecisionRecord, begin: float) -> None:
        """Report a verdict that took from ``begin`` (``perf_counter``) until now."""
        record = replace(record, duration_ms=round((perf_counter() - begin) * 1000, 3))
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
        self._decisions.add(record, traceparent=current_traceparent())


def best_of(scored: Scored) -> tuple[NodeScore, ...]:
    """Return the best nodes as a record has them."""
    return tuple(
        NodeScore(node=node, score=round(score, 3)) for node, score in scored.best(BEST_LISTED)
    )
