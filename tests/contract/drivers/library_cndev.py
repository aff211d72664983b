# SPDX-License-Identifier: Apache-2.0
"""Cambricon's CNDEV for the contract of libraries."""

from hami_nodeagent.drivers.cambricon.binding import PROGRAM
from hami_nodeagent.drivers.errors import DriverDenied, DriverTransient, ToolMismatch
from tests.support.fake_library import Device, LibraryFake


def _keys(device: Device) -> dict[str, object]:
    uuid = device.uuid.removeprefix("MLU-")
    serial = int(uuid.replace("-", "")[:16], 16)
    return {"uuid": uuid, "name": device.type, "serial": serial}


FAKE = LibraryFake(
    vendor="cambricon",
    program=PROGRAM,
    source="cndev_fake.c",
    no_driver=("cndevInit", 1),
    keys=_keys,
    refusals=(
        ("cndevInit", 2, ToolMismatch),
        ("cndevInit", 13, DriverDenied),
        ("cndevInit", 17, DriverTransient),
        ("cndevGetDeviceCount", 4, DriverTransient),
    ),
    same_links=False,
)
