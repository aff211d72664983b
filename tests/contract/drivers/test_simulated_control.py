# SPDX-License-Identifier: Apache-2.0
"""The simulated driver's control file when it is absent, broken, or old."""

import logging
from pathlib import Path

import anyio
import pytest

from hami_nodeagent.core.health import FaultSeen, ProbePassed
from hami_nodeagent.drivers.catalog import build_driver
from hami_sim.hardware import profile
from tests.contract.drivers.benches import SimulatedBench

pytestmark = pytest.mark.anyio


@pytest.fixture
def bench(tmp_path: Path) -> SimulatedBench:
    return SimulatedBench("2xA30", tmp_path)


async def test_without_a_control_file_all_devices_work(bench: SimulatedBench) -> None:
    bench.control.path.unlink()
    driver = bench.driver()
    assert all(facts.healthy for facts in (await driver.discover()).devices)
    assert all(isinstance(stimulus, ProbePassed) for stimulus in await driver.probe())


async def test_without_the_setting_all_devices_work() -> None:
    settings = {"profile": str(profile.path_of("2xA30")), "node": "n"}
    assert len((await build_driver("simulated", settings).discover()).devices) == 2


async def test_broken_control_file_changes_nothing_and_is_logged(
    bench: SimulatedBench, caplog: pytest.LogCaptureFixture
) -> None:
    driver = bench.driver()
    before = await driver.discover()
    bench.control.path.write_text('{"devices": {"0": {"lots": true}}}', encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert await driver.discover() == before
    assert [record.message for record in caplog.records] == [
        "the control file cannot be understood"
    ]


async def test_faults_from_before_the_first_wait_are_history(bench: SimulatedBench) -> None:
    bench.fault(0, 79)
    driver = bench.driver()
    await driver.discover()
    assert await driver.wait_faults(0.02) == ()


async def test_simultaneous_faults_are_delivered_together_in_order(bench: SimulatedBench) -> None:
    driver = bench.driver()
    await driver.discover()
    assert await driver.wait_faults(0.02) == ()
    bench.fault(1, 31)
    bench.fault(0, 79)
    with anyio.fail_after(2):
        faults = await driver.wait_faults(1)
    codes = [(fault.code, fault.fatal) for fault in faults if isinstance(fault, FaultSeen)]
    assert codes == [(31, False), (79, True)]


async def test_unified_memory_follows_the_setting(bench: SimulatedBench, tmp_path: Path) -> None:
    text = profile.path_of("2xA30").read_text(encoding="utf-8")
    path = tmp_path / "unified.toml"
    path.write_text(text.replace("[model]\n", "[model]\nunified_memory = true\n"), encoding="utf-8")
    skipped = await bench.driver(profile=str(path)).discover()
    assert skipped.devices == ()
    assert len(skipped.problems) == 2
    assert all("set unified_memory_mib" in problem for problem in skipped.problems)
    counted = await bench.driver(profile=str(path), unified_memory_mib=9000).discover()
    assert [facts.memory_mib for facts in counted.devices] == [9000, 9000]
