# SPDX-License-Identifier: Apache-2.0
"""Parses the output of ixsmi (4.1 to 4.4; BI-V100, BI-V150, MR-V50, MR-V100, DUO boards).

The chip's number is its index and, on nodes where no chip is missing, the number of
``/dev/iluvatar<N>``. ixsmi writes MiB. ``told`` parses the output of the library's program for the
same chips.
"""

import re

from msgspec.structs import replace

from hami_nodeagent.drivers.errors import DriverMissing
from hami_nodeagent.drivers.parse import forms, library
from hami_nodeagent.drivers.parse.places import by_address
from hami_nodeagent.drivers.parse.seen import Seen, Sight
from hami_nodeagent.drivers.parse.trouble import Rule
from hami_nodeagent.drivers.rules import Neighbour

RULES = (Rule(words=r"libixml", kind=DriverMissing),)
_UUID = r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_SEVERAL = ("Compute M.", "Process name", "GPU Memory")
_UUID_LINE = re.compile(
    r"^GPU (\d{1,3}): (.{1,60}?) "
    rf"\(UUID: ({_UUID})\)\s*$",
    re.MULTILINE,
)


def table(text: str) -> tuple[tuple[Seen, ...], str]:
    """The summary table: chips without identity, and the driver's version."""
    found = forms.box(text, first="GPU", needs="Bus-Id", several=_SEVERAL, greedy=("Name",))
    processes = forms.processes_of(
        [
            (chip, pid, used)
            for before, pid, used in forms.process_lines(text, begin=found.end, several=_SEVERAL)
            if (chip := forms.whole(before[0])) is not None
        ]
    )
    chips: list[Seen] = []
    for record in found.records:
        number = forms.whole(record.get("GPU", ""))
        address = forms.bus_id(record.get("Bus-Id", ""))
        if number is None or not address or not record.get("Name"):
            raise forms.unknown("a chip of ixsmi", " ".join(record.values()))
        used, total = forms.mib_pair(record.get("Memory-Usage", ""))
        model = _model(record["Name"])
        chips.append(
            Seen(
                place=address,
                index=number,
                minor=number,
                type=model.split()[0],
                memory_mib=total,
                bus_id=address,
                attributes={"model": model},
                used_mib=used,
                core_pct=forms.percent(record.get("GPU-Util", "")),
                temperature_c=forms.celsius(record.get("Temp", "")),
                power_w=forms.watts(record.get("Pwr:Usage/Cap", "")),
                processes=processes.get(number, ()),
            )
        )
    if len({chip.index for chip in chips}) != len(chips) or len({c.place for c in chips}) != len(
        chips
    ):
        raise forms.unknown("ixsmi", text)
    version = re.search(r"Driver Version:\s*(\S+)", text)
    return tuple(chips), version[1] if version else ""


def uuids(text: str) -> dict[int, str]:
    """``ixsmi -L``: UUID by chip number."""
    found = {int(number): uuid for number, _, uuid in _UUID_LINE.findall(text)}
    if not found or len(set(found.values())) != len(found):
        raise forms.unknown("ixsmi -L", text)
    return found


def topology(text: str) -> dict[tuple[int, int], Neighbour]:
    """``ixsmi topo -m``."""
    return forms.matrix(text, prefix="GPU", fabric="IX")


def told(text: str) -> Sight:
    """The list of the library's program, with types and attributes as ixsmi's parser has them."""
    sight = by_address(library.devices(text))
    return replace(sight, devices=tuple(map(_chip, sight.devices)))


def _chip(chip: Seen) -> Seen:
    if chip.uuid and not re.fullmatch(_UUID, chip.uuid):
        raise forms.unknown("a UUID of the library", chip.uuid)
    model = _model(chip.type)
    return replace(
        chip,
        type=model.partition(" ")[0],
        attributes={**chip.attributes, **({"model": model} if model else {})},
    )


def _model(name: str) -> str:
    return name.removeprefix("Iluvatar ")
