# SPDX-License-Identifier: Apache-2.0
"""Screens that the vendors' users know, from the tool's table to what a container is given.

Each begins with what the vendor's tool says, goes through registry, scheduler and partitioner, and
ends with what the container sees; ``tests/golden/screens`` keeps the whole of it. Of an MLU, 20 %
are 4661 MiB here and 4660 on the screen, whose plugin counts in hundredths rounded down. Memory in
MiB.
"""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import Placement
from hami_common.pods.podview import PodView
from hami_common.vendors.cambricon import CambriconSettings
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.handles import needs_instance
from hami_common.vendors.protocol import RenderContext
from hami_core.placement.pick import pick
from hami_core.table.table import DeviceTable
from hami_nodeagent.core.hardware import Wanted
from hami_nodeagent.drivers.catalog import build_driver
from hami_registry.core.device_config import DeviceConfig, canonical_device
from tests.fakes.vendortools import VendorTools
from tests.support import builders

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).resolve().parents[2] / "golden/screens"
NODE = "node-a"


class Screen(Struct, frozen=True, kw_only=True):
    """A request for one device."""

    vendor: str
    limits: dict[str, int]
    settings: VendorSettings = VendorSettings()


SCREENS = (
    Screen(
        vendor="ascend",
        limits={"huawei.com/Ascend910B3": 1, "huawei.com/Ascend910B3-memory": 16384},
    ),
    Screen(
        vendor="iluvatar",
        limits={"iluvatar.ai/BI-V150-vgpu": 1, "iluvatar.ai/BI-V150.vMem": 64},
    ),
    Screen(
        vendor="cambricon",
        limits={
            "cambricon.com/vmlu": 1,
            "cambricon.com/mlu.smlu.vmemory": 20,
            "cambricon.com/mlu.smlu.vcore": 20,
        },
        settings=VendorSettings(cambricon=CambriconSettings(memory_unit="percent")),
    ),
)


async def seen(screen: Screen, folder: Path) -> dict[str, object]:
    """Everything between the device and the container."""
    tools = VendorTools(folder, screen.vendor, 1, node=NODE, divided=True)
    driver = build_driver(screen.vendor, {**tools.settings, "answer_age_s": 0.0})
    (facts,) = (await driver.discover()).devices
    device = canonical_device(DeviceConfig(), NODE, facts)
    assert isinstance(device, Device)
    catalog = Catalog.from_settings(screen.settings)
    spec = {"containers": [{"name": "main", "resources": {"limits": screen.limits}}]}
    document = {"metadata": {"uid": "u", "name": "p"}, "spec": spec}
    request = catalog.parse_pod(msgspec.convert(document, PodView))
    assert request is not None
    table = DeviceTable()
    table.upsert_node(builders.node_devices(NODE, [device], vendor=screen.vendor))
    found = pick(table, request, NODE)
    assert isinstance(found, Placement), found
    (container,) = found.containers
    (share,) = container.shares
    handles: dict[str, dict[str, str]] = {}
    if needs_instance(share, device):
        assert driver.partitioner is not None
        made = await driver.partitioner.create(
            Wanted(
                uuid=share.uuid,
                profile=share.profile,
                memory_mib=share.memory_mib,
                core_pct=share.core_pct,
            )
        )
        handles[share.uuid] = made.handles
    edits = catalog.vendor(screen.vendor).render(
        container, (device,), RenderContext(mode="devices", divides=True, handles=handles)
    )
    await driver.aclose()
    return {
        "device": {"type": device.type, "memory_mib": device.memory_mib, "mode": device.mode},
        "share": msgspec.to_builtins(share),
        "hardware": tools.parts(0),
        "env": edits.env,
        "devices": {one.host_path: one.container_path for one in edits.devices},
    }


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.vendor)
async def test_container_sees_the_published_screen(screen: Screen, tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / f"{screen.vendor}.json").read_text(encoding="utf-8"))
    assert await seen(screen, tmp_path) == expected
