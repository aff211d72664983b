# SPDX-License-Identifier: Apache-2.0
"""Parses the output of mx-smi (2.2.4 to 2.2.12; C500, C550, C280), and sGPUs from ``binding``.

``-L`` lists identity and availability, the table memory and load; the bus address joins them with
the library's output. The GPU's number is its index. All sizes are in MiB.
"""

import re

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hami_common.units import INT32_MAX
from hami_nodeagent.drivers.errors import (
    DriverDenied,
    PartitionRefused,
)
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen
from hami_nodeagent.drivers.parse.trouble import Rule
from hami_nodeagent.drivers.rules import Neighbour

RULES = (
    Rule(words=r"insufficient|no more sgpu|invalid compute|exceed", kind=PartitionRefused),
    Rule(words=r"read-only file system", kind=DriverDenied),
)
MOST_SGPUS = 16
FULL_PCT = 100
SCHEDULING_BY_KIND = {"best-effort": 0, "fixed-share": 1, "burst-share": 2}
_SEVERAL = ("Process Name", "GPU Memory")
_LINE = re.compile(
    r"^GPU#(\d{1,3})\s+(\S{1,40})\s+(\S{7,20})"
    r"\s+(Not Available|Available)\s*\(([^()]{1,120})\)\s*$",
    re.MULTILINE,
)
_IDENTITY = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_UUID = re.compile(rf"UUID: ({_IDENTITY.pattern})")


class Sgpu(Struct, frozen=True, kw_only=True):
    """One sGPU."""

    number: int
    alias: str
    compute_pct: int
    memory_mib: int
    used: int | None
    """Bytes in use; ``None`` where the library does not report them."""


class SgpuGpu(Struct, frozen=True, kw_only=True):
    """One GPU in sGPU mode."""

    bus_id: str
    scheduling: int
    """0 best effort, 1 fixed share, 2 burst share; for all of its sGPUs."""
    sgpus: tuple[Sgpu, ...]
    index: int
    uuid: str
    """Empty while the GPU is not available."""
    memory_mib: int


class _SgpuList(Struct, frozen=True, kw_only=True):
    gpus: tuple[SgpuGpu, ...]


class Listed(Struct, frozen=True, kw_only=True):
    """One GPU of ``mx-smi -L``."""

    index: int
    model: str
    bus_id: str
    uuid: str
    """Empty while the GPU is not available."""
    trouble: str
    """Reason for its unavailability."""


def listed(text: str) -> tuple[Listed, ...]:
    """``mx-smi -L``."""
    found: list[Listed] = []
    for number, model, address, word, inside in _LINE.findall(text):
        uuid = _UUID.fullmatch(inside)
        if not forms.bus_id(address) or (word == "Available") != (uuid is not None):
            raise forms.unknown("a line of mx-smi -L", f"{address} {word} {inside}")
        found.append(
            Listed(
                index=int(number),
                model=model,
                bus_id=forms.bus_id(address),
                uuid=uuid[1] if uuid else "",
                trouble="" if uuid else f"{word}({inside})",
            )
        )
    attached = re.search(r"Attached GPUs\s*:\s*(\d{1,4})\b", text)
    told = {one.uuid for one in found if one.uuid}
    if not found or (attached and int(attached[1]) != len(found)):
        raise forms.unknown("mx-smi -L", text)
    if len(told) != sum(bool(one.uuid) for one in found):
        raise forms.unknown("mx-smi -L", text)
    if len({one.bus_id for one in found}) != len(found):
        raise forms.unknown("mx-smi -L", text)
    return tuple(found)


def sgpus(text: str) -> tuple[SgpuGpu, ...]:
    """Parse the output of ``binding list``: GPUs in sGPU mode and their sGPUs."""
    try:
        gpus = msgspec.json.decode(text.encode("utf-8", "replace"), type=_SgpuList).gpus
    except (ValueError, RecursionError) as error:
        raise forms.unknown("the list of sGPUs", text) from error
    found = tuple(replace(gpu, bus_id=forms.bus_id(gpu.bus_id)) for gpu in gpus)
    places = {gpu.bus_id for gpu in found}
    told = [gpu.uuid for gpu in found if gpu.uuid]
    if "" in places or len(places) != len(found) or len(set(told)) != len(told):
        raise forms.unknown("the addresses of GPUs with sGPUs", text)
    for gpu in found:
        numbers = {one.number for one in gpu.sgpus}
        is_sized = all(
            0 <= one.number < MOST_SGPUS
            and 0 < one.memory_mib <= INT32_MAX
            and 0 <= one.compute_pct <= FULL_PCT
            for one in gpu.sgpus
        )
        if len(numbers) != len(gpu.sgpus) or not is_sized:
            raise forms.unknown("an sGPU", text)
        is_named = not gpu.uuid or _IDENTITY.fullmatch(gpu.uuid)
        if not is_named or not 0 <= gpu.index <= INT32_MAX or not 0 <= gpu.memory_mib <= INT32_MAX:
            raise forms.unknown("a GPU with sGPUs", text)
        if gpu.scheduling not in SCHEDULING_BY_KIND.values():
            raise forms.unknown("the scheduling class of sGPUs", text)
    return found


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: GPUs without identity, and the kernel driver's version."""
    first = "Board" if re.search(r"^[ \t]*\|[ \t]*Board\s", text, re.MULTILINE) else "GPU"
    found = forms.box(
        text, first=first, needs="Bus-id", several=_SEVERAL, greedy=("Name", "NAME", "GPU-State")
    )
    processes = forms.processes_of(
        [
            (gpu, pid, used)
            for before, pid, used in forms.process_lines(text, begin=found.end, several=_SEVERAL)
            if (gpu := forms.whole(before[0])) is not None
        ]
    )
    gpus: list[Seen] = []
    for record in found.records:
        number, address = forms.whole(record.get("GPU", "")), forms.bus_id(record.get("Bus-id", ""))
        name = record.get("Name") or record.get("NAME", "")
        if number is None or not address or not name:
            raise forms.unknown("a GPU of mx-smi", " ".join(record.values()))
        used, total = forms.mib_pair(record.get("Memory-Usage", ""))
        state = record.get("GPU-State", "")
        good = state == "Available"
        gpus.append(
            Seen(
                place=address,
                index=number,
                type=type_of(name),
                memory_mib=total,
                bus_id=address,
                mode="sgpu" if record.get("sGPU-M", "") in {"Enabled", "sGPU"} else "whole",
                condition=Condition.GOOD if good else Condition.BAD,
                reason="" if good else state or "its state is unknown",
                used_mib=used,
                core_pct=forms.percent(record.get("GPU-Util", "")),
                temperature_c=forms.celsius(record.get("Temp", "")),
                power_w=forms.watts(record.get("Pwr:Usage/Cap", "")),
                processes=processes.get(number, ()),
            )
        )
    if len({gpu.index for gpu in gpus}) != len(gpus) or len({g.place for g in gpus}) != len(gpus):
        raise forms.unknown("mx-smi", text)
    version = re.search(r"Kernel Mode Driver Version:\s*(\S+)", text)
    return tuple(gpus), version[1] if version else ""


def type_of(name: str) -> str:
    """Return the model word of ``-L``, such as ``MXC500``, from either spelling."""
    return f"MX{name.removeprefix('MetaX ')}" if name.startswith("MetaX ") else name


def topology(text: str) -> dict[tuple[int, int], Neighbour]:
    """``mx-smi topo -m``."""
    return forms.matrix(text, prefix="GPU", fabric="MX")
