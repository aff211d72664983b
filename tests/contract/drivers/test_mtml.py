# SPDX-License-Identifier: Apache-2.0
"""Moore Threads through MTML: facts of the library beyond the contract, and their form."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.model.device import Link
from hami_nodeagent.core.health import DeviceLost, ProbeFailed, ProbePassed
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import AnswerUnknown
from hami_nodeagent.drivers.protocol import Driver, ProcessUsage
from hami_sim.hardware.fake_nvml import Process
from tests.contract.drivers.library_mtml import FAKE
from tests.fakes.vendortools import VendorTools
from tests.support.fake_library import Device, FakeLibrary

pytestmark = pytest.mark.anyio

MakeMachine = Callable[..., FakeLibrary]
_CAPABLE, _PARENT, _INSTANCE, _GUEST = 0x10, 0x20, 0x40, 0x04


def machine_of(folder: Path, count: int, **by_index: Mapping[int, object]) -> FakeLibrary:
    """A machine with keys of its own for single devices."""

    def said(device: Device) -> Mapping[str, object]:
        own = {key: found[device.index] for key, found in by_index.items() if device.index in found}
        return {**FAKE.keys(device), **own}

    return FakeLibrary(folder, replace(FAKE, keys=said), count)


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """Makes a machine whose library is loaded into this process."""

    def make(count: int = 2, **by_index: Mapping[int, object]) -> FakeLibrary:
        machine = machine_of(Path(tempfile.mkdtemp(dir=tmp_path)), count, **by_index)
        machine.answer_in_process(monkeypatch)
        return machine

    return make


def driver_of(machine: FakeLibrary, **settings: object) -> Driver:
    quick = {"answer_age_s": 0.0, "confirm_s": 0.001}
    return build_driver("mthreads", {**machine.settings, **quick, **settings})


async def test_identity_is_the_place_and_the_uuid_an_attribute(make_machine: MakeMachine) -> None:
    machine = make_machine(2)
    inventory = await driver_of(machine).discover()
    assert [facts.uuid for facts in inventory.devices] == [
        "MTT-node-a-0000-11-00.0",
        "MTT-node-a-0000-19-00.0",
    ]
    assert [facts.attributes["uuid"] for facts in inventory.devices] == [
        f"{index:08x}-1ed5-4000-8000-00000000cafe" for index in range(2)
    ]


async def test_a_divided_card_gives_its_instances_only(make_machine: MakeMachine) -> None:
    roles = {0: _CAPABLE | _PARENT, 1: _INSTANCE, 2: _CAPABLE, 3: _GUEST}
    inventory = await driver_of(make_machine(4, role=roles)).discover()
    assert [facts.index for facts in inventory.devices] == [1, 2, 3]
    kinds = [(one.attributes["kind"], "mpc_capable" in one.attributes) for one in inventory.devices]
    assert kinds == [("MPC Instance", False), ("Physical", True), ("Virtual", False)]


async def test_two_devices_at_one_address_are_no_answer(make_machine: MakeMachine) -> None:
    machine = make_machine(2, bus_id={1: "0000:11:00.0"})
    with pytest.raises(AnswerUnknown, match="addresses of devices"):
        await driver_of(machine).discover()


async def test_memory_errors_condemn_and_pending_pages_are_reported(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(2, retiring={1: 1})
    driver = driver_of(machine)
    inventory = await driver.discover()
    assert ["retired_pages_pending" in one.attributes for one in inventory.devices] == [False, True]
    machine.lose(0)
    lost, passed = await driver.probe()
    assert isinstance(lost, DeviceLost)
    assert lost.reason == "3 uncorrectable ECC errors"
    assert isinstance(passed, ProbePassed)
    machine.refuse("mtmlMemoryGetEccErrorCounter", 4)
    assert [type(one) for one in await driver.probe()] == [ProbePassed, ProbePassed]


async def test_lost_device_is_reported_by_the_error_number_of_the_binding(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(1)
    driver = driver_of(machine)
    await driver.discover()
    machine.refuse("mtmlMemoryGetUsed", 669)
    assert [type(one) for one in await driver.probe()] == [DeviceLost]
    machine.refuse("mtmlMemoryGetUsed", 2)
    assert [type(one) for one in await driver.probe()] == [ProbeFailed]


async def test_links_count_on_top_of_the_bridge(make_machine: MakeMachine) -> None:
    machine = make_machine(2, bridge={0: 3, 1: 3})
    a, b = machine.uuid_of(0), machine.uuid_of(1)
    assert (await driver_of(machine).discover()).links == (Link(a=a, b=b, score=30),)
    machine = make_machine(2, bridge={0: 5, 1: 5}, links={0: 4, 1: 4})
    assert (await driver_of(machine).discover()).links == (Link(a=a, b=b, score=10 + 400),)
    machine.refuse("mtmlDeviceGetTopologyLevel", 4)
    assert (await driver_of(machine).discover()).links == (Link(a=a, b=b, score=20 + 400),)


async def test_use_and_power_are_reported_and_processes_are_not(make_machine: MakeMachine) -> None:
    machine = make_machine(1)
    machine.use(0, 2048, 77, [Process(pid=4242, used_mib=1024)])
    driver = driver_of(machine)
    await driver.discover()
    (usage,) = await driver.usage()
    assert (usage.used_mib, usage.core_pct, usage.power_w) == (2048, 77, 57.25)
    assert (usage.temperature_c, usage.processes) == (36, None)


async def test_processes_come_from_the_tool_where_it_is_installed(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, 2)
    (tmp_path / "tools").mkdir()
    tools = VendorTools(tmp_path / "tools", "mthreads", 2)
    tools.use(1, 0, 0, [Process(pid=4242, used_mib=1024)])
    machine.use(1, 2048, 77)
    driver = driver_of(machine, interface="auto", tool_path=str(tools.tool))
    before = await driver.discover()
    first, second = await driver.usage()
    assert first.processes == ()
    assert second.processes == (ProcessUsage(pid=4242, used_mib=1024),)
    assert (second.used_mib, second.core_pct) == (2048, 77)
    tools.garble("garbage")
    assert [usage.processes for usage in await driver.usage()] == [None, None]
    tools.heal()
    machine.remove_tools()
    assert [type(one) for one in await driver.probe()] == [ProbePassed, ProbePassed]
    after = await driver.discover()
    assert [facts.uuid for facts in after.devices] == [facts.uuid for facts in before.devices]
