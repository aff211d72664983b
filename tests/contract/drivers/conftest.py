# SPDX-License-Identifier: Apache-2.0
"""Builds the fake NVML library once and gives each test a fresh machine."""

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from hami_nodeagent.drivers import Driver
from hami_sim.hardware.fake_nvml import STATE_VARIABLE
from tests.contract.drivers.benches import Bench, FakeNvmlBench, SimulatedBench

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def nvml_library() -> Path:
    """The fake libnvidia-ml.so.1; unchanged sources are not built again."""
    tool = ROOT / "tools/build_native_fakes.py"
    done = subprocess.run(
        [sys.executable, str(tool)], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return Path(done.stdout.strip()) / "libnvidia-ml.so.1"


@pytest.fixture
def nvidia_bench(
    tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], FakeNvmlBench]:
    """Makes a machine for the NVIDIA driver; the library in this process follows it."""

    def make(name: str) -> FakeNvmlBench:
        bench = FakeNvmlBench(name, tmp_path, nvml_library)
        monkeypatch.setenv(STATE_VARIABLE, str(bench.nvml.path))
        return bench

    return make


@pytest.fixture(params=["nvidia", "simulated"])
def make_bench(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    nvidia_bench: Callable[[str], FakeNvmlBench],
) -> Callable[[str], Bench]:
    """Makes a machine from a profile, once per driver."""
    if request.param == "nvidia":
        return nvidia_bench
    return lambda name: SimulatedBench(name, tmp_path)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[[Driver], Driver]]:
    """Remembers drivers and closes them at the end."""
    drivers: list[Driver] = []

    def remember(driver: Driver) -> Driver:
        drivers.append(driver)
        return driver

    yield remember
    for driver in drivers:
        await driver.aclose()
