# SPDX-License-Identifier: Apache-2.0
"""Shares that need an object of the driver, and its use in rendering."""

import pytest

from hami_common.errors import NotFound
from hami_common.model.placement import ContainerShares, Share
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.handles import needs_instance
from hami_common.vendors.protocol import ContainerEdits, RenderContext
from tests.support import builders

CATALOG = Catalog.from_settings(VendorSettings())
PARTS = {
    "ascend": ("vnpu", "vir05_1c_16g", "", {"vnpu_id": "104"}),
    "cambricon": ("smlu", "", "", {"cap_node": "/dev/cambricon-caps/cap_dev0_mi1"}),
    "hygon": ("soft", "", "", {"config_directory": "/usr/local/vgpu/dcu/vdev3"}),
    "metax": ("sgpu", "", "best-effort", {"sgpu": "3", "alias": "hami0"}),
    "enflame": ("drs", "1g.7gb", "", {"instance_uuid": "7f1c"}),
    "kunlunxin": ("soft", "1/4", "1/4", {"number": "9"}),
    "amd": ("soft", "", "", {"cu_mask": "0-75"}),
}
"""By vendor: mode of the device, profile and kind of the share, handles of the driver's object."""


def part(vendor: str) -> Share:
    _, profile, kind, _ = PARTS[vendor]
    return Share(vendor=vendor, uuid="u", memory_mib=4096, core_pct=25, profile=profile, kind=kind)


def rendered(share: Share, mode: str, context: RenderContext) -> ContainerEdits:
    device = builders.device("u", vendor=share.vendor, mode=mode)
    shares = ContainerShares(name="c", kind="app", shares=(share,))
    return CATALOG.vendor(share.vendor).render(shares, (device,), context)


@pytest.mark.parametrize("vendor", sorted(PARTS))
def test_partition_needs_a_handle_and_a_whole_device_does_not(vendor: str) -> None:
    device = builders.device("u", vendor=vendor, mode=PARTS[vendor][0])
    whole = Share(
        vendor=vendor, uuid="u", memory_mib=device.memory_mib, core_pct=100, exclusive=True
    )
    assert needs_instance(part(vendor), device)
    assert not needs_instance(whole, device)


@pytest.mark.parametrize("vendor", ["iluvatar", "mthreads", "awsneuron", "biren", "vastai"])
def test_vendors_without_partitions_need_no_handle(vendor: str) -> None:
    share = Share(vendor=vendor, uuid="u", memory_mib=4096, core_pct=25, profile="2nc", start=0)
    assert not needs_instance(share, builders.device("u", vendor=vendor))


@pytest.mark.parametrize("mode", ["cdi", "devices", "env"])
@pytest.mark.parametrize("vendor", sorted(PARTS))
def test_partition_without_its_handle_is_an_error_on_a_dividing_node(
    vendor: str, mode: str
) -> None:
    context = RenderContext(mode=mode, divides=True)  # type: ignore[arg-type] # from the matrix
    with pytest.raises(NotFound, match="has not been made on this node"):
        rendered(part(vendor), PARTS[vendor][0], context)


@pytest.mark.parametrize("vendor", sorted(PARTS))
def test_every_handle_reaches_the_container(vendor: str) -> None:
    device_mode, _, _, words = PARTS[vendor]
    context = RenderContext(mode="devices", divides=True, handles={"u": words})
    edits = rendered(part(vendor), device_mode, context)
    seen = [
        *edits.env.values(),
        *(node.host_path for node in edits.devices),
        *(mount.host_path for mount in edits.mounts),
    ]
    for word in words.values():
        assert any(word in text for text in seen), (word, seen)


@pytest.mark.parametrize("mode", ["cdi", "env"])
def test_an_smlu_instance_is_never_given_by_the_name_of_its_card(mode: str) -> None:
    words = PARTS["cambricon"][3]
    context = RenderContext(
        mode=mode,  # type: ignore[arg-type] # from the matrix
        divides=True,
        handles={"u": words},
    )
    edits = rendered(part("cambricon"), "smlu", context)
    assert not edits.cdi_devices
    assert "CAMBRICON_VISIBLE_DEVICES" not in edits.env
    assert words["cap_node"] in [node.host_path for node in edits.devices]


def test_existing_vnpu_is_named_to_the_runtime_and_not_requested_again() -> None:
    context = RenderContext(mode="env", divides=True, handles={"u": PARTS["ascend"][3]})
    env = rendered(part("ascend"), "vnpu", context).env
    assert env["ASCEND_VISIBLE_DEVICES"] == "104"
    assert env["ASCEND_RUNTIME_OPTIONS"] == "VIRTUAL"
    assert "ASCEND_VNPU_SPECS" not in env
