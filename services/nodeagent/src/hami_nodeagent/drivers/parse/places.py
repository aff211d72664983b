# SPDX-License-Identifier: Apache-2.0
"""Lists of a library with devices named by their addresses, as the vendor's tool names them.

What one way saw is then found again when the other way is asked. A device whose address is not told
keeps its number, which leads to nobody that was seen before.
"""

from msgspec.structs import replace

from hami_nodeagent.drivers.parse import forms
from hami_nodeagent.drivers.parse.seen import Sight


def by_address(sight: Sight) -> Sight:
    """The same devices and links under other places; two at one address are no answer."""
    place = {one.place: one.bus_id or one.place for one in sight.devices}
    if len(set(place.values())) != len(place):
        raise forms.unknown("the addresses of devices", " ".join(place.values()))
    return replace(
        sight,
        devices=tuple(replace(one, place=place[one.place]) for one in sight.devices),
        views={
            (place[a], place[b]): view
            for (a, b), view in sight.views.items()
            if a in place and b in place
        },
    )
