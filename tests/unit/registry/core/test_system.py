# SPDX-License-Identifier: Apache-2.0
"""State of the control plane: what messages show of replicas and agents, and what is a concern."""

from typing import Any

from msgspec.structs import replace

from hami_common.events.decision import DecisionRecord
from hami_common.events.inventory import Heartbeat
from hami_registry.core.system import (
    BEHIND,
    RECENT_S,
    REPLICA_S,
    AgentsRow,
    Concern,
    ConsumerRow,
    CopyRow,
    Observed,
    StreamRow,
    concerns_of,
)

STREAM = StreamRow(
    name="KV_a",
    messages=1,
    size_bytes=10,
    limit_bytes=100,
    last_seq=5,
    read_seq=5,
    consumers=1,
    leader="",
    has_leader=True,
    copies=(),
)
CONSUMER = ConsumerRow(
    stream="HAMI_EVENTS", name="c", is_durable=True, pending=0, unacknowledged=0, redelivered=0
)
AGENTS = AgentsRow(nodes=1, silent=0, silent_nodes=(), versions=(), unserved=())


def decision(time_s: float, duration_ms: float) -> DecisionRecord:
    return DecisionRecord(
        verb="filter",
        namespace="team-a",
        pod="p",
        pod_uid="u",
        time_s=time_s,
        verdict="refused",
        snapshot_id="1.1",
        duration_ms=duration_ms,
        writer="s1",
    )


def concerns(**changes: Any) -> list[tuple[str, str, int]]:
    fields: dict[str, Any] = {
        "agents": AGENTS,
        "version": "1",
        "streams": (STREAM,),
        "consumers": (CONSUMER,),
        "quarantined": {},
        "dead_letters": 0,
        "config_problem": "",
        **changes,
    }
    found = concerns_of(**fields)
    assert all(isinstance(one, Concern) for one in found)
    return [(one.code, one.name, one.count) for one in found]


def test_replicas_are_those_that_wrote_lately() -> None:
    observed = Observed()
    observed.message_seen("webhook", "w1", "admission", time_s=100.0)
    observed.message_seen("webhook", "w1", "quarantine", time_s=90.0)
    observed.message_seen("webhook", "", "admission", time_s=100.0)
    for time_s, ms in ((100.0, 90.0), (800.0, 1.0), (900.0, 3.0)):
        observed.decision_seen(decision(time_s, ms))
    first, second = observed.replicas(now_s=100.0 + REPLICA_S)
    assert (first.service, first.replica, first.last_s) == ("scheduler", "s1", 900.0)
    assert (first.decisions, first.decision_median_ms, first.decision_longest_ms) == (2, 2.0, 3.0)
    assert (second.replica, second.last, second.last_s) == ("w1", "admission", 100.0)
    (only,) = observed.replicas(now_s=101.0 + REPLICA_S + RECENT_S)
    assert (only.service, only.decisions) == ("scheduler", 0)


def test_agents_are_counted_by_version_without_silent_ones() -> None:
    observed = Observed()
    beat = Heartbeat(node="a", boot_id="1", seq=1, time_s=0.0, version="2")
    observed.heartbeat_seen(beat)
    observed.heartbeat_seen(replace(beat, node="b", version="1", unserved=("nvidia",)))
    observed.heartbeat_seen(replace(beat, node="c"))
    row = observed.agents(["a", "b", "c", "d"], ["d", "c"])
    assert (row.nodes, row.silent, row.silent_nodes) == (4, 2, ("c", "d"))
    assert [(one.version, one.agents) for one in row.versions] == [("1", 1), ("2", 1)]
    assert [(one.node, one.vendors) for one in row.unserved] == [("b", ("nvidia",))]
    assert concerns(agents=row) == [
        ("agents-silent", "c", 2),
        ("agents-of-another-version", "2", 1),
        ("vendors-unserved", "b", 1),
    ]


def test_nothing_is_a_concern_while_all_keeps_up() -> None:
    assert concerns() == []
    log = replace(STREAM, read_seq=None, size_bytes=100, last_seq=10 * BEHIND)
    assert concerns(streams=(log,)) == []


def test_streams_and_consumers_that_are_behind_are_concerns() -> None:
    assert concerns(streams=(replace(STREAM, problem="gone"),)) == [("stream-unknown", "KV_a", 0)]
    copies = (CopyRow(server="n2", is_current=False, lag=7),)
    ill = replace(STREAM, has_leader=False, copies=copies, size_bytes=85, last_seq=5 + BEHIND)
    assert concerns(streams=(ill,)) == [
        ("stream-without-leader", "KV_a", 0),
        ("stream-copy-behind", "KV_a", 1),
        ("stream-almost-full", "KV_a", 85),
        ("registry-behind", "KV_a", BEHIND),
    ]
    late = replace(CONSUMER, pending=BEHIND)
    assert concerns(consumers=(late,)) == [("consumer-behind", "HAMI_EVENTS/c", BEHIND)]


def test_quarantine_dead_letters_and_configuration_are_concerns() -> None:
    found = concerns(quarantined={"webhook": 2}, dead_letters=3, config_problem="line 1")
    assert found == [
        ("configuration-not-in-use", "line 1", 0),
        ("objects-in-quarantine", "webhook", 2),
        ("messages-dead-lettered", "", 3),
    ]
