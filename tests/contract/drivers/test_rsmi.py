# SPDX-License-Identifier: Apache-2.0
"""Hygon through RSMI and DMI: facts of the libraries beyond the contract of all."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_common.model.device import Link
from hami_nodeagent.core.hardware import Wanted
from hami_nodeagent.core.health import DeviceLost, ProbeFailed
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import AnswerUnknown, DriverMissing
from hami_nodeagent.drivers.protocol import Driver, ProcessUsage
from hami_sim.hardware.fake_nvml import Process
from tests.contract.drivers.library_rsmi import FAKE
from tests.support.fake_library import FakeLibrary

pytestmark = pytest.mark.anyio

MakeMachine = Callable[..., FakeLibrary]


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """Makes a machine whose libraries are loaded into this process."""

    def make(count: int, **changes: object) -> FakeLibrary:
        machine = FakeLibrary(tmp_path, replace(FAKE, **changes), count)
        machine.answer_in_process(monkeypatch)
        return machine

    return make


def driver_of(machine: FakeLibrary) -> Driver:
    return build_driver("hygon", {**machine.settings, "answer_age_s": 0.0, "confirm_s": 0.001})


async def test_fabric_links_rank_before_one_processor_and_that_before_two(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(5)
    links = (await driver_of(machine).discover()).links
    uuids = [machine.uuid_of(index) for index in range(5)]
    assert Link(a=uuids[0], b=uuids[1], score=120) in links
    assert Link(a=uuids[1], b=uuids[2], score=20) in links
    assert Link(a=uuids[0], b=uuids[4], score=10) in links
    assert len(links) == 10


async def test_process_on_two_cards_is_reported_on_each_with_its_own_memory(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(3)
    driver = driver_of(machine)
    await driver.discover()
    machine.use(0, 900, 10, [Process(pid=7, used_mib=400), Process(pid=8, used_mib=500)])
    machine.use(2, 300, 10, [Process(pid=7, used_mib=300)])
    first, second, third = await driver.usage()
    assert first.processes == (
        ProcessUsage(pid=7, used_mib=400),
        ProcessUsage(pid=8, used_mib=500),
    )
    assert second.processes == ()
    assert third.processes == (ProcessUsage(pid=7, used_mib=300),)


async def test_uncorrected_errors_condemn_and_others_do_not(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(3)
    driver = driver_of(machine)
    await driver.discover()
    machine.lose(0)
    machine.fail(1)
    by_uuid = {getattr(one, "uuid", ""): one for one in await driver.probe()}
    lost, doubtful = by_uuid[machine.uuid_of(0)], by_uuid[machine.uuid_of(1)]
    assert isinstance(lost, DeviceLost)
    assert lost.reason == "3 uncorrectable errors"
    assert isinstance(doubtful, ProbeFailed)
    assert "rsmi_dev_memory_usage_get: UNEXPECTED_DATA (error 15)" in doubtful.reason


async def test_a_driver_without_cards_is_no_error(
    make_machine: MakeMachine,
) -> None:
    assert (await driver_of(make_machine(0)).discover()).devices == ()


async def test_no_card_and_no_module_is_a_missing_driver(make_machine: MakeMachine) -> None:
    with pytest.raises(DriverMissing, match="not loaded"):
        await driver_of(make_machine(0, words=("module gone",))).discover()


async def test_devices_of_another_maker_are_left_out(make_machine: MakeMachine) -> None:
    machine = make_machine(2, keys=lambda device: {**FAKE.keys(device), "maker": "0x1002"})
    assert (await driver_of(machine).discover()).devices == ()


async def test_two_cards_of_one_serial_are_no_answer(make_machine: MakeMachine) -> None:
    machine = make_machine(2, keys=lambda device: {**FAKE.keys(device), "serial": "TZ3L1"})
    with pytest.raises(AnswerUnknown):
        await driver_of(machine).discover()


async def test_compute_units_come_from_the_second_library_and_serve_vdcus(
    make_machine: MakeMachine,
) -> None:
    machine = make_machine(1, keys=lambda device: {**FAKE.keys(device), "units": 60})
    driver = driver_of(machine)
    (facts,) = (await driver.discover()).devices
    assert facts.attributes["compute_units"] == "60"
    assert driver.partitioner is not None
    wanted = Wanted(uuid=facts.uuid, profile="", memory_mib=4096, core_pct=50)
    made = await driver.partitioner.create(wanted)
    (facts,) = (await driver.discover()).devices
    assert '"cu":30' in facts.attributes["instances"]
    await driver.partitioner.destroy(made)


async def test_compute_units_are_unknown_without_the_second_library(
    make_machine: MakeMachine,
) -> None:
    (facts,) = (await driver_of(make_machine(1, also=())).discover()).devices
    assert "compute_units" not in facts.attributes
