# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin through XPUML: states, lost cards, processes, and facts that only xpu-smi reports.

The contract of partitioners covers the division of cards.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from hami_nodeagent.core.health import DeviceLost, ProbeFailed, ProbePassed
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import AnswerUnknown
from hami_nodeagent.drivers.kunlunxin import binding as xpuml
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.libraries import loading
from hami_sim.hardware.fake_nvml import Process
from tests.fakes.vendortools import VendorTools
from tests.support.fake_xpuml import FakeXpuml

pytestmark = pytest.mark.anyio

MakeFake = Callable[..., FakeXpuml]


@pytest.fixture
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFake:
    """Makes a machine whose library is loaded into this process."""

    def make(count: int = 2) -> FakeXpuml:
        machine = FakeXpuml(tmp_path, count)
        machine.answer_in_process(monkeypatch)
        return machine

    return make


def driver_of(machine: FakeXpuml, **settings: object) -> Driver:
    quick = {"answer_age_s": 0.0, "confirm_s": 0.001}
    return build_driver("kunlunxin", {**machine.settings, **quick, **settings})


def state(machine: FakeXpuml, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of every card."""
    lines = machine.device_lines

    def other(index: int) -> list[str]:
        return [line.replace("state=201", f"state={number}") for line in lines(index)]

    monkeypatch.setattr(machine, "device_lines", other)
    machine.heal()


@pytest.mark.parametrize(
    ("number", "kind", "reason"),
    [
        (0, ProbePassed, ""),
        (201, ProbePassed, ""),
        (205, ProbeFailed, "state 205 (in reset)"),
        (207, DeviceLost, "state 207 (error)"),
        (208, DeviceLost, "state 208 (in exception)"),
        (77, ProbeFailed, "state 77 (unknown)"),
    ],
)
async def test_states_are_conditions(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch, number: int, kind: type, reason: str
) -> None:
    machine = make_fake(1)
    driver = driver_of(machine)
    await driver.discover()
    state(machine, number, monkeypatch)
    (stimulus,) = await driver.probe()
    assert isinstance(stimulus, kind)
    assert getattr(stimulus, "reason", "") == reason


@pytest.mark.parametrize("call", ["xpumlDeviceGetHandleByIndex", "xpumlDeviceGetMemoryInfo"])
@pytest.mark.parametrize(("code", "kind"), [(15, DeviceLost), (16, DeviceLost), (11, ProbeFailed)])
async def test_unreadable_card_keeps_its_known_uuid(
    make_fake: MakeFake, call: str, code: int, kind: type
) -> None:
    machine = make_fake(2)
    driver = driver_of(machine)
    await driver.discover()
    machine.refuse(call, code)
    stimuli = await driver.probe()
    assert [type(one) for one in stimuli] == [kind, kind]
    assert {getattr(one, "uuid", "") for one in stimuli} == {
        machine.uuid_of(0),
        machine.uuid_of(1),
    }
    inventory = await driver.discover()
    assert [facts.healthy for facts in inventory.devices] == [kind is not DeviceLost] * 2
    fresh = await driver_of(machine).discover()
    assert fresh.devices == ()
    assert len(fresh.problems) == 2


async def test_processes_have_host_pids_and_the_calling_process_is_left_out(
    make_fake: MakeFake,
) -> None:
    machine = make_fake(2)
    many = [Process(pid=1000 + number, used_mib=number) for number in range(200)]
    machine.use(1, 2048, 40, many)
    driver = driver_of(machine)
    await driver.discover()
    idle, busy = await driver.usage()
    assert idle.processes == ()
    assert {(one.pid, one.used_mib) for one in busy.processes or ()} == {
        (1000 + number, number) for number in range(200)
    }
    assert (busy.core_pct, busy.memory_bus_pct, busy.power_w) == (40, 20, 91.0)


@pytest.mark.parametrize("how", ["garbage", "truncated", "processes", "twice"])
async def test_values_that_cannot_be_are_no_answer(make_fake: MakeFake, how: str) -> None:
    machine = make_fake(2)
    machine.garble(how)
    with pytest.raises(AnswerUnknown):
        await driver_of(machine).discover()


async def test_an_idle_machine_has_no_device(make_fake: MakeFake) -> None:
    machine = make_fake(1)
    machine.unplug(0)
    assert (await driver_of(machine).discover()).devices == ()


async def test_memory_errors_come_from_xpu_smi_where_it_is_installed(
    make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_fake(2)
    (tmp_path / "tools").mkdir()
    tools = VendorTools(tmp_path / "tools", "kunlunxin", 2)
    say = machine.say

    def answer(tool: str, arguments: tuple[str, ...]) -> object:
        return tools.say(tool, arguments) if tool == "xpu-smi" else say(tool, arguments)

    monkeypatch.setattr(machine, "say", answer)
    driver = driver_of(machine, tool_path=str(tools.tool), interface="auto")
    await driver.discover()
    tools.lose(1)
    for trouble in ("", "garbage"):  # the last table is kept until a table can be parsed again
        if trouble:
            tools.garble(trouble)
        good, lost = await driver.probe()
        assert isinstance(good, ProbePassed)
        assert isinstance(lost, DeviceLost)
        assert lost.reason == "2 uncorrectable ECC errors since the last reset"
    tools.heal()
    tools.restore(1)
    assert {type(one) for one in await driver.probe()} == {ProbePassed}
    tools.lose(1)
    alone = driver_of(machine, tool_path=str(tools.tool), interface="library")
    await alone.discover()
    assert {type(one) for one in await alone.probe()} == {ProbePassed}


def test_a_card_that_is_not_there_is_not_cut(make_fake: MakeFake) -> None:
    machine = make_fake(1)
    arguments = [str(machine.library), "cut", "0000:ff:00.0", "4"]
    text, complaint, status = loading.run(xpuml.PROGRAM, arguments)
    assert (text, status) == ("", loading.Kind.GONE)
    assert complaint == "xpuml: there is no XPU 0000:ff:00.0\n"
