# SPDX-License-Identifier: Apache-2.0
"""Describes a card's hardware partitions as devices over one set of counters (ADR 0040).

A counter is what holders that are not claims leave; kube-scheduler subtracts the claims itself. The
counters are those by which the ledger judges partitions: the positions of the grid, the engines and
other resources of the card, memory, compute and slots. The counter ``x`` has the number of
positions: each partition takes its length of it, and it is 0 while someone holds the card otherwise
than by partitions of its table, which positions cannot say. Memory in MiB, compute in percent.
"""

from collections.abc import Mapping
from typing import Any

from hami_common.dra import names
from hami_common.dra.partitions import Place
from hami_common.model.device import Device, Profile
from hami_common.model.placement import Booked, may_join
from hami_common.units import whole

SETS_MOST = 8
"""Sets of counters of a slice (``resource.k8s.io/v1``)."""
_EXCLUSION = "x"
_POSITION = "position "

Obj = dict[str, Any]


def place_device(place: Place, card: Obj) -> Obj:
    """Return the device that stands for a partition of ``card``, with its attributes and taints.

    No two claims share it, so its capacities have no policy.
    """
    device, profile = place.device, place.profile
    found: Obj = {
        "name": place.name,
        "attributes": {
            **card["attributes"],
            names.PROFILE: {"string": profile.name},
            "start": {"int": place.start},
            "parentUUID": {"string": device.uuid},
        },
        "capacity": {
            names.MEMORY: {"value": f"{profile.memory_mib}Mi"},
            names.CORES: {"value": str(profile.core_pct)},
        },
        "consumesCounters": [
            {
                "counterSet": names.device_name(device.uuid),
                "counters": _counters(_taken_by(profile, place.start)),
            }
        ],
    }
    if taints := card.get("taints"):
        found["taints"] = taints
    return found


def counter_set(device: Device, others: Booked) -> Obj:
    """Return the counters of a card; ``others``: held by pods, and reserved for them."""
    taken = _taken(device, others.parts)
    left = {name: max(0, total - taken.get(name, 0)) for name, total in _totals(device).items()}
    left |= {
        names.MEMORY: max(0, device.capacity_mib - others.memory_mib),
        names.CORES: max(0, device.capacity_core_pct - others.core_pct),
        names.SLOTS: max(0, device.slots - others.slots),
    }
    known = sum(count for part, count in others.parts.items() if _place_of(device, part))
    if others.exclusive or known < others.slots or not may_join("", others.kind):
        left[_EXCLUSION] = 0
    return {"name": names.device_name(device.uuid), "counters": _counters(left)}


def overlap(device: Device, parts: Mapping[str, int]) -> str:
    """Return the first position of the card that these partitions take twice; empty if none.

    ``parts``: as ``Booked.parts``.
    """
    for name, amount in sorted(_taken(device, parts).items()):
        if name.startswith(_POSITION) and amount > 1:
            return name
    return ""


def _totals(device: Device) -> dict[str, int]:
    most = max((max(one.starts) + one.size for one in device.partitions if one.starts), default=0)
    limits = {f"limit {one.name}": one.limit for one in device.partitions if one.limit}
    positions = {f"{_POSITION}{at}": 1 for at in range(most)}
    return {**device.resources, **limits, **positions, _EXCLUSION: most}


def _taken_by(profile: Profile, start: int) -> dict[str, int]:
    return {
        **profile.need(start),
        _EXCLUSION: profile.size,
        names.MEMORY: profile.memory_mib,
        names.CORES: profile.core_pct,
        names.SLOTS: 1,
    }


def _taken(device: Device, parts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of what partitions take; those that the card's table lacks take nothing."""
    found: dict[str, int] = {}
    for part, count in parts.items():
        if (place := _place_of(device, part)) is None:
            continue
        for name, amount in _taken_by(place.profile, place.start).items():
            found[name] = found.get(name, 0) + amount * count
    return found


def _place_of(device: Device, part: str) -> Place | None:
    name, _, text = part.partition("@")
    start = whole(text)
    for profile in device.partitions:
        if profile.name == name and start is not None:
            return Place(device=device, profile=profile, start=start)
    return None


def _counters(amounts: Mapping[str, int]) -> Obj:
    return {
        _label(name): {"value": f"{amount}Mi" if name == names.MEMORY else str(amount)}
        for name, amount in amounts.items()
    }


def _label(name: str) -> str:
    """Return a counter's name: a DNS label."""
    if name.startswith(_POSITION):
        return f"memory-slice-{name.removeprefix(_POSITION)}"
    return names.device_name(name)
