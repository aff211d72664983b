# SPDX-License-Identifier: Apache-2.0
"""Kunlunxin's XPUML for the contract of libraries."""

from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DeviceGone,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
    ToolMismatch,
)
from hami_nodeagent.drivers.kunlunxin.binding import PROGRAM
from tests.support.fake_library import LibraryFake

_RUNNING, _ERROR = 201, 207
FAKE = LibraryFake(
    vendor="kunlunxin",
    program=PROGRAM,
    source="xpuml_fake.c",
    no_driver=("xpumlInit", 9),
    keys=lambda device: {
        "name": device.type,
        "serial": f"02K03Y6219{device.index:04}",
        "state": _ERROR if device.lost else _RUNNING,
    },
    refusals=(
        ("xpumlInit", 4, DriverDenied),
        ("xpumlInit", 9, DriverMissing),
        ("xpumlInit", 17, DriverDenied),
        ("xpumlInit", 18, ToolMismatch),
        ("xpumlInit", 999, DriverTransient),
        ("xpumlDeviceGetCount", 10, DriverTransient),
        ("xpumlDeviceGetCount", 13, NotSupported),
        ("xpumlDeviceGetCount", 15, DeviceGone),
        ("xpumlDeviceGetCount", 19, DeviceBusy),
        ("xpumlDeviceGetCount", 31, DriverTransient),
    ),
    only_library=frozenset({"serial"}),
)
