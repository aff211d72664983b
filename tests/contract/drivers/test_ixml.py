# SPDX-License-Identifier: Apache-2.0
"""Iluvatar through IXML: facts of the library beyond the contract, and their form."""

import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.model.device import Link
from hami_nodeagent.core.health import DeviceLost, ProbeFailed, ProbePassed
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import AnswerUnknown
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.libraries import loading
from tests.contract.drivers.library_ixml import FAKE
from tests.fakes.vendortools import VendorTools
from tests.support.fake_library import SOURCES, Device, FakeLibrary

pytestmark = pytest.mark.anyio

MakeMachine = Callable[..., FakeLibrary]


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """Makes a machine whose library is loaded into this process; ``keys`` of every chip."""

    def make(count: int = 2, **keys: object) -> FakeLibrary:
        def said(device: Device) -> Mapping[str, object]:
            return {**FAKE.keys(device), **keys}

        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        machine = FakeLibrary(folder, replace(FAKE, keys=said), count)
        machine.answer_in_process(monkeypatch)
        return machine

    return make


def driver_of(machine: FakeLibrary, **settings: object) -> Driver:
    quick = {"answer_age_s": 0.0, "confirm_s": 0.001}
    return build_driver("iluvatar", {**machine.settings, **quick, **settings})


async def test_each_bit_of_health_is_named_and_condemns(make_machine: MakeMachine) -> None:
    driver = driver_of(make_machine(1, health=0x30))
    inventory = await driver.discover()
    assert inventory.devices == ()
    assert inventory.problems == ("device 0: health: ECC, memory (0x30)",)
    healthy = make_machine(1, health=0x80)
    (problem,) = (await driver_of(healthy).discover()).problems
    assert problem == "device 0: health: unknown fault (0x80)"


async def test_a_chip_that_needs_a_reset_is_lost(make_machine: MakeMachine) -> None:
    machine = make_machine(1)
    driver = driver_of(machine)
    await driver.discover()
    machine.refuse("ixmlDeviceGetHealth", 16)
    (stimulus,) = await driver.probe()
    assert isinstance(stimulus, DeviceLost)
    assert "RESET_REQUIRED (error 16)" in stimulus.reason


async def test_library_without_health_reports_no_health(make_machine: MakeMachine) -> None:
    machine = make_machine(1)
    driver = driver_of(machine)
    await driver.discover()
    machine.refuse("ixmlDeviceGetHealth", 3)
    assert [type(one) for one in await driver.probe()] == [ProbePassed]
    machine.refuse("ixmlDeviceGetHealth", 999)
    assert [type(one) for one in await driver.probe()] == [ProbeFailed]


async def test_a_chip_that_cannot_be_opened_is_missing_and_named(make_machine: MakeMachine) -> None:
    machine = make_machine(2)
    driver = driver_of(machine)
    await driver.discover()
    machine.refuse("nvmlDeviceGetHandleByIndex_v2", 15)
    stimuli = await driver.probe()
    assert [type(one) for one in stimuli] == [ProbeFailed, ProbeFailed]
    inventory = await driver.discover()
    assert [facts.healthy for facts in inventory.devices] == [False, False]
    assert "GPU_IS_LOST" in inventory.problems[0]


async def test_links_of_the_vendors_own_count_as_in_ixsmi(make_machine: MakeMachine) -> None:
    machine = make_machine(2, bridge=50)
    a, b = machine.uuid_of(0), machine.uuid_of(1)
    assert (await driver_of(machine).discover()).links == (Link(a=a, b=b, score=10),)
    machine = make_machine(2, bridge=10, links=4)
    assert (await driver_of(machine).discover()).links == (Link(a=a, b=b, score=20 + 400),)
    machine.refuse("ixmlDeviceGetIxLinkInfo", 3)
    assert (await driver_of(machine).discover()).links == (Link(a=a, b=b, score=50),)


@pytest.mark.parametrize(("power", "power_w"), [(57000, 57.0), (57, 57.0), (1000, 1.0)])
async def test_power_is_milliwatts_unless_it_is_too_little_for_that(
    make_machine: MakeMachine, power: int, power_w: float
) -> None:
    driver = driver_of(make_machine(1, power=power))
    await driver.discover()
    (usage,) = await driver.usage()
    assert (usage.power_w, usage.memory_bus_pct, usage.temperature_c) == (power_w, 7, 36)


async def test_many_processes_without_sizes_are_listed(make_machine: MakeMachine) -> None:
    machine = make_machine(1, more_processes=700)
    driver = driver_of(machine)
    await driver.discover()
    (usage,) = await driver.usage()
    assert usage.processes is not None
    assert len(usage.processes) == 700
    assert {process.used_mib for process in usage.processes} == {None}


async def test_rows_of_another_length_are_rejected(make_machine: MakeMachine) -> None:
    machine = make_machine(1, more_processes=5_000_000)
    driver = driver_of(machine)
    await driver.discover()
    (usage,) = await driver.usage()
    assert usage.processes is None


async def test_a_size_that_is_not_in_bytes_is_no_answer(make_machine: MakeMachine) -> None:
    machine = make_machine(1)
    machine.garble("truncated")
    with pytest.raises(AnswerUnknown, match="0 of 7 bytes"):
        await driver_of(machine).discover()


def test_library_with_the_older_names_reports_the_same(make_machine: MakeMachine) -> None:
    machine = make_machine(2, bridge=30)
    before, _, status = loading.run(FAKE.program, [str(machine.library), "survey"])
    assert status == 0
    renamed = {
        "nvmlInit_v2": "nvmlInit",
        "nvmlDeviceGetCount_v2": "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex_v2": "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetPciInfo_v3": "nvmlDeviceGetPciInfo",
    }
    flags = [f"-D{name}={older}" for name, older in renamed.items()]
    library = machine.library.with_name("libixml_old.so")
    source = str(SOURCES / FAKE.source)
    subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", str(library), source], check=True)
    assert loading.run(FAKE.program, [str(library), "survey"]) == (before, "", 0)


async def test_chips_stay_known_after_the_library_is_removed(tmp_path: Path) -> None:
    machine = FakeLibrary(tmp_path, FAKE, 2)
    (tmp_path / "tools").mkdir()
    tools = VendorTools(tmp_path / "tools", "iluvatar", 2)
    driver = driver_of(machine, interface="auto", tool_path=str(tools.tool))
    before = await driver.discover()
    machine.remove_tools()
    assert [type(one) for one in await driver.probe()] == [ProbePassed, ProbePassed]
    assert [usage.uuid for usage in await driver.usage()] == [
        facts.uuid for facts in before.devices
    ]
    assert await driver.discover() == before
