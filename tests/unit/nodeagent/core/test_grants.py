# SPDX-License-Identifier: Apache-2.0
"""The book of grants and its comparison with kubelet's own."""

from msgspec.structs import replace

from hami_common.events.codec import decode, encode
from hami_nodeagent.core.grants import Comparison, Grant, GrantBook, GrantFile, Shown, compare
from tests.unit.nodeagent.core.builders import GPU, NPU, Container, Given

BOTH: tuple[Container, ...] = (("fetch", "init", {GPU: 1}), ("main", "app", {GPU: 1, NPU: 1}))


def shown(pod: Given, *ids: str, container: str = "main", resource: str = GPU) -> Shown:
    return Shown(pod_uid=pod.uid, container=container, resource=resource, ids=frozenset(ids))


def test_book_holds_one_grant_per_container_and_resource() -> None:
    pod, other = Given("pod", *BOTH), Given("other")
    book = GrantBook([pod.grant("main", "a"), other.grant("main", "b")])
    book.add(pod.grant("main", "c"))
    book.add(pod.grant("main", "n", resource=NPU))
    assert len(book) == 3
    assert book.find(pod.uid, "main", GPU) == pod.grant("main", "c")
    assert book.find(pod.uid, "fetch", GPU) is None
    assert set(book.of_pod(pod.uid)) == {
        pod.grant("main", "c"),
        pod.grant("main", "n", resource=NPU),
    }
    assert book.of_pod("nobody") == ()
    assert book.pod_uids() == {pod.uid, other.uid}
    assert book.held_ids(GPU) == {"b", "c"}


def test_ids_may_belong_to_several_containers_of_a_pod() -> None:
    pod = Given("pod", *BOTH)
    book = GrantBook([pod.grant("fetch", "a", "b"), pod.grant("main", "b", "a")])
    assert {grant.container for grant in book.of_ids(GPU, ["b", "a"])} == {"fetch", "main"}
    assert book.of_ids(GPU, ["a"]) == ()
    assert book.of_ids(NPU, ["a", "b"]) == ()


def test_only_the_exact_grant_is_removed() -> None:
    pod = Given("pod", *BOTH)
    first, second = pod.grant("main", "a"), pod.grant("main", "b")
    book = GrantBook([first])
    book.add(second)
    book.remove(first)
    assert list(book) == [second]
    book.remove(second)
    assert len(book) == 0
    book.remove(second)
    assert book.pod_uids() == set()


def test_pods_are_dropped_whole() -> None:
    pod, other = Given("pod", *BOTH), Given("other")
    book = GrantBook([pod.grant("fetch", "a"), pod.grant("main", "a"), other.grant("main", "b")])
    assert book.drop_pod(pod.uid) == 2
    assert book.drop_pod(pod.uid) == 0
    assert list(book) == [other.grant("main", "b")]


def test_copy_with_a_grant_leaves_the_book_alone() -> None:
    pod = Given("pod")
    book = GrantBook()
    assert len(book.with_grant(pod.grant("main", "a"))) == 1
    assert len(book) == 0


def test_book_survives_the_disk() -> None:
    pod = Given("pod", *BOTH)
    book = GrantBook([pod.grant("fetch", "a", uuids=("u",), time_s=1.5), pod.grant("main", "a")])
    again = GrantBook(decode(encode(book.to_file()), GrantFile, what="grants").grants)
    assert list(again) == list(book)


def test_grants_by_claims_are_kept_with_the_claims_and_contest_no_ids() -> None:
    one, two = Given("one"), Given("two")
    by_claim = replace(one.grant("main"), resource="gpu.hami.io/nvidia", claim="c")
    book = GrantBook([by_claim, two.grant("main", "a")])
    assert book.to_file().grants == (two.grant("main", "a"),)
    assert book.is_by_claim(one.uid)
    assert not book.is_by_claim(two.uid)
    assert compare(book, [shown(two, "a")], [GPU]) == Comparison()


def test_equal_books_agree() -> None:
    pod = Given("pod", *BOTH)
    book = GrantBook([pod.grant("fetch", "a"), pod.grant("main", "a")])
    assert compare(book, [shown(pod, "a")], {GPU}) == Comparison()


def test_ids_in_another_pods_container_condemn_both() -> None:
    one, two = Given("one"), Given("two")
    book = GrantBook([one.grant("main", "a"), two.grant("main", "b")])
    found = compare(book, [shown(one, "b"), shown(two, "a")], {GPU})
    assert {mismatch.pod_uid for mismatch in found.mismatches} == {one.uid, two.uid}
    assert "granted to container main of pod default/two" in found.mismatches[0].text
    assert found.unknown == ()


def test_ids_of_a_pod_that_waits_elsewhere_condemn_both() -> None:
    granted, holder = Given("granted"), Given("holder")
    book = GrantBook([granted.grant("main", "a")])
    found = compare(book, [shown(holder, "a"), shown(granted)], {GPU})
    assert {mismatch.pod_uid for mismatch in found.mismatches} == {granted.uid, holder.uid}
    assert found.unconfirmed == (granted.grant("main", "a"),)


def test_ids_of_a_deleted_pod_may_be_reused() -> None:
    gone, pod = Given("gone"), Given("pod")
    book = GrantBook([gone.grant("main", "a")])
    found = compare(book, [shown(pod, "a")], {GPU})
    assert found == Comparison(unknown=(shown(pod, "a"),))


def test_other_ids_than_granted_are_a_mismatch_of_that_container() -> None:
    pod = Given("pod")
    found = compare(GrantBook([pod.grant("main", "a")]), [shown(pod, "z")], {GPU})
    assert [mismatch.text for mismatch in found.mismatches] == ["kubelet gave it z, granted were a"]


def test_containers_of_one_pod_that_swapped_ids_are_noticed() -> None:
    pod = Given("pod", ("a", "app", {GPU: 1}), ("b", "app", {GPU: 1}))
    book = GrantBook([pod.grant("a", "1"), pod.grant("b", "2")])
    found = compare(book, [shown(pod, "2", container="a"), shown(pod, "1", container="b")], {GPU})
    assert {mismatch.container for mismatch in found.mismatches} == {"a", "b"}


def test_grants_that_kubelet_lost_are_unconfirmed() -> None:
    pod = Given("pod")
    grant: Grant = pod.grant("main", "a")
    assert compare(GrantBook([grant]), [shown(pod)], {GPU}) == Comparison(unconfirmed=(grant,))
    assert compare(GrantBook(), [shown(pod)], {GPU}) == Comparison()


def test_other_resources_are_ignored() -> None:
    pod = Given("pod")
    assert compare(GrantBook(), [shown(pod, "a", resource="example.com/x")], {GPU}) == Comparison()
