# SPDX-License-Identifier: Apache-2.0
"""Timeline of a node's devices."""

from typing import Any

from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.breach import BreachRecord
from hami_common.events.decision import AdmissionRecord, DecisionRecord, RefusalClass
from hami_common.events.inventory import NodeDevices
from hami_common.events.partition import PartitionRecord
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_registry.core import timeline
from hami_registry.core.timeline import PodFold, Timeline, TimelineFold, slices_of


def allocation(
    op: str, time_s: float, pod: str = "a", mib: int = 100, *, uuid: str = "A"
) -> AllocationRecord:
    shares = (Share(vendor="nvidia", uuid=uuid, memory_mib=mib, core_pct=10),)
    return AllocationRecord(
        op=op,  # type: ignore[arg-type]  # test data
        allocation_id=f"id-{pod}",
        node="n",
        pod_uid=f"uid-{pod}",
        namespace=f"team-{pod}",
        pod=pod,
        containers=()
        if op == "release"
        else (ContainerShares(name="main", kind="app", shares=shares),),
        time_s=time_s,
        reason="pod-gone" if op == "release" else "",
    )


def devices(**more: Any) -> NodeDevices:
    one = Device(
        uuid="A", vendor="nvidia", index=0, type="H200", memory_mib=9, capacity_mib=9, **more
    )
    return NodeDevices(
        node="n", vendor="nvidia", boot_id="1", seq=1, time_s=0, config_generation=1, devices=(one,)
    )


def answer(fold: TimelineFold, **more: object) -> Timeline:
    return fold.timeline(**{"held": (), "until_s": 1000.0, **more})  # type: ignore[arg-type]  # test data


def test_slices_of_a_device_over_reserve_resize_and_release() -> None:
    fold = TimelineFold("n", from_s=0)
    fold.allocation_seen(allocation("reserve", 10), 1, 0)
    fold.allocation_seen(allocation("reserve", 12, "b", uuid="B"), 2, 0)
    fold.allocation_seen(allocation("resize", 20, mib=300), 3, 0)
    fold.allocation_seen(allocation("release", 30), 4, 0)
    found = answer(fold)
    assert [(one.pod, one.begin_s, one.end_s, one.memory_mib) for one in found.slices] == [
        ("a", 10, 20, 100),
        ("b", 12, None, 100),
        ("a", 20, 30, 300),
    ]
    assert [(one.what, one.uuids, one.memory_mib) for one in found.entries] == [
        ("reserve", ("A",), 100),
        ("reserve", ("B",), 100),
        ("resize", ("A",), 300),
        ("release", ("A",), 300),
    ]
    assert found.entries[-1].text == "pod-gone"
    assert [one.pod for one in answer(fold, uuid="B").slices] == ["b"]
    assert len(answer(fold, uuid="A").entries) == 3


def test_slices_before_the_start_are_known_only_while_they_last() -> None:
    fold = TimelineFold("n", from_s=100)
    fold.allocation_seen(allocation("reserve", 10), 1, 0)
    fold.allocation_seen(allocation("reserve", 11, "b"), 2, 0)
    fold.allocation_seen(allocation("release", 50), 3, 0)
    fold.allocation_seen(allocation("release", 120, "b"), 4, 0)
    found = answer(fold)
    assert [(one.pod, one.begin_s, one.end_s) for one in found.slices] == [("b", 11, 120)]
    assert [(one.pod, one.what) for one in found.entries] == [("b", "release")]


def test_allocation_older_than_the_stream_comes_from_the_read_model() -> None:
    def held(pod: str) -> list[timeline.Slice]:
        record = allocation("reserve", 1, pod)
        return slices_of(
            record.containers,
            begin_s=1,
            namespace=record.namespace,
            pod=pod,
            pod_uid=record.pod_uid,
            allocation_id=record.allocation_id,
            origin="",
        )

    fold = TimelineFold("n", from_s=100)
    fold.allocation_seen(allocation("reserve", 110, "b"), 1, 0)
    fold.allocation_seen(allocation("release", 120, "c"), 2, 0)
    found = answer(fold, held=[*held("a"), *held("b"), *held("c")])
    assert [(one.pod, one.begin_s, one.end_s) for one in found.slices] == [
        ("a", 1, None),
        ("b", 110, None),
    ]


def state(pod: str, word: str = "running") -> StateRecord:
    return StateRecord(
        state=word,  # type: ignore[arg-type]  # test data
        allocation_id=f"id-{pod}",
        node="n",
        pod_uid=f"uid-{pod}",
        namespace=f"team-{pod}",
        pod=pod,
        ledger_seq=3,
        code="device-mismatch" if word == "failed" else "",
        reason="no" if word == "failed" else "",
    )


def test_state_has_the_devices_of_its_allocation_in_any_order() -> None:
    fold = TimelineFold("n", from_s=0)
    fold.state_seen(state("a"), 1, 11)
    fold.allocation_seen(allocation("reserve", 10), 2, 0)
    fold.allocation_seen(allocation("release", 12), 3, 0)
    fold.state_seen(state("a", "failed"), 4, 13)
    fold.state_seen(state("b"), 5, 14)
    older = allocation("reserve", 1, "b", uuid="B")
    held = slices_of(
        older.containers,
        begin_s=1,
        namespace=older.namespace,
        pod=older.pod,
        pod_uid=older.pod_uid,
        allocation_id=older.allocation_id,
        origin="",
    )
    found = answer(fold, held=held)
    assert [(one.what, one.pod, one.uuids) for one in found.entries] == [
        ("reserve", "a", ("A",)),
        ("running", "a", ("A",)),
        ("release", "a", ("A",)),
        ("failed", "a", ("A",)),
        ("running", "b", ("B",)),
    ]
    assert [one.what for one in answer(fold, held=held, uuid="B").entries] == ["running"]
    late = TimelineFold("n", from_s=12)
    late.state_seen(state("a"), 1, 11)
    assert answer(late).entries == ()


def test_changes_of_devices_are_differences() -> None:
    fold = TimelineFold("n", from_s=0)
    fold.devices_seen(devices(), 1, 1)
    fold.devices_seen(devices(healthy=False, health_reason="XID 79"), 2, 2)
    fold.devices_seen(devices(cordoned=True), 3, 3)
    fold.devices_seen(devices(mode="mig", slots=7), 4, 4)
    fold.devices_seen(replace(devices(), devices=()), 5, 5)
    fold.devices_seen(devices(), 6, 6)
    assert [(one.time_s, one.what, one.text) for one in answer(fold).entries] == [
        (2, "unhealthy", "XID 79"),
        (3, "healthy", ""),
        (3, "cordoned", ""),
        (4, "uncordoned", ""),
        (4, "mode", "soft to mig"),
        (4, "capacity", "10 slots to 7 slots"),
        (5, "vanished", "H200"),
        (6, "appeared", "H200"),
    ]


def partition(pod: str) -> PartitionRecord:
    return PartitionRecord(
        change="created",
        node="n",
        vendor="nvidia",
        uuid="A",
        boot_id="1",
        seq=1,
        time_s=20,
        profile="1g",
        namespace=f"team-{pod}",
        pod=pod,
    )


def breach(kind: str, pod: str = "a") -> BreachRecord:
    return BreachRecord(
        kind=kind,  # type: ignore[arg-type]  # test data
        node="n",
        vendor="nvidia",
        uuid="A",
        boot_id="1",
        seq=1,
        time_s=30,
        namespace=f"team-{pod}",
        pod=pod,
        limit_mib=10,
        used_mib=20,
        limit_core_pct=30,
        core_pct=80,
        action="evict",
    )


def test_tenant_sees_slices_of_others_without_names_and_no_entries_of_them() -> None:
    fold = TimelineFold("n", from_s=0)
    fold.devices_seen(devices(), 1, 1)
    fold.devices_seen(devices(cordoned=True), 2, 2)
    fold.allocation_seen(allocation("reserve", 10), 3, 0)
    fold.allocation_seen(allocation("reserve", 11, "b", 700), 4, 0)
    fold.allocation_seen(allocation("release", 12, "b", 700), 5, 0)
    fold.state_seen(state("a", "failed"), 6, 13)
    fold.partition_seen(partition("b"), 7, 0)
    fold.breach_seen(breach("memory"), 8, 0)
    fold.breach_seen(breach("compute", "b"), 9, 0)
    found = answer(fold, namespace="team-a")
    assert [(one.namespace, one.pod, one.memory_mib, one.reason) for one in found.slices] == [
        ("team-a", "a", 100, ""),
        ("", "", 700, ""),
    ]
    assert (found.slices[1].pod_uid, found.slices[1].allocation_id) == ("", "")
    assert [(one.kind, one.what, one.text, one.uuids) for one in found.entries] == [
        ("device", "cordoned", "", ("A",)),
        ("allocation", "reserve", "", ("A",)),
        ("state", "failed", "device-mismatch: no", ("A",)),
        ("breach", "memory", "20 MiB of 10 MiB: evicted", ("A",)),
    ]
    assert "team-b" not in repr(found)


def test_long_answers_are_cut_and_marked() -> None:
    fold = TimelineFold("n", from_s=0)
    for at in range(timeline.ENTRIES_MOST + 1):
        fold.partition_seen(partition("a"), at, 0)
    found = answer(fold)
    assert len(found.entries) == timeline.ENTRIES_MOST
    assert "only the newest 5000" in found.cut
    assert answer(fold, cut="bound").cut == "bound"


def test_events_of_a_pod_keep_its_last_shares() -> None:
    fold = PodFold()
    fold.admission_seen(
        AdmissionRecord(
            namespace="team-a",
            pod="a",
            operation="CREATE",
            request_uid="r",
            time_s=1,
            allowed=False,
            message="no",
        ),
        1,
    )
    refused = DecisionRecord(
        verb="filter",
        namespace="team-a",
        pod="a",
        pod_uid="uid-a",
        time_s=2,
        verdict="refused",
        snapshot_id="1.1",
        refusals=(RefusalClass(code="x", text="too large", count=1),),
    )
    fold.decision_seen(refused, 2)
    fold.allocation_seen(allocation("reserve", 3), 3, 0)
    fold.allocation_seen(allocation("release", 9), 5, 0)
    fold.breach_seen(breach("compute"), 4, 0)
    entries, cut = fold.entries()
    assert [(one.kind, one.what, one.text) for one in entries] == [
        ("admission", "denied", "no"),
        ("decision", "filter: refused", "too large"),
        ("allocation", "reserve", ""),
        ("allocation", "release", "pod-gone"),
        ("breach", "compute", "80 % of 30 %: evicted"),
    ]
    assert cut == ""
    assert fold.containers[0].shares[0].memory_mib == 100
