# SPDX-License-Identifier: Apache-2.0
"""AMD through AMD SMI: the structures of each version, and the tool that replaces the library."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.model.device import Link
from hami_nodeagent.core.health import DeviceLost
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import DriverMissing, LibraryUnusable
from hami_nodeagent.drivers.protocol import Driver, ProcessUsage
from hami_sim.hardware.fake_nvml import Process
from tests.contract.drivers.library_amdsmi import FAKE
from tests.fakes.vendortools import VendorTools
from tests.support.fake_library import FakeLibrary

pytestmark = pytest.mark.anyio

_QUICK = {"answer_age_s": 0.0, "confirm_s": 0.001}


def machine_of(folder: Path, release: int, **changes: object) -> FakeLibrary:
    fake = replace(FAKE, words=(f"release {release}",), **changes)
    return FakeLibrary(folder, fake, 3)


def driver_of(machine: FakeLibrary | VendorTools, **settings: object) -> Driver:
    return build_driver("amd", {**machine.settings, **_QUICK, **settings})


@pytest.mark.parametrize("release", [24, 25, 26])
async def test_each_version_reports_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: int
) -> None:
    machine = machine_of(tmp_path, release)
    machine.answer_in_process(monkeypatch)
    driver = driver_of(machine)
    inventory = await driver.discover()
    uuids = [machine.uuid_of(index) for index in range(3)]
    assert [facts.uuid for facts in inventory.devices] == uuids
    assert {facts.type for facts in inventory.devices} == {"AMD Instinct MI300X"}
    for facts in inventory.devices:
        assert facts.attributes["compute_units"] == "304"
        assert facts.attributes["compute_partition"] == "SPX"
        assert facts.attributes["serial"].startswith("0x")
    assert Link(a=uuids[0], b=uuids[2], score=120) in inventory.links
    machine.use(1, 700, 40, [Process(pid=11, used_mib=300), Process(pid=12, used_mib=400)])
    usage = (await driver.usage())[1]
    assert (usage.temperature_c, usage.power_w, usage.memory_bus_pct) == (36, 91, 3)
    assert usage.processes == (
        ProcessUsage(pid=11, used_mib=300),
        ProcessUsage(pid=12, used_mib=400),
    )
    machine.lose(2)
    lost = next(one for one in await driver.probe() if isinstance(one, DeviceLost))
    assert (lost.uuid, lost.reason) == (uuids[2], "4 uncorrectable ECC errors")


@pytest.mark.parametrize("release", [23, 27])
async def test_a_version_with_unknown_structures_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: int
) -> None:
    machine = machine_of(tmp_path, release)
    machine.answer_in_process(monkeypatch)
    with pytest.raises(LibraryUnusable, match=f"of version {release}"):
        await driver_of(machine).discover()


async def test_a_partition_is_a_device_with_its_number_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of(
        tmp_path,
        26,
        keys=lambda device: {**FAKE.keys(device), "mode": "CPX", "partition": device.index},
    )
    machine.answer_in_process(monkeypatch)
    devices = (await driver_of(machine).discover()).devices
    assert [facts.attributes.get("partition_id") for facts in devices] == [None, "1", "2"]
    assert {facts.attributes["compute_partition"] for facts in devices} == {"CPX"}


async def test_a_library_that_cannot_be_used_does_not_change_identities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = VendorTools(tmp_path, "amd", 1)
    tools.tool.rename(tools.tool.with_name("rocm-smi"))
    library = tmp_path / "libamd_smi.so"
    library.write_bytes(b"not a library")
    driver = driver_of(tools, library_path=str(library))
    for _ in range(2):
        with pytest.raises(DriverMissing, match=r"amd-smi is not installed; .*shared libraries"):
            await driver.discover()
    assert len(caplog.records) == 1
