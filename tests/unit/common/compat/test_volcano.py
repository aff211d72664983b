# SPDX-License-Identifier: Apache-2.0
"""Annotations for Volcano, read back as its plugin deviceshare reads them."""

from datetime import UTC, datetime

from hami_common.compat import volcano
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import ContainerKind


def device(index: int, **more: object) -> Device:
    fields = {"memory_mib": 24576, "capacity_mib": 24576, "type": "NVIDIA A30", **more}
    return Device(uuid=f"GPU-{index}", vendor="nvidia", index=index, **fields)  # type: ignore[arg-type]


def shares(
    name: str, *given: tuple[str, int, int], kind: ContainerKind = "app", vendor: str = "nvidia"
) -> ContainerShares:
    return ContainerShares(
        name=name,
        kind=kind,
        shares=tuple(
            Share(vendor=vendor, uuid=uuid, memory_mib=memory_mib, core_pct=core_pct)
            for uuid, memory_mib, core_pct in given
        ),
    )


def of_pod(*containers: ContainerShares, unit_mib: int = 1) -> dict[str, str]:
    return volcano.of_pod(containers, vendor="nvidia", node="n1", unit_mib=unit_mib)


def test_devices_are_registered_in_the_order_of_their_index() -> None:
    """Volcano's number of a device is its place in the list, and it needs six fields."""
    found = volcano.of_node([device(1), device(0, slots=4)], unit_mib=1, time_s=0)
    assert found[volcano.REGISTER] == (
        "GPU-0,4,24576,NVIDIA-NVIDIA A30,true,hami-core:"
        "GPU-1,10,24576,NVIDIA-NVIDIA A30,true,hami-core:"
    )
    assert volcano.of_node([], unit_mib=1, time_s=0) == {}


def test_device_that_takes_no_pods_is_registered_without_shares() -> None:
    devices = [device(0, healthy=False), device(1, cordoned=True), device(2)]
    entries = (
        volcano.of_node(devices, unit_mib=1, time_s=0)[volcano.REGISTER].rstrip(":").split(":")
    )
    assert [entry.split(",")[1] for entry in entries] == ["0", "0", "10"]


def test_model_cannot_break_the_list() -> None:
    entry = volcano.of_node([device(0, type="A,B:C;D")], unit_mib=1, time_s=0)[volcano.REGISTER]
    assert entry.split(",")[3] == "NVIDIA-A B C D"
    assert entry.count(":") == 1


def test_handshake_is_a_question_that_never_expires_and_changes_with_time() -> None:
    """Volcano writes to a node whose handshake is no question, and drops one that is old."""
    found = [volcano.of_node([device(0)], unit_mib=1, time_s=now_s) for now_s in (0, 86_399, 1e9)]
    for one in found:
        word, _, when = one[volcano.HANDSHAKE].partition("_")
        asked = datetime.strptime(when, "%Y.%m.%d %H:%M:%S").replace(tzinfo=UTC)
        assert (word, asked.year) == ("Requesting", 9999)
        assert volcano.is_ours(one)
    assert len({one[volcano.HANDSHAKE] for one in found}) == 3
    assert not volcano.is_ours({})
    assert not volcano.is_ours({volcano.HANDSHAKE: "Requesting_2026.11.27 12:00:00"})


def test_pod_has_an_entry_for_each_container_with_shares() -> None:
    found = of_pod(
        shares("load", ("GPU-0", 500, 0), kind="init"),
        shares("proxy", ("GPU-0", 100, 5), kind="sidecar"),
        shares("plain"),
        shares("main", ("GPU-0", 3000, 50), ("GPU-1", 3000, 50)),
        shares("other", ("GPU-1", 1000, 0)),
        shares("npu", ("NPU-0", 1000, 0), vendor="ascend"),
    )
    assert found[volcano.POD_IDS] == (
        "GPU-0,NVIDIA,3000,50:GPU-1,NVIDIA,3000,50:;GPU-1,NVIDIA,1000,0:;GPU-0,NVIDIA,100,5:"
    )
    assert found[volcano.POD_NODE] == "n1"
    assert found[volcano.TO_ALLOCATE] == ""


def test_pod_without_shares_of_the_vendor_has_no_annotations() -> None:
    assert of_pod(shares("npu", ("NPU-0", 1000, 0), vendor="ascend")) == {}
    assert of_pod(shares("load", ("GPU-0", 500, 0), kind="init")) == {}


def test_memory_is_in_units_and_never_rounded_in_favor_of_another_pod() -> None:
    assert of_pod(shares("main", ("GPU-0", 2500, 0)), unit_mib=1024)[volcano.POD_IDS] == (
        "GPU-0,NVIDIA,3,0:"
    )
    register = volcano.of_node([device(0, capacity_mib=24575)], unit_mib=1024, time_s=0)[
        volcano.REGISTER
    ]
    assert register.split(",")[2] == "23"
