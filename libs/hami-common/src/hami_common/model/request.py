# SPDX-License-Identifier: Apache-2.0
"""Request of a pod, after parsing: per container and vendor, with selectors and policy.

Containers keep the order in which kubelet admits them: init containers (restartable ones,
"sidecars", among them) in specification order, then application containers. Memory in MiB, compute
in percent of one device, both per device.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from hami_common.bounds import (
    ATTRIBUTES_MOST,
    CONTAINERS_MOST,
    LIST_MOST,
    VENDORS_MOST,
    WORDS_MOST,
    CorePct,
    Count,
    Label,
    MapKey,
    MemoryMib,
    Name,
    Resource,
    TaskPriority,
    Uid,
    Vendor,
    Weight,
    Word,
    Words,
)
from hami_common.model.isolation import isolation_of

ContainerKind = Literal["init", "sidecar", "app"]
NodePolicy = Literal["binpack", "spread"]
PARTITION_MODES = frozenset({"mig"})
"""Modes of devices that are divided in hardware: such a device is never given whole, and a process
uses one part, however many its container has.
"""
MPS_MODE = "mps"
NAMED_MODES = frozenset({"timeslice", MPS_MODE})
"""Modes whose devices serve only pods that name them, and no request for a whole device.

NVIDIA's time slices have no limit of compute, and its Multi-Process Service has one fault domain
per device. A process uses the Multi-Process Service of one device.
"""
WHOLE_MODE = "whole"
"""The mode of devices that are not divided: such a device is given whole only."""
DevicePolicy = Literal["binpack", "spread", "numa", "mutex", "topology-aware"]


class DeviceRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request of one container for devices of one vendor.

    ``count`` different devices, each with this memory and compute; where ``wants_parts``, as many
    hardware partitions, on one device or several.
    """

    vendor: Vendor
    count: Count
    memory_mib: MemoryMib = 0
    """0 means: take ``memory_pct`` instead."""
    memory_pct: CorePct = 0
    """Percent of the device's physical memory; read only when ``memory_mib`` is 0.

    Then it is 1..100.
    """
    core_pct: CorePct = 0
    """0: no compute limit.

    Nothing is booked then, yet a device without free compute is refused.
    """
    memory_limit_mib: MemoryMib = 0
    """As ``Share.memory_limit_mib``."""
    core_limit_pct: CorePct = 0
    """As ``Share.core_limit_pct``."""
    exclusive: bool = False
    """Excludes all other pods from the device."""
    profile: Word = ""
    """Hardware partition asked for by name; empty: the size decides."""
    exact: Annotated[tuple[tuple[MapKey, Resource], ...], Meta(max_length=ATTRIBUTES_MOST)] = ()
    """Amounts that the partition must have, by the names of ``Profile.resources``."""
    kind: Word = ""
    """Shares of one device all have the same kind; empty: any."""
    types: Annotated[tuple[Word, ...], Meta(max_length=LIST_MOST)] = ()
    """Device types that the resource's name selects, exactly; empty: every type."""
    modes: Annotated[tuple[Word, ...], Meta(max_length=LIST_MOST)] = ()
    """Modes of devices that the resource's name selects; empty: see ``DeviceSelector``."""
    shape: Word = ""
    """Rule for the sets of devices that may serve the request, see ``hami_common.vendors.shapes``.
    """

    keeps: Word = ""
    """Shape whose sets a request for one device leaves whole where it can, as ``shape``."""

    def memory_mib_on(self, device_memory_mib: int) -> int:
        """MiB taken from a device with ``device_memory_mib`` of physical memory."""
        return self.memory_mib or device_memory_mib * self.memory_pct // 100


class ContainerRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one container asks for, one entry per vendor."""

    name: Label
    kind: ContainerKind
    requests: Annotated[tuple[DeviceRequest, ...], Meta(max_length=VENDORS_MOST)]
    priority: TaskPriority | None = None
    """Task priority 0 (highest) … 7; ``None`` when the user set none."""


class DeviceSelector(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraints on the devices of one vendor. An empty tuple is no constraint.

    Types match as case-insensitive substrings of the device type (users write ``A100``), UUIDs
    exactly, for every vendor.
    """

    allow_types: Words = ()
    deny_types: Words = ()
    allow_uuids: Words = ()
    deny_uuids: Words = ()
    modes: Words = ()
    """Accepted modes of sharing; empty accepts every mode in which one request is one share."""
    numa_bind: bool = False
    min_isolation: Annotated[tuple[tuple[Word, Word], ...], Meta(max_length=WORDS_MOST)] = ()
    """Least grades per property that a share must have, see ``hami_common.model.isolation``."""
    no_overcommit: bool = False
    """Only devices that offer no more memory and compute than they have."""

    def accepts_type(self, device_type: str) -> bool:
        """True when a device of ``device_type`` passes the type lists.

        A device of unknown type (empty) passes only without lists, so a deny list never fails open.
        """
        if not (self.allow_types or self.deny_types):
            return True
        lowered = device_type.lower()
        allowed = not self.allow_types or any(word.lower() in lowered for word in self.allow_types)
        denied = not lowered or any(word.lower() in lowered for word in self.deny_types)
        return allowed and not denied

    def accepts_uuid(self, uuid: str) -> bool:
        """True when the device named ``uuid`` passes the UUID lists."""
        return (not self.allow_uuids or uuid in self.allow_uuids) and uuid not in self.deny_uuids


def wants_parts(request: DeviceRequest, selector: DeviceSelector) -> bool:
    """True when the request accepts only hardware partitions, each for a process of its own.

    Several of them may then be on one device: to a process each partition is a device.
    """
    named = [words for words in (selector.modes, request.modes) if words]
    return any((mode,) in named for mode in PARTITION_MODES)


def serves_mode(
    request: DeviceRequest,
    selector: DeviceSelector,
    mode: str,
    *,
    divided: bool,
    memory_cap: bool = False,
) -> bool:
    """True when a device in ``mode`` can serve a request; ``divided``: it has partitions.

    ``memory_cap``: as ``Device.memory_cap``.

    A request that names no mode gets a share of any device except one that is given whole only, and
    a whole device only where it is not divided. Several devices for one container are partitions
    only where ``wants_parts``. A pod that demands isolation gets devices of classes that have it.
    """
    if selector.min_isolation and not isolation_of(
        request.vendor,
        divided=divided,
        exclusive=request.exclusive,
        mode=mode,
        memory_cap=memory_cap,
    ).meets(selector.min_isolation):
        return False
    is_of_many = divided and request.count > 1 and mode in PARTITION_MODES
    if is_of_many and not wants_parts(request, selector):
        return False
    if request.modes and mode not in request.modes:
        return False
    if mode in NAMED_MODES:
        is_one = mode != MPS_MODE or request.count == 1
        return mode in selector.modes and is_one and not request.exclusive
    if selector.modes:
        return mode in selector.modes
    if request.modes:
        return True
    if mode == WHOLE_MODE:
        return request.exclusive
    return mode not in PARTITION_MODES or (divided and not request.exclusive)


class ScoringWeights(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Weights of the three terms of a device score."""

    slot: Weight = 1
    core: Weight = 1
    memory: Weight = 1


class PlacementPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Policy for choosing among nodes and devices that fit."""

    node: NodePolicy = "binpack"
    device: Annotated[tuple[DevicePolicy, ...], Meta(max_length=WORDS_MOST)] = ("spread",)
    weights: ScoringWeights = ScoringWeights()


class Choice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another way to serve a pod: the same containers, with devices of another kind."""

    containers: Annotated[tuple[ContainerRequest, ...], Meta(max_length=CONTAINERS_MOST)]
    selectors: Annotated[dict[Vendor, DeviceSelector], Meta(max_length=VENDORS_MOST)] = {}


class PodRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pod's whole request. ``containers`` lists only containers that ask for a device."""

    uid: Uid
    namespace: Label
    name: Name
    containers: Annotated[tuple[ContainerRequest, ...], Meta(max_length=CONTAINERS_MOST)]
    selectors: Annotated[dict[Vendor, DeviceSelector], Meta(max_length=VENDORS_MOST)] = {}
    """By vendor; a vendor that is absent has no constraint."""
    policy: PlacementPolicy = PlacementPolicy()
    claim: Name = ""
    """ResourceClaim through which the pod gets the devices; empty: through the device plugin."""
    others: Annotated[tuple[Choice, ...], Meta(max_length=LIST_MOST)] = ()
    """Alternatives after the first one, in order of preference, see ``options``."""


def options(request: PodRequest) -> tuple[PodRequest, ...]:
    """Return the alternatives of a request in order of preference, each as a request of its own."""
    if not request.others:
        return (request,)
    first = replace(request, others=())
    return (
        first,
        *(
            replace(first, containers=other.containers, selectors=other.selectors)
            for other in request.others
        ),
    )
