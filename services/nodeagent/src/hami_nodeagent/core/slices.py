# SPDX-License-Identifier: Apache-2.0
"""Describes the node's devices as ResourceSlices of our DRA driver (``resource.k8s.io/v1``).

The value of a capacity is what holders that are not claims, and processes without an allocation,
leave: kube-scheduler subtracts the claims itself, so the sum over all is bounded by the device
(ADR 38). A claim's allocation never changes, so the amount that a resize added to it is taken off,
too. A device gets a taint where its capacities cannot say that it takes no further share: the API
server demands at least two steps of memory and one slot, a device whose compute is used up takes no
share at all, and shares of some kinds do not mix. Published are devices that are shared by limits,
and hardware partitions in the places at which a card may have them (ADR 0040): no modes that pods
request by name, no memory that is moved to the host while its container is idle.

Memory in MiB, published in bytes; compute in percent. Devices are in the order in which
kube-scheduler tries them: vendor, index, UUID; then partitions, see ``places_of``.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.dra import names
from hami_common.dra.claims import MEMORY_LEAST_MIB, is_published
from hami_common.dra.partitions import is_divided, places_of
from hami_common.events.allocation import AllocationRecord, is_by_claim
from hami_common.model.device import Device
from hami_common.model.placement import (
    NOTHING,
    Booked,
    ContainerShares,
    booked_by_device,
    may_join,
)
from hami_common.units import parse_quantity
from hami_nodeagent.core.partitiondevices import SETS_MOST, counter_set, place_device

DEVICES_MOST: Final = 64
"""Devices of a slice. The API server's limit is 128 without taints: a taint moves no device."""
_TEXT_MOST: Final = 64
_MESSAGE_MOST: Final = 1024
"""Characters of the message of a device's health."""
_AMOUNTS: Final = ("capacity", "counters")
"""Fields of slices with quantities, which the API server may spell otherwise."""
_BUS_ID: Final = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")

Obj = dict[str, Any]


class Holdings(Struct, frozen=True, kw_only=True):
    """Resources of one device that the ledger's records of this node hold."""

    claims: Booked = NOTHING
    others: Booked = NOTHING
    """Held by pods, and reserved for them."""
    grown_mib: int = 0
    """Amount that resizes added to the claims' allocations, which kube-scheduler does not see;
    negative: that they took off."""
    grown_core_pct: int = 0


def holdings_of(
    records: Iterable[AllocationRecord],
    allocated: Mapping[str, Sequence[ContainerShares]] = {},
) -> dict[str, Holdings]:
    """Return what the records hold of each device, by UUID.

    ``allocated``: shares of the allocations of prepared claims, by the record's ``pod_uid``.
    """
    found: dict[str, Holdings] = {}
    for record in records:
        if record.op == "release":
            continue
        shares = booked_by_device(record.containers)
        before = booked_by_device(allocated[record.pod_uid]) if record.pod_uid in allocated else {}
        for uuid, booked in shares.items():
            known = found.get(uuid, Holdings())
            if not is_by_claim(record):
                found[uuid] = replace(known, others=known.others.plus(booked))
                continue
            # Of a resized share whose allocation is unknown, all is taken off.
            was = before.get(uuid, NOTHING if record.op == "resize" else booked)
            found[uuid] = replace(
                known,
                claims=known.claims.plus(booked),
                grown_mib=known.grown_mib + booked.memory_mib - was.memory_mib,
                grown_core_pct=known.grown_core_pct + booked.core_pct - was.core_pct,
            )
    return found


def pages_of(
    devices: Iterable[Device],
    holdings: Mapping[str, Holdings],
    *,
    faulty: Collection[str] = (),
    sound: Collection[str] = (),
    pcie_roots: Mapping[str, str] = {},
    fault_effect: str = "NoSchedule",
) -> tuple[tuple[Obj, ...], ...]:
    """Return the devices, or the sets of counters, of each slice; one empty slice without any.

    ``faulty`` and ``sound``: devices by this node's own finding, which is newer than the registry's
    record. ``pcie_roots``: by UUID, where known. ``fault_effect``: of the taint of a faulty device.
    """
    known = sorted(devices, key=lambda one: (one.vendor, one.index, one.uuid))

    def shown(one: Device, held: Holdings) -> Obj:
        return _device(
            one,
            held,
            is_sound=_is_sound(one, faulty, sound),
            pcie_root=pcie_roots.get(one.uuid, ""),
            fault_effect=fault_effect,
        )

    idle = Holdings()
    found = [shown(one, holdings.get(one.uuid, idle)) for one in known if is_published(one)]
    divided = {one.uuid: shown(one, idle) for one in known if is_divided(one)}
    found += [place_device(one, divided[one.device.uuid]) for one in places_of(known)]
    sets = [
        counter_set(one, holdings.get(one.uuid, idle).others)
        for one in known
        if one.uuid in divided
    ]
    return (*_pages(found, DEVICES_MOST), *_pages(sets, SETS_MOST)) or ((),)


def _pages(items: Sequence[Obj], most: int) -> Iterable[tuple[Obj, ...]]:
    return (tuple(items[first : first + most]) for first in range(0, len(items), most))


class DeviceHealth(Struct, frozen=True, kw_only=True):
    """Health of one device."""

    name: str
    """Name of the device in its pool."""
    is_healthy: bool
    message: str = ""


def health_of(
    devices: Iterable[Device], *, faulty: Collection[str], sound: Collection[str]
) -> tuple[DeviceHealth, ...]:
    """Return the health of all devices, also of those that are not published any more.

    A partition has the health of its card.
    """
    return tuple(
        DeviceHealth(
            name=name,
            is_healthy=is_sound,
            message="" if is_sound else (one.health_reason or "a fault")[:_MESSAGE_MOST],
        )
        for one in sorted(devices, key=lambda one: one.uuid)
        for is_sound in [_is_sound(one, faulty, sound)]
        for name in (names.device_name(one.uuid), *(place.name for place in places_of([one])))
    )


def _is_sound(device: Device, faulty: Collection[str], sound: Collection[str]) -> bool:
    """Return whether the device may be used; this node's own finding is newer than the record."""
    return device.uuid in sound or (device.healthy and device.uuid not in faulty)


def _device(
    device: Device, held: Holdings, *, is_sound: bool, pcie_root: str, fault_effect: str
) -> Obj:
    others = held.others
    bursts_mib = sum(one.memory_mib for one in device.bursts)
    taken_mib = device.foreign_mib + bursts_mib + others.memory_mib + held.grown_mib
    left_mib = device.capacity_mib - taken_mib
    left_mib = 0 if others.exclusive else left_mib
    left_core_pct = max(0, device.capacity_core_pct - others.core_pct - held.grown_core_pct)
    left_slots = device.slots - others.slots
    taints: dict[str, str] = {}
    if _is_full(device, held, left_mib, left_slots):
        taints[names.FULL] = "NoSchedule"
    if not is_sound:
        taints[names.UNHEALTHY] = fault_effect
    if device.cordoned:
        taints[names.CORDONED] = "NoSchedule"
    found: Obj = {
        "name": names.device_name(device.uuid),
        "attributes": _attributes(device, pcie_root),
        "capacity": {
            names.MEMORY: {
                "value": f"{max(MEMORY_LEAST_MIB, left_mib)}Mi",
                "requestPolicy": {
                    "default": f"{device.capacity_mib}Mi",
                    "validRange": {"min": "1Mi", "step": "1Mi"},
                },
            },
            names.CORES: _count(left_core_pct, least=0),
            names.SLOTS: _count(max(1, left_slots), least=1),
        },
        "allowMultipleAllocations": True,
    }
    if taints:
        found["taints"] = [{"key": key, "effect": effect} for key, effect in taints.items()]
    return found


def _is_full(device: Device, held: Holdings, left_mib: int, left_slots: int) -> bool:
    """Return whether the device takes no share of a claim, by the rules of placement."""
    return (
        left_mib < MEMORY_LEAST_MIB
        or left_slots < 1
        or held.claims.exclusive
        or held.claims.core_pct + held.others.core_pct >= device.capacity_core_pct
        or not may_join("", held.others.kind)
    )


def _count(value: int, *, least: int) -> Obj:
    return {
        "value": str(value),
        "requestPolicy": {"default": str(least), "validRange": {"min": str(least)}},
    }


def _attributes(device: Device, pcie_root: str) -> Obj:
    texts = {
        "uuid": device.uuid,
        "vendor": device.vendor,
        "type": device.type,
        "resource.kubernetes.io/pciBusID": pci_bus_id(device.bus_id),
        "resource.kubernetes.io/pcieRoot": pcie_root,
    }
    found: Obj = {
        name: {"string": text} for name, text in texts.items() if 0 < len(text) <= _TEXT_MOST
    }
    found["index"] = {"int": device.index}
    if device.numa is not None:
        found["numaNode"] = {"int": device.numa}
    return found


def pci_bus_id(text: str) -> str:
    """Return a bus id as the kernel writes it, ``0000:3b:00.0``; empty where it is none."""
    match = _BUS_ID.fullmatch(text.lower())
    if match is None:
        return ""
    domain, bus, slot, function = match.groups(default="0")
    return f"{int(domain, 16):04x}:{bus}:{slot}.{function}"


# ------------------------------------------------------------------------------ slices in the API


class SliceWrite(Struct, frozen=True, kw_only=True):
    """The next change of the node's slices in the API server."""

    verb: str
    """``create``, ``replace`` or ``delete``."""
    name: str
    slice: Obj = {}


def next_write(
    node: str,
    pages: Sequence[Sequence[Obj]],
    stored: Mapping[str, Obj],
    *,
    owner_uid: str = "",
) -> SliceWrite | None:
    """Return the first change that brings ``stored`` (slices by name) to ``pages``, if any.

    The pool's generation grows when devices move between slices or the number of slices changes,
    so that schedulers never combine slices of two layouts. ``owner_uid``: uid of the Node object.
    """
    wanted = {names.slice_name(node, number): page for number, page in enumerate(pages)}
    newest = max((_generation(one) for one in stored.values()), default=0)
    generation = newest if _has_layout(wanted, stored, newest) else newest + 1
    for number, name in enumerate(wanted):
        fresh = _slice(node, number, pages, generation, owner_uid)
        known = stored.get(name)
        if known is None:
            return SliceWrite(verb="create", name=name, slice=fresh)
        if _comparable(known["spec"]) != _comparable(fresh["spec"]):
            fresh["metadata"]["resourceVersion"] = known["metadata"]["resourceVersion"]
            _keep_times(fresh["spec"], known["spec"])
            return SliceWrite(verb="replace", name=name, slice=fresh)
    for name in sorted(stored.keys() - wanted.keys()):
        return SliceWrite(verb="delete", name=name)
    return None


def monitor_write(
    node: str, stored: Obj | None, *, is_on: bool, owner_uid: str = ""
) -> SliceWrite | None:
    """Return the change that brings the slice of the device ``MONITOR`` about, if any.

    The device has neither capacities nor counters: only so does kube-scheduler allocate it with
    admin access while all devices are full. ``stored``: the slice in the API server.
    """
    name = names.monitor_slice(node)
    if not is_on:
        return SliceWrite(verb="delete", name=name) if stored is not None else None
    if stored is not None:
        return None
    return SliceWrite(
        verb="create",
        name=name,
        slice={
            "apiVersion": f"{names.GROUP}/{names.VERSION}",
            "kind": "ResourceSlice",
            "metadata": _metadata(name, node, owner_uid),
            "spec": {
                "driver": names.DRIVER,
                "nodeName": node,
                "pool": {
                    "name": names.monitor_pool(node),
                    "generation": 1,
                    "resourceSliceCount": 1,
                },
                "devices": [{"name": names.MONITOR, "attributes": {names.MONITOR: {"bool": True}}}],
            },
        },
    )


def _has_layout(
    wanted: Mapping[str, Sequence[Obj]], stored: Mapping[str, Obj], generation: int
) -> bool:
    """Return whether all slices of a generation have the wanted number, devices and counters."""
    if generation == 0:
        return False
    for name, known in stored.items():
        if _generation(known) != generation:
            continue
        if name not in wanted:
            return False
        kind = _kind(wanted[name])
        found = [one["name"] for one in known["spec"].get(kind) or ()]
        if found != [one["name"] for one in wanted[name]]:
            return False
        if known["spec"]["pool"].get("resourceSliceCount") != len(wanted):
            return False
    return True


def _generation(stored: Obj) -> int:
    return int(stored["spec"]["pool"].get("generation", 0))


def _slice(
    node: str, number: int, pages: Sequence[Sequence[Obj]], generation: int, owner_uid: str
) -> Obj:
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": "ResourceSlice",
        "metadata": _metadata(names.slice_name(node, number), node, owner_uid),
        "spec": {
            "driver": names.DRIVER,
            "nodeName": node,
            "pool": {
                "name": names.pool_name(node),
                "generation": generation,
                "resourceSliceCount": len(pages),
            },
            _kind(pages[number]): [dict(one) for one in pages[number]],
        },
    }


def _metadata(name: str, node: str, owner_uid: str) -> Obj:
    metadata: Obj = {"name": name}
    if owner_uid:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Node", "name": node, "uid": owner_uid, "controller": True}
        ]
    return metadata


def _kind(page: Sequence[Obj]) -> str:
    """Return the field of a slice that holds a page: a slice has devices, or sets of counters."""
    return "sharedCounters" if page and "counters" in page[0] else "devices"


def _keep_times(fresh: Obj, known: Obj) -> None:
    """Keep the time since when each taint has been there, which the API server added."""
    times = {
        (device["name"], taint["key"]): taint["timeAdded"]
        for device in known.get("devices") or ()
        for taint in device.get("taints") or ()
        if "timeAdded" in taint
    }
    for device in fresh.get("devices") or ():
        if "taints" in device:
            device["taints"] = [
                taint | ({"timeAdded": times[key]} if key in times else {})
                for taint in device["taints"]
                for key in [(device["name"], taint["key"])]
            ]


def _comparable(value: object) -> object:
    """Return a slice's spec without what the API server adds, and with quantities as numbers."""
    if isinstance(value, Mapping):
        return {
            name: _quantities(part) if name in _AMOUNTS else _comparable(part)
            for name, part in value.items()
            if name != "timeAdded" and part != []
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_comparable(part) for part in value]
    return value


def _quantities(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _quantities(part) for name, part in value.items()}
    found: Fraction | None = parse_quantity(str(value))
    return value if found is None else found
