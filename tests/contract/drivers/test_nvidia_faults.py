# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver against a library that misbehaves: hangs, errors per function, odd hardware."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from hami_common.model.device import Link
from hami_nodeagent.core.health import DeviceLost, FaultSeen, ProbeFailed, ProbePassed
from hami_nodeagent.drivers.errors import (
    DriverDenied,
    DriverError,
    DriverMismatch,
    DriverMissing,
    DriverTransient,
)
from hami_nodeagent.drivers.nvidia.driver import NvidiaDriver
from hami_nodeagent.drivers.protocol import Driver
from hami_sim.hardware.fake_nvml import EVENT_DOUBLE_BIT_ECC, NvLink, Process
from hami_sim.hardware.profile import Level
from tests.contract.drivers.benches import FakeNvmlBench

pytestmark = pytest.mark.anyio

MakeBench = Callable[[str], FakeNvmlBench]
HANG_MS = 60_000
DEADLINE_S = 0.3


@asynccontextmanager
async def driving(bench: FakeNvmlBench, **settings: object) -> AsyncIterator[Driver]:
    """A driver that is closed in the end, after the library's hanging functions have returned."""
    driver = bench.driver(**settings)
    try:
        yield driver
    finally:
        bench.nvml.clear_faults()
        await free(driver)
        await driver.aclose()


async def free(driver: Driver) -> None:
    """Wait until no call hangs."""
    with anyio.fail_after(5):
        while driver.is_stuck:
            await anyio.sleep(0.005)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetAttributes_v2",
    ],
)
@pytest.mark.parametrize("code", [999, 15, 17])
async def test_card_that_fails_in_any_query_does_not_hide_the_others(
    nvidia_bench: MakeBench, function: str, code: int
) -> None:
    bench = nvidia_bench("8xA100-40")
    bench.nvml.fault(function, 5, code)
    async with driving(bench) as driver:
        inventory = await driver.discover()
    assert [facts.index for facts in inventory.devices] == [0, 1, 2, 3, 4, 6, 7]
    assert len(inventory.problems) == 1
    assert inventory.problems[0].startswith("device 5: ")


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetSerial", "nvmlDeviceGetMigMode", "nvmlDeviceGetAttributes_v2"],
)
async def test_query_that_a_part_does_not_support_is_left_out(
    nvidia_bench: MakeBench, function: str
) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.fault(function, 0, 3)
    async with driving(bench) as driver:
        inventory = await driver.discover()
    assert len(inventory.devices) == 2
    assert inventory.problems == ()


async def test_hung_card_costs_one_deadline_and_only_itself(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("4xT4")
    async with driving(bench, call_deadline_s=DEADLINE_S) as driver:
        await driver.discover()
        bench.nvml.fault("nvmlDeviceGetUUID", 2, 0, hang_ms=HANG_MS)
        started = anyio.current_time()
        by_uuid = {getattr(s, "uuid", ""): s for s in await driver.probe()}
        assert anyio.current_time() - started < 10 * DEADLINE_S
        assert driver.is_stuck
        assert isinstance(by_uuid[bench.uuids[2]], DeviceLost)
        others = [by_uuid[bench.uuids[index]] for index in (0, 1, 3)]
        assert all(isinstance(stimulus, ProbePassed) for stimulus in others)

        inventory = await driver.discover()
        assert [facts.healthy for facts in inventory.devices] == [True, True, False, True]
        assert "has not returned yet" in inventory.devices[2].health_reason
        assert len(await driver.usage()) == 3

        bench.nvml.clear_faults()
        await free(driver)
        assert all(isinstance(stimulus, ProbePassed) for stimulus in await driver.probe())
        assert (await driver.discover()).problems == ()


async def test_hung_library_does_not_block_the_loop(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.fault("nvmlInitWithFlags", None, 0, hang_ms=HANG_MS)
    async with driving(bench, call_deadline_s=DEADLINE_S) as driver:
        with anyio.fail_after(10 * DEADLINE_S), pytest.raises(DriverError, match="no answer"):
            await driver.discover()
        bench.nvml.clear_faults()
        await free(driver)
        assert len((await driver.discover()).devices) == 2


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (9, DriverMissing),
        (12, DriverMissing),
        (18, DriverMismatch),
        (4, DriverDenied),
        (999, DriverTransient),
    ],
)
async def test_init_errors_are_distinguished(
    nvidia_bench: MakeBench, code: int, error: type[DriverError]
) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.init_error(code)
    async with driving(bench) as driver:
        with pytest.raises(error) as raised:
            await driver.discover()
        assert raised.value.code == code
        bench.nvml.init_error(0)
        assert len((await driver.discover()).devices) == 2


async def test_library_file_that_is_not_there_means_no_driver(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    async with driving(bench, library_path="/nowhere/libnvidia-ml.so.1") as driver:
        with pytest.raises(DriverMissing, match="load NVML"):
            await driver.discover()


@pytest.mark.parametrize("code", [999, 17, 20])
async def test_failing_wait_condemns_no_device_and_is_retried(
    nvidia_bench: MakeBench, code: int
) -> None:
    bench = nvidia_bench("2xA30")
    async with driving(bench) as driver:
        await driver.discover()
        bench.nvml.fault("nvmlEventSetWait_v2", None, code)
        for _ in range(3):
            assert await driver.wait_faults(0.02) == ()
        bench.nvml.clear_faults()
        assert await driver.wait_faults(0.02) == ()
        bench.nvml.xid(1, 79)
        assert [getattr(s, "uuid", "") for s in await driver.wait_faults(2)] == [bench.uuids[1]]


async def test_wait_names_the_lost_card_and_keeps_watching_the_others(
    nvidia_bench: MakeBench,
) -> None:
    bench = nvidia_bench("4xT4")
    async with driving(bench) as driver:
        await driver.discover()
        assert await driver.wait_faults(0.02) == ()
        bench.nvml.lose(3)
        lost = await driver.wait_faults(0.05)
        assert [type(stimulus) for stimulus in lost] == [DeviceLost]
        assert [getattr(stimulus, "uuid", "") for stimulus in lost] == [bench.uuids[3]]
        assert await driver.wait_faults(0.05) == ()
        bench.nvml.xid(0, 48)
        faults = await driver.wait_faults(2)
        assert [getattr(stimulus, "uuid", "") for stimulus in faults] == [bench.uuids[0]]


async def test_card_without_events_stays_healthy_and_the_others_are_watched(
    nvidia_bench: MakeBench,
) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_key(0, "supported_events", "0")
    async with driving(bench) as driver:
        await driver.discover()
        assert await driver.wait_faults(0.02) == ()
        bench.nvml.xid(1, 79)
        faults = await driver.wait_faults(2)
        assert [getattr(stimulus, "uuid", "") for stimulus in faults] == [bench.uuids[1]]
        assert all(isinstance(stimulus, ProbePassed) for stimulus in await driver.probe())


async def test_memory_error_event_alone_condemns_nothing(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    async with driving(bench) as driver:
        await driver.discover()
        assert await driver.wait_faults(0.02) == ()
        bench.nvml.event(0, EVENT_DOUBLE_BIT_ECC, 1)
        (fault,) = await driver.wait_faults(2)
        assert isinstance(fault, FaultSeen)
        assert (fault.fatal, fault.text) == (False, "uncorrectable memory error")


async def test_row_that_cannot_be_remapped_fails_the_probe(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    async with driving(bench) as driver:
        await driver.discover()
        bench.nvml.set_key(0, "remapped_failure", "1")
        by_uuid = {getattr(s, "uuid", ""): s for s in await driver.probe()}
        assert isinstance(by_uuid[bench.uuids[0]], ProbeFailed)
        assert isinstance(by_uuid[bench.uuids[1]], ProbePassed)


async def test_unified_memory_is_skipped_with_the_setting_that_enables_it(
    nvidia_bench: MakeBench,
) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_key(1, "unified_memory", "1")
    async with driving(bench) as driver:
        inventory = await driver.discover()
    assert [facts.index for facts in inventory.devices] == [0]
    assert "set unified_memory_mib" in inventory.problems[0]


async def test_unified_memory_uses_the_configured_amount(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_key(1, "unified_memory", "1")
    async with driving(bench, unified_memory_mib=120_000) as driver:
        inventory = await driver.discover()
        usages = await driver.usage()
    assert [facts.memory_mib for facts in inventory.devices] == [24576, 120_000]
    assert [usage.used_mib for usage in usages] == [0, None]


async def test_memory_is_rounded_down_to_whole_mib(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_key(0, "memory_total", str((100 << 20) + (1 << 20) - 1))
    async with driving(bench) as driver:
        assert (await driver.discover()).devices[0].memory_mib == 100


async def test_unreadable_topology_counts_as_distant(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("4xT4")
    bench.nvml.fault("nvmlDeviceGetTopologyCommonAncestor", None, 3)
    async with driving(bench) as driver:
        assert {link.score for link in (await driver.discover()).links} == {10}


async def test_links_that_cannot_be_read_leave_the_inventory_standing(
    nvidia_bench: MakeBench,
) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.fault("nvmlDeviceGetNvLinkState", None, 999)
    async with driving(bench) as driver:
        inventory = await driver.discover()
    assert len(inventory.devices) == 2
    assert inventory.links == ()


async def test_link_that_differs_by_direction_scores_zero(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    far = bench.nvml.bus_id(1)
    bench.nvml.set_links(
        0, [NvLink(number=n, remote_type=0, remote_bus_id=far, active=n < 3) for n in range(4)]
    )
    async with driving(bench) as driver:
        inventory = await driver.discover()
    assert inventory.links == (Link(a=bench.uuids[0], b=bench.uuids[1], score=0),)
    assert "differs by direction: 330 and 430" in inventory.problems[0]


async def test_switched_pair_is_as_strong_as_its_weaker_end(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("8xH200")
    switch = "00000000:C0:00.0"
    bench.nvml.set_links(
        7, [NvLink(number=n, remote_type=2, remote_bus_id=switch, active=n < 16) for n in range(18)]
    )
    async with driving(bench) as driver:
        inventory = await driver.discover()
    assert Link(a=bench.uuids[0], b=bench.uuids[7], score=1610) in inventory.links
    assert Link(a=bench.uuids[0], b=bench.uuids[6], score=1810) in inventory.links


async def test_level_change_is_seen_by_the_next_discovery(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xL40S")
    async with driving(bench) as driver:
        await driver.discover()
        bench.nvml.set_level(0, 1, Level.SINGLE)
        bench.nvml.set_level(1, 0, Level.SINGLE)
        assert (await driver.discover()).links[0].score == 50


async def test_mig_mode_is_reported(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_key(1, "mig_current", "1")
    async with driving(bench) as driver:
        inventory = await driver.discover()
        usages = await driver.usage()
    assert [facts.mode for facts in inventory.devices] == ["soft", "mig"]
    assert [usage.core_pct for usage in usages] == [0, None]


async def test_numa_is_unknown_where_sysfs_has_no_value(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    async with driving(bench, sysfs_root="/nowhere") as driver:
        assert [facts.numa for facts in (await driver.discover()).devices] == [None, None]


async def test_nvml_is_reopened_only_when_the_kernel_lists_other_cards(
    nvidia_bench: MakeBench,
) -> None:
    bench = nvidia_bench("2xA30")
    bench.unplug(1)
    async with driving(bench) as driver:
        assert len((await driver.discover()).devices) == 1
        bench.nvml.plug(1)
        assert len((await driver.discover()).devices) == 1
        bench.bind(1)
        assert len((await driver.discover()).devices) == 2


async def test_lost_card_does_not_reopen_nvml_at_every_discovery(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    async with driving(bench, reopen_min_s=3600.0) as driver:
        await driver.discover()
        bench.nvml.lose(0)
        await driver.discover()
        bench.nvml.init_error(999)  # a second open would show
        assert [facts.healthy for facts in (await driver.discover()).devices] == [False, True]


async def test_no_probe_sees_a_closed_library_while_nvml_is_reopened(
    nvidia_bench: MakeBench,
) -> None:
    bench = nvidia_bench("4xT4")
    async with driving(bench) as driver:
        await driver.discover()
        bench.nvml.lose(0)
        rounds = 30
        stimuli: list[object] = []

        async def probe() -> None:
            for _ in range(rounds):
                stimuli.extend(await driver.probe())

        async def wait() -> None:
            for _ in range(rounds):
                stimuli.extend(await driver.wait_faults(0.005))

        async def discover() -> None:
            for _ in range(rounds):
                await driver.discover()

        async with anyio.create_task_group() as tasks:
            for task in (probe, wait, discover):
                tasks.start_soon(task)
        kinds = {(type(s), getattr(s, "uuid", "")) for s in stimuli}
        assert kinds == {
            (DeviceLost, bench.uuids[0]),
            *((ProbePassed, uuid) for uuid in bench.uuids[1:]),
        }


async def test_process_load_is_of_new_samples_only(nvidia_bench: MakeBench) -> None:
    bench = nvidia_bench("2xA30")
    bench.nvml.set_processes(0, [Process(pid=7, used_mib=10, sm_pct=60)])
    async with driving(bench) as driver:
        await driver.discover()
        first = (await driver.usage())[0].processes
        second = (await driver.usage())[0].processes
    assert first is not None
    assert second is not None
    assert [process.core_pct for process in first] == [60]
    assert [process.core_pct for process in second] == [None]


async def test_settings_default_to_the_system(nvidia_bench: MakeBench) -> None:
    nvidia_bench("2xA30")
    driver = NvidiaDriver()
    assert (driver.vendor, driver.is_stuck) == ("nvidia", False)
