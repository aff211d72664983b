# SPDX-License-Identifier: Apache-2.0
"""The scheduling queue: order, backoff, events."""

from typing import Any

from hami_sim.kubescheduler.queue import SchedulingQueue, Waiting


def pod(name: str, priority: int = 0) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name}, "spec": {"priority": priority}}


def queue() -> SchedulingQueue:
    return SchedulingQueue(initial_s=1.0, max_s=2.0, flush_s=300.0)


def take(q: SchedulingQueue, now_s: float) -> Waiting:
    waiting = q.pop(now_s)
    assert waiting is not None
    return waiting


def test_higher_priority_first_then_first_come() -> None:
    q = queue()
    for name, priority in (("a", 0), ("b", 5), ("c", 0)):
        q.add(pod(name, priority))
    assert [take(q, 0).uid for _ in range(3)] == ["b", "a", "c"]
    assert q.pop(0) is None


def test_unschedulable_pod_waits_for_an_event_and_the_rest_of_its_backoff() -> None:
    q = queue()
    q.add(pod("a"))
    q.back(take(q, 0), 0, unschedulable=True)
    assert q.pop(100) is None
    q.moved()
    assert take(q, 100).uid == "a"
    assert q.counts()["in_flight"] == 1


def test_event_during_backoff_does_not_shorten_it() -> None:
    q = queue()
    q.add(pod("a"))
    q.back(take(q, 0), 0, unschedulable=True)
    q.moved()
    assert q.pop(0.9) is None
    assert q.next_wake_s() == 1.0
    assert take(q, 1.0).uid == "a"


def test_backoff_doubles_up_to_its_limit() -> None:
    q = queue()
    q.add(pod("a"))
    now_s = 0.0
    for want_s in (1.0, 2.0, 2.0):
        q.back(take(q, now_s), now_s, unschedulable=False)
        due_s = q.next_wake_s()
        assert due_s is not None
        assert due_s - now_s == want_s
        now_s = due_s


def test_event_while_a_pod_is_tried_counts_as_later() -> None:
    q = queue()
    q.add(pod("a"))
    waiting = take(q, 0)
    q.moved()
    q.back(waiting, 0, unschedulable=True)
    assert q.counts()["backoff"] == 1


def test_update_of_a_waiting_pod_that_may_now_fit_wakes_it() -> None:
    q = queue()
    q.add(pod("a"))
    q.back(take(q, 0), 0, unschedulable=True)
    q.update(pod("a", 3), wakes=False)
    assert q.pop(100) is None
    q.update(pod("a", 4), wakes=True)
    assert take(q, 100).priority == 4


def test_forgotten_pods_do_not_come_back() -> None:
    q = queue()
    q.add(pod("a"))
    waiting = take(q, 0)
    q.remove("a")
    q.back(waiting, 0, unschedulable=False)
    assert q.pop(100) is None
    assert q.next_wake_s() is None


def test_unschedulable_pods_are_flushed_after_long() -> None:
    q = queue()
    q.add(pod("a"))
    q.back(take(q, 0), 0, unschedulable=True)
    assert q.pop(299) is None
    assert take(q, 301).uid == "a"
