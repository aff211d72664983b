# SPDX-License-Identifier: Apache-2.0
"""Explains a pod: from recorded decisions and, while it waits, from what a scheduler knows now.

The decisions are the registry's; what would be decided now is worked out here, on a snapshot, with
the scheduler's own core, quotas and queues included. Gangs are not in a snapshot: a refusal of
theirs is told by the recorded decisions only.
"""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.decision import DecisionRecord
from hami_core.planning.whatif import Standing, standing
from hami_core.replay.snapshot import Snapshot, load
from hamictl import client
from hamictl.client import Allocation, Explanation
from hamictl.errors import Absent, Unreachable
from hamictl.simulate import decode_snapshot, governed_by, read_snapshot


class Answer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that is known of a pod."""

    namespace: str
    pod: str
    decisions: tuple[DecisionRecord, ...]
    allocations: tuple[Allocation, ...]
    snapshot_id: str = ""
    """What ``now`` is about."""
    now: Standing | None = None
    """Only of a pod that waits for a node."""
    problem: str = ""
    """Why nothing can be said about now."""


def explain(
    namespace: str, name: str, *, node: str, registry: str, scheduler: str, file: Path | None
) -> Answer:
    """Ask the registry, and a scheduler (or a file of its) where the pod still waits."""
    absent: Absent | None = None
    recorded = Explanation(namespace=namespace, pod=name, decisions=(), allocations=())
    try:
        recorded = client.read(Explanation, registry, f"/v1/explain/{namespace}/{name}")
    except Absent as error:
        absent = error
    except Unreachable:
        if file is None:  # a file is also looked at where there is no cluster
            raise
    answer = Answer(
        namespace=recorded.namespace,
        pod=recorded.pod,
        decisions=recorded.decisions,
        allocations=recorded.allocations,
    )
    if any(one.state not in ("released", "failed") for one in recorded.allocations):
        return answer
    try:
        known = _known(scheduler, file)
    except Unreachable as error:
        if absent is not None:
            raise absent from error
        return replace(answer, problem=error.message)
    request = next((r for r in known.waiting if (r.namespace, r.name) == (namespace, name)), None)
    if request is None:
        if absent is not None:
            raise absent
        return replace(
            answer,
            snapshot_id=known.snapshot_id,
            problem="the scheduler knows no such pod that waits for a node",
        )
    return replace(
        answer,
        snapshot_id=known.snapshot_id,
        now=standing(
            load(known), request, node=node, governed=governed_by(known, known.quotas.askers)
        ),
    )


def _known(scheduler: str, file: Path | None) -> Snapshot:
    if file is not None:
        return read_snapshot(file)
    body = client.fetch(scheduler, "/v1/snapshot")
    return decode_snapshot(body, what=f"{scheduler}/v1/snapshot")
