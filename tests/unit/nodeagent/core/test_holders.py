# SPDX-License-Identifier: Apache-2.0
"""Enforcers of each share at a given time."""

from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from hami_common.model.placement import Share
from hami_nodeagent.core.grants import GrantBook
from hami_nodeagent.core.holders import (
    Holder,
    enforcement_of,
    holders_of,
    is_whole,
    needs_library,
    unheld_vendors,
)
from hami_nodeagent.core.podbook import PodBook
from hami_nodeagent.core.podfacts import ClaimUse, PodFacts
from tests.unit.nodeagent.core.builders import GPU, NPU, Given, device

DEVICES = {one.uuid: one for one in (device(0), device(1), device(0, vendor="ascend"))}
DIVIDED = {"ascend-0": replace(DEVICES["ascend-0"], mode="vnpu")}
WHOLE = Share(vendor="nvidia", uuid="nvidia-0", memory_mib=1000, core_pct=100, exclusive=True)


def holders(*pods: Given, grants: GrantBook, gone: Collection[str] = ()) -> tuple[Holder, ...]:
    book = PodBook()
    for pod in pods:
        book.put(pod.facts, revision=1, now_s=0)
    for uid in gone:
        book.end(uid, now_s=0)
    return holders_of({pod.uid: pod.entry for pod in pods}, book, grants, DEVICES)


def with_shares(pod: Given, *shares: Share) -> Given:
    container = replace(pod.record.containers[0], shares=shares, priority=2)
    record = replace(pod.record, op="resize", containers=(container,))
    pod.record, pod.entry = record, replace(pod.entry, record=record)
    return pod


def test_every_device_of_a_granted_container_is_held() -> None:
    pod = Given("pod", ("main", "app", {GPU: 2, NPU: 1}), region_volumes={"main": "region"})
    grants = GrantBook([pod.grant("main", "a", "b"), pod.grant("main", "c", resource=NPU)])
    found = holders(pod, grants=grants)
    assert [(one.uuid, one.number, one.limit_mib, one.volume) for one in found] == [
        ("nvidia-0", 0, 10, "region"),
        ("ascend-0", 0, 10, "region"),
        ("nvidia-1", 1, 10, "region"),
    ]


def test_newest_record_counts() -> None:
    pod = with_shares(Given("pod"), Share(vendor="nvidia", uuid="nvidia-1", memory_mib=77))
    (found,) = holders(pod, grants=GrantBook([pod.grant("main", "a")]))
    assert (found.uuid, found.limit_mib, found.priority) == ("nvidia-1", 77, 2)


def test_no_share_is_held_without_grant_record_or_live_pod() -> None:
    pod = Given("pod")
    grants = GrantBook([pod.grant("main", "a")])
    assert len(holders(pod, grants=grants)) == 1
    assert holders(pod, grants=GrantBook()) == ()
    assert holders(pod, grants=grants, gone=[pod.uid]) == ()
    assert holders(Given("other"), grants=grants) == ()
    finished = Given("pod", finished=True)
    assert holders(finished, grants=grants) == ()
    released = Given("pod")
    released.entry = replace(
        released.entry, record=replace(released.record, op="release", containers=())
    )
    assert holders(released, grants=grants) == ()


def test_whole_devices_are_recognized_by_their_amounts() -> None:
    assert is_whole(WHOLE, DEVICES["nvidia-0"])
    assert not is_whole(replace(WHOLE, memory_mib=999), DEVICES["nvidia-0"])
    assert not is_whole(replace(WHOLE, exclusive=False), DEVICES["nvidia-0"])
    assert not is_whole(WHOLE, None)
    pod = with_shares(Given("pod"), WHOLE)
    (found,) = holders(pod, grants=GrantBook([pod.grant("main", "a")]))
    assert found.is_whole


def test_library_is_needed_for_any_share_that_is_not_whole() -> None:
    part = replace(WHOLE, uuid="nvidia-1", exclusive=False)
    both = (DEVICES["nvidia-0"], DEVICES["nvidia-1"])
    assert not needs_library([WHOLE], both[:1])
    assert needs_library([WHOLE, part], both)
    npu = Share(vendor="ascend", uuid="ascend-0", memory_mib=1)
    assert not needs_library([npu], [DEVICES["ascend-0"]])


def test_enforcement_follows_the_mounts() -> None:
    pod = Given("pod", ("a", "app", {GPU: 1}), ("b", "app", {GPU: 1}))
    kinds: list[Any] = []
    for library in ("", "libvgpu-1.so"):
        grants = GrantBook([pod.grant("a", "x"), pod.grant("b", "y", library=library)])
        kinds.append(enforcement_of(pod.record, grants))
    assert kinds == ["none", "libvgpu"]


def held_by(**words: str) -> Callable[[str], str]:
    return lambda vendor: words.get(vendor, "")


def test_partial_share_is_not_enforced_where_its_vendor_has_no_means() -> None:
    part = Share(vendor="ascend", uuid="ascend-0", memory_mib=10, profile="vir01")
    pod = with_shares(Given("pod"), part)
    assert unheld_vendors(pod.record, GrantBook(), DIVIDED, held_by()) == ("ascend",)
    assert unheld_vendors(pod.record, GrantBook(), DIVIDED, held_by(ascend="vNPU")) == ()


def test_part_that_no_partition_carries_is_not_held_by_partitions() -> None:
    soft = Share(vendor="ascend", uuid="ascend-0", memory_mib=10)
    for shares in ((soft,), (replace(soft, profile="vir01"), soft)):
        pod = with_shares(Given("pod"), *shares)
        found = unheld_vendors(pod.record, GrantBook(), DIVIDED, held_by(ascend="vNPU"))
        assert found == ("ascend",)


def test_whole_device_needs_no_enforcement() -> None:
    whole = replace(WHOLE, memory_mib=DEVICES["nvidia-0"].memory_mib)
    pod = with_shares(Given("pod"), whole)
    assert unheld_vendors(pod.record, GrantBook(), DEVICES, held_by()) == ()


def test_library_must_have_been_given_whatever_is_promised() -> None:
    pod = with_shares(Given("pod"), Share(vendor="nvidia", uuid="nvidia-1", memory_mib=10))
    promised = held_by(nvidia="libvgpu")
    without = GrantBook([pod.grant("main", "a")])
    assert unheld_vendors(pod.record, without, DEVICES, promised) == ("nvidia",)
    given = GrantBook([replace(pod.grant("main", "a"), library="libvgpu-1.so")])
    assert unheld_vendors(pod.record, given, DEVICES, promised) == ()


def test_soft_share_of_a_chip_is_enforced_by_the_library_of_its_grant() -> None:
    pod = with_shares(Given("pod"), Share(vendor="ascend", uuid="ascend-0", memory_mib=10))
    promised = held_by(ascend="vNPU, hami-vnpu-core")
    given = pod.grant("main", "a", resource=NPU)
    for library, expected in (("", ("ascend",)), ("hami-vnpu-core", ())):
        grants = GrantBook([replace(given, library=library)])
        assert unheld_vendors(pod.record, grants, DEVICES, promised) == expected
        assert enforcement_of(pod.record, grants) == "none"  # libvgpu has no part in it
        (holder,) = holders(pod, grants=grants)
        assert holder.needs_grant


def test_hardware_partition_is_always_enforced() -> None:
    part = Share(vendor="nvidia", uuid="nvidia-0", memory_mib=10, profile="1g.18gb", start=6)
    soft = Share(vendor="nvidia", uuid="nvidia-1", memory_mib=10)
    assert not needs_library([part], [device(0)])
    assert needs_library([part, soft], [device(0), device(1)])
    pod = with_shares(Given("pod"), part)
    assert unheld_vendors(pod.record, GrantBook([]), DEVICES, lambda _vendor: "") == ()


def test_share_of_a_pod_by_its_claim_is_held_by_the_containers_that_use_the_request() -> None:
    pod = Given("web", ("main", "app", {GPU: 1}), ("side", "app", {GPU: 1}))
    pod.entry = replace(pod.entry, record=replace(pod.record, claim="c"))
    uses = {
        "load": (ClaimUse(claim="c", request="main-nvidia"),),
        "main": (ClaimUse(claim="c", request="main-nvidia"),),
        "side": (ClaimUse(claim="c", request="side-nvidia"),),
        "other": (ClaimUse(claim="d", request="main-nvidia"),),
    }
    volumes = {"main": "old"}
    pod.facts = replace(pod.facts, claims_by_container=uses, region_volumes=volumes)
    thief = replace(pod.facts, uid="thief", name="thief")
    book = PodBook()
    for number, facts in enumerate((pod.facts, thief)):
        book.put(facts, revision=number + 1, now_s=0)
    grants = GrantBook(
        replace(pod.grant(name, library="lib"), claim="c") for name in ("main", "side")
    )
    found = holders_of({pod.uid: pod.entry}, book, grants, DEVICES)
    assert {(one.pod, one.container, one.owner) for one in found} == {
        ("web", "load", (pod.uid, "main")),
        ("web", "main", (pod.uid, "main")),
        ("web", "side", (pod.uid, "side")),
    }
    assert all(one.has_region and not one.volume for one in found)
    assert [one.container for one in found if one.is_borrowed] == ["load"]
    assert enforcement_of(pod.record, grants, pod.facts) == "libvgpu"


def test_pods_of_hami_are_compared_in_memory_only_and_never_warned() -> None:
    share = Share(vendor="nvidia", uuid="nvidia-0", memory_mib=300, core_pct=30)
    pod = with_shares(Given("pod"), share)
    record = replace(pod.record, origin="hami")
    pod.entry = replace(pod.entry, record=record)
    grants = GrantBook([pod.grant("main", "a", adopted=True)])
    (found,) = holders(pod, grants=grants)
    assert (found.limit_mib, found.core_pct) == (300, 0)
    assert enforcement_of(record, grants) == "hami"
    assert unheld_vendors(record, grants, DEVICES, lambda _: "") == ()


def test_prepared_claim_is_held_by_the_containers_that_use_the_request() -> None:
    claim = Given("claim", ("main", "app", {GPU: 1}), ("side", "app", {GPU: 1}))
    record = replace(claim.record, origin="claim")
    entries = {claim.uid: replace(claim.entry, record=record)}
    grants = GrantBook(
        replace(claim.grant(name, library="lib"), is_claim=True) for name in ("main", "side")
    )

    def user(name: str, *uses: ClaimUse, **more: Any) -> PodFacts:
        return PodFacts(
            uid=f"uid-{name}",
            namespace=more.pop("namespace", "default"),
            name=name,
            claims_by_container={"app": uses},
            **more,
        )

    book = PodBook()
    for number, pod in enumerate(
        (
            user("one", ClaimUse(claim="claim", request="main")),
            user("all", ClaimUse(claim="claim")),
            user("other", ClaimUse(claim="other", request="main")),
            user("elsewhere", ClaimUse(claim="claim"), namespace="elsewhere"),
            user("over", ClaimUse(claim="claim"), finished=True),
        )
    ):
        book.put(pod, revision=number + 1, now_s=0)
    found = holders_of(entries, book, grants, DEVICES)
    assert {(one.pod, one.container, one.owner[1]) for one in found} == {
        ("one", "app", "main"),
        ("all", "app", "main"),
        ("all", "app", "side"),
    }
    assert {one.owner for one in found} == {(claim.uid, "main"), (claim.uid, "side")}
    assert not any(one.is_borrowed for one in found)
    assert all(one.has_region and not one.volume for one in found)
    assert enforcement_of(record, grants) == "libvgpu"
    assert holders_of({}, book, grants, DEVICES) == ()
