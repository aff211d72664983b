# SPDX-License-Identifier: Apache-2.0
"""Memory that no share books, divided among containers with a limit above their request."""

from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.model.device import RECALL, Burst, Profile
from hami_common.model.placement import Share
from hami_nodeagent.core.bursts import (
    FALL_S,
    SETTLE_S,
    BurstBook,
    Grants,
    ShareKey,
    Want,
    booked_mib,
    bounds_of,
    left_mib,
    may_burst,
    reason_of,
    wanting,
)
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.holders import Holder, holders_of
from hami_nodeagent.core.podbook import PodBook
from tests.unit.nodeagent.core.builders import Given, device

A, B = ("uid-a", "main"), ("uid-b", "main")
GPU = "nvidia-0"


def want(request_mib: int, limit_mib: int, used_mib: int = 0, **more: Any) -> Want:
    return Want(request_mib=request_mib, limit_mib=limit_mib, used_mib=used_mib, **more)


@pytest.mark.parametrize(
    ("left", "wants", "bounds"),
    [
        (1000, [want(100, 500)], (500,)),
        (300, [want(100, 500)], (400,)),
        (0, [want(100, 500)], (100,)),
        (600, [want(100, 2000), want(200, 2000)], (400, 500)),  # equal parts of the rest
        (600, [want(100, 200), want(100, 2000)], (200, 600)),  # what one cannot take
        (601, [want(100, 2000), want(100, 2000)], (400, 400)),
        (1000, [want(100, 2000, used_mib=800), want(100, 2000)], (400, 400)),
        (500, [want(100, 2000, used_mib=800), want(100, 2000)], (100, 100)),  # use exceeds it
        (1000, [want(100, 2000, used_mib=90)], (1100,)),
        (1000, [want(100, 100)], (100,)),
        (1000, [want(100, 2000, leased_mib=800), want(100, 2000)], (400, 400)),
        (1000, [want(100, 500, leased_mib=10**6), want(100, 2000)], (500, 700)),  # a false figure
        (1000, [want(100, 500, used_mib=10**6), want(100, 2000)], (500, 700)),
        (1000, [], ()),
    ],
)
def test_rest_is_divided_in_equal_parts(
    left: int, wants: list[Want], bounds: tuple[int, ...]
) -> None:
    assert bounds_of(left, wants) == bounds


def test_bound_rises_only_into_memory_that_no_process_may_still_take() -> None:
    old = want(100, 2000, bound_mib=1100, granted_mib=1100)
    assert bounds_of(1000, [old, want(100, 2000)]) == (600, 100)
    settled = replace(old, bound_mib=600, granted_mib=600)
    assert bounds_of(1000, [settled, want(100, 2000)]) == (600, 600)


def test_lowered_bound_counts_until_every_process_has_read_it() -> None:
    grants = Grants()
    one: dict[ShareKey, Want] = {(A, GPU): want(100, 2000)}
    assert grants.divide({GPU: 1000}, one, 0.0) == {(A, GPU): 1100}
    both = {**one, (B, GPU): want(100, 2000)}
    assert grants.divide({GPU: 1000}, both, 1.0) == {(A, GPU): 600, (B, GPU): 100}
    assert grants.divide({GPU: 1000}, both, 1.0 + SETTLE_S / 2)[B, GPU] == 100
    assert grants.divide({GPU: 1000}, both, 1.0 + SETTLE_S) == {(A, GPU): 600, (B, GPU): 600}
    assert grants.divide({}, both, 2.0) == {(A, GPU): 100, (B, GPU): 100}


def test_bounds_of_the_previous_agent_count_after_a_restart() -> None:
    grants = Grants()
    grants.adopt((A, GPU), 1100, 10.0)
    wants = {(A, GPU): want(100, 2000), (B, GPU): want(100, 2000)}
    assert grants.divide({GPU: 1000}, wants, 10.0) == {(A, GPU): 600, (B, GPU): 100}


def test_memory_left_is_neither_booked_nor_reserved_nor_foreign() -> None:
    assert left_mib(device(0), 300, 0) == 700
    assert left_mib(device(0, capacity_mib=900), 300, 0) == 600
    assert left_mib(device(0, capacity_mib=900), 300, 100) == 600, "use of what is reserved"
    assert left_mib(device(0, capacity_mib=900), 300, 250) == 450
    assert left_mib(device(0), 1100, 0) == 0
    scaled = device(0, capacity_mib=500, foreign_mib=200)
    assert left_mib(scaled, 100, 200) == 200, "as the scheduler counts"


def test_booked_memory_includes_reservations_without_a_container_and_whole_shares() -> None:
    pod, gone = Given("a", ("main", "app", {"nvidia.com/gpu": 2})), Given("b")
    held = replace(gone.record, pod_uid="hold", held_for="preemption")
    released = replace(gone.entry, record=replace(gone.record, op="release"))
    entries = {pod.uid: pod.entry, "hold": replace(gone.entry, record=held), gone.uid: released}
    assert booked_mib(entries, PodBook()) == {"nvidia-0": 20, "nvidia-1": 10}


def test_pods_whose_records_are_missing_count_by_their_annotations() -> None:
    pod, book = Given("a"), PodBook()
    book.put(pod.facts, revision=1, now_s=0)
    assert booked_mib({}, book) == {"nvidia-0": 10}
    assert booked_mib({pod.uid: pod.entry}, book) == {"nvidia-0": 10}
    released = replace(pod.entry, record=replace(pod.record, op="release"))
    assert booked_mib({pod.uid: released}, book) == {}
    older = replace(released, record=replace(released.record, allocation_id="older"), sequence=0)
    assert booked_mib({pod.uid: older}, book) == {"nvidia-0": 10}
    book.put(replace(pod.facts, finished=True), revision=2, now_s=0)
    assert booked_mib({}, book) == {}


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ({}, True),
        ({"healthy": False, "cordoned": True}, True),
        ({"capacity_mib": 1001}, False),
        ({"overcommit": RECALL}, False),
        ({"mode": "mps"}, False),
        ({"mode": "timeslice"}, False),
        ({"partitions": (Profile(name="1g", memory_mib=10),)}, False),
        ({"vendor": "ascend"}, False),
    ],
)
def test_only_devices_shared_by_the_library_give_more(more: dict[str, Any], *, may: bool) -> None:
    assert may_burst(device(0, **more)) == may


def holders(share: Share, *, origin: str = "", **facts: Any) -> tuple[Holder, ...]:
    pod = Given("a", **{"region_volumes": {"main": "region"}, **facts})
    containers = (replace(pod.record.containers[0], shares=(share,)),)
    record = replace(pod.record, containers=containers, origin=origin)
    book, grants = PodBook(), GrantBook([pod.grant("main", "id")])
    book.put(pod.facts, revision=1, now_s=0)
    entries = {pod.uid: replace(pod.entry, record=record)}
    return holders_of(entries, book, grants, {GPU: device(0)})


def test_only_limited_shares_with_a_limit_above_the_request_are_granted_more() -> None:
    share = Share(vendor="nvidia", uuid=GPU, memory_mib=100, memory_limit_mib=500)
    (holder,) = wanting(holders(share), PodBook()).values()
    assert (holder.limit_mib, holder.memory_limit_mib, holder.most_mib) == (100, 500, 500)
    assert not wanting(holders(share, origin="hami"), PodBook())
    assert not wanting(holders(share, region_volumes={}), PodBook())
    assert not wanting(holders(replace(share, memory_limit_mib=0)), PodBook())
    assert not wanting(holders(replace(share, profile="1g.10gb")), PodBook())


def test_init_containers_have_no_part_once_the_application_has_started() -> None:
    share = Share(vendor="nvidia", uuid=GPU, memory_mib=100, memory_limit_mib=500)
    asked = {"nvidia.com/gpu": 1}
    volumes = {"setup": "one", "main": "two"}
    pod = Given("a", ("setup", "init", asked), ("main", "app", asked), region_volumes=volumes)
    shares = tuple(replace(one, shares=(share,)) for one in pod.record.containers)
    entries = {pod.uid: replace(pod.entry, record=replace(pod.record, containers=shares))}
    book, grants = PodBook(), GrantBook([pod.grant("setup", "x"), pod.grant("main", "y")])

    def names(*started: str) -> set[str]:
        book.put(replace(pod.facts, started=frozenset(started)), revision=0, now_s=0)
        every = holders_of(entries, book, grants, {GPU: device(0)})
        return {owner[1] for owner, _ in wanting(every, book)}

    assert names() == names("setup") == {"setup", "main"}
    assert names("setup", "main") == {"main"}


def reported(book: BurstBook, now_s: float, **used_mib: int) -> dict[str, int]:
    wants = {
        ((f"uid-{name}", "main"), GPU): want(1000, 3000, used_mib=mib)
        for name, mib in used_mib.items()
    }
    found = book.look(wants, dict.fromkeys(wants, 3000), now_s)
    return {one.pod_uid: one.memory_mib for one in found.get(GPU, ())}


def test_rise_is_reported_at_once_and_a_fall_later() -> None:
    book = BurstBook()
    assert reported(book, 0.0, a=1000) == {}
    assert reported(book, 0.1, a=1001) == {"uid-a": 256}
    assert reported(book, 0.2, a=1257, b=2000) == {"uid-a": 512, "uid-b": 1024}
    assert reported(book, 0.3, a=1000, b=2000) == {"uid-a": 512, "uid-b": 1024}
    assert reported(book, 0.2 + FALL_S / 2, a=1200, b=2000) == {"uid-a": 512, "uid-b": 1024}
    assert reported(book, 0.2 + FALL_S, a=1000, b=2000) == {"uid-a": 256, "uid-b": 1024}
    assert reported(book, 0.3 + FALL_S, a=1000) == {"uid-a": 256}, "the pod has ended"
    assert reported(book, 1.0 + 2 * FALL_S, a=1000) == {}


def test_grown_request_covers_what_was_reported() -> None:
    book = BurstBook()
    for now_s, request_mib, burst in ((0.0, 1000, 1500), (0.1, 2000, 500), (0.2, 3000, 0)):
        wants: dict[ShareKey, Want] = {(A, GPU): want(request_mib, 3000, used_mib=2500)}
        found = book.look(wants, {(A, GPU): max(2500, request_mib)}, now_s)
        assert found.get(GPU, ()) == (
            ((Burst(pod_uid="uid-a", memory_mib=burst),)) if burst else ()
        )


def test_memory_that_is_only_leased_is_not_reported() -> None:
    wants = {(A, GPU): want(1000, 3000, used_mib=1000, leased_mib=1064)}
    assert BurstBook().look(wants, dict.fromkeys(wants, 3000), 0.0) == {}


def test_containers_of_a_pod_are_summed_up_and_use_beyond_the_limit_is_none() -> None:
    wants = {
        (("uid-a", "one"), GPU): want(100, 500, used_mib=400),
        (("uid-a", "two"), GPU): want(100, 500, used_mib=900),
        (("uid-a", "two"), "nvidia-1"): want(100, 500, used_mib=101),
    }
    assert BurstBook().look(wants, dict.fromkeys(wants, 500), 0.0) == {
        GPU: (Burst(pod_uid="uid-a", memory_mib=768),),
        "nvidia-1": (Burst(pod_uid="uid-a", memory_mib=256),),
    }


@pytest.mark.parametrize(
    ("used", "bound", "mib"), [(150, 190, 90), (150, 900, 256), (400, 100, 300)]
)
def test_amount_is_rounded_up_to_the_bound_at_most(used: int, bound: int, mib: int) -> None:
    wants: dict[ShareKey, Want] = {(A, GPU): want(100, 900, used_mib=used)}
    found = BurstBook().look(wants, {(A, GPU): bound}, 0.0)
    assert found == {GPU: (Burst(pod_uid="uid-a", memory_mib=mib),)}


def test_reason_names_the_sums() -> None:
    assert reason_of(device(0), 900, 0, 1) == "900 of 1000 MiB are booked"
    assert reason_of(device(0), 900, 50, 2) == (
        "900 of 1000 MiB are booked, 50 MiB are in foreign use, 2 containers share the rest"
    )
    assert "no memory above requests" in reason_of(device(0, mode="mps"), 1, 0, 1)
    assert "no memory above requests" in reason_of(None, 1, 0, 1)
