# SPDX-License-Identifier: Apache-2.0
"""Devices offered under each resource, and the times at which a vendor is served."""

from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.skus.expansion import ACCELERATORS
from hami_common.vendors.catalog import Catalog
from hami_nodeagent.shell.picture import Picture
from tests.unit.nodeagent.core.builders import NODE, device


def picture_of(*devices: Device) -> Picture:
    catalog = Catalog.from_settings()
    picture = Picture(node=NODE, advertised=lambda one: catalog.vendor(one.vendor).advertised(one))
    picture.set_canonical(
        NodeDevices(
            node=NODE,
            vendor=devices[0].vendor,
            boot_id="",
            seq=1,
            time_s=0,
            config_generation=1,
            devices=devices,
        )
    )
    return picture


def offered(picture: Picture, vendor: str, resource: str) -> set[str]:
    return {split.uuid for split in picture.splits(vendor, resource).all}


def test_chips_are_offered_under_the_names_of_their_types() -> None:
    picture = picture_of(
        device(0, vendor="ascend", type="Ascend910B4"),
        device(1, vendor="ascend", type="Ascend310P"),
    )
    assert offered(picture, "ascend", "huawei.com/Ascend910B4") == {"ascend-0"}
    assert offered(picture, "ascend", "huawei.com/Ascend310P") == {"ascend-1"}
    assert offered(picture, "ascend", "huawei.com/Ascend910") == {"ascend-0"}
    assert offered(picture, "ascend", "huawei.com/Ascend910C") == set()


def test_one_device_is_offered_under_each_of_its_resources() -> None:
    picture = picture_of(device(0, vendor="kunlunxin", type="P800 OAM"))
    for resource in ("kunlunxin.com/xpu", "kunlunxin.com/vxpu"):
        assert offered(picture, "kunlunxin", resource) == {"kunlunxin-0"}


def test_without_a_rule_every_device_is_offered() -> None:
    picture = Picture(node=NODE)
    picture.set_canonical(
        NodeDevices(
            node=NODE,
            vendor="nvidia",
            boot_id="",
            seq=1,
            time_s=0,
            config_generation=1,
            devices=(device(0),),
        )
    )
    assert offered(picture, "nvidia", "whatever.example/gpu") == {"nvidia-0"}


def test_vendor_is_served_while_kubelet_holds_one_of_its_plugins() -> None:
    picture = Picture(node=NODE)
    changed = picture.changed
    picture.note_served("metax", served=True, resource="metax-tech.com/gpu")
    assert picture.served == {"metax"}
    assert changed.is_set()
    changed = picture.changed
    picture.note_served("metax", served=True, resource="metax-tech.com/sgpu")
    picture.note_served("metax", served=False, resource="metax-tech.com/gpu")
    assert picture.served == {"metax"}
    assert not changed.is_set()
    picture.note_served("metax", served=False, resource="metax-tech.com/sgpu")
    assert picture.served == frozenset()


def test_neutral_resource_has_the_devices_of_every_vendor_and_serves_none_of_them() -> None:
    catalog = Catalog.from_settings()
    picture = Picture(node=NODE, advertised=lambda one: catalog.vendor(one.vendor).advertised(one))
    for vendor in ("nvidia", "ascend"):
        picture.set_canonical(
            NodeDevices(
                node=NODE,
                vendor=vendor,
                boot_id="",
                seq=1,
                time_s=0,
                config_generation=1,
                devices=(device(0, vendor=vendor, type="Ascend910B4", slots=2),),
            )
        )
    neutral = picture.splits("", ACCELERATORS).all
    assert [split.id for split in neutral] == [
        "ascend-0::0",
        "ascend-0::1",
        "nvidia-0::0",
        "nvidia-0::1",
    ]
    picture.set_health("ascend", faulty=frozenset({"ascend-0"}), sound=frozenset())
    healthy = {split.uuid: split.healthy for split in picture.splits("", ACCELERATORS).all}
    assert healthy == {"ascend-0": False, "nvidia-0": True}
    picture.note_served("", served=True, resource=ACCELERATORS)
    assert picture.served == frozenset()
