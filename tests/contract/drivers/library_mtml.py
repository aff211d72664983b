# SPDX-License-Identifier: Apache-2.0
"""Moore Threads' fake library."""

from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
    ToolMismatch,
)
from hami_nodeagent.drivers.mthreads import binding as mtml
from tests.support.fake_library import LibraryFake

FAKE = LibraryFake(
    vendor="mthreads",
    program=mtml.PROGRAM,
    source="mtml_fake.c",
    no_driver=("mtmlLibraryInit", 1),
    keys=lambda device: {
        "name": device.type,
        "mtml_uuid": f"{device.index:08x}-1ed5-4000-8000-00000000cafe",
        "power_mw": 57250,
        "errors": 3 * device.lost,
    },
    refusals=(
        ("mtmlLibraryInit", 1, DriverMissing),
        ("mtmlLibraryInit", 9, ToolMismatch),
        ("mtmlLibraryInit", 10, ToolMismatch),
        ("mtmlLibraryInit", 5, DriverDenied),
        ("mtmlLibraryInit", 11, DriverTransient),
        ("mtmlLibraryCountDevice", 12, DeviceBusy),
        ("mtmlLibraryCountDevice", 4, NotSupported),
        ("mtmlLibraryCountDevice", 2, DriverTransient),
        ("mtmlMemoryGetTotal", 9, ToolMismatch),
    ),
    only_library=frozenset({"uuid"}),
    make={"tells_loss": True, "tells_processes": False},
)
