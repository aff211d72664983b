# SPDX-License-Identifier: Apache-2.0
"""Parses the output of Kunlunxin's xpu-smi (5.0; P800 OAM).

Another vendor has a tool of the same name: output whose header does not name XPU-RT is rejected.
The table contains no UUID; the bus address is the stable identity. The XPU's number is its index
and the number of ``/dev/xpu<N>``. Sizes are MiB.
"""

import re

from hami_nodeagent.drivers.errors import (
    DeviceBusy,
    DeviceGone,
    DriverMissing,
    NotSupported,
    PartitionRefused,
    ToolMismatch,
)
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen
from hami_nodeagent.drivers.parse.trouble import Rule

RULES = (
    Rule(words=r"libxpuml", kind=DriverMissing),
    Rule(words=r"XPU is lost", kind=DeviceGone),
    Rule(words=r"insufficient resources", kind=PartitionRefused),
    Rule(words=r"\bin use\b", kind=DeviceBusy),
    Rule(words=r"\becc\b.{0,40}(enabled|not supported)", kind=NotSupported),
    Rule(words=r"driver/library version", kind=ToolMismatch),
)
_SR_IOV_WORDS = ("Enabled", "Disabled")
_SEVERAL = ("Volatile Uncorr. ECC", "Compute M.", "SR-IOV M.", "Process name", "XPU Memory")


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: XPUs, and the driver's version."""
    version = re.search(r"XPU-SMI\s+Driver Version:\s*(\S+)\s+XPU-RT Version", text)
    if version is None:
        raise forms.unknown("the head of Kunlunxin's xpu-smi", text)
    found = forms.box(text, first="XPU", needs="Bus-Id", several=_SEVERAL, greedy=("Name",))
    processes = forms.processes_of(
        [
            (xpu, pid, used)
            for before, pid, used in forms.process_lines(text, begin=found.end, several=_SEVERAL)
            if (xpu := forms.whole(before[0])) is not None
        ]
    )
    xpus: list[Seen] = []
    for record in found.records:
        number, address = forms.whole(record.get("XPU", "")), forms.bus_id(record.get("Bus-Id", ""))
        if number is None or not address or not record.get("Name"):
            raise forms.unknown("an XPU of xpu-smi", " ".join(record.values()))
        used, total = forms.mib_pair(record.get("Memory-Usage", ""))
        errors = forms.whole(record.get("Volatile Uncorr. ECC", "")) or 0
        xpus.append(
            Seen(
                place=address,
                index=number,
                minor=number,
                type=record["Name"],
                memory_mib=total,
                bus_id=address,
                mode="sriov" if record.get("SR-IOV M.") == "Enabled" else "",
                attributes=(
                    {"sriov": record["SR-IOV M."].lower()}
                    if record.get("SR-IOV M.") in _SR_IOV_WORDS
                    else {}
                ),
                condition=Condition.BAD if errors else Condition.GOOD,
                reason=f"{errors} uncorrectable ECC errors since the last reset" if errors else "",
                used_mib=used,
                core_pct=forms.percent(record.get("XPU-Util", "")),
                temperature_c=forms.celsius(record.get("Temp", "")),
                power_w=forms.watts(record.get("Pwr:Usage/Cap", "")),
                processes=processes.get(number, ()),
            )
        )
    if len({xpu.index for xpu in xpus}) != len(xpus) or len({x.place for x in xpus}) != len(xpus):
        raise forms.unknown("xpu-smi", text)
    return tuple(xpus), version[1]
