# SPDX-License-Identifier: Apache-2.0
"""Parses the output of vasmi (VA1, VA10, VA16).

Two queries, joined by bus address: ``getmem`` has the serial number and the memory, ``summary`` the
power. A die has a bus address of its own and the serial number of its board, so both form its
identity. Devices are numbered in order of their addresses. Sizes are MiB with their unit.
"""

import re

from hami_common.model.device import BOARD
from hami_nodeagent.drivers.errors import HardwareAbsent
from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Seen


def devices(text: str) -> tuple[Seen, ...]:
    """Parse ``vasmi getmem``; an empty list means that there is no device."""
    entries = _elements("vasmi getmem", text)
    if not entries:
        raise HardwareAbsent(doing="vasmi getmem", detail="its list is empty")
    found: dict[str, Seen] = {}
    for entry in entries:
        address, serial = forms.bus_id(forms.text_at(entry, "pci_bus")), forms.text_at(entry, "sn")
        if not address or address in found or not re.fullmatch(r"[\w-]{4,40}", serial):
            raise forms.unknown("a device of vasmi getmem", str(entry))
        total = forms.text_at(entry, "vals", "Physical") or forms.text_at(
            entry, "vals", "Physical memory"
        )
        found[address] = Seen(
            place=address,
            index=0,
            uuid=f"VA-{serial}-{address.replace(':', '-')}",
            type="Vastai",
            memory_mib=forms.mib(total),
            bus_id=address,
            attributes={BOARD: serial},
            used_mib=forms.mib(forms.text_at(entry, "vals", "Used")),
        )
    boards = [one.attributes[BOARD] for one in found.values()]
    return tuple(
        Seen(
            place=one.place,
            index=index,
            minor=index,
            uuid=one.uuid,
            type=one.type,
            memory_mib=one.memory_mib,
            bus_id=one.bus_id,
            mode="whole",
            attributes={
                **one.attributes,
                "strategy": "die" if boards.count(one.attributes[BOARD]) > 1 else "card",
            },
            used_mib=one.used_mib,
        )
        for index, (_, one) in enumerate(sorted(found.items()))
    )


def power_by_address(text: str) -> dict[str, float]:
    """``vasmi summary``: power by bus address."""
    found: dict[str, float] = {}
    for entry in _elements("vasmi summary", text):
        address = forms.bus_id(forms.text_at(entry, "vals", "devBusId"))
        power = forms.watts(forms.text_at(entry, "vals", "P_Cur"))
        if address and power is not None:
            found[address] = power
    return found


def _elements(what: str, text: str) -> list[dict[str, object]]:
    document = forms.json_of(what, text)
    if not isinstance(document, dict) or "elem" not in document:
        raise forms.unknown(what, text)
    return forms.entries(what, document["elem"])
