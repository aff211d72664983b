# SPDX-License-Identifier: Apache-2.0
"""NVML outside of all tenants: what the driver itself reports about the device."""

import ctypes
import time
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p, create_string_buffer

from tests.gpu.guest import Steps

_LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
_PROCESSES = 512
_DRAM_BW_UTIL = 10
"""NVML_GPM_METRIC_DRAM_BW_UTIL."""
_GPM_S = 0.5


class NvmlFailed(Exception):
    """NVML answered with an error."""


class Nvml:
    """One device."""

    def __init__(self, uuid: str = "") -> None:
        """Open the device, the first one without a ``uuid``."""
        self._library = ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")
        self._handle = c_void_p()
        if uuid:
            self._call("nvmlDeviceGetHandleByUUID", c_char_p(uuid.encode()), byref(self._handle))
        else:
            self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(0), byref(self._handle))

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise NvmlFailed(f"{name} returns {code}")

    def text(self, name: str) -> str:
        """A property of the device as text."""
        buffer = create_string_buffer(_TEXT)
        self._call(name, self._handle, buffer, c_uint(_TEXT))
        return buffer.value.decode()

    def driver_version(self) -> str:
        """Version of the driver."""
        buffer = create_string_buffer(_TEXT)
        self._call("nvmlSystemGetDriverVersion", buffer, c_uint(_TEXT))
        return buffer.value.decode()

    def memory(self) -> tuple[int, int]:
        """Total and used bytes of the device."""
        values = (c_ulonglong * 3)()
        self._call("nvmlDeviceGetMemoryInfo", self._handle, values)
        return values[0], values[2]

    def clock_reasons(self) -> int:
        """Reasons for lower clocks, as bits."""
        reasons = c_ulonglong()
        self._call("nvmlDeviceGetCurrentClocksEventReasons", self._handle, byref(reasons))
        return reasons.value

    def used_by_pid(self) -> dict[int, int]:
        """Bytes of each process with a context on the device."""
        room = c_uint(_PROCESSES)
        entries = (c_ulonglong * (3 * room.value))()
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        self._call(name, self._handle, byref(room), entries)
        return {entries[3 * i] & 0xFFFFFFFF: entries[3 * i + 1] for i in range(room.value)}

    def memory_bandwidth_pct(self) -> float:
        """Use of the memory bandwidth over half a second, by GPM."""
        if not hasattr(self._library, "nvmlGpmMetricsGet"):
            raise NvmlFailed("NVML has no GPM")
        samples = [c_void_p(), c_void_p()]
        for sample in samples:
            self._call("nvmlGpmSampleAlloc", byref(sample))
            self._call("nvmlGpmSampleGet", self._handle, sample)
            time.sleep(_GPM_S)
        query = _GpmQuery(version=1, count=1, first=samples[0], second=samples[1])
        query.metric.id = _DRAM_BW_UTIL
        self._call("nvmlGpmMetricsGet", byref(query))
        for sample in samples:
            self._call("nvmlGpmSampleFree", sample)
        return float(query.metric.value)


class _GpmMetric(ctypes.Structure):
    """nvmlGpmMetric_t."""

    _fields_ = (
        ("id", c_uint),
        ("result", c_uint),
        ("value", ctypes.c_double),
        ("names", c_void_p * 3),
    )


class _GpmQuery(ctypes.Structure):
    """nvmlGpmMetricsGet_t, whose array of metrics has room for more than are asked."""

    _fields_ = (
        ("version", c_uint),
        ("count", c_uint),
        ("first", c_void_p),
        ("second", c_void_p),
        ("metric", _GpmMetric),
        ("room", _GpmMetric * 400),
    )


def watch(*, uuid: str = "") -> Steps:
    """Answer queries about one device, the first one without a ``uuid``."""
    nvml = Nvml(uuid)
    query = yield {
        "uuid": nvml.text("nvmlDeviceGetUUID"),
        "device": nvml.text("nvmlDeviceGetName"),
        "driver": nvml.driver_version(),
        "memory": nvml.memory(),
    }
    queries = {
        "memory": nvml.memory,
        "used_by_pid": nvml.used_by_pid,
        "clock_reasons": nvml.clock_reasons,
        "bandwidth_pct": nvml.memory_bandwidth_pct,
    }
    while True:
        try:
            answer = {"value": queries[query["query"]]()}
        except (NvmlFailed, AttributeError) as error:  # an older NVML lacks the function
            answer = {"error": str(error)}
        query = yield answer
