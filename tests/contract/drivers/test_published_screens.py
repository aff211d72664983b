# SPDX-License-Identifier: Apache-2.0
"""Screens that the vendors' users know, from the tool's table to what a container is given.

Each begins with what the vendor's tool says, goes through registry, scheduler and partitioner, and
ends with what the container sees; ``tests/golden/screens`` keeps the whole of it: 1235 of 16384 MiB
of an Ascend 910B3 used, 16384 of 32768 MiB of an Iluvatar chip, 10240 of 81920 MiB on two A800, and
a 23 GiB card that shows 46 GiB and so serves three models instead of one. Of an MLU, 20 % are 4661
MiB here and 4660 on the screen, whose plugin counts in hundredths rounded down. Memory in MiB.
"""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Placement
from hami_common.pods.podview import PodView
from hami_common.vendors.cambricon import CambriconSettings
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.handles import needs_instance
from hami_common.vendors.protocol import RenderContext
from hami_core.placement.pick import pick
from hami_core.table.table import DeviceTable
from hami_nodeagent.core.hardware import Wanted
from hami_nodeagent.drivers.catalog import build_driver
from hami_registry.core.device_config import Defaults, DeviceConfig, canonical_device
from hami_sim.hardware import profile
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
    used_mib: int = 0
    """Memory that the vendor's tool shows as used."""


SCREENS = (
    Screen(
        vendor="ascend",
        limits={"huawei.com/Ascend910B3": 1, "huawei.com/Ascend910B3-memory": 16384},
        used_mib=1235,
    ),
    Screen(
        vendor="iluvatar",
        limits={"iluvatar.ai/gpu": 1, "iluvatar.ai/vcuda-memory": 64, "iluvatar.ai/vcuda-core": 50},
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
    tools.use(0, screen.used_mib, 0)
    (usage,) = await driver.usage()
    await driver.aclose()
    return {
        "shown": f"{usage.used_mib} / {share.memory_mib}",
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


class CardScreen(Struct, frozen=True, kw_only=True):
    """Equal pods on NVIDIA cards, as many as fit."""

    name: str
    model: str
    memory_mib: int
    limits: dict[str, int]
    scaling: float = 1.0


CARD_SCREENS = (
    CardScreen(
        name="nvidia-a800",
        model="NVIDIA A800-SXM4-80GB",
        memory_mib=81920,
        limits={"nvidia.com/gpu": 2, "nvidia.com/gpumem": 10240},
    ),
    CardScreen(
        name="nvidia-23g-shows-46g",
        model="NVIDIA A10",
        memory_mib=23552,
        limits={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 15000},
        scaling=2.0,
    ),
)


async def card_seen(screen: CardScreen, folder: Path) -> dict[str, object]:
    """Everything between the cards and the first container, and the number of pods that fit."""
    text = profile.path_of("2xL40S").read_text(encoding="utf-8")
    for old, new in (("NVIDIA L40S", screen.model), ("46068", str(screen.memory_mib))):
        assert old in text
        text = text.replace(old, new)
    path = folder / "cards.toml"
    path.write_text(text, encoding="utf-8")
    driver = build_driver(
        "simulated", {"profile": str(path), "node": NODE, "control": str(folder / "control.json")}
    )
    facts = (await driver.discover()).devices[: screen.limits["nvidia.com/gpu"]]
    await driver.aclose()
    vendor = Catalog.from_settings().vendor("nvidia")
    pods_by_scaling: dict[str, int] = {}
    seen: dict[str, object] = {}
    for scaling in dict.fromkeys((1.0, screen.scaling)):
        config = DeviceConfig(defaults=Defaults(memory_scaling=scaling))
        found = [canonical_device(config, NODE, one) for one in facts]
        devices = {device.uuid: device for device in found if device is not None}
        shares = fill(screen.limits, list(devices.values()))
        pods_by_scaling[str(scaling)] = len(shares)
        given = [devices[share.uuid] for share in shares[0].shares]
        oversubscribed = any(one.capacity_mib > one.memory_mib for one in given)
        context = RenderContext(mode="devices", memory_oversubscribed=oversubscribed)
        edits = vendor.render(shares[0], given, context)
        seen = {
            "devices": [
                {"type": one.type, "memory_mib": one.memory_mib, "capacity_mib": one.capacity_mib}
                for one in given
            ],
            "shares": [{"memory_mib": share.memory_mib} for share in shares[0].shares],
            "pods_by_scaling": pods_by_scaling,
            "env": {k: v for k, v in edits.env.items() if k != "NVIDIA_VISIBLE_DEVICES"},
        }
    return seen


def fill(limits: dict[str, int], devices: list[Device]) -> list[ContainerShares]:
    """Shares of equal pods, until one is refused."""
    table = DeviceTable()
    table.upsert_node(builders.node_devices(NODE, devices, vendor="nvidia"))
    placed: list[ContainerShares] = []
    while True:
        spec = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
        document = {"metadata": {"uid": f"u{len(placed)}", "name": "p"}, "spec": spec}
        request = Catalog.from_settings().parse_pod(msgspec.convert(document, PodView))
        assert request is not None
        found = pick(table, request, NODE)
        if not isinstance(found, Placement):
            return placed
        assert table.book(NODE, found.containers) == ()
        placed += found.containers


@pytest.mark.parametrize("screen", CARD_SCREENS, ids=lambda screen: screen.name)
async def test_nvidia_container_sees_the_published_screen(
    screen: CardScreen, tmp_path: Path
) -> None:
    expected = json.loads((GOLDEN / f"{screen.name}.json").read_text(encoding="utf-8"))
    assert await card_seen(screen, tmp_path) == expected
