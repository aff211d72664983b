# SPDX-License-Identifier: Apache-2.0
"""Pods that have left their partitions, as kubelet's list and the grants show."""

from msgspec.structs import replace

from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.partitions import have_left
from hami_nodeagent.core.podbook import PodBook
from tests.unit.nodeagent.core.builders import GPU, Given


def test_pod_that_kubelet_still_lists_has_not_left() -> None:
    pod = Given("pod")
    grants = GrantBook([pod.grant("main", "x")])
    assert have_left(PodBook(), grants, [pod.listed({"main": {GPU: {"x"}}})]) == frozenset()
    assert have_left(PodBook(), grants, [pod.listed({"main": {GPU: {"y"}}})]) == {pod.uid}
    assert have_left(PodBook(), grants, []) == {pod.uid}


def test_successor_of_the_same_name_with_the_same_ids_is_another_pod() -> None:
    pod = Given("pod")
    first = pod.grant("main", "x", time_s=1.0)
    second = replace(first, pod_uid="successor", time_s=2.0)
    listing = [pod.listed({"main": {GPU: {"x"}}})]
    assert have_left(PodBook(), GrantBook([first, second]), listing) == {pod.uid}


def test_id_that_kubelet_gives_twice_ends_no_grant() -> None:
    ending, other = Given("ending"), Given("other")
    grants = GrantBook(
        [ending.grant("main", "x", time_s=1.0), other.grant("main", "x", time_s=2.0)]
    )
    listing = [ending.listed({"main": {GPU: {"x"}}}), other.listed({"main": {GPU: {"x"}}})]
    assert have_left(PodBook(), grants, listing) == frozenset()
