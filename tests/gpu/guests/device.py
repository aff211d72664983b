# SPDX-License-Identifier: Apache-2.0
"""Kernels, streams and the C loops of ``probes/probe.c`` in a guest's process."""

import ctypes
import os
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from tests.support import cuda_guest as cu

STEPS_MOST = 2_000_000
_DRIVER = (
    "cuLaunchKernel",
    "cuGraphLaunch",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuStreamSynchronize",
    "cuEventElapsedTime",
)
_MULTIPROCESSORS = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""


class Work(ctypes.Structure):
    """``struct probe_work``."""

    _fields_ = (
        ("function", c_void_p),
        ("graph", c_void_p),
        ("stream", c_void_p),
        ("stream_b", c_void_p),
        ("parameter", c_uint64),
        ("grid", c_uint32),
        ("ahead", c_uint32),
    )


def stream() -> c_void_p:
    """A stream that does not synchronize with the legacy one."""
    made = c_void_p()
    cu.ask("cuStreamCreate", byref(made), 1)
    return made


def multiprocessors() -> int:
    """Multiprocessors of the device."""
    count = ctypes.c_int()
    cu.ask("cuDeviceGetAttribute", byref(count), _MULTIPROCESSORS, 0)
    return count.value


class Kernels:
    """The kernels of ``probes/kernels.ptx``, loaded in the current context."""

    def __init__(self) -> None:
        image = Path(os.environ["GPU_PROBE_IMAGE"]).read_bytes() + b"\0"
        module = c_void_p()
        cu.ask("cuModuleLoadData", byref(module), image)
        self._module = module

    def __getitem__(self, name: str) -> c_void_p:
        function = c_void_p()
        cu.ask("cuModuleGetFunction", byref(function), self._module, name.encode())
        return function


class Probe:
    """The loops in C. Launches go through the hooks that ``dlsym`` answers here."""

    def __init__(self, find: Callable[[str], int] = cu.address) -> None:
        self._library = ctypes.CDLL(os.environ["GPU_PROBE"])
        self._driver = (c_void_p * len(_DRIVER))(*(find(name) for name in _DRIVER))

    def steps(self, work: Work, seconds: float, most: int = STEPS_MOST) -> list[int]:
        """Launch for so long; when each launch was complete, CLOCK_MONOTONIC nanoseconds."""
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        done, count = (c_uint64 * most)(), c_size_t()
        self._call(
            "probe_steps", byref(work), c_uint64(until_ns), done, c_size_t(most), byref(count)
        )
        return done[: count.value]

    def cost_ns(self, work: Work, launches: int) -> float:
        """Nanoseconds per launch of the calling thread."""
        total = c_uint64()
        self._call("probe_cost", byref(work), c_uint64(launches), byref(total))
        return total.value / launches

    def gaps_ms(self, work: Work, launches: int) -> list[float]:
        """Device time between the ends of consecutive launches."""
        found = (c_float * launches)()
        self._call("probe_gaps", byref(work), c_size_t(launches), found)
        return list(found)

    def presence(
        self, work: Work, side: c_void_p, seconds: float, spacing_us: int
    ) -> tuple[int, int]:
        """Events posted on an idle stream while the device works, and those answered at once."""
        until_ns = time.monotonic_ns() + int(seconds * 1e9)
        posted, answered = c_uint64(), c_uint64()
        times = c_uint64(until_ns), c_uint64(spacing_us * 1000)
        self._call("probe_presence", byref(work), side, *times, byref(posted), byref(answered))
        return posted.value, answered.value

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(self._driver, *arguments):
            raise cu.Failed(code)
