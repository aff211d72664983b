# SPDX-License-Identifier: Apache-2.0
"""Quarantined objects are shown once per object and replica, bounded in number and in time."""

from typing import Any

from hami_common.events.quarantine import STALE_S, QuarantineRecord
from hami_registry.core.quarantined import AGENT_ROWS_MOST, Quarantined


def record(key: str = "uid-1", **more: Any) -> QuarantineRecord:
    given = {
        "service": "scheduler",
        "replica": "scheduler-0",
        "kind": "pod",
        "namespace": "ns",
        "name": "p",
        "problem": "ValueError: odd",
        "failures": 1,
        "first_s": 1.0,
        "last_s": 1.0,
    }
    return QuarantineRecord(key=key, **{**given, **more})


def keys(rows: Quarantined, **more: Any) -> list[str]:
    return [row.key for row in rows.rows(now_s=0.0, **more)]


def test_a_repeated_report_renews_the_row() -> None:
    rows = Quarantined()
    rows.seen(record(), now_s=0.0)
    rows.seen(record(failures=7, last_s=9.0), now_s=0.0)
    (row,) = rows.rows(now_s=0.0)
    assert (row.failures, row.first_s, row.last_s) == (7, 1.0, 9.0)


def test_a_row_ends_when_its_replica_reports_the_end() -> None:
    rows = Quarantined()
    rows.seen(record(), now_s=0.0)
    rows.seen(record(replica="scheduler-1"), now_s=0.0)
    rows.seen(record(is_over=True), now_s=0.0)
    assert [row.replica for row in rows.rows(now_s=0.0)] == ["scheduler-1"]


def test_a_row_that_is_not_repeated_expires() -> None:
    rows = Quarantined()
    rows.seen(record("a"), now_s=0.0)
    rows.seen(record("b"), now_s=10.0)
    rows.seen(record("a"), now_s=20.0)
    assert [row.key for row in rows.rows(now_s=STALE_S + 15.0)] == ["a"]
    assert rows.rows(now_s=STALE_S + 25.0) == []


def test_rows_of_one_namespace_hide_all_others() -> None:
    rows = Quarantined()
    rows.seen(record("a"), now_s=0.0)
    rows.seen(record("b", namespace="other"), now_s=0.0)
    rows.seen(record("c", namespace="", name=""), now_s=0.0)
    assert keys(rows, namespace="ns") == ["a"]
    assert keys(rows) == ["a", "b", "c"]


def test_one_agent_that_reports_without_end_hides_no_other() -> None:
    rows = Quarantined()
    rows.seen(record("mine", service="nodeagent", replica="gpu-1"), now_s=0.0)
    for number in range(AGENT_ROWS_MOST + 10):
        rows.seen(record(f"{number:05d}", service="nodeagent", replica="gpu-2"), now_s=0.0)
    found = rows.rows(now_s=0.0)
    assert len(found) == AGENT_ROWS_MOST + 1
    assert found[0].key == "mine"
    assert found[-1].key == f"{AGENT_ROWS_MOST + 9:05d}"
