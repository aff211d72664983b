# SPDX-License-Identifier: Apache-2.0
"""Names devices of a library's lists by their addresses, as the vendor's tool names them.

Devices seen through one interface are thus recognized through the other. A device without a
reported address keeps its number, which matches no known device.
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
