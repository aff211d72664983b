# SPDX-License-Identifier: Apache-2.0
"""Pods as reported by the API server, through a watch and through reads that overtake it."""

from msgspec.structs import replace

from hami_nodeagent.core.podbook import PodBook
from tests.unit.nodeagent.core.builders import Given

OLD = Given("db-0", uid="old").facts
NEW = Given("db-0", uid="new").facts
NAME = ("default", "db-0")


def uids(book: PodBook) -> list[str]:
    return [pod.uid for pod in book.by_name.get(NAME, ())]


def test_updates_are_ordered_by_revision() -> None:
    book = PodBook()
    assert book.put(OLD, revision=5, now_s=0)
    assert not book.put(replace(OLD, finished=True), revision=4, now_s=0)
    assert not book.put(OLD, revision=6, now_s=0)
    assert book.put(replace(OLD, finished=True), revision=7, now_s=0)
    found = book.find("old")
    assert found is not None
    assert found.finished
    assert not book.is_alive("old")
    assert len(book) == 1
    assert list(book) == [found]


def test_update_without_a_revision_applies_and_keeps_the_order() -> None:
    book = PodBook()
    book.put(OLD, revision=5, now_s=0)
    assert book.put(replace(OLD, admitted=True), revision=0, now_s=0)
    assert not book.put(OLD, revision=4, now_s=0)


def test_another_uid_under_the_name_ends_the_first_pod() -> None:
    book = PodBook()
    book.put(OLD, revision=5, now_s=0)
    book.put(NEW, revision=9, now_s=0)
    assert uids(book) == ["old", "new"]
    old = book.find("old")
    assert old is not None
    assert old.gone
    assert book.is_alive("new")
    assert not book.is_alive("old")


def test_late_update_of_a_predecessor_restores_nothing() -> None:
    book = PodBook()
    book.put(NEW, revision=9, now_s=0)
    assert not book.put(OLD, revision=5, now_s=0)
    assert uids(book) == ["new"]


def test_late_update_that_a_gone_pod_had_finished_is_kept() -> None:
    book = PodBook()
    book.put(OLD, revision=5, now_s=0)
    assert book.end("old", now_s=0)
    assert not book.end("old", now_s=0)
    assert not book.end("nobody", now_s=0)
    assert not book.put(OLD, revision=6, now_s=0)
    assert book.put(replace(OLD, finished=True), revision=6, now_s=0)
    assert not book.put(replace(OLD, finished=True), revision=6, now_s=0)
    old = book.find("old")
    assert old is not None
    assert (old.gone, old.finished) == (True, True)
    assert book.by_name[NAME] == (old,)


def test_name_without_a_pod_ends_the_pod_that_had_it() -> None:
    book = PodBook()
    book.put(OLD, revision=5, now_s=0)
    assert book.end_name(*NAME, now_s=0)
    assert not book.end_name(*NAME, now_s=0)
    assert not book.is_alive("old")


def test_full_list_ends_unlisted_pods_unless_newer() -> None:
    book = PodBook()
    newer = Given("web-1").facts
    book.put(OLD, revision=5, now_s=0)
    book.put(newer, revision=30, now_s=0)
    book.put_all([(NEW, 9)], revision=20, now_s=0)
    assert not book.is_alive("old")
    assert book.is_alive("new")
    assert book.is_alive(newer.uid)
    book.put_all([], revision=40, now_s=0)
    assert not book.is_alive(newer.uid)


def test_ended_pods_are_dropped_after_a_time() -> None:
    book = PodBook()
    book.put(OLD, revision=5, now_s=0)
    book.end("old", now_s=10)
    book.forget(gone_before_s=10)
    assert book.find("old") is not None
    book.put(NEW, revision=9, now_s=11)
    book.forget(gone_before_s=11)
    assert book.find("old") is None
    assert uids(book) == ["new"]
    book.end("new", now_s=12)
    book.forget(gone_before_s=13)
    assert NAME not in book.by_name
    assert len(book) == 0
