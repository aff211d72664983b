# SPDX-License-Identifier: Apache-2.0
"""Parses the output of amd-smi, rocm-smi and the kernel's KFD tree (MI200, MI300).

amd-smi writes MB for MiB; some versions wrap lists in ``gpu_data``. rocm-smi reports no identity
and no size, so both come from the KFD tree where amd-smi is not installed. A partition of a GPU is
a device of its own with the same address and another PCI function.
"""

import re

from msgspec import Struct

from hami_common.bounds import UINT64_MAX
from hami_common.units import whole
from hami_nodeagent.drivers.errors import DriverMissing
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen
from hami_nodeagent.drivers.parse.trouble import Rule
from hami_nodeagent.drivers.protocol import ProcessUsage

RULES = (Rule(words=r"amdgpu not found in modules|Driver not initialized", kind=DriverMissing),)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MOST_GPUS = 1024
_KEY_AND_VALUE = 2
_MOST_DOMAIN, _MOST_LOCATION = 0xFFFFFFFF, 0xFFFF
_MOST_BYTES, _MOST_UNIQUE = 1 << 50, (1 << 64) - 1


class KfdNode(Struct, frozen=True, kw_only=True):
    """One GPU of the KFD tree."""

    uuid: str
    bus_id: str
    compute_units: int
    memory_mib: int
    render: int


def gpus(text: str) -> tuple[Seen, ...]:
    """``amd-smi list --json``: identity and address."""
    found: list[Seen] = []
    document = forms.json_of("amd-smi list", text)
    for entry in forms.entries("amd-smi list", document, key="gpu_data"):
        number, uuid = _number(entry), forms.text_at(entry, "uuid")
        address = forms.bus_id(forms.text_at(entry, "bdf"))
        if not _UUID.fullmatch(uuid) or not address:
            raise forms.unknown("a GPU of amd-smi list", str(entry))
        partition = forms.text_at(entry, "partition_id")
        found.append(
            Seen(
                place=str(number),
                index=number,
                uuid=uuid,
                bus_id=address,
                attributes={"partition_id": partition} if forms.whole(partition) else {},
            )
        )
    if not found or len({one.uuid for one in found}) != len(found):
        raise forms.unknown("amd-smi list", text)
    if len({one.index for one in found}) != len(found):
        raise forms.unknown("amd-smi list", text)
    return tuple(sorted(found, key=lambda one: one.index))


def static(text: str) -> tuple[dict[int, Seen], str]:
    """``amd-smi static --json``: model, memory, compute units, NUMA, mode; the driver's version."""
    found: dict[int, Seen] = {}
    version = ""
    document = forms.json_of("amd-smi static", text)
    for entry in forms.entries("amd-smi static", document, key="gpu_data"):
        number = _number(entry)
        units = forms.whole(forms.text_at(entry, "asic", "num_compute_units"))
        attributes = {"compute_units": str(units)} if units else {}
        serial = forms.text_at(entry, "asic", "asic_serial")
        if forms.is_told(serial):
            attributes["serial"] = serial[:64]
        name = forms.text_at(entry, "asic", "market_name")
        cut = forms.text_at(entry, "partition", "accelerator_partition") or forms.text_at(
            entry, "partition", "compute_partition"
        )
        if re.fullmatch(r"[SDTQC]PX", cut):
            attributes["compute_partition"] = cut
        found[number] = Seen(
            place=str(number),
            index=number,
            type=name if forms.is_told(name) else "",
            memory_mib=forms.mib(forms.text_at(entry, "vram", "size")),
            numa=forms.whole(forms.text_at(entry, "numa", "node")),
            attributes=attributes,
        )
        version = version or forms.text_at(entry, "driver", "version")
    if not found:
        raise forms.unknown("amd-smi static", text)
    return found, version if forms.is_told(version) else ""


def metric(text: str) -> dict[int, Seen]:
    """``amd-smi metric --json``: use and uncorrectable errors by GPU number."""
    found: dict[int, Seen] = {}
    document = forms.json_of("amd-smi metric", text)
    for entry in forms.entries("amd-smi metric", document, key="gpu_data"):
        number = _number(entry)
        errors = forms.whole(forms.text_at(entry, "ecc", "total_uncorrectable_count")) or 0
        hot = forms.text_at(entry, "temperature", "hotspot")
        edge = forms.text_at(entry, "temperature", "edge")
        found[number] = Seen(
            place=str(number),
            index=number,
            memory_mib=forms.mib(forms.text_at(entry, "mem_usage", "total_vram")),
            condition=Condition.BAD if errors else Condition.GOOD,
            reason=f"{errors} uncorrectable ECC errors" if errors else "",
            used_mib=forms.mib(forms.text_at(entry, "mem_usage", "used_vram")),
            core_pct=forms.percent(forms.text_at(entry, "usage", "gfx_activity")),
            memory_bus_pct=forms.percent(forms.text_at(entry, "usage", "umc_activity")),
            temperature_c=forms.celsius(hot if forms.is_told(hot) else edge),
            power_w=forms.watts(forms.text_at(entry, "power", "socket_power")),
        )
    if not found:
        raise forms.unknown("amd-smi metric", text)
    return found


def processes(text: str) -> dict[int, tuple[ProcessUsage, ...]]:
    """``amd-smi process --json`` by GPU number."""
    found: dict[int, tuple[ProcessUsage, ...]] = {}
    document = forms.json_of("amd-smi process", text)
    for entry in forms.entries("amd-smi process", document, key="gpu_data"):
        listed = entry.get("process_list")
        rows: list[tuple[int, int, int | None]] = []
        for one in listed if isinstance(listed, list) else ():
            pid = forms.whole(forms.text_at(one, "process_info", "pid"))
            memory = forms.text_at(one, "process_info", "memory_usage", "vram_mem")
            if pid is not None:
                rows.append((0, pid, forms.mib(memory, unit="B")))
        found[_number(entry)] = forms.processes_of(rows).get(0, ())
    return found


def _number(entry: dict[str, object]) -> int:
    number = forms.whole(forms.text_at(entry, "gpu"))
    if number is None or number >= _MOST_GPUS:
        raise forms.unknown("the number of a GPU of amd-smi", str(entry))
    return number


def concise(text: str) -> dict[int, Seen]:
    """rocm-smi's table: load, temperature and power by GPU number."""
    names: list[str] = []
    found: dict[int, Seen] = {}
    closed = False
    for line in text.splitlines():
        if not names:
            names = _concise_names(line)
            continue
        words = line.split()
        if "====" in line:
            closed = bool(found)
            if closed:
                break
            continue
        number = forms.whole(words[0]) if words else None
        if number is None and not found:
            continue  # the second line of the head
        if number is None or len(words) != len(names) or number in found:
            raise forms.unknown("a line of rocm-smi", line)
        row = dict(zip(names, words, strict=True))
        heat = next((value for name, value in row.items() if name.startswith("Temp")), "")
        found[number] = Seen(
            place=str(number),
            index=number,
            core_pct=forms.percent(row.get("GPU%", "")),
            temperature_c=forms.celsius(heat),
            power_w=forms.watts(row.get("AvgPwr", row.get("Power", ""))),
            attributes={"vram_pct": str(forms.percent(row.get("VRAM%", "")) or 0)},
        )
    if not found or not closed:
        raise forms.unknown("rocm-smi", text)
    return found


_WORDS_BY_COLUMN = {"IDs": ("DID", "GUID"), "Partitions": ("Mem", "Compute", "ID")}


def _concise_names(line: str) -> list[str]:
    """The columns of rocm-smi's head, one name for each word of a row; empty for another line."""
    columns = re.split(r"\s{2,}", line.strip())
    if columns[0] not in {"Device", "GPU"} or "GPU%" not in columns:
        return []
    return [name for column in columns for name in _WORDS_BY_COLUMN.get(column, (column,))]


def kfd_node(properties: str, banks: str) -> KfdNode | None:
    """One node of the KFD tree; ``None`` for a processor that is no GPU."""
    lines = [line.split() for line in properties.splitlines()]
    number = {line[0]: _uint(line[1]) for line in lines if len(line) == _KEY_AND_VALUE}
    simds, per_cu = number.get("simd_count"), number.get("simd_per_cu")
    if not simds or not per_cu:
        return None
    unique, location, domain = (number.get(key) for key in ("unique_id", "location_id", "domain"))
    sizes = [
        size
        for line in banks.splitlines()
        if line.startswith("size_in_bytes") and (size := _uint(line.split()[-1])) is not None
    ]
    render = number.get("drm_render_minor")
    if not unique or location is None or domain is None or not sizes or render is None:
        raise forms.unknown("a node of the KFD tree", properties)
    if domain > _MOST_DOMAIN or location > _MOST_LOCATION or max(sizes) > _MOST_BYTES:
        raise forms.unknown("a node of the KFD tree", properties)
    if unique > _MOST_UNIQUE:
        raise forms.unknown("a node of the KFD tree", properties)
    bus, device, function = location >> 8, location >> 3 & 0x1F, location & 7
    return KfdNode(
        uuid=f"GPU-{unique:016x}",
        bus_id=f"{domain:04x}:{bus:02x}:{device:02x}.{function}",
        compute_units=simds // per_cu,
        memory_mib=sum(sizes) >> 20,
        render=render,
    )


def _uint(text: str) -> int | None:
    return whole(text, most=UINT64_MAX)
