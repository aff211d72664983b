# SPDX-License-Identifier: Apache-2.0
"""Builds the fakes and the limiter once; gives tests machines, containers and processes in them.

Containers need mount namespaces. Where they are not permitted the tests that use one are skipped
with the reason, except in CI, where they fail.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from hami_sim.hardware.fake_nvml import FakeNvml
from hami_sim.hardware.profile import Profile, load
from tests.fakes.gpucontainers import GpuContainer, GpuNode, gpu_node, why_not
from tests.support.cuda_child import CudaChild
from tests.support.drive import Drive
from tools import build_native, build_native_fakes

MIB = 1 << 20

MakeNode = Callable[..., GpuNode]
StartDrive = Callable[..., Drive]


@pytest.fixture(scope="session")
def drivers() -> Path:
    """Directory of the fake drivers and the test programs."""
    return build_native_fakes.build(build_native_fakes.DEFAULT_OUT)


@pytest.fixture(scope="session")
def limiter() -> Path:
    """The release library."""
    return build_native.build("release")


@pytest.fixture(scope="session")
def containers_work() -> None:
    """Skip, or fail in CI, where containers cannot be made."""
    reason = why_not()
    if reason and os.environ.get("CI"):
        pytest.fail(f"CI must be able to make containers: {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture
def make_node(drivers: Path, request: pytest.FixtureRequest) -> Iterator[MakeNode]:
    """Makes machines from profiles; ``is_limited=False`` preloads nothing in its containers."""
    with ExitStack() as stack:

        def make(profile: Profile | str, *, is_limited: bool = True) -> GpuNode:
            library = request.getfixturevalue("limiter") if is_limited else None
            return stack.enter_context(gpu_node(profile, drivers, library=library))

        yield make


@pytest.fixture
def node(make_node: MakeNode, containers_work: None) -> GpuNode:
    """A machine with eight devices whose containers are limited."""
    return make_node("8xH100")


@pytest.fixture
def start_drive(drivers: Path) -> Iterator[StartDrive]:
    """Starts the program ``drive`` in a container and ends it after the test."""
    with ExitStack() as stack:

        def start(
            container: GpuContainer,
            *,
            env: dict[str, str] | None = None,
            way: str = "link",
            wrapper: Sequence[Path] = (),
        ) -> Drive:
            drive = Drive(drivers / "drive", container=container, env=env, way=way, wrapper=wrapper)
            stack.callback(drive.close)
            return drive

        yield start


@pytest.fixture
def bare_drive(drivers: Path) -> Iterator[Callable[..., Drive]]:
    """Starts the program ``drive`` on the bare machine: fake driver, no container, no limiter."""
    with ExitStack() as stack:

        def start(node: GpuNode, *, env: dict[str, str] | None = None, way: str = "link") -> Drive:
            drive = Drive(drivers / "drive", env={**node.environment, **(env or {})}, way=way)
            stack.callback(drive.close)
            return drive

        yield start


@pytest.fixture
def machine(tmp_path: Path) -> FakeNvml:
    """Two devices whose contexts take 8 MiB, pools grow by 2 MiB."""
    state = FakeNvml(tmp_path / "nvml.state", load("2xL40S"), "node-a")
    for index in range(2):
        state.set_key(index, "context_bytes", str(8 * MIB))
        state.set_key(index, "pool_granularity", str(2 * MIB))
    return state


@pytest.fixture
def guest(machine: FakeNvml, limiter: Path, drivers: Path, tmp_path: Path) -> CudaChild:
    """Runs children under a limit."""
    return CudaChild(machine.path, limiter, drivers, tmp_path / "region")
