# SPDX-License-Identifier: Apache-2.0
"""MetaX's MXSML for the contract of libraries."""

from hami_nodeagent.drivers.errors import DeviceBusy, DriverDenied, DriverTransient
from hami_nodeagent.drivers.metax.binding import PROGRAM
from tests.support.fake_library import LibraryFake

FAKE = LibraryFake(
    vendor="metax",
    program=PROGRAM,
    source="mxsml_fake.c",
    no_driver=("mxSmlInit", 21),
    keys=lambda device: {"uuid": device.uuid, "name": device.type, "sgpu": 0},
    refusals=(
        ("mxSmlInit", 8, DriverDenied),
        ("mxSmlInit", 23, DeviceBusy),
        ("mxSmlInit", 4, DriverTransient),
    ),
)
