# SPDX-License-Identifier: Apache-2.0
"""Devices as ResourceSlices: attributes, values, taints, order, and when they are written."""

from copy import deepcopy
from typing import Any

import pytest

from hami_common.events.allocation import AllocationRecord
from hami_common.model.device import RECALL, Burst, Device, Profile
from hami_common.model.placement import ContainerShares, Share
from hami_nodeagent.core.slices import (
    health_of,
    holdings_of,
    monitor_write,
    next_write,
    pages_of,
    pci_bus_id,
)
from tests.unit.nodeagent.core.builders import NODE, device

FULL, UNHEALTHY, CORDONED = "gpu.hami.io/full", "gpu.hami.io/unhealthy", "gpu.hami.io/cordoned"
Obj = dict[str, Any]


def record(number: int, share: Share, **more: Any) -> AllocationRecord:
    given: dict[str, Any] = {
        "op": "reserve",
        "allocation_id": f"a-{number}",
        "node": NODE,
        "pod_uid": f"uid-{number}",
        "namespace": "default",
        "pod": f"pod-{number}",
        "containers": (ContainerShares(name="main", kind="app", shares=(share,)),),
        **more,
    }
    return AllocationRecord(**given)


def share(memory_mib: int, core_pct: int = 0, **more: Any) -> Share:
    return Share(vendor="nvidia", uuid="nvidia-0", memory_mib=memory_mib, core_pct=core_pct, **more)


def shown(known: Device, *records: AllocationRecord, **more: Any) -> Obj:
    ((found,),) = pages_of([known], holdings_of(records), **more)
    return found


def values(found: Obj) -> tuple[str, ...]:
    return tuple(found["capacity"][name]["value"] for name in ("memory", "cores", "slots"))


def taints(found: Obj) -> list[str]:
    return [one["key"] for one in found.get("taints", ())]


def test_memory_of_processes_without_an_allocation_is_not_offered_to_claims() -> None:
    assert values(shown(device(0, foreign_mib=256)))[0] == "744Mi"
    used = shown(device(0, foreign_mib=768), record(1, share(300)))
    assert (values(used)[0], taints(used)) == ("2Mi", [FULL])


def test_memory_that_pods_use_above_their_requests_is_not_offered_to_claims() -> None:
    used = (Burst(pod_uid="uid-a", memory_mib=256), Burst(pod_uid="uid-b", memory_mib=256))
    assert values(shown(device(0, bursts=used, foreign_mib=100)))[0] == "388Mi"


def test_device_has_what_selectors_and_requests_use() -> None:
    found = shown(
        device(0, bus_id="00000000:3B:00.0", numa=1), pcie_roots={"nvidia-0": "pci0000:3a"}
    )
    assert found == {
        "name": "nvidia-0",
        "attributes": {
            "uuid": {"string": "nvidia-0"},
            "vendor": {"string": "nvidia"},
            "type": {"string": "TEST"},
            "index": {"int": 0},
            "numaNode": {"int": 1},
            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:3a"},
        },
        "capacity": {
            "memory": {
                "value": "1000Mi",
                "requestPolicy": {
                    "default": "1000Mi",
                    "validRange": {"min": "1Mi", "step": "1Mi"},
                },
            },
            "cores": {
                "value": "100",
                "requestPolicy": {"default": "0", "validRange": {"min": "0"}},
            },
            "slots": {
                "value": "10",
                "requestPolicy": {"default": "1", "validRange": {"min": "1"}},
            },
        },
        "allowMultipleAllocations": True,
    }


def test_value_is_what_pods_leave_and_claims_do_not_lower_it() -> None:
    pod, claim = record(1, share(300, 20)), record(2, share(100, 10), origin="claim")
    assert values(shown(device(0), pod, claim)) == ("700Mi", "80", "9")
    gone = record(1, share(300, 20), op="release", containers=())
    assert values(shown(device(0), gone)) == ("1000Mi", "100", "10")


@pytest.mark.parametrize(
    ("records", "want"),
    [
        ([record(1, share(999))], ("2Mi", "100", "9")),
        ([record(1, share(1000))], ("2Mi", "100", "9")),
        ([record(1, share(10, exclusive=True))], ("2Mi", "100", "9")),
        ([record(1, share(10, 100))], ("990Mi", "0", "9")),
        (
            [record(1, share(10, 60)), record(2, share(10, 40), origin="claim")],
            ("990Mi", "40", "9"),
        ),
        ([record(n, share(1)) for n in range(10)], ("990Mi", "100", "1")),
        ([record(1, share(10, kind="online"))], ("990Mi", "100", "9")),
    ],
)
def test_device_that_takes_no_share_more_is_tainted_and_stays_legal(
    records: list[AllocationRecord], want: tuple[str, ...]
) -> None:
    found = shown(device(0), *records)
    assert values(found) == want
    assert taints(found) == [FULL]
    assert found["taints"][0]["effect"] == "NoSchedule"


def test_taint_of_a_fault_has_the_effect_of_the_setting() -> None:
    broken = device(0, healthy=False, cordoned=True)
    [[found]] = pages_of([broken], {}, fault_effect="NoExecute")
    effects = {one["key"]: one["effect"] for one in found["taints"]}
    assert effects == {UNHEALTHY: "NoExecute", CORDONED: "NoSchedule"}


def test_faults_and_cordons_are_taints() -> None:
    assert taints(shown(device(0, healthy=False, cordoned=True))) == [UNHEALTHY, CORDONED]
    assert taints(shown(device(0), faulty={"nvidia-0"})) == [UNHEALTHY]
    assert taints(shown(device(0, healthy=False), sound={"nvidia-0"})) == []


def test_health_is_of_all_devices_and_has_a_reason() -> None:
    known = [
        device(2, healthy=False, health_reason="x" * 2000),
        device(1, mode="mig"),
        device(0),
        device(3, healthy=False),
    ]
    found = health_of(known, faulty={"nvidia-0"}, sound={"nvidia-3"})
    assert [(one.name, one.is_healthy, one.message) for one in found] == [
        ("nvidia-0", False, "a fault"),
        ("nvidia-1", True, ""),
        ("nvidia-2", False, "x" * 1024),
        ("nvidia-3", True, ""),
    ]


def test_devices_are_in_the_order_of_vendor_and_index_and_others_are_left_out() -> None:
    known = [
        device(2),
        device(1, vendor="hygon"),
        device(0),
        device(3, mode="mig"),
        device(4, partitions=(Profile(name="1g", memory_mib=100),)),
        device(5, mode="mps"),
        device(6, overcommit=RECALL, capacity_mib=2000),
        device(7, vendor="ascend"),
    ]
    (page,) = pages_of(known, {})
    assert [one["name"] for one in page] == ["hygon-1", "nvidia-0", "nvidia-2"]


@pytest.mark.parametrize(
    ("text", "want"),
    [("0000:01:00.0", "0000:01:00.0"), ("3B:00.1", "0000:3b:00.1"), ("", ""), ("x", "")],
)
def test_bus_ids_are_as_the_kernel_writes_them(text: str, want: str) -> None:
    assert pci_bus_id(text) == want


def stored(page: tuple[Obj, ...], **changes: str) -> dict[str, Obj]:
    write = next_write(NODE, [page], {})
    assert write is not None
    found = deepcopy(write.slice)
    found["metadata"] = {**found["metadata"], "resourceVersion": "7"}
    for one in found["spec"]["devices"]:
        one["capacity"]["memory"]["value"] = changes.get("memory", "1000Mi")
        one["taints"] = [
            {**taint, "timeAdded": "2026-01-01T00:00:00Z"} for taint in one.get("taints", ())
        ]
    return {write.name: found}


def test_other_spelling_and_added_times_need_no_write() -> None:
    (page,) = pages_of([device(0, cordoned=True)], {})
    assert next_write(NODE, [page], stored(page, memory="1048576000")) is None
    assert next_write(NODE, [()], {"x": stored(())[f"{NODE}-gpu.hami.io-0"]}) is not None
    write = next_write(NODE, [page], stored(page, memory="1001Mi"))
    assert write is not None
    assert write.verb == "replace"
    assert write.slice["metadata"]["resourceVersion"] == "7"
    (taint,) = write.slice["spec"]["devices"][0]["taints"]
    assert taint["timeAdded"] == "2026-01-01T00:00:00Z"
    assert write.slice["spec"]["pool"]["generation"] == 1


def test_empty_slice_that_the_server_stores_without_devices_needs_no_write() -> None:
    known = stored(())
    del known[f"{NODE}-gpu.hami.io-0"]["spec"]["devices"]
    assert next_write(NODE, [()], known) is None


def test_monitor_has_a_pool_of_its_own_and_follows_the_setting() -> None:
    write = monitor_write("n1", None, is_on=True, owner_uid="u")
    assert write is not None
    assert (write.verb, write.name) == ("create", "n1-gpu.hami.io-monitor")
    assert write.slice["metadata"]["ownerReferences"][0]["uid"] == "u"
    spec = write.slice["spec"]
    assert spec["pool"]["name"] == "n1/hami-monitor"
    (device,) = spec["devices"]
    assert device == {"name": "monitor", "attributes": {"monitor": {"bool": True}}}
    assert monitor_write("n1", write.slice, is_on=True) is None
    assert monitor_write("n1", None, is_on=False) is None
    left = monitor_write("n1", write.slice, is_on=False)
    assert left is not None
    assert (left.verb, left.name) == ("delete", write.name)
