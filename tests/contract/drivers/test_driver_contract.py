# SPDX-License-Identifier: Apache-2.0
"""Contract of every driver, run over each of them on a machine that can be broken."""

from collections.abc import Callable

import anyio
import pytest

from hami_common.model.device import Link
from hami_nodeagent.core.health import (
    DeviceListed,
    DeviceLost,
    DriverGone,
    FaultSeen,
    HealthBook,
    HealthRules,
    ProbeFailed,
    ProbePassed,
    Stimulus,
)
from hami_nodeagent.drivers.errors import DriverMissing
from hami_nodeagent.drivers.protocol import DeviceUsage, Driver, ProcessUsage
from hami_nodeagent.drivers.rules import type_of
from hami_sim.hardware import profile
from hami_sim.hardware.fake_nvml import Process
from tests.contract.drivers.benches import Bench, ProfileBench

pytestmark = pytest.mark.anyio

MakeBench = Callable[[str], Bench]
MakeProfileBench = Callable[[str], ProfileBench]
Opened = Callable[[Driver], Driver]
SOON_S = 2.0


async def faults_within(driver: Driver, limit_s: float) -> tuple[Stimulus, ...]:
    deadline_s = anyio.current_time() + limit_s
    stimuli: tuple[Stimulus, ...] = ()
    while not stimuli and anyio.current_time() < deadline_s:
        stimuli = await driver.wait_faults(0.1)
    return stimuli


@pytest.mark.parametrize("name", profile.names("nvidia"))
async def test_discovery_lists_all_devices_of_the_machine(
    make_profile_bench: MakeProfileBench, opened: Opened, name: str
) -> None:
    bench = make_profile_bench(name)
    inventory = await opened(bench.driver()).discover()
    assert inventory.problems == ()
    assert inventory.driver_version == bench.profile.driver.version
    assert [facts.uuid for facts in inventory.devices] == bench.uuids
    for index, facts in enumerate(inventory.devices):
        part = bench.profile.devices[index]
        assert facts.vendor == bench.profile.vendor
        assert facts.index == index
        assert facts.type == type_of("nvidia", bench.profile.name_of(index))
        assert facts.memory_mib == bench.profile.memory_mib_of(index)
        assert (facts.core_pct, facts.mode, facts.healthy) == (100, bench.profile.model.mode, True)
        assert (facts.minor, facts.numa, facts.bus_id) == (part.minor, part.numa, part.bus_id)
        capability = bench.profile.model.attributes["compute_capability"]
        assert facts.attributes["compute_capability"] == capability


@pytest.mark.parametrize(
    ("name", "pair", "score"),
    [
        ("8xH200", (0, 1), 20 + 1800),
        ("8xH200", (0, 7), 10 + 1800),
        ("8xA100-40", (2, 3), 40 + 1200),
        ("2xA30", (0, 1), 30 + 400),
        ("2xL40S", (0, 1), 10),
        ("4xT4", (2, 3), 20),
    ],
)
async def test_links_are_scored_once_per_pair(
    make_profile_bench: MakeProfileBench,
    opened: Opened,
    name: str,
    pair: tuple[int, int],
    score: int,
) -> None:
    bench = make_profile_bench(name)
    inventory = await opened(bench.driver()).discover()
    count = len(bench.uuids)
    assert len(inventory.links) == count * (count - 1) // 2
    assert Link(a=bench.uuids[pair[0]], b=bench.uuids[pair[1]], score=score) in inventory.links


async def test_discovery_is_stable_when_nothing_changed(
    make_bench: MakeBench, opened: Opened
) -> None:
    driver = opened(make_bench("8xA100-80").driver())
    assert await driver.discover() == await driver.discover()


async def test_missing_driver_is_an_error_until_it_is_loaded(
    make_bench: MakeBench, opened: Opened
) -> None:
    bench = make_bench("2xA30")
    bench.unload_driver()
    driver = opened(bench.driver())
    for _ in range(2):
        with pytest.raises(DriverMissing):
            await driver.discover()
    assert await driver.probe() == ()
    bench.load_driver()
    assert len((await driver.discover()).devices) == 2
    assert await driver.probe() == tuple(ProbePassed(uuid=uuid) for uuid in sorted(bench.uuids))


async def test_unloaded_driver_is_reported_and_found_again(
    make_bench: MakeBench, opened: Opened
) -> None:
    bench = make_bench("2xA30")
    driver = opened(bench.driver())
    await driver.discover()
    bench.unload_driver()
    assert isinstance((await driver.probe())[0], DriverGone)
    if isinstance(bench, ProfileBench):
        assert isinstance((await driver.wait_faults(0.1))[0], DriverGone)
    with pytest.raises(DriverMissing):
        await driver.usage()
    bench.load_driver()
    stimuli = await driver.probe()
    assert {type(stimulus) for stimulus in stimuli} == {ProbePassed}
    assert len((await driver.discover()).devices) == 2


async def test_device_that_appears_later_is_found(make_bench: MakeBench, opened: Opened) -> None:
    bench = make_bench("4xT4")
    bench.unplug(2)
    driver = opened(bench.driver())
    first = await driver.discover()
    assert len(first.devices) == 3
    bench.plug(2)
    second = await driver.discover()
    assert [facts.uuid for facts in second.devices] == bench.uuids
    assert await driver.probe() == tuple(ProbePassed(uuid=uuid) for uuid in sorted(bench.uuids))


async def test_device_that_appears_later_is_linked_and_watched(
    make_profile_bench: MakeProfileBench, opened: Opened
) -> None:
    bench = make_profile_bench("4xT4")
    bench.unplug(2)
    driver = opened(bench.driver())
    assert len((await driver.discover()).links) == 3
    bench.plug(2)
    assert len((await driver.discover()).links) == 6
    assert await driver.wait_faults(0.05) == ()
    bench.fault(2, 79)
    faults = await faults_within(driver, SOON_S)
    assert [fault.uuid for fault in faults if isinstance(fault, FaultSeen)] == [bench.uuids[2]]


async def test_machine_without_devices_is_no_error_and_devices_may_appear(
    make_bench: MakeBench, opened: Opened
) -> None:
    bench = make_bench("2xA30")
    bench.unplug(0)
    bench.unplug(1)
    driver = opened(bench.driver())
    assert (await driver.discover()).devices == ()
    assert await driver.usage() == ()
    bench.plug(0)
    bench.plug(1)
    assert [facts.uuid for facts in (await driver.discover()).devices] == bench.uuids


async def test_lost_device_does_not_hide_the_others(make_bench: MakeBench, opened: Opened) -> None:
    bench = make_bench("4xT4")
    driver = opened(bench.driver())
    before = await driver.discover()
    bench.lose(1)
    inventory = await driver.discover()
    assert [facts.uuid for facts in inventory.devices] == bench.uuids
    assert [facts.healthy for facts in inventory.devices] == [True, False, True, True]
    assert inventory.devices[1].health_reason
    assert inventory.devices[1].memory_mib == before.devices[1].memory_mib
    assert len(inventory.problems) == bench.tells_loss
    assert [usage.uuid for usage in await driver.usage()] == [
        bench.uuids[index] for index in (0, 2, 3)
    ]
    bench.restore(1)
    assert await driver.discover() == before


async def test_device_that_was_never_seen_working_is_a_problem_not_a_device(
    make_bench: MakeBench, opened: Opened
) -> None:
    bench = make_bench("4xT4")
    bench.lose(0)
    inventory = await opened(bench.driver()).discover()
    assert [facts.uuid for facts in inventory.devices] == bench.uuids[1:]
    told = ["device 0"] if bench.tells_loss else []
    assert [problem.partition(": ")[0] for problem in inventory.problems] == told


async def test_unplugged_device_stays_in_the_report(make_bench: MakeBench, opened: Opened) -> None:
    bench = make_bench("2xL40S")
    driver = opened(bench.driver())
    await driver.discover()
    bench.unplug(1)
    inventory = await driver.discover()
    assert [facts.healthy for facts in inventory.devices] == [True, False]
    assert "does not list" in inventory.devices[1].health_reason


async def test_probes_distinguish_lost_failing_and_working_devices(
    make_bench: MakeBench, opened: Opened
) -> None:
    bench = make_bench("4xT4")
    driver = opened(bench.driver())
    await driver.discover()
    bench.lose(0)
    bench.fail_probes(1)
    by_uuid = {getattr(stimulus, "uuid", ""): stimulus for stimulus in await driver.probe()}
    kinds = [type(by_uuid[uuid]) for uuid in bench.uuids]
    gone = DeviceLost if bench.tells_loss else ProbeFailed
    assert kinds == [gone, ProbeFailed, ProbePassed, ProbePassed]
    bench.restore(0)
    again = {getattr(stimulus, "uuid", ""): stimulus for stimulus in await driver.probe()}
    assert isinstance(again[bench.uuids[0]], ProbePassed)


async def test_probing_before_discovery_probes_no_device(
    make_bench: MakeBench, opened: Opened
) -> None:
    assert await opened(make_bench("2xA30").driver()).probe() == ()


async def test_waiting_without_faults_ends_in_time(make_bench: MakeBench, opened: Opened) -> None:
    driver = opened(make_bench("2xA30").driver())
    await driver.discover()
    started = anyio.current_time()
    assert await driver.wait_faults(0.2) == ()
    assert 0.15 <= anyio.current_time() - started < SOON_S


@pytest.mark.parametrize(
    ("code", "fatal"), [(79, True), (48, True), (119, True), (13, False), (31, False), (109, False)]
)
async def test_fault_is_delivered_once_and_judged(
    make_profile_bench: MakeProfileBench, opened: Opened, code: int, *, fatal: bool
) -> None:
    bench = make_profile_bench("2xA30")
    driver = opened(bench.driver())
    await driver.discover()
    assert await driver.wait_faults(0.05) == ()
    bench.fault(1, code)
    assert await faults_within(driver, SOON_S) == (
        FaultSeen(uuid=bench.uuids[1], code=code, fatal=fatal, text=f"Xid {code}"),
    )
    assert await driver.wait_faults(0.1) == ()


async def test_operators_lists_override_the_severity_of_a_fault(
    make_profile_bench: MakeProfileBench, opened: Opened
) -> None:
    bench = make_profile_bench("2xA30")
    driver = opened(bench.driver(disable_health_checks="74,79", enable_health_checks="31"))
    await driver.discover()
    assert await driver.wait_faults(0.05) == ()
    seen = {}
    for code in (74, 79, 31, 48):
        bench.fault(0, code)
        for fault in await faults_within(driver, SOON_S):
            assert isinstance(fault, FaultSeen)
            seen[fault.code] = fault.fatal
    assert seen == {74: False, 79: False, 31: True, 48: True}


async def test_health_checks_can_be_switched_off(make_bench: MakeBench, opened: Opened) -> None:
    bench = make_bench("2xA30")
    driver = opened(bench.driver(disable_health_checks="all"))
    await driver.discover()
    bench.lose(0)
    assert await driver.probe() == ()


async def test_usage_shows_memory_load_and_processes(make_bench: MakeBench, opened: Opened) -> None:
    bench = make_bench("2xA30")
    driver = opened(bench.driver())
    await driver.discover()
    bench.use(0, 3000, 40, [Process(pid=4711, used_mib=1500, sm_pct=35)])
    first, second = await driver.usage()
    assert isinstance(first, DeviceUsage)
    assert (first.uuid, first.total_mib) == (bench.uuids[0], bench.memory_mib(0))
    assert first.used_mib == (3000 if bench.tells_used else None)
    assert first.core_pct == (40 if bench.tells_load else None)
    assert second.core_pct == (0 if bench.tells_load else None)
    assert second.used_mib == (0 if bench.tells_used else None)
    if not bench.tells_processes:
        assert (first.processes, second.processes) == (None, None)
        return
    process = ProcessUsage(
        pid=4711,
        used_mib=1500 if bench.tells_process_memory else None,
        core_pct=35 if bench.tells_process_load else None,
    )
    assert (first.processes, second.processes) == ((process,), ())


async def test_close_right_after_a_cancelled_wait_is_complete(
    make_bench: MakeBench, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    driver = opened(make_bench("2xA30").driver())
    await driver.discover()
    with anyio.move_on_after(0.05):
        await driver.wait_faults(0.5)
    await driver.aclose()
    assert not driver.is_stuck
    assert caplog.records == []


async def test_closed_driver_can_be_used_again(make_bench: MakeBench, opened: Opened) -> None:
    driver = opened(make_bench("2xA30").driver())
    before = await driver.discover()
    await driver.aclose()
    await driver.aclose()
    assert await driver.discover() == before


async def test_fatal_fault_is_seen_within_five_seconds_and_recovers_without_restart(
    make_profile_bench: MakeProfileBench, opened: Opened
) -> None:
    bench = make_profile_bench("2xA30")
    driver = opened(bench.driver())
    book = HealthBook(HealthRules(probes_to_recover=2, recover_s=0.05))
    for facts in (await driver.discover()).devices:
        book.handle(DeviceListed(uuid=facts.uuid), anyio.current_time())
    assert await driver.wait_faults(0.05) == ()
    bench.fault(0, 79)
    started = anyio.current_time()
    for fault in await faults_within(driver, 5):
        book.handle(fault, anyio.current_time())
    assert anyio.current_time() - started < 5
    assert [book.verdict(uuid).usable for uuid in bench.uuids] == [False, True]
    with anyio.fail_after(5):
        while not book.verdict(bench.uuids[0]).usable:
            for stimulus in await driver.probe():
                book.handle(stimulus, anyio.current_time())
            await anyio.sleep(0.01)
    book.check()
