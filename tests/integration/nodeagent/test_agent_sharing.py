# SPDX-License-Identifier: Apache-2.0
"""A card in mode ``mps`` through a real agent: its service runs, and its containers get it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_nodeagent.settings import DriversSettings, NvidiaSettings
from hami_sim.hardware import profile as hardware
from tests.fakes.mpscontrol import FakeMps, make_control
from tests.integration.nodeagent.plane import NODE, Ask, Plane, until

pytestmark = pytest.mark.anyio
CARD = 3


@pytest.mark.timeout(180)
async def test_container_gets_the_service_of_its_card_and_no_compute_limit(
    plane: Plane, tmp_path: Path
) -> None:
    place = tmp_path / "mps"
    plane.devices = tuple(
        replace(one, mode="mps") if index == CARD else one
        for index, one in enumerate(plane.devices)
    )
    await plane.publish_devices()
    nvidia = NvidiaSettings(
        simulated_profile=str(hardware.path_of("8xA100-40")),
        simulated_control=str(tmp_path / "control.json"),
        sharing={f"{NODE}/{CARD}": "mps"},
        mps_control=make_control(tmp_path),
        mps_dir=str(place),
    )
    uuid = plane.devices[CARD].uuid
    async with plane.agent(drivers=DriversSettings(nvidia=nvidia)):
        record = plane.record(await plane.create("serve", Ask(shares=((CARD, 4096),))))
        share = replace(record.containers[0].shares[0], mode="mps", core_pct=25)
        record = replace(record, containers=(replace(record.containers[0], shares=(share,)),))
        await plane.bind(record, await plane.reserve(record))
        await plane.until_phase("serve", "Running")
        seen = await plane.environment("serve")
        assert seen["CUDA_MPS_PIPE_DIRECTORY"] == "/run/hami-mps"
        assert seen["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert seen["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
        assert seen["CUDA_DEVICE_SM_LIMIT_0"] == seen["device.0.core_pct"] == "0"
        fake = FakeMps(place, uuid)

        async def is_reported() -> bool:
            modes = {one.uuid: (one.mode, one.cordoned) for one in (await plane.report()).devices}
            return modes[uuid] == ("mps", False)

        await until(is_reported)
        assert fake.commands("start") == ["start -f -multiuser-server"]
    assert fake.commands()[-1].startswith("quit")
