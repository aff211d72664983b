# SPDX-License-Identifier: Apache-2.0
"""The machine that the checks run on: the real driver, or the fake one of the tests.

The fake needs the packages of ``.venv`` (``hami_sim``); the real driver needs none.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.process import Guest, GuestFailed
from tests.gpu.registry import Skipped
from tools import build_native_fakes

MIB = 1 << 20
FAKE_PROFILE = "8xH100"


class NvmlRefused(Exception):
    """NVML answered a query with an error."""


class Observer:
    """NVML in a process outside of all tenants, started again if it ended."""

    def __init__(self, uuid: str, environment: dict[str, str], cwd: Path) -> None:
        """Start it for a device, the first one without ``uuid``; ``GuestFailed``: no driver."""
        self._start = partial(
            Guest, "observer:watch", {"uuid": uuid}, environment=environment, cwd=cwd
        )
        self._guest = self._start()
        self.device = self._guest.answer()

    def __call__(self, query: str) -> Any:
        """The answer to a query of ``guests/observer.py``."""
        if self._guest.process.poll() is not None:
            self._guest.close()
            self._guest = self._start()
            self._guest.answer()
        answer = self._guest.ask(query=query)
        if "error" in answer:
            raise NvmlRefused(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        """End a query that hangs."""
        self._guest.kill()

    def close(self) -> None:
        """End it."""
        self._guest.close()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The first device of a machine, and how programs find its driver."""

    is_fake: bool
    uuid: str
    device: str
    driver: str
    memory_mib: int
    environment: dict[str, str]
    nvml_library: str
    """Path of NVML; empty: found by the dynamic linker."""
    observer: "Observer"
    fake: Any = None
    """``FakeNvml`` of the fake machine."""

    def break_driver(self, function: str, code: int, hang_ms: int) -> None:
        """Let a function of the fake driver answer ``code`` after ``hang_ms``."""
        if self.fake is None:
            raise Skipped("only the fake driver takes faults")
        self.fake.fault(function, None, code, hang_ms=hang_ms)

    def repair_driver(self) -> None:
        """End all faults of the fake driver."""
        if self.fake is not None:
            self.fake.clear_faults()


@contextmanager
def _observed(
    environment: dict[str, str], *, uuid: str = "", library: str = "", fake: Any = None
) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="gpu-observer-") as name:
        try:
            observer = Observer(uuid, environment, Path(name))
        except GuestFailed as error:
            raise Skipped(f"no NVIDIA driver: {error}") from error
        seen = observer.device
        try:
            yield Machine(
                is_fake=fake is not None,
                uuid=seen["uuid"],
                device=("fake " if fake else "") + seen["device"],
                driver=seen["driver"],
                memory_mib=seen["memory"][0] // MIB,
                environment=environment,
                nvml_library=library,
                observer=observer,
                fake=fake,
            )
        finally:
            observer.close()


@contextmanager
def real_machine() -> Iterator[Machine]:
    """The driver of this machine; ``Skipped`` where it has none."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    with _observed(environment) as machine:
        yield machine


@contextmanager
def fake_machine() -> Iterator[Machine]:
    """A simulated H100 node with the fake driver of native/libvgpu/tests/fakedrv."""
    from hami_sim.hardware.fake_nvml import STATE_VARIABLE, FakeNvml  # noqa: PLC0415 - not there on a real machine
    from hami_sim.hardware.profile import load  # noqa: PLC0415 - as above

    drivers = build_native_fakes.build(build_native_fakes.DEFAULT_OUT)
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as name:
        fake = FakeNvml(Path(name) / "state", load(FAKE_PROFILE), "node-a")
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            STATE_VARIABLE: str(fake.path),
            "LD_LIBRARY_PATH": str(drivers),
        }
        library = str(drivers / build_native_fakes.NVML)
        with _observed(environment, uuid=fake.uuids[0], library=library, fake=fake) as machine:
            yield machine
