# SPDX-License-Identifier: Apache-2.0
"""What efsmi says (1.2 to 1.7; S60, S60G, L300; DRS).

The DEV number is the index and that of ``/dev/gcu<N>``; the serial number is the identity. The
table shows the size of the memory, ``-q`` its use. Sizes are MiB. The layout of the DRS lists was
not seen on a machine: they are read by their heads and left out when they differ.
"""

import re

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


class Instance(Struct, frozen=True, kw_only=True):
    """One DRS instance."""

    device: int
    profile: str
    id: int
    uuid: str


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: cards, and the driver's version."""
    flat = re.sub(r"(\d)\s*(℃|°C)", r"\1C", text)
    flat = re.sub(r"(\d+W)\s+(\d+W)", r"\1/\2", flat)
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


def profiles(text: str) -> dict[int, tuple[Profile, ...]]:
    """``efsmi --drs --list-profile``: DRS sizes by card number; ``core_pct`` by slices."""
    table_ = forms.box(text, first="DEV", needs="NAME")
    found: dict[int, list[Profile]] = {}
    for record in table_.records:
        number, native = forms.whole(record.get("DEV", "")), forms.whole(record.get("ID", ""))
        match = _PROFILE.fullmatch(record.get("NAME", ""))
        memory = forms.mib(record.get("MEMORY", ""))
        if number is None or native is None or match is None or not memory or not int(match[1]):
            raise forms.unknown("a profile of efsmi", " ".join(record.values()))
        found.setdefault(number, []).append(
            Profile(
                name=match[0],
                memory_mib=memory,
                resources={"slices": int(match[1])},
                native_id=native,
            )
        )
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
    if forms.has_no_rows(text, first="DEV", needs="INSTANCE-ID"):
        return ()
    found: list[Instance] = []
    for record in forms.box(text, first="DEV", needs="INSTANCE-ID").records:
        number = forms.whole(record.get("DEV", ""))
        native = forms.whole(record.get("INSTANCE-ID", ""))
        uuid, profile = record.get("UUID", ""), record.get("PROFILE", "")
        if number is None or native is None or not re.fullmatch(r"[0-9a-fA-F-]{8,40}", uuid):
            raise forms.unknown("an instance of efsmi", " ".join(record.values()))
        if not _PROFILE.fullmatch(profile):
            raise forms.unknown("an instance of efsmi", " ".join(record.values()))
        found.append(Instance(device=number, profile=profile, id=native, uuid=uuid))
    if len({(one.device, one.id) for one in found}) != len(found):
        raise forms.unknown("efsmi -L", text)
    return tuple(found)
