# SPDX-License-Identifier: Apache-2.0
"""Parses the output of hy-smi and the files that describe vDCUs (Z100, K100).

The number of a card is its index. Sizes are bytes in JSON and in the virtual queries, MiB in files.
"""

import re

from msgspec import Struct

from hami_nodeagent.drivers.errors import DriverMissing, NotSupported
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen
from hami_nodeagent.drivers.parse.trouble import Rule

RULES = (
    Rule(words=r"libhydmi.{0,10}error|open hydmilib", kind=NotSupported),
    Rule(words=r"hy(d)?cu not found in modules", kind=DriverMissing),
)
MASK_BITS = 64
_CONDITION_BY_WORD = {"healthy": Condition.GOOD, "critical": Condition.BAD}


class Vdcu(Struct, frozen=True, kw_only=True):
    """One virtual DCU as its file describes it."""

    bus_id: str
    masks: tuple[int, int]
    cu_count: int
    memory_mib: int
    device: int
    vdev: int
    pipe: int


def cards(text: str) -> tuple[Seen, ...]:
    """The JSON answer: identity, memory and address of each card."""
    document = forms.json_of("hy-smi --json", text)
    if not isinstance(document, dict):
        raise forms.unknown("hy-smi --json", text)
    found: list[Seen] = []
    for key, card in document.items():
        match = re.fullmatch(r"card(\d{1,3})", str(key))
        if match is None:
            continue
        serial = forms.text_at(card, "Serial Number")
        address = forms.bus_id(forms.text_at(card, "PCI Bus"))
        memory = forms.mib(forms.text_at(card, "VRAM Total Memory (B)"), unit="B")
        if not re.fullmatch(r"[\w.-]{1,64}", serial) or not forms.is_told(serial):
            raise forms.unknown(f"the serial number of {key}", serial)
        series = forms.text_at(card, "Card series") or forms.text_at(card, "Card model")
        found.append(
            Seen(
                place=match[1],
                index=int(match[1]),
                uuid=f"DCU-{serial}",
                type=f"DCU-{series}" if series else "",
                memory_mib=memory,
                bus_id=address,
                attributes=_unique(forms.text_at(card, "Unique ID")),
                used_mib=forms.mib(forms.text_at(card, "VRAM Total Used Memory (B)"), unit="B"),
            )
        )
    if not found or len({one.uuid for one in found}) != len(found):
        raise forms.unknown("hy-smi --json", text)
    return tuple(sorted(found, key=lambda one: one.index))


def _unique(text: str) -> dict[str, str]:
    """Return the card's unique number besides its serial, without leading zeros."""
    found = re.fullmatch(r"(0x)?[0-9a-fA-F]{1,16}", text)
    return {"unique_id": f"{int(text, 16):#x}"} if found else {}


def table(text: str) -> dict[int, Seen]:
    """Parse the concise table by card number: load, temperature, power, responsiveness."""
    lines = text.splitlines()
    found: dict[int, Seen] = {}
    names: list[str] = []
    closed = False
    for line in lines:
        words = line.split()
        if not names:
            if words and words[0] in {"HCU", "DCU"} and "Temp" in words:
                names = words
            continue
        if forms.is_separator(line) or "=====" in line:
            closed = True
            break
        if len(words) != len(names) or forms.whole(words[0]) is None:
            raise forms.unknown("a line of hy-smi", line)
        row = dict(zip(names, words, strict=True))
        number = int(words[0])
        silent = not forms.is_told(row["Temp"]) and not forms.is_told(row.get("VRAM%", ""))
        load = row.get("HCU%" if names[0] == "HCU" else "DCU%", "")
        found[number] = Seen(
            place=words[0],
            index=number,
            condition=Condition.DOUBTFUL if silent else Condition.GOOD,
            reason="hy-smi shows no values for it" if silent else "",
            core_pct=forms.percent(load),
            temperature_c=forms.celsius(row["Temp"]),
            power_w=forms.watts(row.get("AvgPwr", "")),
        )
    if not found or not closed:
        raise forms.unknown("hy-smi", text)
    return found


def numa(text: str) -> dict[int, int]:
    """``--showtoponuma``: NUMA node by card number."""
    found = re.findall(
        r"^[HD]CU\[(\d{1,3})\]\s*: \(Topology\) Numa Node: (\d{1,3})\s*$", text, re.MULTILINE
    )
    if not found:
        raise forms.unknown("hy-smi --showtoponuma", text)
    return {int(card): int(node) for card, node in found}


def health(text: str) -> dict[int, tuple[Condition, str]]:
    """Parse the list of health words by card number."""
    found = re.findall(
        r"^[HD]CU\[(\d{1,3})\]\s*: Bus Id : (\S{1,20}) : (\w{1,20})\s*$", text, re.MULTILINE
    )
    if not found:
        raise forms.unknown("hy-smi --showhealth", text)
    return {
        int(card): (_CONDITION_BY_WORD.get(word.lower(), Condition.DOUBTFUL), word)
        for card, _, word in found
    }


def compute_units(text: str) -> dict[int, int]:
    """``virtual -show-device-info``: compute units by card number."""
    found: dict[int, int] = {}
    for block in forms.key_blocks(text, start="Device "):
        card = forms.whole(block.get("Actual Device", ""))
        units = forms.whole(block.get("Compute units", ""))
        if card is None or not units or units > 2 * MASK_BITS:
            raise forms.unknown("hy-smi virtual -show-device-info", " ".join(block.values()))
        found[card] = units
    if not found:
        raise forms.unknown("hy-smi virtual -show-device-info", text)
    return found


def vdcu_text(one: Vdcu, *, device: int | None = None) -> str:
    """The file that describes a vDCU; the order of its lines matters. ``device``: its host copy."""
    lines = (
        f"PciBusId: {one.bus_id}",
        *(f"cu_mask: 0x{mask:016x}" for mask in one.masks),
        f"cu_count: {one.cu_count}",
        f"mem: {one.memory_mib} MiB",
        f"device_id: {one.device if device is None else device}",
        f"vdev_id: {one.vdev}",
        f"pipe_id: {one.pipe}",
        "enable: 1",
    )
    return "\n".join((*lines, ""))


def vdcu(text: str) -> Vdcu:
    """One ``vdev<N>.conf``; a count that is not that of the masks is refused."""
    masks: list[int] = []
    keys: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = (part.strip() for part in line.partition(":"))
        if key == "cu_mask":
            if not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", value):
                raise forms.unknown("a cu_mask", value)
            masks.append(int(value, 16))
        elif separator:
            keys.setdefault(key, value)
    numbers = {
        name: forms.whole(keys.get(name, "")) for name in ("cu_count", "device_id", "vdev_id")
    }
    memory, address = forms.mib(keys.get("mem", "")), forms.bus_id(keys.get("PciBusId", ""))
    pipe = forms.whole(keys.get("pipe_id", ""))
    count, device, vdev = numbers["cu_count"], numbers["device_id"], numbers["vdev_id"]
    if len(masks) != 2 or not address or not memory or pipe is None:  # noqa: PLR2004
        raise forms.unknown("a vDCU file", text)
    if count is None or device is None or vdev is None:
        raise forms.unknown("a vDCU file", text)
    if count != sum(mask.bit_count() for mask in masks):
        raise forms.unknown("a vDCU file whose cu_count is that of its masks", text)
    return Vdcu(
        bus_id=address,
        masks=(masks[0], masks[1]),
        cu_count=count,
        memory_mib=memory,
        device=device,
        vdev=vdev,
        pipe=pipe,
    )
