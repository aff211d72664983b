# SPDX-License-Identifier: Apache-2.0
"""Hygon's part of the contract of libraries."""

import json

from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
)
from hami_nodeagent.drivers.hygon.binding import PROGRAM
from tests.fakes import vendoranswers
from tests.fakes.vendoranswers import MAKE_BY_VENDOR
from tests.support.fake_library import Device, LibraryFake


def _keys(device: Device) -> dict[str, object]:
    make = MAKE_BY_VENDOR["hygon"]
    card = vendoranswers.card(make, device.index)
    facts = next(text for key, text in make.print([card]).items() if "--showuniqueid" in key[1])
    return {
        "serial": device.uuid.removeprefix("DCU-"),
        "name": device.type.removeprefix("DCU-"),
        "unique": json.loads(facts)[f"card{device.index}"]["Unique ID"],
        "maker": "0x1d94",
        "units": 120,
    }


FAKE = LibraryFake(
    vendor="hygon",
    program=PROGRAM,
    source="rsmi_fake.c",
    also=("libhydmi.so",),
    no_driver=("rsmi_init", 8),
    keys=_keys,
    refusals=(
        ("rsmi_init", 8, DriverMissing),
        ("rsmi_init", 4, DriverDenied),
        ("rsmi_init", -1, DriverTransient),
        ("rsmi_num_monitor_devices", 16, DeviceBusy),
        ("rsmi_num_monitor_devices", 9, NotSupported),
        ("rsmi_num_monitor_devices", 3, DriverTransient),
    ),
    same_links=False,
    make={"tells_processes": True},
)
