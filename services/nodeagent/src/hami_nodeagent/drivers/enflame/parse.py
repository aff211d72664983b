# SPDX-License-Identifier: Apache-2.0
"""Parses the output of efsmi (1.2 to 1.7; S60, S60G, L300; DRS).

The DEV number is the index and the number of ``/dev/gcu<N>``; the serial number is the identity.
The table shows the size of the memory, ``-q`` its use. Sizes are MiB. No output of the DRS lists is
public, only the parser of Enflame's own device plugin: every line with a profile's name is a row
whose words are in a fixed order. This module parses them the same way and ignores their headers.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

from hami_common.model.device import Profile
from hami_nodeagent.drivers.errors import DriverMissing, PartitionRefused
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Condition, Seen
from hami_nodeagent.drivers.parse.trouble import Rule

RULES = (
    Rule(words=r"libefml", kind=DriverMissing),
    Rule(words=r"insufficient|no (free|enough)|profile \S+ is not found", kind=PartitionRefused),
)
_SEVERAL = ("GCU Virt", "Boot FW VER", "FW VER")
_MODE_BY_WORD = {"drs": "drs", "sriov": "sriov"}
_PROFILE = re.compile(r"(\d{1,2})g\.(\d{1,4})gb")
_WORD = re.compile(r"(?<!\S)\d{1,2}g\.\d{1,4}gb(?!\S)")
_SIZED = re.compile(r"(\d)\s+(?=[MG]i?B(?!\S))")
_PROFILE_WORDS = ("device", "name", "id", "count", "memory", "processors")
_INSTANCE_WORDS = ("device", "profile", "id", "uuid")


class Instance(Struct, frozen=True, kw_only=True):
    """One DRS instance."""

    device: int
    profile: str
    id: int
    uuid: str


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: cards, and the driver's version."""
    flat = re.sub(r"(\d)\s*(℃|°C)", r"\1C", text)
    flat = re.sub(r"(?<!\d)(\d{1,6}W)[ \t]+(\d{1,6}W)", r"\1/\2", flat)
    found = forms.box(flat, first="DEV", needs="BUS-ID", several=_SEVERAL, greedy=("NAME",))
    cards: list[Seen] = []
    for record in found.records:
        number, serial = forms.whole(record.get("DEV", "")), record.get("SN", "")
        name = record.get("NAME", "").removeprefix("Enflame ")
        address = forms.bus_id(record.get("BUS-ID", ""))
        if number is None or not name or not address or not re.fullmatch(r"\w{6,40}", serial):
            raise forms.unknown("a card of efsmi", " ".join(record.values()))
        cards.append(
            Seen(
                place=address,
                index=number,
                minor=number,
                uuid=f"GCU-{serial}",
                type=name,
                memory_mib=forms.mib(record.get("Mem", "")),
                bus_id=address,
                mode=_MODE_BY_WORD.get(record.get("GCU Virt", "").lower(), "whole"),
                attributes={"serial": serial},
                core_pct=forms.percent(record.get("DUsed", "")),
                temperature_c=forms.celsius(record.get("TEMP", "")),
                power_w=forms.watts(record.get("Pwr(Usage/Cap)", "")),
            )
        )
    for key in ("index", "uuid", "place"):
        if len({getattr(card, key) for card in cards}) != len(cards):
            raise forms.unknown("efsmi", text)
    version = re.search(r"Driver Ver:\s*(\S+)", text)
    return tuple(cards), version[1] if version else ""


def details(text: str) -> dict[int, Seen]:
    """``efsmi -q``: health, memory in use and address by card number."""
    found: dict[int, Seen] = {}
    for block in forms.key_blocks(text, start="DEV ID "):
        number = forms.whole(block["DEV ID "])
        healthy = block.get("Device Info/Health", "")
        if number is None or number in found or healthy not in {"True", "False"}:
            raise forms.unknown("a card of efsmi -q", " ".join(block.values()))
        address = "{}:{}:{}.{}".format(
            *(block.get(f"PCIe Info/{key}", "") for key in ("Domain", "Bus", "Dev", "Func"))
        )
        used = block.get("Memory Info/Mem Usage") or block.get("Memory Info/Used Size", "")
        total = block.get("Memory Info/Mem Size") or block.get("Memory Info/Total Size", "")
        found[number] = Seen(
            place=str(number),
            index=number,
            memory_mib=forms.mib(total),
            bus_id=forms.bus_id(address),
            attributes={"dev_uuid": uuid}
            if (uuid := block.get("Device Info/Dev UUID", ""))
            else {},
            condition=Condition.GOOD if healthy == "True" else Condition.BAD,
            reason="" if healthy == "True" else "Health : False",
            used_mib=forms.mib(used),
            core_pct=forms.percent(block.get("Usage Info/GCU Usage", "")),
        )
    if not found:
        raise forms.unknown("efsmi -q", text)
    return found


def _rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a DRS list by the order of their words; none if it is truncated."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or not forms.is_separator(lines[-1]):
        raise forms.unknown("a DRS list of efsmi", text)
    rows = []
    for line in lines:
        if not _WORD.search(line):
            continue
        words = _SIZED.sub(r"\1", " ".join(forms.cells(line))).split()
        if len(words) < len(names):
            raise forms.unknown("a row of a DRS list", line)
        rows.append(dict(zip(names, words, strict=False)))
    return rows


def profiles(text: str) -> dict[int, tuple[Profile, ...]]:
    """``efsmi --drs --list-profile``: DRS sizes by card number; ``core_pct`` by slices."""
    found: dict[int, list[Profile]] = {}
    for row in _rows(text, _PROFILE_WORDS):
        number, native = forms.whole(row["device"]), forms.whole(row["id"])
        match, memory = _PROFILE.fullmatch(row["name"]), forms.mib(row["memory"])
        if number is None or native is None or match is None or not memory or not int(match[1]):
            raise forms.unknown("a profile of efsmi", " ".join(row.values()))
        found.setdefault(number, []).append(
            Profile(
                name=match[0],
                memory_mib=memory,
                resources={"slices": int(match[1])},
                native_id=native,
            )
        )
    if not found:
        raise forms.unknown("efsmi --drs --list-profile", text)
    for known in found.values():
        if len({profile.name for profile in known}) != len(known):
            raise forms.unknown("efsmi --drs --list-profile", text)
    return {
        number: tuple(
            Profile(
                name=profile.name,
                memory_mib=profile.memory_mib,
                core_pct=100
                * profile.resources["slices"]
                // max(one.resources["slices"] for one in known),
                resources=profile.resources,
                native_id=profile.native_id,
            )
            for profile in known
        )
        for number, known in found.items()
    }


def instances(text: str) -> tuple[Instance, ...]:
    """``efsmi -L``: the DRS instances of all cards."""
    found: list[Instance] = []
    for row in _rows(text, _INSTANCE_WORDS):
        number, native = forms.whole(row["device"]), forms.whole(row["id"])
        if number is None or native is None or not re.fullmatch(r"[0-9a-fA-F-]{8,40}", row["uuid"]):
            raise forms.unknown("an instance of efsmi", " ".join(row.values()))
        if not _PROFILE.fullmatch(row["profile"]):
            raise forms.unknown("an instance of efsmi", " ".join(row.values()))
        found.append(Instance(device=number, profile=row["profile"], id=native, uuid=row["uuid"]))
    if len({(one.device, one.id) for one in found}) != len(found):
        raise forms.unknown("efsmi -L", text)
    return tuple(found)
