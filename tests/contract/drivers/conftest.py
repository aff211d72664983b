# SPDX-License-Identifier: Apache-2.0
"""Builds the fake NVML library once and gives each test a fresh machine, once per driver."""

import importlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from hami_nodeagent.drivers.protocol import Driver
from hami_sim.hardware.fake_nvml import STATE_VARIABLE
from tests.contract.drivers.benches import (
    Bench,
    FakeNvmlBench,
    ProfileBench,
    SimulatedBench,
    ToolBench,
)
from tests.fakes.vendoranswers import MAKE_BY_VENDOR
from tests.support.fake_dcmi import DCMI, FakeDcmi
from tests.support.fake_library import FakeLibrary, LibraryFake

ROOT = Path(__file__).resolve().parents[3]
for _path in sorted(Path(__file__).parent.glob("answers_*.py")):
    MAKE_BY_VENDOR[_path.stem.removeprefix("answers_")] = importlib.import_module(
        f"tests.contract.drivers.{_path.stem}"
    ).MAKE
LIBRARIES: dict[str, LibraryFake] = {DCMI.name: DCMI}
"""Fake libraries by vendor and library: DCMI's, and those of the files ``library_<word>.py``."""
for _path in sorted(Path(__file__).parent.glob("library_*.py")):
    _fake = importlib.import_module(f"tests.contract.drivers.{_path.stem}").FAKE
    LIBRARIES[_fake.name] = _fake


def library_of(name: str, folder: Path, count: int) -> FakeLibrary:
    """A machine of ``count`` devices behind a library."""
    fake = LIBRARIES[name]
    return FakeDcmi(folder, count) if fake is DCMI else FakeLibrary(folder, fake, count)


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
def make_profile_bench(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    nvidia_bench: Callable[[str], FakeNvmlBench],
) -> Callable[[str], ProfileBench]:
    """Makes a machine from a profile, once per driver that receives fault events."""
    if request.param == "nvidia":
        return nvidia_bench
    return lambda name: SimulatedBench(name, tmp_path)


@pytest.fixture(params=sorted(MAKE_BY_VENDOR))
def make_tool_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], ToolBench]:
    """Makes a machine with fake tools, once per vendor that has one."""
    return lambda name: ToolBench(request.param, name, tmp_path)


@pytest.fixture(params=sorted(LIBRARIES))
def library_name(request: pytest.FixtureRequest) -> str:
    """Every library, in turn."""
    return str(request.param)


@pytest.fixture(params=["nvidia", "simulated", *sorted(LIBRARIES), *sorted(MAKE_BY_VENDOR)])
def make_bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Bench]:
    """Makes a machine, once per driver and interface; a library is loaded into this process."""

    def behind_library(name: str) -> Bench:
        tools = library_of(request.param, tmp_path, int(name.partition("x")[0]))
        tools.answer_in_process(monkeypatch)
        return ToolBench(tools.fake.vendor, name, tmp_path, tools)

    if request.param == "nvidia":
        make: Callable[[str], Bench] = request.getfixturevalue("nvidia_bench")
        return make
    if request.param == "simulated":
        return lambda name: SimulatedBench(name, tmp_path)
    if request.param in LIBRARIES:
        return behind_library
    return lambda name: ToolBench(request.param, name, tmp_path)


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
