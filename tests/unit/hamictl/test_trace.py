# SPDX-License-Identifier: Apache-2.0
"""A pod's story: sources joined in order, each fact once, and what could not be asked."""

import base64
import json
from typing import Any

from hami_common.events.decision import DecisionRecord, RefusalClass
from hami_common.model.placement import ContainerShares, Share
from hamictl.client import Allocation, Explanation
from hamictl.commands.trace import timeline_of
from hamictl.eventstream import Event, Filter, event_of, summary

SHARES = (
    ContainerShares(
        name="main", kind="app", shares=(Share(vendor="nvidia", uuid="GPU-1", memory_mib=300),)
    ),
)
DECISION = DecisionRecord(
    verb="bind",
    namespace="default",
    pod="web",
    pod_uid="u",
    time_s=12.0,
    verdict="placed",
    snapshot_id="1.1",
    node="node-1",
    before=(
        DecisionRecord(
            verb="filter",
            namespace="default",
            pod="web",
            pod_uid="u",
            time_s=11.9,
            verdict="feasible",
            snapshot_id="1.1",
            refusals=(RefusalClass(code="Memory", text="no memory", count=3),),
        ),
    ),
)
EXPLANATION = Explanation(
    namespace="default",
    pod="web",
    decisions=(DECISION,),
    allocations=(
        Allocation(
            namespace="default",
            pod="web",
            node="node-1",
            state="running",
            allocation_id="abcdefgh12",
            ledger_seq=1,
            reserved_s=12.1,
            state_s=14.0,
            containers=SHARES,
        ),
    ),
)
POD: dict[str, Any] = {
    "metadata": {
        "uid": "u",
        "creationTimestamp": "1970-01-01T00:00:11Z",
        "annotations": {"hami.io/traceparent": "00-0af7651916cd43dd8448eb211c80319c-1-01"},
    },
    "status": {
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "True",
                "lastTransitionTime": "1970-01-01T00:00:12Z",
            }
        ],
        "containerStatuses": [
            {
                "name": "main",
                "state": {"running": {"startedAt": "1970-01-01T00:00:13Z"}},
                "lastState": {
                    "terminated": {
                        "startedAt": "1970-01-01T00:00:12Z",
                        "finishedAt": "1970-01-01T00:00:13Z",
                        "exitCode": 3,
                        "reason": "Error",
                    }
                },
            }
        ],
    },
}


def event(sequence: int, kind: str, time_s: float, **record: Any) -> Event:
    body = {"namespace": "default", "pod": "web", "node": "node-1", "time_s": time_s, **record}
    return event_of(
        {
            "seq": sequence,
            "subject": f"hami.v1.event.{kind}."
            + ("node-1.uid" if kind in {"state", "allocation"} else "default.web"),
            "time": "1970-01-01T00:00:20.123456789Z",
            "data": base64.b64encode(json.dumps(body).encode()).decode(),
        }
    )


def kinds(**sources: Any) -> list[str]:
    given = {"explanation": None, "events": (), "pod": None, "kube_events": (), "missing": ()}
    timeline = timeline_of("default", "web", **{**given, **sources})
    return [line.what for line in timeline.lines]


def test_registry_alone_has_decisions_and_allocation() -> None:
    assert kinds(explanation=EXPLANATION) == [
        "decision filter: feasible",
        "decision bind: placed",
        "allocation abcdefgh on node-1",
        "state running",
    ]


def test_stream_replaces_the_registry_without_duplicates() -> None:
    events = [
        event(1, "decision", 12.0, verb="bind", verdict="placed", writer="s"),
        event(2, "allocation", 12.1, op="reserve", allocation_id="abcdefgh12", writer="s"),
        event(3, "state", 13.0, state="prepared"),
        event(4, "state", 14.0, state="running"),
    ]
    assert kinds(explanation=EXPLANATION, events=[*events, events[0]]) == [
        "decision bind: placed",
        "allocation reserve abcdefgh",
        "state prepared",
        "state running",
    ]


def test_whole_seconds_of_kubernetes_stand_at_their_end() -> None:
    timeline = kinds(explanation=EXPLANATION, pod=POD)
    assert timeline[0] == "created"
    assert timeline.index("decision bind: placed") < timeline.index("PodScheduled is true")
    assert "container main ended with 3" in timeline


def test_trace_id_causes_and_missing_sources_are_reported() -> None:
    kube_event = {
        "eventTime": "1970-01-01T00:00:15.5Z",
        "reason": "FailedScheduling",
        "message": "no node",
        "reportingComponent": "hami-scheduler",
    }
    timeline = timeline_of(
        "default",
        "web",
        explanation=None,
        events=(),
        pod=POD,
        kube_events=[kube_event, {"reason": "Timeless"}],
        missing=("registry: away",),
    )
    assert timeline.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert timeline.missing == ("registry: away",)
    assert ("FailedScheduling", "no node") in {(line.what, line.cause) for line in timeline.lines}


def test_events_are_chosen_by_kind_node_and_pod() -> None:
    one = event(7, "state", 13.0, state="failed", code="device-mismatch")
    assert Filter(kinds=frozenset({"state"}), node="node-1", pod="web").matches(one)
    assert not Filter(kinds=frozenset({"decision"})).matches(one)
    assert not Filter(node="node-2").matches(one)
    assert not Filter(namespace="other").matches(one)
    assert summary(one) == "failed (device-mismatch)"


def test_record_that_does_not_decode_is_shown_and_does_not_stop_reading() -> None:
    found = event_of(
        {
            "seq": 1,
            "subject": "hami.v1.event.state.n.u",
            "time": "1970-01-01T00:00:20Z",
            "data": base64.b64encode(b"\xff").decode(),
        }
    )
    assert found.record == {"undecodable_base64": "/w=="}
    assert found.time_s == 20.0
