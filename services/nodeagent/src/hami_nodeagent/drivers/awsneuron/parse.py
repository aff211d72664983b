# SPDX-License-Identifier: Apache-2.0
"""Parses the output of neuron-ls and neuron-monitor (Inferentia2, Trainium1, Trainium2).

The device's number is its index, its identity on the node, and the number of ``/dev/neuron<N>``.
Sizes are bytes in both tools' JSON. The use of a core is attributed to the device that contains it.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from hami_nodeagent.drivers.errors import DriverMissing, HardwareAbsent
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Seen
from hami_nodeagent.drivers.parse.trouble import Rule
from hami_nodeagent.drivers.protocol import ProcessUsage

RULES = (
    Rule(words=r"no neuron device", kind=HardwareAbsent),
    Rule(words=r"neuron driver is not (installed|running)", kind=DriverMissing),
)
_MOST_CORES = 64
_FULL_PCT = 100.0


class Monitored(Struct, frozen=True, kw_only=True):
    """One report of neuron-monitor."""

    type: str
    ecc_by_device: dict[int, int]
    """Uncorrectable memory errors."""
    core_pct_by_core: dict[int, float]


def devices(text: str) -> tuple[tuple[Seen, ...], dict[int, tuple[int, ...]]]:
    """``neuron-ls -j``: devices, and which devices each is connected to."""
    found: list[Seen] = []
    links: dict[int, tuple[int, ...]] = {}
    for entry in forms.entries("neuron-ls -j", forms.json_of("neuron-ls -j", text)):
        number, size = entry.get("neuron_device"), entry.get("memory_size")
        cores = entry.get("nc_count")
        if not _counts(number, 1024) or not _counts(cores, _MOST_CORES) or not cores:
            raise forms.unknown("a device of neuron-ls", str(entry))
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 50:
            raise forms.unknown("the memory of a device of neuron-ls", str(size))
        index, count = int(str(number)), int(str(cores))
        ids = entry.get("neuroncore_ids")
        core_ids = (
            [int(str(core)) for core in ids]
            if isinstance(ids, list) and len(ids) == count and all(_counts(c, 65536) for c in ids)
            else list(range(index * count, (index + 1) * count))
        )
        attributes = {"cores": str(count), "core_ids": ",".join(map(str, core_ids))}
        if _counts(lnc := entry.get("logical_neuroncore_config"), 16):
            attributes["logical_core_config"] = str(lnc)
        peers = entry.get("connected_to")
        links[index] = tuple(
            int(str(peer))
            for peer in (peers if isinstance(peers, list) else ())
            if _counts(peer, 1024)
        )
        found.append(
            Seen(
                place=str(index),
                index=index,
                minor=index,
                memory_mib=size >> 20,
                bus_id=forms.bus_id(forms.text_at(entry, "bdf")),
                numa=forms.whole(forms.text_at(entry, "numa_node")),
                attributes=attributes,
                processes=_processes(entry.get("neuron_processes")),
            )
        )
    if len({one.index for one in found}) != len(found):
        raise forms.unknown("neuron-ls -j", text)
    return tuple(sorted(found, key=lambda one: one.index)), links


def _counts(value: object, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def _processes(found: object) -> tuple[ProcessUsage, ...]:
    pids = {
        int(str(entry["pid"]))
        for entry in (found if isinstance(found, list) else ())
        if isinstance(entry, dict) and _counts(entry.get("pid"), 1 << 31)
    }
    return tuple(ProcessUsage(pid=pid) for pid in sorted(pids))


def monitored(text: str) -> Monitored:
    """Parse one line of neuron-monitor; raise ``DriverMissing`` if it reports no driver."""
    document = forms.json_of("neuron-monitor", text)
    if not isinstance(document, dict) or "neuron_hardware_info" not in document:
        raise forms.unknown("neuron-monitor", text)
    if error := forms.text_at(document, "neuron_hardware_info", "error"):
        raise DriverMissing(doing="neuron-monitor", detail=error[:200])
    counters = forms.at(document, "system_data", "neuron_hw_counters", "neuron_devices")
    ecc: dict[int, int] = {}
    for entry in counters if isinstance(counters, list) else ():
        index = forms.at(entry, "neuron_device_index")
        if _counts(index, 1024):
            ecc[int(str(index))] = sum(
                int(str(value))
                for key in ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
                if _counts(value := forms.at(entry, key), 1 << 62)
            )
    runtimes = document.get("neuron_runtime_data")
    load: dict[int, float] = {}
    for runtime in runtimes if isinstance(runtimes, list) else ():
        used = forms.at(runtime, "report", "neuroncore_counters", "neuroncores_in_use")
        for core, counter in used.items() if isinstance(used, dict) else ():
            value = forms.at(counter, "neuroncore_utilization")
            if not isinstance(value, int | float) or not re.fullmatch(r"[0-9]{1,5}", core):
                continue
            if 0 <= value <= _FULL_PCT:
                load[int(core)] = min(_FULL_PCT, load.get(int(core), 0.0) + value)
    kind = forms.text_at(document, "neuron_hardware_info", "neuron_device_type")
    return Monitored(
        type=kind if re.fullmatch(r"[\w-]{1,40}", kind) else "",
        ecc_by_device=ecc,
        core_pct_by_core=load,
    )


def load_of(core_ids: str, load: Mapping[int, float], count: int) -> int:
    """Use of a device from that of its cores, percent of the whole device."""
    cores = [int(core) for core in core_ids.split(",") if core]
    return round(sum(load.get(core, 0.0) for core in cores) / max(1, count))
