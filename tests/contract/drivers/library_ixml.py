# SPDX-License-Identifier: Apache-2.0
"""Iluvatar's fake library."""

from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
    ToolMismatch,
)
from hami_nodeagent.drivers.iluvatar import binding as ixml
from tests.support.fake_library import LibraryFake

FAKE = LibraryFake(
    vendor="iluvatar",
    program=ixml.PROGRAM,
    source="ixml_fake.c",
    no_driver=("nvmlInit_v2", 9),
    keys=lambda device: {
        "uuid": device.uuid,
        "name": f"Iluvatar {device.type}",
        "power": 57000,
    },
    refusals=(
        ("nvmlInit_v2", 9, DriverMissing),
        ("nvmlInit_v2", 18, ToolMismatch),
        ("nvmlInit_v2", 4, DriverDenied),
        ("nvmlInit_v2", 10, DriverTransient),
        ("nvmlDeviceGetCount_v2", 19, DeviceBusy),
        ("nvmlDeviceGetCount_v2", 3, NotSupported),
        ("nvmlDeviceGetCount_v2", 999, DriverTransient),
        ("nvmlDeviceGetMemoryInfo", 18, ToolMismatch),
    ),
    make={"tells_loss": True},
)
