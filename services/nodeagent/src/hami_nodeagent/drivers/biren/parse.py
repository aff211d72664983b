# SPDX-License-Identifier: Apache-2.0
"""Parses the output of brsmi (BR100, BR104, 106, 166).

The query prints ``index, memory.used, memory.free`` with or without units (MiB). It reports no
identity: HAMi names a card by its node and ``card_<N>``, and so does this driver.
"""

from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Seen

COLUMNS = ("index", "memory.used", "memory.free")
TYPE = "Biren"
"""Product name; brsmi reports none."""


def cards(text: str) -> tuple[Seen, ...]:
    """The answer of the query for ``COLUMNS``."""
    if not text.endswith("\n"):
        raise forms.unknown("the end of brsmi's answer", text[-40:])
    found: list[Seen] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(COLUMNS):
            raise forms.unknown("a line of brsmi", line)
        number = forms.whole(values[0])
        used, free = forms.mib(values[1]), forms.mib(values[2])
        if number is None or number > 1023:  # noqa: PLR2004 - more than any node has
            raise forms.unknown("a line of brsmi", line)
        found.append(
            Seen(
                place=str(number),
                index=number,
                minor=number,
                type=TYPE,
                memory_mib=None if used is None or free is None else used + free,
                used_mib=used,
            )
        )
    if not found or len({one.index for one in found}) != len(found):
        raise forms.unknown("brsmi gpu --query-gpu", text)
    return tuple(sorted(found, key=lambda one: one.index))
