# SPDX-License-Identifier: Apache-2.0
"""Pods that wait, from decisions: who is listed, with which reason, and until when."""

from typing import Any

from hami_common.events.decision import DecisionRecord, RefusalClass
from hami_registry.core import waiting
from hami_registry.core.waiting import SILENT_S, Waiting, WaitingPods

MEMORY = RefusalClass(code="CardInsufficientMemory", text="too small", count=3, nodes=("n1",))
QUEUE = RefusalClass(code="QueueCannotBorrow", text="queue full", count=1)


def decision(time_s: float, **changes: Any) -> DecisionRecord:
    fields: dict[str, Any] = {
        "verb": "filter",
        "namespace": "team-a",
        "pod": "p",
        "pod_uid": "u",
        "time_s": time_s,
        "verdict": "refused",
        "snapshot_id": "1.1",
        "refusals": (MEMORY,),
        **changes,
    }
    return DecisionRecord(**fields)


def after(*decisions: DecisionRecord) -> WaitingPods:
    found = WaitingPods()
    for one in decisions:
        found.decision_seen(one)
    return found


def rows(
    found: WaitingPods, now_s: float = 100.0, *, placed: Any = (), namespace: Any = None
) -> list[Waiting]:
    return found.rows(namespace=namespace, placed=placed, now_s=now_s)


def test_refused_pod_waits_since_its_creation_with_the_refusal_to_act_on_first() -> None:
    found = after(
        decision(10.0, created_s=4.0, attempts=1),
        decision(20.0, created_s=4.0, attempts=2, refusals=(MEMORY, QUEUE)),
    )
    (row,) = rows(found)
    assert (row.since_s, row.decided_s, row.attempts) == (4.0, 20.0, 2)
    assert (row.reason, row.code, row.text) == ("queue", "QueueCannotBorrow", "queue full")
    assert [(one.code, one.count, one.nodes) for one in row.refusals] == [
        ("CardInsufficientMemory", 3, ()),
        ("QueueCannotBorrow", 1, ()),
    ]


def test_decisions_without_age_and_number_are_counted_here() -> None:
    (row,) = rows(after(decision(10.0), decision(20.0)))
    assert (row.since_s, row.attempts, row.reason) == (10.0, 2, "devices")


def test_pod_that_was_placed_ended_or_fell_silent_is_not_listed() -> None:
    placed = decision(20.0, verb="bind", verdict="placed", refusals=(), node="n1")
    assert rows(after(decision(10.0), placed)) == []
    ended = decision(20.0, verdict="error", ended=True, refusals=())
    assert rows(after(decision(10.0), ended)) == []
    assert rows(after(decision(10.0)), placed={"u"}) == []
    assert rows(after(decision(10.0)), 10.0 + SILENT_S + 1) == []
    assert len(rows(after(decision(10.0)), 10.0 + SILENT_S)) == 1


def test_end_of_an_earlier_pod_of_the_name_and_late_messages_change_nothing() -> None:
    again = decision(20.0, pod_uid="u2")
    ended = decision(30.0, verdict="error", ended=True, refusals=())
    (row,) = rows(after(decision(10.0, attempts=9), again, ended, decision(15.0)))
    assert (row.pod_uid, row.attempts, row.decided_s) == ("u2", 1, 20.0)


def test_pod_that_fits_waits_for_kube_scheduler_only_after_a_while() -> None:
    found = after(decision(10.0, attempts=3), decision(20.0, verdict="feasible", refusals=()))
    assert rows(found, 21.0) == []
    (row,) = rows(found, 60.0)
    assert (row.reason, row.attempts) == ("kube-scheduler", 3)


def test_failed_bind_shows_its_error() -> None:
    failed = decision(20.0, verb="bind", verdict="error", error="contended", refusals=())
    (row,) = rows(after(decision(10.0), failed))
    assert (row.reason, row.text) == ("error", "contended")


def test_rows_are_of_the_namespace_the_longest_wait_first(monkeypatch: Any) -> None:
    found = after(
        decision(10.0, pod="a", created_s=9.0),
        decision(11.0, pod="b", created_s=2.0),
        decision(12.0, pod="c", namespace="team-b"),
    )
    assert [row.pod for row in rows(found, namespace="team-a")] == ["b", "a"]
    monkeypatch.setattr(waiting, "WAITING_MOST", 2)
    found.decision_seen(decision(13.0, pod="d"))
    assert sorted(row.pod for row in rows(found)) == ["c", "d"]
