# SPDX-License-Identifier: Apache-2.0
"""The store: revisions, history, watches."""

from typing import Any

import pytest

from hami_sim.apiserver.errors import ApiError
from hami_sim.apiserver.resources import ResourceTable
from hami_sim.apiserver.selectors import parse_fields, parse_labels
from hami_sim.apiserver.store import Filter, Store, Subscription


def make(**options: Any) -> Store:
    return Store(ResourceTable(), **options)


def pod(name: str, node: str = "", **labels: str) -> dict[str, Any]:
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels}, "spec": spec}


def drained(subscription: Subscription) -> list[tuple[str, str]]:
    return [(d.type, d.stored.obj["metadata"]["name"]) for d in subscription.pending()]


def test_every_change_takes_the_next_revision() -> None:
    store = make()
    first = store.put("pods", pod("a"))
    second = store.put("pods", pod("b"))
    last = store.remove("pods", "ns", "a")
    assert [first.revision, second.revision, last.revision] == [2, 3, 4]
    assert last.obj["metadata"]["resourceVersion"] == "4"
    assert first.obj["metadata"]["resourceVersion"] == "2"


def test_stored_objects_are_not_changed_by_later_writes() -> None:
    store = make()
    first = store.put("pods", pod("a"))
    store.put("pods", pod("a", node="n"))
    assert first.obj["spec"] == {}
    assert b'"nodeName"' not in first.body


def test_past_states_are_rebuilt_from_history() -> None:
    store = make()
    store.put("pods", pod("a"))
    at = store.revision
    store.put("pods", pod("b"))
    store.put("pods", pod("a", node="n"))
    store.remove("pods", "ns", "a")
    rows = store.tables["pods"].at(at)
    assert rows is not None
    assert {name: row.obj["spec"] for (_, name), row in rows.items()} == {"a": {}}


def test_history_is_bounded_and_older_watches_are_gone() -> None:
    store = make(window=2)
    start = store.revision
    for name in "abc":
        store.put("pods", pod(name))
    assert store.tables["pods"].at(start) is None
    with pytest.raises(ApiError) as raised:
        store.subscribe("pods", Filter(), start)
    assert (raised.value.code, raised.value.reason) == (410, "Expired")
    assert drained(store.subscribe("pods", Filter(), start + 1)) == [("ADDED", "b"), ("ADDED", "c")]


def test_watch_from_the_future_is_refused() -> None:
    store = make()
    with pytest.raises(ApiError, match="Too large resource version"):
        store.subscribe("pods", Filter(), store.revision + 1)


def test_watch_sees_selector_transitions_with_the_previous_object() -> None:
    store = make()
    watch = store.subscribe("pods", Filter(labels=parse_labels("on=yes")), store.revision)
    store.put("pods", pod("a"))
    store.put("pods", pod("a", on="yes"))
    store.put("pods", pod("a", on="yes", more="1"))
    store.put("pods", pod("a", on="no"))
    store.remove("pods", "ns", "a")
    deliveries = watch.pending()
    assert [d.type for d in deliveries] == ["ADDED", "MODIFIED", "DELETED"]
    left = deliveries[-1].stored.obj["metadata"]
    assert left["labels"] == {"on": "yes", "more": "1"}
    assert left["resourceVersion"] == "5"


def test_indexed_watches_are_fed_only_their_own_changes() -> None:
    store = make()
    mine = store.subscribe("pods", Filter(fields=parse_fields("spec.nodeName=n1")), store.revision)
    store.put("pods", pod("a"))
    store.put("pods", pod("a", node="n1"))
    store.put("pods", pod("b", node="n2"))
    store.remove("pods", "ns", "a")
    assert drained(mine) == [("ADDED", "a"), ("DELETED", "a")]


def test_watch_too_far_behind_is_closed() -> None:
    store = make(watch_limit=2)
    watch = store.subscribe("pods", Filter(), store.revision)
    for name in "abc":
        store.put("pods", pod(name))
    assert watch.closed
    assert len(watch.pending()) == 2


def test_unsubscribed_watches_get_nothing() -> None:
    store = make()
    watch = store.subscribe("pods", Filter(), store.revision)
    store.unsubscribe("pods", watch)
    store.put("pods", pod("a"))
    assert watch.pending() == []


def test_forgetting_history_expires_every_older_watch() -> None:
    store = make()
    store.put("pods", pod("a"))
    before = store.revision - 1
    store.forget_history()
    with pytest.raises(ApiError):
        store.subscribe("pods", Filter(), before)
    store.subscribe("pods", Filter(), store.revision)
