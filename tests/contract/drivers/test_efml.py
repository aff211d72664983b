# SPDX-License-Identifier: Apache-2.0
"""Enflame through EFML: links, older libraries, impossible values, and DRS through efsmi."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_nodeagent.core.hardware import Wanted
from hami_nodeagent.core.health import DeviceLost, ProbeFailed
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.enflame import binding as efml
from hami_nodeagent.drivers.errors import AnswerUnknown, DriverError
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.libraries import loading
from hami_sim.hardware.fake_nvml import Process
from tests.contract.drivers.library_efml import FAKE
from tests.fakes.vendortools import VendorTools
from tests.support.fake_library import Device, FakeLibrary

pytestmark = pytest.mark.anyio

MakeFake = Callable[..., FakeLibrary]


@pytest.fixture
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFake:
    """Makes a machine whose library is loaded into this process; ``keys`` by device number."""

    def make(count: int = 2, **keys: dict[int, object]) -> FakeLibrary:
        def told(device: Device) -> dict[str, object]:
            own = {key: by[device.index] for key, by in keys.items() if device.index in by}
            return {**FAKE.keys(device), **own}

        machine = FakeLibrary(tmp_path, replace(FAKE, keys=told), count)
        machine.answer_in_process(monkeypatch)
        return machine

    return make


def driver_of(machine: FakeLibrary, **settings: object) -> Driver:
    quick = {"answer_age_s": 0.0, "confirm_s": 0.001}
    return build_driver("enflame", {**machine.settings, **quick, **settings})


def older(machine: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library from before 2024."""
    monkeypatch.setattr(machine, "machine_lines", lambda: ["old true"])
    machine.heal()


@pytest.mark.parametrize("is_old", [False, True])
async def test_ports_that_both_ends_see_are_links(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    machine = make_fake(4, ports={0: "1,1,-1,2", 1: "0,0", 2: "3", 3: "-1,-1"})
    if is_old:
        older(machine, monkeypatch)
    links = (await driver_of(machine).discover()).links
    uuids = [machine.uuid_of(index) for index in range(4)]
    assert [(link.a, link.b, link.score) for link in links] == [(uuids[0], uuids[1], 220)]


async def test_library_of_2019_reports_temperature_and_numa_comes_from_sysfs(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_fake(5, numa={4: 7})
    newer = await driver_of(machine).discover()
    older(machine, monkeypatch)
    driver = driver_of(machine)
    inventory = await driver.discover()
    assert (newer.devices[4].numa, inventory.devices[4].numa) == (7, machine.numa_of(4))
    assert [usage.temperature_c for usage in await driver.usage()] == [36] * 5


async def test_processes_are_reported_without_memory_of_an_unknown_unit(
    make_fake: MakeFake,
) -> None:
    machine = make_fake(1)
    machine.use(0, 2048, 50, [Process(pid=4242, used_mib=1024)])
    driver = driver_of(machine)
    await driver.discover()
    (usage,) = await driver.usage()
    assert [(one.pid, one.used_mib) for one in usage.processes or ()] == [(4242, None)]
    machine.refuse("EfmlGetProcessInfo", 3)
    assert (await driver.usage())[0].processes is None


async def test_sriov_mode_comes_from_the_library_and_other_modes_are_whole_cards(
    make_fake: MakeFake,
) -> None:
    machine = make_fake(3, mode={0: 0, 1: 3, 2: 2})
    inventory = await driver_of(machine).discover()
    assert [facts.mode for facts in inventory.devices] == ["whole", "sriov", "whole"]


async def test_card_is_condemned_by_its_health_and_probe_fails_without_health(
    make_fake: MakeFake,
) -> None:
    machine = make_fake(2)
    driver = driver_of(machine)
    await driver.discover()
    machine.lose(0)
    machine.fail(1)
    by_uuid = {getattr(one, "uuid", ""): one for one in await driver.probe()}
    lost, failed = (by_uuid[machine.uuid_of(index)] for index in range(2))
    assert isinstance(lost, DeviceLost)
    assert lost.reason == "EfmlGetDevHealth: false"
    assert isinstance(failed, ProbeFailed)
    assert failed.reason == "EfmlGetDevHealth: FAIL (error 254)"


@pytest.mark.parametrize("how", ["garbage", "serial", "memory", "processes"])
async def test_values_that_cannot_be_are_no_answer(make_fake: MakeFake, how: str) -> None:
    machine = make_fake(1)
    machine.garble(how)
    with pytest.raises(AnswerUnknown):
        await driver_of(machine).discover()


async def test_no_device_is_an_empty_machine(make_fake: MakeFake) -> None:
    machine = make_fake(1)
    machine.refuse("EfmlGetDevCount", 12)
    assert (await driver_of(machine).discover()).devices == ()
    machine.heal()
    machine.unplug(0)
    assert (await driver_of(machine).discover()).devices == ()


# ---- DRS, which only efsmi reports -------------------------------------------------------------


def beside(machine: FakeLibrary, folder: Path, monkeypatch: pytest.MonkeyPatch) -> VendorTools:
    """efsmi on the same machine, whose cards are in DRS mode."""
    folder.mkdir()
    tools = VendorTools(folder, "enflame", 2, divided=True)
    say = machine.say

    def answer(tool: str, arguments: tuple[str, ...]) -> object:
        return tools.say(tool, arguments) if tool == "efsmi" else say(tool, arguments)

    monkeypatch.setattr(machine, "say", answer)
    return tools


async def test_drs_comes_from_efsmi_where_it_is_installed(
    make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_fake(2)
    tools = beside(machine, tmp_path / "tools", monkeypatch)
    settings = {**machine.settings, "tool_path": str(tools.tool), "interface": "auto"}
    driver = driver_of(machine, **settings)
    for facts in (await driver.discover()).devices:
        assert (facts.mode, facts.resources) == ("drs", {"slices": 6})
        assert [profile.name for profile in facts.partitions] == [
            "1g.7gb", "2g.14gb", "3g.21gb", "6g.42gb",
        ]  # fmt: skip
    assert driver.partitioner is not None
    wanted = Wanted(uuid=machine.uuid_of(1), profile="2g.14gb", memory_mib=14325, core_pct=33)
    made = await driver.partitioner.create(wanted)
    assert await driver.partitioner.instances() == (made,)
    assert "2g.14gb" in (await driver.discover()).devices[1].attributes["instances"]


async def test_failing_efsmi_keeps_modes_and_reports_the_problem(
    make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_fake(2)
    tools = beside(machine, tmp_path / "tools", monkeypatch)
    driver = driver_of(machine, tool_path=str(tools.tool), interface="auto")
    before = await driver.discover()
    tools.garble("garbage")
    inventory = await driver.discover()
    assert inventory.devices == before.devices
    assert {facts.mode for facts in inventory.devices} == {"drs"}
    assert "DRS mode is not known" in inventory.problems[0]
    assert driver.partitioner is not None
    with pytest.raises(DriverError):
        await driver.partitioner.instances()


async def test_no_partitions_are_listed_without_efsmi(make_fake: MakeFake) -> None:
    machine = make_fake(1)
    driver = driver_of(machine, interface="auto")
    await driver.discover()
    assert driver.partitioner is not None
    assert await driver.partitioner.instances() == ()


def test_missing_library_file_is_reported(tmp_path: Path) -> None:
    _, complaint, status = loading.run(efml.PROGRAM, [str(tmp_path / "libefml.so"), "glance"])
    assert (status, "is not there" in complaint) == (loading.Kind.UNUSABLE, True)
