# SPDX-License-Identifier: Apache-2.0
"""AMD's part of the contract of libraries."""

import json

from hami_nodeagent.drivers.amd.binding import PROGRAM
from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DriverDenied,
    DriverMissing,
    DriverTransient,
    NotSupported,
    ToolMismatch,
)
from tests.fakes import vendoranswers
from tests.fakes.vendoranswers import MAKE_BY_VENDOR
from tests.support.fake_library import Device, LibraryFake


def _keys(device: Device) -> dict[str, object]:
    make = MAKE_BY_VENDOR["amd"]
    card = vendoranswers.card(make, device.index)
    static = json.loads(make.print([card])["amd-smi", ("static", "--json")])[0]
    return {
        "uuid": device.uuid,
        "name": device.type,
        "serial": static["asic"]["asic_serial"].removeprefix("0x").lower(),
        "units": static["asic"]["num_compute_units"],
        "mode": static["partition"]["accelerator_partition"],
    }


FAKE = LibraryFake(
    vendor="amd",
    program=PROGRAM,
    source="amdsmi_fake.c",
    words=("release 26",),
    no_driver=("amdsmi_init", 34),
    keys=_keys,
    refusals=(
        ("amdsmi_init", 34, DriverMissing),
        ("amdsmi_init", 18, DriverMissing),
        ("amdsmi_init", 10, DriverDenied),
        ("amdsmi_init", 5, ToolMismatch),
        ("amdsmi_init", -1, DriverTransient),
        ("amdsmi_get_socket_handles", 30, DeviceBusy),
        ("amdsmi_get_socket_handles", 2, NotSupported),
        ("amdsmi_get_processor_handles", 8, DriverTransient),
    ),
    same_links=False,
)
