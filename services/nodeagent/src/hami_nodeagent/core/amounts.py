# SPDX-License-Identifier: Apache-2.0
"""Decides the totals of memory and compute that a node advertises in its status.

Schedulers and autoscalers that sum extended resources compare each request with
``status.allocatable``, in which device plugins report the count resources only. The totals are
necessary for these programs and never sufficient: ``gpu: 2, gpumem: 3000`` is 3000 in a sum and
6000 in the ledger, and a sum does not show how free capacity is spread over devices.

Kubelet ignores requests for resources that ``allocatable`` lacks and adds up the others; it rejects
a pod for which the sum of all admitted pods exceeds the total (``removeMissingExtendedResources``
and ``Admit`` in ``pkg/kubelet/lifecycle/predicate.go``, v1.34). So a total is never less than

- for each device: its capacity without foreign use while it is usable, or what the ledger has
  booked on it if that is more, as after a reduced scaling;
- for each pod: what it requests beyond what the ledger has booked for it.

Kubelet then admits each pod that the ledger places within the devices' capacity, unless the pod
itself requests more than is booked for it. A cordoned device counts, as a cordoned node does.
Totals are in the units of requests. Memory in MiB, compute in percent of one device.

Volcano's own device plugin registers its amounts with kubelet, one id for each unit. Kubelet then
rejects pods that request them until 5 minutes after the plugin ended, and while a pod holds ids
(``isDevicePluginResource`` in ``pkg/kubelet/cm/devicemanager/manager.go``). Such amounts are not
advertised, so that no scheduler that compares sums places a pod there.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from hami_common.compat import volcano
from hami_common.model.device import Device
from hami_common.model.placement import NOTHING, Booked, ContainerShares, booked_by_device
from hami_common.pods import annotations
from hami_common.units import MIB_BYTES, parse_quantity
from hami_common.vendors.protocol import ResourceNames, Vendor

FULL_PCT: Final = 100
LOWEST_PRIORITY: Final = 7
"""Largest amount of a priority resource that one container may request."""
_KUBERNETES: Final = "kubernetes.io/"


class HeldPod(Struct, frozen=True, kw_only=True):
    """One pod of the node."""

    requests: Mapping[str, int] = {}
    """Amounts by resource, as kubelet counts them; empty for a pod that kubelet does not have."""
    booked: Mapping[str, Booked] = {}
    """Bookings of the ledger for it on the vendor's devices, by UUID."""
    holds_ids: bool = False
    """True: kubelet allocated ids of Volcano's device plugin for its amounts."""


class NodeAmounts(Struct, frozen=True, kw_only=True):
    """The node's present status, and the annotations that name what agents advertise in it."""

    capacity: Mapping[str, str] = {}
    allocatable: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


class Change(Struct, frozen=True, kw_only=True):
    """The next change of the node's status."""

    patch: dict[str, Any] | None = None
    """Merge patch for the subresource ``status``; ``None`` if nothing is to be written."""
    above: frozenset[str] = frozenset()
    """Resources that keep an amount above the wanted one because they may not be lowered yet."""


def booked_of(vendor: str, containers: Iterable[ContainerShares]) -> dict[str, Booked]:
    """Return what a pod's shares book on each device of a vendor, by UUID."""
    return booked_by_device(
        replace(one, shares=tuple(share for share in one.shares if share.vendor == vendor))
        for one in containers
    )


def amounts_of(
    names: ResourceNames, *, memory_mib: int, core_pct: int, slots: int
) -> dict[str, int]:
    """Return amounts of a family's resources, each in the unit of its requests, rounded down.

    A container requests at most 100 of a percentage, and its lowest priority is 7, so these
    resources have as much for each slot. Memory that may be written in bytes is counted in bytes.
    """
    of_slots = FULL_PCT * slots
    found: dict[str, int] = {}
    if names.memory_takes_bytes:
        found[names.memory] = memory_mib * MIB_BYTES
    elif names.memory_unit_mib:
        found[names.memory] = memory_mib // names.memory_unit_mib
    else:
        found[names.memory] = of_slots
    found[names.memory_percentage] = of_slots
    found[names.cores] = core_pct * names.core_units // FULL_PCT
    found[names.priority] = LOWEST_PRIORITY * slots
    return {name: amount for name, amount in found.items() if name}


def resources_of(vendor: Vendor) -> frozenset[str]:
    """Return the resources of a vendor whose totals are advertised.

    Count resources belong to device plugins; aliases do not occur in pods after admission.
    """
    return frozenset(
        name
        for names in vendor.families
        for name in amounts_of(names, memory_mib=0, core_pct=0, slots=0)
    )


def totals(
    vendor: Vendor,
    devices: Iterable[Device],
    *,
    is_usable: Callable[[Device], bool],
    pods: Iterable[HeldPod],
) -> dict[str, int]:
    """Return the totals to advertise, by resource, for the families that the devices serve."""
    devices, pods = tuple(devices), tuple(pods)
    families: dict[str, Sequence[ResourceNames]] = {}
    found: Counter[str] = Counter()
    booked: dict[str, Booked] = {}
    for pod in pods:
        for uuid, part in pod.booked.items():
            booked[uuid] = booked.get(uuid, NOTHING).plus(part)
    for device in devices:
        counts = vendor.advertised(device)
        families[device.uuid] = [names for names in vendor.families if names.count in counts]
        held, usable = booked.pop(device.uuid, NOTHING), is_usable(device)
        most = Booked(
            memory_mib=max(held.memory_mib, (device.capacity_mib - device.foreign_mib) * usable),
            core_pct=max(held.core_pct, device.capacity_core_pct * usable),
            slots=max(held.slots, device.slots * usable),
        )
        found.update(_amounts(families[device.uuid], most))
    served = frozenset(found)
    # A device that is not known yet, or no more, may serve any family.
    for held in booked.values():
        found.update(_amounts(vendor.families, held))
    for pod in pods:
        backed: Counter[str] = Counter()
        for uuid, part in pod.booked.items():
            backed.update(_amounts(families.get(uuid, vendor.families), part))
        found.update({name: max(0, n - backed[name]) for name, n in pod.requests.items()})
    return {name: amount for name, amount in found.items() if name in served}


def of_ended_plugin(node: NodeAmounts, pods: Iterable[HeldPod]) -> frozenset[str]:
    """Return resources that kubelet allocates by ids of a device plugin that has ended.

    Kubelet shows those of a plugin that has just ended with a capacity of which nothing is
    allocatable; totals of agents are the same in both.
    """
    held = {name for pod in pods if pod.holds_ids for name in pod.requests}
    listed = {
        name
        for key, text in node.annotations.items()
        if key.startswith(annotations.ADVERTISED_AMOUNTS)
        for name in _extended(text)
    }
    stopped = {
        name
        for name in node.capacity.keys() - listed
        if parse_quantity(node.capacity[name])
        and not parse_quantity(node.allocatable.get(name, "0"))
    }
    return frozenset(held | stopped)


def change(
    node: NodeAmounts,
    wanted_by_vendor: Mapping[str, Mapping[str, int]],
    *,
    due: Collection[str] = (),
    described: Mapping[str, str] | None = None,
) -> Change:
    """Return the patch that brings the status to the wanted totals.

    Raises amounts and removes resources at once: neither can make kubelet reject a pod. Lowers only
    those in ``due``, because kubelet may still count a pod that has just ended. A vendor with no
    wanted resource loses those that its annotation names. ``described``: the annotations by which
    Volcano knows the devices; empty: those that an agent wrote are removed; ``None``: left.
    """
    amounts: dict[str, str | None] = {}
    notes: dict[str, str | None] = {}
    above: set[str] = set()
    for vendor, wanted in wanted_by_vendor.items():
        key = annotations.advertised_amounts(vendor)
        listed = node.annotations.get(key, "")
        for name in _extended(listed) - wanted.keys():
            if name in node.capacity or name in node.allocatable:
                amounts[name] = None
        for name, amount in wanted.items():
            known = _known(node, name)
            if known is not None and known > amount and name not in due:
                above.add(name)
            elif known != amount:
                amounts[name] = str(amount)
        names = ",".join(sorted(wanted))
        if names != listed:
            notes[key] = names or None
    if described is not None:
        notes |= _descriptions(node, described)
    if not amounts and not notes:
        return Change(above=frozenset(above))
    patch: dict[str, Any] = {}
    if notes:
        patch["metadata"] = {"annotations": notes}
    if amounts:
        patch["status"] = {"capacity": amounts, "allocatable": amounts}
    return Change(patch=patch, above=frozenset(above))


def _descriptions(node: NodeAmounts, wanted: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes of Volcano's annotations; those of another device plugin are left."""
    shown = {key: node.annotations[key] for key in volcano.OF_NODE if key in node.annotations}
    if wanted:
        return {key: text for key, text in wanted.items() if shown.get(key) != text}
    return dict.fromkeys(shown) if volcano.is_ours(shown) else {}


def _amounts(families: Iterable[ResourceNames], booked: Booked) -> dict[str, int]:
    return {
        name: amount
        for names in families
        for name, amount in amounts_of(
            names, memory_mib=booked.memory_mib, core_pct=booked.core_pct, slots=booked.slots
        ).items()
    }


def _known(node: NodeAmounts, name: str) -> int | None:
    """Return the amount that the status shows; ``None`` if it is absent, odd or not the same."""
    texts = node.capacity.get(name), node.allocatable.get(name)
    values = {None if text is None else parse_quantity(text) for text in texts}
    value = values.pop()
    if values or value is None or value.denominator != 1:
        return None
    return int(value)


def _extended(listed: str) -> frozenset[str]:
    """Return the extended resources in an annotation: kubelet's own are never removed."""
    names = (name.strip() for name in listed.split(","))
    return frozenset(name for name in names if "/" in name and _KUBERNETES not in name)
