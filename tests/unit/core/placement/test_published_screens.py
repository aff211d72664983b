# SPDX-License-Identifier: Apache-2.0
"""Figures that HAMi's users know from its published screens, from limits to what a container sees.

Each goes through the parsing of a pod, the registry's rules, the scheduler's core and the vendor's
rendering. Memory in MiB.
"""

import msgspec
import pytest

from hami_common.model.device import Device, DeviceFacts
from hami_common.model.placement import Placement
from hami_common.model.request import PodRequest
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_common.vendors.protocol import RenderContext
from hami_core.placement.pick import pick, satisfies
from hami_core.placement.reasons import DeviceVerdict, NodeRefusal, explain
from hami_core.placement.verdicts import Verdicts
from hami_core.table.table import DeviceTable
from hami_registry.core.device_config import DeviceConfig, canonical_device
from tests.support import builders
from tests.support.mig import facts_of

NODE = "gpu-node"
CATALOG = Catalog.from_settings(
    VendorSettings(nvidia=NvidiaSettings(mig_profiles=("1g.18gb", "1g.18gb+me", "3g.71gb")))
)


def pod(uid: str, limits: dict[str, int], annotations: dict[str, str] | None = None) -> PodRequest:
    document = {
        "metadata": {"uid": uid, "name": uid, "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }
    request = CATALOG.parse_pod(msgspec.convert(document, PodView))
    assert request is not None
    return request


def cards(*facts: DeviceFacts) -> dict[str, Device]:
    found = [canonical_device(DeviceConfig(), NODE, one) for one in facts]
    return {device.uuid: device for device in found if device is not None}


def cluster(devices: dict[str, Device]) -> DeviceTable:
    table = DeviceTable()
    table.upsert_node(builders.node_devices(NODE, list(devices.values())))
    return table


def placed(table: DeviceTable, request: PodRequest) -> Placement:
    found = pick(table, request, NODE)
    assert isinstance(found, Placement), found
    assert table.book(NODE, found.containers) == ()
    table.check()
    return found


def refused(table: DeviceTable, request: PodRequest) -> tuple[str, str]:
    """Code and text of the refusal that the user reads."""
    found = pick(table, request, NODE)
    assert isinstance(found, NodeRefusal)
    verdict = Verdicts(table).filter(request, [NODE])
    assert verdict.feasible == []
    return found.code, verdict.refused()[NODE]


NO_PLACE = "1g.18gb (16384 MiB) wanted: no place, 1 of 8 positions and 29056 MiB free (gpu-node)"
TEN_GIB = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10240}


def test_ten_gib_of_an_h200_is_a_1g_18gb_and_the_eighth_does_not_fit() -> None:
    devices = cards(facts_of("H200-141"))
    table = cluster(devices)
    given = [placed(table, pod(f"p{number}", TEN_GIB)).containers[0] for number in range(7)]
    shares = [share for container in given for share in container.shares]
    assert {(s.profile, s.memory_mib, s.core_pct) for s in shares} == {("1g.18gb", 16384, 12)}
    assert {share.start for share in shares} == set(range(7))
    assert refused(table, pod("p7", TEN_GIB)) == (
        "CardPartitionInfeasible",
        f"CardPartitionInfeasible: {NO_PLACE}",
    )
    (step,) = explain(table, pod("p7", TEN_GIB), NODE).steps
    assert step.devices == (
        DeviceVerdict(uuid="GPU-0", code="CardPartitionInfeasible", wanted=1, resource="place"),
    )
    handles = {"GPU-0": {"mig_uuid": "MIG-7"}}
    edits = CATALOG.vendor("nvidia").render(
        given[-1], list(devices.values()), RenderContext(mode="env", handles=handles, divides=True)
    )
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "MIG-7"}


@pytest.mark.parametrize(
    ("limits", "profile"),
    [
        ({"nvidia.com/gpumem": 16384}, "1g.18gb"),
        ({"nvidia.com/gpumem": 16385}, "1g.35gb"),
        ({"nvidia.com/gpumem": 16385, "nvidia.com/gpucores": 20}, "2g.35gb"),
        ({"nvidia.com/gpumem": 40000}, "3g.71gb"),
        ({"nvidia.com/gpumem": 40000, "nvidia.com/gpucores": 47}, "4g.71gb"),
        ({"nvidia.com/gpumem-percentage": 100, "nvidia.com/gpucores": 50}, "7g.141gb"),
        ({"nvidia.com/gpumem-percentage": 20}, "1g.35gb"),
        ({"nvidia.com/mig-1g.18gb.me": 1}, "1g.18gb+me"),
        ({"nvidia.com/mig-3g.71gb": 1}, "3g.71gb"),
    ],
)
def test_smallest_profile_that_holds_it_or_the_named_one(
    limits: dict[str, int], profile: str
) -> None:
    table = cluster(cards(facts_of("H200-141")))
    (container,) = placed(table, pod("p", limits)).containers
    assert [share.profile for share in container.shares] == [profile]


def test_profile_with_media_engines_is_available_once() -> None:
    table = cluster(cards(facts_of("H200-141")))
    placed(table, pod("a", {"nvidia.com/mig-1g.18gb.me": 1}))
    code, text = refused(table, pod("b", {"nvidia.com/mig-1g.18gb.me": 1}))
    assert code == "CardPartitionInfeasible"
    assert "1g.18gb+me (16384 MiB) wanted: 1 at most at a time, 127360 MiB free" in text
    placed(table, pod("c", {"nvidia.com/mig-1g.18gb": 1}))


def test_name_is_served_by_cards_that_have_the_profile_only() -> None:
    table = cluster(cards(facts_of("A30"), facts_of("H200-141", uuid="GPU-1", index=1)))
    found = placed(table, pod("a", {"nvidia.com/mig-3g.71gb": 1}))
    assert found.containers[0].shares[0].uuid == "GPU-1"
    code, _ = refused(cluster(cards(facts_of("A30"))), pod("b", {"nvidia.com/mig-3g.71gb": 1}))
    assert code == "CardPartitionMismatch"


def test_several_devices_for_a_container_are_mig_instances_only_on_request() -> None:
    """One CUDA process uses one MIG instance and, beside it, no other device."""
    soft = DeviceFacts(uuid="GPU-9", vendor="nvidia", index=9, type="NVIDIA H200", memory_mib=99999)
    migs = (facts_of("H200-141"), facts_of("H200-141", uuid="GPU-1", index=1))
    two = {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 10240}
    unsaid = refused(cluster(cards(*migs)), pod("p", two))
    assert unsaid[0] == "ModeNotFit"
    assert "2 devices wanted; neither hardware parts" in unsaid[1]
    assert unsaid[1].endswith("; write nvidia.com/vgpu-mode: mig")
    both = {"nvidia.com/vgpu-mode": "hami-core,mig"}
    for annotations in ({}, both):
        code, _ = refused(cluster(cards(*migs, soft)), pod("p", two, annotations))
        assert code == "AllocatedCardsInsufficientRequest"
    said = placed(cluster(cards(*migs, soft)), pod("p", two, {"nvidia.com/vgpu-mode": "mig"}))
    named = placed(cluster(cards(*migs, soft)), pod("p", {"nvidia.com/mig-1g.18gb": 2}))
    for found in (said, named):
        (container,) = found.containers
        assert {(one.uuid, one.profile) for one in container.shares} == {
            ("GPU-0", "1g.18gb"),
            ("GPU-1", "1g.18gb"),
        }


def test_several_instances_for_a_container_may_be_of_one_card() -> None:
    mig = {"nvidia.com/vgpu-mode": "mig"}
    packed = {**mig, "hami.io/gpu-scheduler-policy": "binpack"}
    two = {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 10240}
    named = {"nvidia.com/mig-1g.18gb": 3}
    migs = (facts_of("H200-141"), facts_of("H200-141", uuid="GPU-1", index=1))

    def cards_of(found: Placement) -> list[tuple[str, int | None]]:
        return [(one.uuid, one.start) for one in found.containers[0].shares]

    table = cluster(cards(facts_of("H200-141")))
    alone = placed(table, pod("a", two, mig))
    assert cards_of(alone) == [("GPU-0", 5), ("GPU-0", 6)]
    assert {one.profile for one in alone.containers[0].shares} == {"1g.18gb"}
    assert [start for _, start in cards_of(placed(table, pod("b", named)))] == [2, 3, 4]
    last = placed(table, pod("c", two, mig))
    assert satisfies(table, pod("c", two, mig), NODE, last.containers)
    assert not satisfies(table, pod("c", two), NODE, last.containers)
    assert refused(table, pod("d", two, mig))[0] == "CardPartitionInfeasible"
    # Different cards where the policy spreads, one card where it packs.
    assert {uuid for uuid, _ in cards_of(placed(cluster(cards(*migs)), pod("e", two, mig)))} == {
        "GPU-0",
        "GPU-1",
    }
    assert {uuid for uuid, _ in cards_of(placed(cluster(cards(*migs)), pod("f", two, packed)))} == {
        "GPU-0"
    }


def test_second_of_several_instances_without_a_place_is_reported() -> None:
    table = cluster(cards(facts_of("H200-141")))
    mig = {"nvidia.com/vgpu-mode": "mig"}
    code, text = refused(table, pod("a", {"nvidia.com/gpu": 8, "nvidia.com/gpumem": 10240}, mig))
    assert (code, text) == (
        "CardPartitionInfeasible",
        f"CardPartitionInfeasible: part 8 of 8: {NO_PLACE}",
    )


def test_modes_on_one_node_serve_their_own() -> None:
    soft = DeviceFacts(
        uuid="GPU-9", vendor="nvidia", index=9, type="NVIDIA H200", memory_mib=143771
    )
    devices = cards(facts_of("H200-141"), soft)
    for mode, uuid in (("mig", "GPU-0"), ("hami-core", "GPU-9")):
        table = cluster(devices)
        request = pod("p", TEN_GIB, {"nvidia.com/vgpu-mode": mode})
        assert placed(table, request).containers[0].shares[0].uuid == uuid
    table = cluster(devices)
    whole = placed(table, pod("w", {"nvidia.com/gpu": 1}))
    assert whole.containers[0].shares[0].uuid == "GPU-9"
    named = placed(table, pod("n", {"nvidia.com/mig-1g.18gb": 1}))
    assert named.containers[0].shares[0].uuid == "GPU-0"


def test_eight_cards_in_three_modes_serve_their_own_and_one_changes_alone() -> None:
    def card(index: int, mode: str) -> DeviceFacts:
        uuid = f"GPU-{index}"
        if mode == "mig":
            return facts_of("H200-141", uuid=uuid, index=index)
        return DeviceFacts(
            uuid=uuid,
            vendor="nvidia",
            index=index,
            type="NVIDIA H200",
            memory_mib=143771,
            mode=mode,
        )

    modes = ["mig"] * 2 + ["soft"] * 4 + ["whole"] * 2
    table = cluster(cards(*(card(index, mode) for index, mode in enumerate(modes))))
    core = {"nvidia.com/vgpu-mode": "hami-core"}
    for number in range(2):
        mig = placed(table, pod(f"m{number}", TEN_GIB, {"nvidia.com/vgpu-mode": "mig"}))
        assert mig.containers[0].shares[0].uuid in {"GPU-0", "GPU-1"}
        soft = placed(table, pod(f"s{number}", {**TEN_GIB, "nvidia.com/gpu": 3}, core))
        held = {share.uuid for share in soft.containers[0].shares}
        assert held < {"GPU-2", "GPU-3", "GPU-4", "GPU-5"}
    whole = placed(table, pod("w", {"nvidia.com/gpu": 2}))
    assert {share.uuid for share in whole.containers[0].shares} == {"GPU-6", "GPU-7"}
    table.unbook(NODE, whole.containers)
    before = {uuid: usage for _, uuid, usage in table.usages() if uuid != "GPU-7"}
    modes[7] = "mig"  # its administrator enabled MIG mode while the card was idle
    changed = cards(*(card(index, mode) for index, mode in enumerate(modes)))
    table.upsert_node(builders.node_devices(NODE, list(changed.values())))
    table.check()
    assert before == {uuid: usage for _, uuid, usage in table.usages() if uuid != "GPU-7"}
    assert len(before) >= 4
    large = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 140000}
    found = placed(table, pod("l", large, {"nvidia.com/vgpu-mode": "mig"}))
    assert found.containers[0].shares[0].uuid == "GPU-7"
