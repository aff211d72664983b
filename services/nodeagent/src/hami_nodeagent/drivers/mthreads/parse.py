# SPDX-License-Identifier: Apache-2.0
"""Parses the output of mthreads-gmi (1.14 to 2.4; MTT S80, S3000, S4000, S5000).

Its table contains no UUID; the bus address is the stable identity. The ID is the index and the
number of ``/dev/mtgpu.<N>``. Sizes are MiB. ``told`` parses the output of the library's program for
the same devices.
"""

import re

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import DriverMissing
from hami_nodeagent.drivers.parse import forms, library
from hami_nodeagent.drivers.parse.places import by_address
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.parse.trouble import Rule

RULES = (Rule(words=r"failed to initiali[sz]e mtml", kind=DriverMissing),)
_SEVERAL = ("Device Type", "Pcie Lane Width", "MPC Capable", "ECC Mode", "Process name")
PARENT = "MPC Parent"
"""The kind of a card that is divided: its instances are devices, it is not."""


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: devices, and the driver's version."""
    found = forms.box(
        text,
        first="ID",
        needs="PCIe",
        several=_SEVERAL,
        greedy=("Name", "Device Type", "ECC Mode"),
    )
    processes = forms.processes_of(
        [
            (device, pid, used)
            for before, pid, used in forms.process_lines(text, begin=found.end)
            if (device := forms.whole(before[0])) is not None
        ]
    )
    devices: list[Seen] = []
    for record in found.records:
        number = forms.whole(record.get("ID", ""))
        address = forms.bus_id(record.get("PCIe", ""))
        if number is None or not address or not record.get("Name"):
            raise forms.unknown("a device of mthreads-gmi", " ".join(record.values()))
        used, total = forms.mib_pair(record.get("Mem", ""))
        kind = re.sub(r"\s+P\d+$", "", record.get("Device Type", ""))
        attributes = {"kind": kind} if kind else {}
        if record.get("MPC Capable") == "YES":
            attributes["mpc_capable"] = "true"
        devices.append(
            Seen(
                place=address,
                index=number,
                minor=number,
                type=record["Name"],
                memory_mib=total,
                bus_id=address,
                attributes=attributes,
                used_mib=used,
                core_pct=forms.percent(record.get("%GPU", "")),
                temperature_c=forms.celsius(record.get("Temp", "")),
                processes=processes.get(number, ()),
            )
        )
    addresses = {device.bus_id for device in devices}
    if len({device.index for device in devices}) != len(devices) or len(addresses) != len(devices):
        raise forms.unknown("mthreads-gmi", text)
    version = re.search(r"Driver Version:\s*(\S+)", text)
    return tuple(devices), version[1] if version else ""


def told(text: str, node: str) -> Sight:
    """The list of the library's program, under the identities that ``table`` leads to."""
    return by_address(identified(library.devices(text), node))


def identified(sight: Sight, node: str) -> Sight:
    """Devices under their identities, without cards that are divided."""
    return replace(
        sight,
        devices=tuple(
            replace(device, uuid=f"MTT-{node}-{device.bus_id.replace(':', '-')}")
            if device.bus_id
            else device
            for device in sight.devices
            if device.attributes.get("kind") != PARENT
        ),
    )
