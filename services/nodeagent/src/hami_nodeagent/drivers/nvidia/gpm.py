# SPDX-License-Identifier: Apache-2.0
"""Reads NVML's samples (GPM, from Hopper on) of one device or MIG instance.

Metrics are computed between two samples, at least 100 ms apart, so the first read has none. The
driver may reserve samples for administrators, and some drivers refuse them while another profiler
runs; there are then no metrics. Blocking calls for the worker thread of the card.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html (R570)
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import pynvml
from msgspec.structs import replace

from hami_nodeagent.drivers.errors import DriverError
from hami_nodeagent.drivers.nvidia.nvml import ask, ask_or
from hami_nodeagent.drivers.protocol import DeviceUsage

_TRAFFIC = (
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
)

_log = logging.getLogger(__name__)
Take = Callable[[pynvml.c_nvmlDevice_t, pynvml.c_nvmlGpmSample_t], object]


class Series:
    """The newest sample of a device or instance."""

    def __init__(self) -> None:
        self._newest: pynvml.c_nvmlGpmSample_t | None = None

    def read(
        self, raw: pynvml.c_nvmlDevice_t, take: Take, metrics: Sequence[int]
    ) -> Mapping[int, float]:
        """Take a sample by ``take``; return those metrics since the last one that are reported."""
        before, self._newest = self._newest, None
        try:
            fresh = self._newest = ask("make a sample", pynvml.nvmlGpmSampleAlloc)
            ask("take a sample", take, raw, fresh)
            return {} if before is None else _between(before, fresh, metrics)
        except DriverError as error:
            self.close()
            _log.debug("no sample of a device", extra={"problem": str(error)})
            return {}
        finally:
            if before is not None:
                _free(before)

    def close(self) -> None:
        """Release the sample."""
        if self._newest is not None:
            _free(self._newest)
            self._newest = None


def is_supported(raw: pynvml.c_nvmlDevice_t) -> bool:
    """Return whether the device has samples."""
    support = ask_or(None, "ask for samples", pynvml.nvmlGpmQueryDeviceSupport, raw)
    return support is not None and bool(support.isSupportedDevice)


def with_traffic(usage: DeviceUsage, raw: pynvml.c_nvmlDevice_t, series: Series) -> DeviceUsage:
    """Return the use of a device that is not divided with its traffic, where that is reported."""
    if not is_supported(raw):
        return usage
    found = series.read(raw, pynvml.nvmlGpmSampleGet, _TRAFFIC)
    dram, sent, received = (found.get(metric) for metric in _TRAFFIC)
    return replace(
        usage,
        dram_pct=dram,
        pcie_mib_s=sent + received if sent is not None and received is not None else None,
    )


def _between(
    before: pynvml.c_nvmlGpmSample_t, after: pynvml.c_nvmlGpmSample_t, metrics: Sequence[int]
) -> dict[int, float]:
    wanted = pynvml.c_nvmlGpmMetricsGet_t()
    wanted.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    wanted.numMetrics = len(metrics)
    wanted.sample1, wanted.sample2 = before, after
    for number, metric in enumerate(metrics):
        wanted.metrics[number].metricId = metric
    answer = ask("compare two samples", pynvml.nvmlGpmMetricsGet, wanted)
    return {
        one.metricId: one.value
        for one in answer.metrics[: len(metrics)]
        if one.nvmlReturn == pynvml.NVML_SUCCESS
    }


def _free(sample: pynvml.c_nvmlGpmSample_t) -> None:
    with suppress(DriverError):
        ask("free a sample", pynvml.nvmlGpmSampleFree, sample)
