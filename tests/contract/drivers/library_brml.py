# SPDX-License-Identifier: Apache-2.0
"""Biren's BRML for the contract of libraries."""

from hami_nodeagent.drivers.biren.binding import PROGRAM
from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverTransient,
    ToolMismatch,
)
from tests.support.fake_library import Device, LibraryFake


def _keys(device: Device) -> dict[str, object]:
    return {
        "health": 3 if device.lost else 0,
        "product": "Biren166M",
        "direct": 3,
        "uuid": f"GPU-{device.index:08}",
        "serial": f"BR{device.index:06}",
    }


FAKE = LibraryFake(
    vendor="biren",
    program=PROGRAM,
    source="brml_fake.c",
    no_driver=("brmlInit", 7),
    keys=_keys,
    refusals=(
        ("brmlInit", 4, DriverDenied),
        ("brmlInit", 16, ToolMismatch),
        ("brmlInit", 255, DriverTransient),
        ("brmlDeviceGetCount", 15, DeviceBusy),
    ),
    only_library=frozenset({"product", "serial", "uuid"}),
    same_links=False,
    make={"tells_loss": True, "tells_processes": True, "tells_load": True},
)
