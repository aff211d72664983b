# SPDX-License-Identifier: Apache-2.0
"""Cards in MIG mode as ResourceSlices: a device for each place, over counters of each card."""

from typing import Any

import pytest
from msgspec.structs import replace

from hami_common.dra.names import partition_name
from hami_common.events.allocation import CLAIM, AllocationRecord
from hami_common.model.device import Device
from hami_common.model.placement import Share
from hami_nodeagent.core.partitiondevices import overlap
from hami_nodeagent.core.slices import holdings_of, next_write, pages_of
from hami_sim.apiserver.dra import check_slice, default_slice
from tests.support.mig import CHIPS, card
from tests.unit.nodeagent.core.builders import NODE, device
from tests.unit.nodeagent.core.test_slices import record

Obj = dict[str, Any]
H200 = card("H200-141")


def share(profile: str, start: int, **more: Any) -> Share:
    (size,) = (one for one in H200.partitions if one.name == profile)
    given: dict[str, Any] = {"memory_mib": size.memory_mib, "core_pct": size.core_pct, **more}
    return Share(vendor="nvidia", uuid="GPU-0", profile=profile, start=start, **given)


def counters(*records: AllocationRecord, known: Device = H200) -> dict[str, str]:
    """Return the amounts that the slices offer of the card."""
    *_, (found,) = pages_of([known], holdings_of(records))
    return {name: counter["value"] for name, counter in found["counters"].items()}


def free(found: dict[str, str]) -> list[int]:
    return [at for at in range(8) if found[f"memory-slice-{at}"] == "1"]


def test_place_has_what_selectors_and_requests_use() -> None:
    devices, _ = pages_of([H200], {}, pcie_roots={"GPU-0": "pci0000:3a"})
    shown = {one["name"]: one for one in devices}
    found = shown[partition_name("GPU-0", "2g.35gb", 2)]
    assert found["attributes"]["profile"] == {"string": "2g.35gb"}
    assert found["attributes"]["start"] == {"int": 2}
    assert found["attributes"]["parentUUID"] == found["attributes"]["uuid"] == {"string": "GPU-0"}
    assert found["attributes"]["resource.kubernetes.io/pcieRoot"] == {"string": "pci0000:3a"}
    assert found["capacity"] == {"memory": {"value": "33024Mi"}, "cores": {"value": "24"}}
    assert "allowMultipleAllocations" not in found
    ((consumed),) = found["consumesCounters"]
    assert {name: one["value"] for name, one in consumed["counters"].items()} == {
        "memory-slice-2": "1",
        "memory-slice-3": "1",
        "x": "2",
        "memory": "33024Mi",
        "cores": "24",
        "slots": "1",
        "decoders": "2",
        "jpeg": "2",
    }


@pytest.mark.parametrize("chip", CHIPS)
def test_slices_of_every_card_are_legal_and_consume_counters_that_exist(chip: str) -> None:
    known = [card(chip, number) for number in range(10)] + [device(99)]
    pages = pages_of(known, {})
    sets: dict[str, Obj] = {}
    consumed: list[Obj] = []
    stored: dict[str, Obj] = {}
    while (write := next_write(NODE, pages, stored)) is not None:
        default_slice(write.slice)
        assert not check_slice(write.slice)
        stored[write.name] = write.slice
        spec = write.slice["spec"]
        sets |= {one["name"]: one["counters"] for one in spec.get("sharedCounters") or ()}
        consumed += [
            one
            for shown in spec.get("devices") or ()
            for one in shown.get("consumesCounters") or ()
        ]
    assert len(sets) == 10
    assert len(consumed) == 10 * sum(len(one.starts) for one in known[0].partitions)
    for one in consumed:
        assert one["counters"].keys() <= sets[one["counterSet"]].keys()


def test_counters_are_what_pods_leave_and_claims_do_not_lower_them() -> None:
    pod, claim = record(1, share("3g.71gb", 4)), record(2, share("1g.18gb", 0), origin=CLAIM)
    left = counters(pod, claim)
    assert free(left) == [0, 1, 2, 3]
    assert (left["x"], left["cores"], left["slots"], left["decoders"]) == ("4", "55", "9", "4")
    assert left["memory"] == f"{H200.capacity_mib - 71_168}Mi"
    gone = record(1, share("3g.71gb", 4), op="release", containers=())
    assert counters(gone, claim) == counters()
    assert free(counters()) == list(range(8))


@pytest.mark.parametrize(
    "odd",
    [
        Share(vendor="nvidia", uuid="GPU-0", memory_mib=1000),
        share("7g.141gb", 0, exclusive=True),
        replace(share("1g.18gb", 0), profile="1g.10gb"),
        share("1g.18gb", 0, kind="online"),
    ],
)
def test_card_that_is_held_otherwise_than_by_its_partitions_has_none_left(odd: Share) -> None:
    assert counters(record(1, odd))["x"] == "0"


def test_faults_and_cordons_taint_each_place() -> None:
    devices, _ = pages_of([replace(H200, cordoned=True)], {}, faulty={"GPU-0"})
    keys = {tuple(taint["key"] for taint in one["taints"]) for one in devices}
    assert keys == {("gpu.hami.io/unhealthy", "gpu.hami.io/cordoned")}


def test_only_the_slice_with_counters_is_written_when_pods_come_and_go() -> None:
    known = [H200, card("H200-141", 1), card("H200-141", 2)]
    pages = pages_of(known, {})
    stored: dict[str, Obj] = {}
    while (write := next_write(NODE, pages, stored)) is not None:
        default_slice(write.slice)
        write.slice["metadata"]["resourceVersion"] = "1"
        stored[write.name] = write.slice
    fresh = pages_of(known, holdings_of([record(1, share("3g.71gb", 4))]))
    change = next_write(NODE, fresh, stored)
    assert change is not None
    assert change.verb == "replace"
    assert "sharedCounters" in change.slice["spec"]
    assert change.slice["spec"]["pool"]["generation"] == 1
    stored[change.name] = change.slice
    assert next_write(NODE, fresh, stored) is None


def test_position_that_is_given_twice_is_named() -> None:
    parts = {"3g.71gb@4": 1, "1g.18gb@3": 1}
    assert overlap(H200, parts) == ""
    assert overlap(H200, {**parts, "1g.18gb@6": 1}) == "position 6"
    assert overlap(H200, {"1g.18gb@3": 2}) == "position 3"
