# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of memory and PCIe of a device, where the driver reports it."""

from collections.abc import Callable

import pytest

from hami_nodeagent.drivers.protocol import Driver
from tests.contract.drivers.benches import FakeNvmlBench

pytestmark = pytest.mark.anyio
NO_PERMISSION = 4
Traffic = tuple[float | None, float | None]
Opened = Callable[[Driver], Driver]


async def opened_on(bench: FakeNvmlBench, opened: Opened) -> Driver:
    driver = opened(bench.driver())
    await driver.discover()
    return driver


async def traffic(driver: Driver) -> list[Traffic]:
    return [(one.dram_pct, one.pcie_mib_s) for one in await driver.usage()]


async def test_traffic_is_that_between_two_reads(
    nvidia_bench: Callable[[str], FakeNvmlBench], opened: Opened
) -> None:
    bench = nvidia_bench("8xH100")
    bench.nvml.set_traffic(1, 62.5, 1000, 24)
    driver = await opened_on(bench, opened)
    assert await traffic(driver) == [(None, None)] * 8
    assert (await traffic(driver))[:2] == [(0.0, 0.0), (62.5, 1024.0)]
    bench.nvml.set_traffic(1, 5, 0, 1)
    assert (await traffic(driver))[1] == (5.0, 1.0)


async def test_parts_before_hopper_report_none(
    nvidia_bench: Callable[[str], FakeNvmlBench], opened: Opened
) -> None:
    bench = nvidia_bench("4xT4")
    driver = await opened_on(bench, opened)
    for _ in range(2):
        assert await traffic(driver) == [(None, None)] * 4


async def test_agent_without_the_right_to_profile_reports_none_and_recovers(
    nvidia_bench: Callable[[str], FakeNvmlBench], opened: Opened
) -> None:
    bench = nvidia_bench("8xH100")
    driver = await opened_on(bench, opened)
    bench.nvml.fault("nvmlGpmSampleGet", 0, NO_PERMISSION)
    for _ in range(3):
        assert (await traffic(driver))[0] == (None, None)
    bench.nvml.clear_faults()
    assert (await traffic(driver))[0] == (None, None)
    assert (await traffic(driver))[0] == (0.0, 0.0)


async def test_card_in_mig_mode_reports_none(
    nvidia_bench: Callable[[str], FakeNvmlBench], opened: Opened
) -> None:
    bench = nvidia_bench("8xH100")
    bench.nvml.set_mig_mode(0, is_on=True)
    driver = await opened_on(bench, opened)
    await traffic(driver)
    assert (await traffic(driver))[:2] == [(None, None), (0.0, 0.0)]
