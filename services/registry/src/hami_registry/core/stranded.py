# SPDX-License-Identifier: Apache-2.0
"""Finds pods that would use more of a device than a new configuration provides.

Such pods would keep running, while the device counts as overfull until they end: a mistake in a
file must not do that to a cluster. A device that is overfull already, under the configuration in
effect, is not counted against the new one. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, Booked

SHOWN_DEVICES = 5
SHOWN_PODS = 5


class Holding(Struct, frozen=True, kw_only=True):
    """Booked amounts of a device, and their pods."""

    booked: Booked
    pods: tuple[str, ...]
    """``namespace/name``, sorted."""


class Stranded(Struct, frozen=True, kw_only=True):
    """One device that would provide less than is booked on it."""

    node: str
    uuid: str
    why: str
    pods: tuple[str, ...]

    def __str__(self) -> str:
        """Return the device, the numbers and the pods."""
        shown = ", ".join(self.pods[:SHOWN_PODS])
        more = len(self.pods) - SHOWN_PODS
        tail = f" and {more} more" if more > 0 else ""
        return f"device {self.uuid} of node {self.node} {self.why}: {shown}{tail}"


def stranded(
    before: Mapping[str, Iterable[Device]],
    after: Mapping[str, Iterable[Device]],
    holdings: Mapping[str, Holding],
) -> list[Stranded]:
    """Return devices that ``after`` (by node) makes too small for their pods, unlike ``before``."""
    new = {device.uuid: device for devices in after.values() for device in devices}
    found = []
    for node, devices in before.items():
        for device in devices:
            held = holdings.get(device.uuid)
            if held is None or held.booked == NOTHING or _shortage(device, held.booked):
                continue
            if why := _shortage(new.get(device.uuid), held.booked):
                found.append(Stranded(node=node, uuid=device.uuid, why=why, pods=held.pods))
    return sorted(found, key=lambda one: (one.node, one.uuid))


def _shortage(device: Device | None, booked: Booked) -> str:
    if device is None:
        return "would be hidden, and is in use"
    pairs = (
        ("MiB", booked.memory_mib, device.capacity_mib),
        ("% of its compute", booked.core_pct, device.capacity_core_pct),
        ("shares", booked.slots, device.slots),
    )
    for unit, taken, given in pairs:
        if taken > given:
            return f"would give {given} {unit}, and {taken} are in use"
    return ""


def refusal(found: Sequence[Stranded]) -> str:
    """Return why the configuration is not used, and how to force it."""
    if not found:
        return ""
    shown = "; ".join(str(one) for one in found[:SHOWN_DEVICES])
    more = len(found) - SHOWN_DEVICES
    tail = f"; and {more} more devices" if more > 0 else ""
    return (
        f"running pods would hold more than their devices give: {shown}{tail}. Wait for these pods,"
        " cordon the devices until then, or set allow_stranded = true in the file"
    )
