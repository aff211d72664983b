# SPDX-License-Identifier: Apache-2.0
"""The read-only part of the driver contract on a real NVIDIA driver, in a process of its own.

A process of its own, because the fake library stays loaded in this one under the same soname.
"""

import ctypes.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

PROGRAM = """
import anyio, msgspec, sys
from hami_nodeagent.drivers import build_driver

async def main():
    driver = build_driver("nvidia", {})
    first, again = await driver.discover(), await driver.discover()
    probes = await driver.probe()
    faults = await driver.wait_faults(0.5)
    usage = await driver.usage()
    await driver.aclose()
    sys.stdout.buffer.write(msgspec.json.encode({
        "same": first == again,
        "inventory": first,
        "probes": [type(stimulus).__name__ for stimulus in probes],
        "faults": len(faults),
        "usage": usage,
    }))

anyio.run(main)
"""


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() and bool(
        ctypes.util.find_library("nvidia-ml")
    )


@pytest.mark.gpu
@pytest.mark.real
@pytest.mark.skipif(not has_nvidia_driver(), reason="this machine has no NVIDIA driver")
def test_real_driver_lists_probes_and_measures_its_devices() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True)
    seen = msgspec.json.decode(done.stdout)
    devices = seen["inventory"]["devices"]
    assert devices
    assert seen["same"]
    assert seen["inventory"]["driver_version"]
    for device in devices:
        assert device["uuid"].startswith("GPU-")
        assert device["type"].startswith("NVIDIA")
        assert device["memory_mib"] > 0
    assert seen["probes"] == ["ProbePassed"] * len(devices)
    assert seen["faults"] == 0
    assert [usage["uuid"] for usage in seen["usage"]] == [device["uuid"] for device in devices]
