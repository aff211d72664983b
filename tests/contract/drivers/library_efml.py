# SPDX-License-Identifier: Apache-2.0
"""Enflame's EFML for the contract of libraries."""

from hami_nodeagent.drivers.enflame.binding import PROGRAM
from hami_nodeagent.drivers.errors import (
    DriverMissing,
    DriverTransient,
    NotSupported,
    ToolMismatch,
)
from tests.support.fake_library import LibraryFake

FAKE = LibraryFake(
    vendor="enflame",
    program=PROGRAM,
    source="efml_fake.c",
    no_driver=("EfmlInit", 6),
    keys=lambda device: {
        "serial": device.uuid.removeprefix("GCU-"),
        "dev_uuid": "T6P1A0000000",
        "name": device.type,
    },
    refusals=(
        ("EfmlInit", 6, DriverMissing),
        ("EfmlInit", 10, DriverMissing),
        ("EfmlInit", 11, ToolMismatch),
        ("EfmlInit", 253, DriverTransient),
        ("EfmlGetDevCount", 3, NotSupported),
        ("EfmlGetDevCount", 254, DriverTransient),
        ("EfmlGetDevCount", 77, DriverTransient),
    ),
    make={"tells_processes": True, "tells_process_memory": False},
)
