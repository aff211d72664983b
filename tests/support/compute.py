# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the programs of native/libvgpu/tests/compute: rules and simulation.

Times in seconds, shares in percent of the device's time.
"""

import shlex
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from tools import build_native

PROGRAMS = build_native.ROOT / "native/libvgpu/tests/compute"
PARTS = ("budget", "estimate", "compute_core", "priority", "platform")
SANITIZERS = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")
STEP_S = 0.1


class SimulatedProcess(Struct, frozen=True):
    """Result of one process of a simulation."""

    tenant: int
    pct: float
    launches: int
    longest_wait_ms: float
    late: int
    overlap: int
    implausible: bool
    """Its presence probes were found to be implausible."""
    slice_us: float
    """Length of a time slice as it has learned it."""
    charges_us: tuple[float, ...]


class SimulatedTenant(Struct, frozen=True):
    """Result of all processes of one container."""

    pct: float
    series: tuple[float, ...]

    def share(self, from_s: float = 0.0, to_s: float | None = None) -> float:
        """Percent of the device between two times."""
        part = self.series[int(from_s / STEP_S) : int(to_s / STEP_S) if to_s else None]
        return sum(part) / len(part)

    def windows(self, from_s: float = 0.0) -> tuple[float, ...]:
        """Shares of all windows of one second."""
        steps = int(1 / STEP_S)
        part = self.series[int(from_s / STEP_S) :]
        return tuple(sum(part[i : i + steps]) / steps for i in range(len(part) - steps + 1))


class Simulation(Struct, frozen=True):
    """Result of one run."""

    processes: tuple[SimulatedProcess, ...]
    tenants: tuple[SimulatedTenant, ...]


def build(name: str, directory: Path, *flags: str) -> Path:
    """Compile one of the programs with the rules under test."""
    target = directory / name
    sources = [PROGRAMS / f"{name}.c", *(build_native.SOURCES / f"{part}.c" for part in PARTS)]
    language = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", *build_native.WARNINGS, *flags]
    command = [*build_native.compiler(), *language, "-I", str(build_native.SOURCES)]
    subprocess.run([*command, "-o", str(target), *map(str, sources)], check=True)
    return target


def simulate(program: Path, *words: str) -> Simulation:
    """Run the simulation; each argument may hold several words."""
    argv = [str(program), *shlex.split(" ".join(words))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Simulation)
