# SPDX-License-Identifier: Apache-2.0
"""Contract of every driver that runs a vendor's tool, when the tool behaves badly."""

from collections.abc import Callable

import anyio
import pytest

from hami_nodeagent.core.health import (
    DeviceListed,
    DeviceLost,
    HealthBook,
    HealthRules,
    ProbeFailed,
    ProbePassed,
)
from hami_nodeagent.drivers.catalog import is_detected
from hami_nodeagent.drivers.errors import (
    AnswerUnknown,
    DeviceHung,
    DriverDenied,
    DriverError,
    DriverMismatch,
    DriverMissing,
)
from hami_nodeagent.drivers.protocol import Driver
from tests.contract.drivers.benches import ToolBench

pytestmark = pytest.mark.anyio

MakeToolBench = Callable[[str], ToolBench]
Opened = Callable[[Driver], Driver]


async def test_facts_are_those_of_the_machine(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("6x")
    inventory = await opened(bench.driver()).discover()
    make = bench.tools.make
    assert inventory.problems == ()
    assert inventory.driver_version == make.version
    assert [facts.uuid for facts in inventory.devices] == bench.uuids
    for index, facts in enumerate(inventory.devices):
        assert (facts.vendor, facts.index, facts.type) == (bench.vendor, index, make.type)
        assert (facts.memory_mib, facts.healthy, facts.core_pct) == (make.memory_mib, True, 100)
        assert facts.bus_id == bench.tools.bus_id_of(index)
        assert facts.numa == bench.tools.numa_of(index)
        assert facts.minor == index
        for profile in facts.partitions:
            assert profile.memory_mib <= facts.memory_mib
            assert profile.resources.keys() <= facts.resources.keys()


async def test_hardware_is_detected_by_its_signs_without_any_tool(
    make_tool_bench: MakeToolBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_tool_bench("2x")
    monkeypatch.setenv("PATH", "/nowhere")
    settings = {**bench.tools.settings, "tool_path": ""}
    assert is_detected(bench.vendor, settings)
    bench.unplug(0)
    bench.unplug(1)
    assert not is_detected(bench.vendor, settings)


async def test_missing_tool_is_a_missing_driver(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("2x")
    bench.tools.remove_tools()
    with pytest.raises(DriverMissing, match="is not installed"):
        await opened(bench.driver()).discover()


@pytest.mark.parametrize("how", ["garbage", "truncated"])
async def test_answer_of_unknown_form_changes_no_state_and_marks_it_stale(
    make_tool_bench: MakeToolBench, opened: Opened, how: str
) -> None:
    bench = make_tool_bench("2x")
    driver = opened(bench.driver())
    before = await driver.discover()
    bench.tools.garble(how)
    for _ in range(4):
        assert await driver.probe() == ()
    stale = await driver.discover()
    assert [facts.uuid for facts in stale.devices] == bench.uuids
    assert all(facts.healthy for facts in stale.devices)
    assert {facts.attributes["stale"] for facts in stale.devices} == {"true"}
    assert "as they were seen last" in stale.problems[0]
    with pytest.raises(DriverError):
        await driver.usage()
    bench.tools.heal()
    assert await driver.discover() == before


async def test_answer_of_unknown_form_from_the_start_is_an_error(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("2x")
    bench.tools.garble("garbage")
    driver = opened(bench.driver())
    with pytest.raises(AnswerUnknown):
        await driver.discover()
    assert await driver.probe() == ()


async def test_tool_that_hangs_is_killed_and_counts_as_failed_probes(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("2x")
    driver = opened(bench.driver(query_limit_s=0.3))
    with anyio.fail_after(20):
        bench.tools.hang()
        with pytest.raises(DeviceHung, match="no answer within"):
            await driver.discover()
        bench.tools.heal()
        patient = opened(bench.driver(query_limit_s=10.0))
        await patient.discover()
    assert not driver.is_stuck


async def test_three_timeouts_condemn_and_clean_answers_restore(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("1x")
    driver = opened(bench.driver())
    book = HealthBook(HealthRules(probes_to_recover=2, recover_s=0.0))
    for facts in (await driver.discover()).devices:
        book.handle(DeviceListed(uuid=facts.uuid), 0.0)
    uuid = bench.uuids[0]
    bench.tools.answer("", complaint="operation timed out", status=1)
    seen = []
    for moment in range(3):
        (stimulus,) = await driver.probe()
        assert isinstance(stimulus, ProbeFailed)
        book.handle(stimulus, float(moment))
        seen.append(book.verdict(uuid).usable)
    assert seen == [True, True, False]
    bench.tools.heal()
    for moment in range(3, 6):
        for passed in await driver.probe():
            assert isinstance(passed, ProbePassed)
            book.handle(passed, float(moment))
    assert book.verdict(uuid).usable


async def test_device_condemned_by_its_tool_is_lost_at_once_and_recovers(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("2x")
    if not bench.tells_loss:
        bench.lose(1)
        driver = opened(bench.driver())
        assert [facts.uuid for facts in (await driver.discover()).devices] == bench.uuids[:1]
        return
    driver = opened(bench.driver())
    await driver.discover()
    bench.lose(1)
    by_uuid = {getattr(one, "uuid", ""): one for one in await driver.probe()}
    lost = by_uuid[bench.uuids[1]]
    assert isinstance(lost, DeviceLost)
    assert lost.reason
    bench.restore(1)
    assert {type(one) for one in await driver.probe()} == {ProbePassed}


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        ("Failed to initialize: Driver/library version mismatch", DriverMismatch),
        ("open /dev/xyz: Permission denied", DriverDenied),
    ],
)
async def test_messages_of_the_tool_are_kept_in_errors(
    make_tool_bench: MakeToolBench, opened: Opened, complaint: str, kind: type[DriverError]
) -> None:
    bench = make_tool_bench("1x")
    bench.tools.answer("", complaint=complaint, status=9)
    with pytest.raises(kind) as caught:
        await opened(bench.driver()).discover()
    assert caught.value.detail == complaint
    assert caught.value.code == 9


async def test_version_mismatch_of_a_tool_needs_no_restart_of_the_agent(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("1x")
    bench.tools.answer("", complaint="version mismatch", status=1)
    with pytest.raises(DriverMismatch) as caught:
        await opened(bench.driver()).discover()
    assert not caught.value.is_loaded_here


async def test_unknown_messages_are_kept(make_tool_bench: MakeToolBench, opened: Opened) -> None:
    bench = make_tool_bench("1x")
    bench.tools.answer("", complaint="flux capacitor exhausted", status=42)
    with pytest.raises(AnswerUnknown, match=r"flux capacitor exhausted \(code 42\)"):
        await opened(bench.driver()).discover()


async def test_one_answer_serves_probe_and_usage_for_a_moment(
    make_tool_bench: MakeToolBench, opened: Opened
) -> None:
    bench = make_tool_bench("1x")
    driver = opened(bench.driver(answer_age_s=3600.0))
    await driver.discover()
    bench.tools.garble("garbage")
    assert [type(one) for one in await driver.probe()] == [ProbePassed]
    assert [usage.uuid for usage in await driver.usage()] == bench.uuids
