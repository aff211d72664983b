# SPDX-License-Identifier: Apache-2.0
"""Provides checks with tenants that have limits of their own, and with processes in them.

The limiter is built for the root directory ``/proc/self/cwd``, so the working directory of a
process decides which tenant it belongs to: ``etc/hami/limits`` and ``run/hami`` there are the
tenant's. Neither namespaces nor rights are needed, and limits change while processes run.
"""

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu import region
from tests.gpu.machine import MIB, Machine
from tests.gpu.process import Guest, GuestFailed
from tests.gpu.registry import Fault

HERE = Path(__file__).resolve().parent
ROOT_OF_TENANT = "/proc/self/cwd"


class DeadlineExceeded(Exception):
    """A check took longer than it may."""


class Tenant:
    """A container's share of the device."""

    def __init__(
        self, bench: "Bench", root: Path, *, memory_mib: int, core_pct: int, priority: int | None
    ) -> None:
        self._bench = bench
        self.root = root
        self._priority = priority
        self._is_written = False
        for part in ("etc/hami", "run/hami"):
            (root / part).mkdir(parents=True)
        (root / "run/hami-priority").symlink_to(bench.priority_directory)
        self.region = root / "run/hami/region-1"
        self.memory_mib = memory_mib
        self.core_pct = core_pct
        self.resize(memory_mib=memory_mib, core_pct=core_pct)

    def resize(self, *, memory_mib: int | None = None, core_pct: int | None = None) -> None:
        """Replace the limits file, as kubelet does."""
        fault = self._bench.fault
        if self._is_written and not fault.is_resized:
            return
        self._is_written = True
        self.memory_mib = self.memory_mib if memory_mib is None else memory_mib
        self.core_pct = self.core_pct if core_pct is None else core_pct
        lines = ["hami-limits/1", f"container={self.root.name}", f"allocation={self.root.name}"]
        lines += [f"core_policy={fault.core_policy}"] if fault.core_policy else []
        lines += [] if self._priority is None else [f"priority={self._priority}"]
        lines += [
            "devices=1",
            "device.0.vendor=nvidia",
            f"device.0.uuid={self._bench.machine.uuid}",
        ]
        lines.append(f"device.0.memory_mib={self.memory_mib * fault.memory_pct // 100}")
        lines += [f"device.0.core_pct={self.core_pct}", "device.0.exclusive=0"]
        fresh = self.root / "etc/hami/.limits"
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
        fresh.replace(self.root / "etc/hami/limits")

    def environment(self, *, is_preloaded: bool = True) -> dict[str, str]:
        """Variables of its processes."""
        bench = self._bench
        environment = {
            **bench.machine.environment,
            "CUDA_VISIBLE_DEVICES": bench.machine.uuid,
            "PYTHONDONTWRITEBYTECODE": "1",
            **bench.probe_environment,
        }
        if is_preloaded and bench.fault.is_preloaded:
            slow = [str(bench.slow_library)] if bench.fault.is_slow else []
            environment["LD_PRELOAD"] = " ".join([*slow, str(bench.limiter)])
        return environment

    def start(
        self,
        name: str,
        *,
        is_preloaded: bool = True,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        **arguments: Any,
    ) -> Guest:
        """Start a guest; it ends with the check. ``prefix``: a command that runs it."""
        environment = {**self.environment(is_preloaded=is_preloaded), **(env or {})}
        return self._bench.keep(
            Guest(name, arguments, environment=environment, cwd=self.root, prefix=prefix)
        )

    def run(
        self,
        name: str,
        *,
        is_preloaded: bool = True,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Run a guest to its first answer, and end it."""
        guest = self.start(name, is_preloaded=is_preloaded, env=env, **arguments)
        answer = guest.answer()
        guest.close()
        return answer

    def charged_mib(self, *pids: int) -> float:
        """Charge of these processes, or of all of the tenant."""
        processes = region.read(self.region)
        return sum(one.used_bytes for one in processes if not pids or one.pid in pids) / MIB


class Bench:
    """Builds and measures for one check after the other."""

    def __init__(
        self,
        machine: Machine,
        *,
        limiter: Path,
        probe: Path,
        slow: Path,
        image: Path,
        scratch: Path,
    ) -> None:
        self.machine = machine
        self.limiter = limiter
        self.slow_library = slow
        self.fault = Fault()
        self.probe_environment = {"GPU_PROBE": str(probe), "GPU_PROBE_IMAGE": str(image)}
        self.scratch = scratch
        self._tenants = 0
        self._guests: list[Guest] = []
        self._is_expired = False
        self._units_per_us = 0.0
        self._context_mib = 0
        self.priority_directory = scratch / "priority"
        self.priority_directory.mkdir()

    @property
    def is_fake(self) -> bool:
        """True on the fake driver."""
        return self.machine.is_fake

    def on(self, *, fake: float, real: float) -> float:
        """A figure that depends on the driver."""
        return fake if self.is_fake else real

    def used_mib(self, *pids: int) -> float:
        """Memory that the driver has given to these processes."""
        used = self.machine.observer("used_by_pid")
        return float(sum(used.get(str(pid), 0) for pid in pids)) / MIB

    def device_memory(self) -> tuple[int, int]:
        """Total and used bytes of the device."""
        total, used = self.machine.observer("memory")
        return total, used

    def clock_reasons(self) -> int:
        """Reasons for which the device lowers its clocks now, as bits; the fake device has none."""
        return 0 if self.is_fake else int(self.machine.observer("clock_reasons"))

    def tenant(
        self, *, memory_mib: int = 0, core_pct: int = 0, priority: int | None = None
    ) -> Tenant:
        """A tenant; without ``memory_mib`` its limit is half of the device."""
        self._tenants += 1
        root = self.scratch / f"tenant-{self._tenants}"
        root.mkdir()
        memory_mib = memory_mib or self.machine.memory_mib // 2
        return Tenant(self, root, memory_mib=memory_mib, core_pct=core_pct, priority=priority)

    def outside(self, name: str, **arguments: Any) -> Guest:
        """Start a guest outside of all tenants, without the limiter."""
        environment = {**self.machine.environment, "PYTHONDONTWRITEBYTECODE": "1"}
        return self.keep(Guest(name, arguments, environment=environment, cwd=self.scratch))

    def agent_driver(self, wait_s: float) -> dict[str, Any]:
        """Report of the node agent's NVIDIA driver about this machine."""
        library = self.machine.nvml_library
        return self.outside("agent:driver", library=library, wait_s=wait_s).answer()

    def breaches(
        self, shares: Sequence[tuple[list[int], int]], *, expected: int, limit_s: float
    ) -> list[dict[str, Any]]:
        """The agent's report for each share, ``(pids, limit in MiB)``."""
        arguments = {"library": self.machine.nvml_library, "uuid": self.machine.uuid}
        watching = self.outside(
            "agent:breaches",
            **arguments,
            shares=shares,
            expected=expected,
            look_s=self.on(fake=0.3, real=2),
            limit_s=limit_s,
        )
        told: list[dict[str, Any]] = watching.answer()["told"]
        return told

    def context_mib(self) -> int:
        """Memory of a context on this device; measured once."""
        if not self._context_mib:
            guest = self.tenant().start("memory:hold", is_preloaded=False)
            guest.answer()
            self._context_mib = int(self.used_mib(guest.pid)) + 1
            guest.close()
        return self._context_mib

    def keep(self, guest: Guest) -> Guest:
        """Close the guest when the check ends."""
        self._guests.append(guest)
        return guest

    def end_guests(self) -> None:
        """Close all guests, and take away what a guest in the agent's place has published."""
        while self._guests:
            self._guests.pop().close()
        for page in self.priority_directory.iterdir():
            page.unlink()

    def units_per_us(self) -> float:
        """Loops of the spin kernel per microsecond of an undisturbed device; measured once."""
        if not self._units_per_us:
            answer = self.tenant().run("compute:calibrate", is_preloaded=False)
            self._units_per_us = answer["units_per_us"]
        return self._units_per_us

    @contextmanager
    def checking(self, deadline_s: float, fault: Fault) -> Iterator[None]:
        """Run one check: its fault, its deadline, and the end of its processes.

        At the deadline its processes are killed, so that no wait for them goes on.
        """
        self.fault = fault
        self._is_expired = False
        timer = threading.Timer(deadline_s, self._expire)
        timer.start()
        try:
            if fault.driver is not None:
                self.machine.break_driver(*fault.driver)
            yield
        except GuestFailed as error:
            if self._is_expired:
                raise DeadlineExceeded(f"took longer than {deadline_s:.0f} s") from error
            raise
        finally:
            timer.cancel()
            timer.join()
            self.machine.repair_driver()
            self.end_guests()
            self.fault = Fault()

    def _expire(self) -> None:
        self._is_expired = True
        for guest in self._guests:
            guest.kill()
        self.machine.observer.kill()


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for the tenants."""
    with tempfile.TemporaryDirectory(prefix="gpu-tenants-", ignore_cleanup_errors=True) as name:
        yield Path(name)
