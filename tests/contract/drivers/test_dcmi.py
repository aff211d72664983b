# SPDX-License-Identifier: Apache-2.0
"""Ascend through DCMI: facts of the library beyond the driver contract, and its error cases."""

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from hami_common.model.device import Profile
from hami_nodeagent.core.hardware import Wanted
from hami_nodeagent.core.health import DeviceLost, ProbeFailed, Stimulus
from hami_nodeagent.drivers.ascend import binding as dcmi
from hami_nodeagent.drivers.ascend import parse_dcmi as parse
from hami_nodeagent.drivers.ascend.reader import AscendReader
from hami_nodeagent.drivers.catalog import build_driver
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceBusy,
    DriverMismatch,
)
from hami_nodeagent.drivers.protocol import Driver
from hami_nodeagent.drivers.reader import ToolSettings
from hami_nodeagent.libraries.loading import Kind
from tests.fakes import vendorparts
from tests.fakes.vendortools import VendorTools
from tests.support.fake_dcmi import FakeDcmi
from tests.support.vendor_parts import ASCEND_MODELS

pytestmark = pytest.mark.anyio

MakeFake = Callable[..., FakeDcmi]


@pytest.fixture
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFake:
    """Makes a machine whose library is loaded into this process."""

    def make(count: int = 2, *, model: str = "", dies: int = 1) -> FakeDcmi:
        fake = FakeDcmi(tmp_path, count, model=model, dies=dies)
        fake.answer_in_process(monkeypatch)
        return fake

    return make


def driver_of(fake: FakeDcmi, **settings: object) -> Driver:
    quick = {"answer_age_s": 0.0, "confirm_s": 0.001}
    return build_driver("ascend", {**fake.settings, **quick, **settings})


def sizes(profile: Profile) -> tuple[int, int, int, int]:
    """The published sizes of every template; media units of 24-core chips are not published."""
    amounts = profile.resources
    return (
        profile.memory_mib,
        profile.core_pct,
        amounts.get("aicore", 0),
        amounts.get("aicpu", 0),
    )


# ---- the same facts both ways ------------------------------------------------------------------


@pytest.mark.parametrize("model", ASCEND_MODELS)
async def test_library_and_tool_report_the_same_facts(
    tmp_path: Path, make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    through_library = await driver_of(make_fake(2, model=model)).discover()
    (tmp_path / "tools").mkdir()
    tools = VendorTools(tmp_path / "tools", "ascend", 2, model=model)
    monkeypatch.setattr(FakeDcmi, "say", lambda _, tool, words: tools.say(tool, words))
    through_tool = await build_driver(
        "ascend", {**tools.settings, "interface": "tool", "confirm_s": 0.001}
    ).discover()
    assert through_library.problems == through_tool.problems == ()
    for ours, theirs in zip(through_library.devices, through_tool.devices, strict=True):
        share = ours.attributes.pop("device_share")
        assert share == "off"
        told = {profile.name: sizes(profile) for profile in theirs.partitions}
        assert ours.partitions
        for profile in ours.partitions:  # the vendor's table: fewer for 910B2 than this machine has
            assert sizes(profile) == told[profile.name]
        assert msgspec.structs.replace(ours, partitions=()) == msgspec.structs.replace(
            theirs, partitions=()
        )
    assert through_library.links == through_tool.links


async def test_templates_come_from_npu_smi_where_it_is_installed(
    tmp_path: Path, make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make_fake(1, model="910B2")
    names = [profile.name for profile in (await driver_of(fake).discover()).devices[0].partitions]
    assert names == ["vir06_1c_16g", "vir12_3c_32g", ""]
    monkeypatch.setattr(
        FakeDcmi, "say", _with_tool(FakeDcmi.say, vendorparts.ascend_templates("910B2"))
    )
    names = [profile.name for profile in (await driver_of(fake).discover()).devices[0].partitions]
    assert names == ["vir12_3c_32g", "vir06_1c_16g", "vir03_1c_8g", ""]
    del tmp_path


def _with_tool(say: Callable[..., object], text: str) -> Callable[..., object]:
    from tests.fakes.vendoranswers import Answer  # noqa: PLC0415

    def answer(fake: FakeDcmi, tool: str, arguments: tuple[str, ...]) -> object:
        return say(fake, tool, arguments) if tool == "hami-dcmi" else Answer(text=text)

    return answer


# ---- 910C --------------------------------------------------------------------------------------


async def test_two_dies_of_a_910c_are_one_card_in_one_super_pod(make_fake: MakeFake) -> None:
    fake = make_fake(4, model="Ascend910", dies=2)
    fake.super_pod = 77
    fake.heal()
    inventory = await driver_of(fake).discover()
    assert [facts.type for facts in inventory.devices] == ["Ascend910C"] * 4
    assert [facts.attributes["npu"] for facts in inventory.devices] == ["0/0", "0/1", "1/0", "1/1"]
    assert {facts.attributes["super_pod"] for facts in inventory.devices} == {"77"}
    assert [facts.attributes["sdid"] for facts in inventory.devices] == [
        str(0x1000 + number) for number in range(4)
    ]
    pairs = {(link.a, link.b) for link in inventory.links}
    assert len(pairs) == 6
    usage = await driver_of(fake).usage()
    assert usage == ()


# ---- health ------------------------------------------------------------------------------------


async def test_a_dropped_card_is_lost_whatever_its_health_says(make_fake: MakeFake) -> None:
    fake = make_fake(2)
    driver = driver_of(fake)
    await driver.discover()
    fake.report(1, 0x40F84E00)
    by_uuid = {getattr(one, "uuid", ""): one for one in await driver.probe()}
    lost = by_uuid[fake.uuid_of(1)]
    assert isinstance(lost, DeviceLost)
    assert "card dropped" in lost.reason


async def test_unreadable_health_of_a_chip_is_one_failed_probe(
    make_fake: MakeFake,
) -> None:
    fake = make_fake(1)
    driver = driver_of(fake)
    await driver.discover()
    fake.refuse("dcmi_get_device_health", -8012)
    (stimulus,) = await driver.probe()
    assert isinstance(stimulus, ProbeFailed)
    assert "-8012" in stimulus.reason


async def test_unsupported_values_are_none_and_no_error(make_fake: MakeFake) -> None:
    fake = make_fake(1)
    for call in ("temperature", "power_info", "utilization_rate", "resource_info"):
        fake.refuse(f"dcmi_get_device_{call}", -8255)
    driver = driver_of(fake)
    await driver.discover()
    (usage,) = await driver.usage()
    assert (usage.temperature_c, usage.power_w, usage.core_pct) == (None, None, None)
    assert usage.memory_bus_pct == 7


# ---- errors ------------------------------------------------------------------------------------


def test_every_published_code_has_a_meaning_of_its_own() -> None:
    kinds = {
        code: dcmi.PROGRAM.errors.kind("dcmi_get_device_health", code)
        for code in (*range(-8023, -8000), -8255)
    }
    assert kinds[-8007] is kinds[-8008] is Kind.GONE
    assert kinds[-8013] is kinds[-8001] is kinds[-8255] is Kind.UNSUPPORTED
    assert kinds[-8005] is Kind.TRANSIENT
    assert dcmi.PROGRAM.errors.kind("dcmi_create_vdevice", -8001) is Kind.REFUSED


async def test_driver_and_firmware_that_do_not_fit_are_a_mismatch(make_fake: MakeFake) -> None:
    fake = make_fake(1)
    fake.garble("mismatch")
    with pytest.raises(DriverMismatch, match="driver and firmware") as caught:
        await driver_of(fake).discover()
    assert not caught.value.is_loaded_here


async def test_a_count_that_cannot_be_changes_no_state(make_fake: MakeFake) -> None:
    fake = make_fake(2)
    driver = driver_of(fake)
    before = await driver.discover()
    fake.garble("truncated")
    assert await driver.probe() == ()
    stale = await driver.discover()
    assert {facts.attributes["stale"] for facts in stale.devices} == {"true"}
    with pytest.raises(AnswerUnknown):
        await driver_of(fake).discover()
    fake.heal()
    assert await driver.discover() == before


async def test_unreadable_division_fails_only_the_partitioner(
    make_fake: MakeFake,
) -> None:
    fake = make_fake(1)
    fake.refuse("dcmi_get_device_info", -8020)
    driver = driver_of(fake)
    (facts,) = (await driver.discover()).devices
    assert (facts.mode, facts.partitions) == ("whole", ())
    assert driver.partitioner is not None
    with pytest.raises(DeviceBusy):
        await driver.partitioner.instances()


# ---- sharing without division ------------------------------------------------------------------


async def test_soft_shares_switch_device_share_on_and_make_no_partitions(
    make_fake: MakeFake,
) -> None:
    fake = make_fake(2)
    driver = driver_of(fake, soft_shares=True)
    inventory = await driver.discover()
    assert [facts.mode for facts in inventory.devices] == ["soft", "soft"]
    assert {facts.attributes["device_share"] for facts in inventory.devices} == {"on"}
    assert all(facts.partitions == () for facts in inventory.devices)
    assert driver.partitioner is None
    assert {
        facts.attributes["device_share"] for facts in (await driver_of(fake).discover()).devices
    } == {"on"}


async def test_soft_shares_leave_a_divided_chip_and_one_that_refuses(make_fake: MakeFake) -> None:
    fake = make_fake(2)
    divider = driver_of(fake).partitioner
    assert divider is not None
    wanted = Wanted(uuid=fake.uuid_of(0), profile="vir05_1c_16g", memory_mib=16384, core_pct=25)
    await divider.create(wanted)
    fake.refuse("dcmi_set_device_share_enable", -8255)
    inventory = await driver_of(fake, soft_shares=True).discover()
    assert [facts.mode for facts in inventory.devices] == ["whole", "whole"]
    assert ["is divided" in inventory.problems[0], "device-share" in inventory.problems[1]] == [
        True,
        True,
    ]


# ---- faults that chips report ------------------------------------------------------------------


def reader_of(fake: FakeDcmi) -> AscendReader:
    return AscendReader(msgspec.convert(fake.settings, ToolSettings))


async def told(driver: Driver, *, within_s: float = 60.0) -> tuple[Stimulus, ...]:
    """Faults that the driver reports without a probe."""
    with anyio.fail_after(within_s):
        while not (found := await driver.wait_faults(5.0)):
            pass
    return found


async def test_reported_fault_of_a_chip_is_examined_at_once(tmp_path: Path) -> None:
    fake = FakeDcmi(tmp_path, 2)
    driver = driver_of(fake)
    first, second = (await driver.discover()).devices
    async with anyio.create_task_group() as group:
        found: list[Stimulus] = []

        async def listen() -> None:
            found.extend(await told(driver))

        group.start_soon(listen)
        fake.lose(1)
        serial = 0
        with anyio.fail_after(60.0):
            while not found:  # an event between two waits is not received
                serial += 1
                fake.tell(1, 0x80E01801, serial)
                await anyio.sleep(0.3)
    (lost,) = found
    assert isinstance(lost, DeviceLost)
    assert lost.uuid == second.uuid
    assert first.uuid != second.uuid
    await driver.aclose()


async def test_repeated_fault_is_reported_once(tmp_path: Path) -> None:
    fake = FakeDcmi(tmp_path, 1)
    reader = reader_of(fake)
    await reader.survey()
    fake.tell(0, 0x80E01801, 1, replays=True)
    assert await reader.wait_news(20.0)
    assert not await reader.wait_news(0.05)
    reader.forget()
    await reader.survey()
    assert await reader.wait_news(20.0)


async def test_library_without_fault_events_is_asked_once(tmp_path: Path) -> None:
    fake = FakeDcmi(tmp_path, 1)
    reader = reader_of(fake)
    assert not await reader.wait_news(0.01)  # nothing is known of the library yet
    await reader.survey()
    fake.refuse("dcmi_subscribe_fault_event", -8255)
    fake.tell(0, 0x80E01801, 1, replays=True)
    assert not await reader.wait_news(0.01)
    fake.refuse("dcmi_subscribe_fault_event", 0)
    assert not await reader.wait_news(0.01)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"chip": "a"}]', '[{"chip": 1}]'])
def test_unparsable_fault_text_is_an_error(text: str) -> None:
    with pytest.raises(AnswerUnknown):
        parse.faults(text)
