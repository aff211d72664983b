# SPDX-License-Identifier: Apache-2.0
"""Devices: the facts an agent reports and the canonical device the registry publishes.

Units: memory in MiB, compute in percent of one device. A device is named by its vendor UUID
everywhere; ``index`` and ``minor`` are the vendor's own numbers and are never used as identity.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from hami_common.bounds import (
    PROFILES_MOST,
    SHARES_MOST,
    Attributes,
    CapacityCorePct,
    CapacityMib,
    CorePct,
    DeviceId,
    GridPosition,
    HardwareShares,
    Index,
    LinkScore,
    MemoryMib,
    Minor,
    Numa,
    Resource,
    Resources,
    SignedInt64,
    Slots,
    Text,
    Uid,
    Vendor,
    Word,
)

MANAGED: Final = "managed"
"""Memory is overcommitted by CUDA managed memory."""
RECALL: Final = "recall"
"""Memory is overcommitted by moving that of idle containers to the host."""
BOARD = "board"
"""Attribute of devices that are parts (dies) of one physical card: a word for the card."""


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One size in which a device can be divided in hardware, such as a MIG profile.

    A device with profiles gives each share the smallest one that fits the request, and books the
    profile's size. The profile without a name is the whole device: its share is exclusive.
    """

    name: Word = ""
    """The vendor's own word, such as ``1g.18gb`` or ``vir05_1c_16g``; empty: the whole device."""
    memory_mib: MemoryMib
    core_pct: CorePct = 0
    """Part of the device's compute, rounded down."""
    resources: Resources = {}
    """Other resources that it takes, by the names of ``Device.resources``: AI cores, AI CPUs,
    slices …
    """
    size: GridPosition = 0
    """Length on the device's grid of positions; 0 where positions do not matter."""
    starts: Annotated[tuple[GridPosition, ...], Meta(max_length=PROFILES_MOST)] = ()
    """Legal first positions on the grid."""
    kind: Word = ""
    """Instances on one device all have the same kind: a size where sizes do not mix; empty: any."""
    limit: Resource = 0
    """Most instances of it on one device; 0: as many as fit."""
    native_id: SignedInt64 | None = None
    """The vendor's number for it."""
    by_name_only: bool = False
    """Given only to requests that name it: it has something that a mere size does not ask for."""

    def need(self, start: int | None = None) -> dict[str, int]:
        """Resources besides memory and compute that an instance at ``start`` takes of its device.

        Each position of the grid counts as a resource with an amount of one.
        """
        taken = dict(self.resources)
        if self.limit:
            taken[f"limit {self.name}"] = 1
        if start is not None:
            taken.update({f"position {at}": 1 for at in range(start, start + self.size)})
        return taken


class Burst(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of one device that a pod uses beyond its request, within its limit (ADR 52)."""

    pod_uid: Uid
    memory_mib: MemoryMib
    """Above 0, in steps."""


class DeviceFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accelerator as the node's driver describes it, before any configuration is applied."""

    uuid: DeviceId
    vendor: Vendor
    """Vendor word, for example ``nvidia``: the key of ``hami_common.vendors.catalog``."""
    index: Index
    """Position in the vendor's own enumeration."""
    type: Word
    """Model name as users select it, for example ``NVIDIA H200``."""
    memory_mib: MemoryMib
    """Physical memory, rounded down."""
    core_pct: CapacityCorePct = 100
    """Physical compute; 100 for every whole device."""
    minor: Minor | None = None
    """N of the device node ``/dev/nvidiaN`` where the vendor has one."""
    bus_id: Word = ""
    numa: Numa | None = None
    """NUMA node, or ``None`` when the platform reports no affinity."""
    healthy: bool = True
    health_reason: Text = ""
    """Reason for which the device is unhealthy, in words for an operator; empty when healthy."""
    cordoned: bool = False
    """The node's agent refuses new pods on it, because it is about to change the device."""
    mode: Word = "soft"
    """Way in which the device can be shared now.

    ``soft`` (limited by the in-container library), ``mig``, ``whole`` …
    """
    partitions: Annotated[tuple[Profile, ...], Meta(max_length=PROFILES_MOST)] = ()
    """Sizes in which the hardware can be divided now; empty: it is not divided."""
    resources: Resources = {}
    """Totals of the resources besides memory and compute that partitions take, by name."""
    max_shares: HardwareShares = 0
    """Most shares that the hardware allows at a time; 0: no limit of its own."""
    memory_cap: bool = False
    """The vendor's driver limits the memory of each container on it, by its cgroup."""
    foreign_mib: MemoryMib = 0
    """Memory in use that no allocation covers, in steps; see the agent's ``usage.foreign``."""
    bursts: Annotated[tuple[Burst, ...], Meta(max_length=SHARES_MOST)] = ()
    """Memory that pods use beyond their requests, by pod."""
    attributes: Attributes = {}
    """Further facts of the vendor, such as ``compute_capability``.

    Placement uses none but ``BOARD``.
    """


class Link(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """Strength of the connection between two devices of one node; symmetric, larger is closer."""

    a: DeviceId
    b: DeviceId
    score: LinkScore


class Device(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accelerator as the scheduler may use it: facts plus configuration.

    Written by the registry only.
    """

    uuid: DeviceId
    vendor: Vendor
    index: Index
    type: Word
    memory_mib: MemoryMib
    """Physical memory; percentages are taken of this figure."""
    capacity_mib: CapacityMib
    """Memory that may be handed out: physical memory times the configured scaling."""
    overcommit: Word = MANAGED
    """Mechanism that keeps memory beyond the device's own: ``managed`` or ``recall``."""
    largest_mib: MemoryMib = 0
    """With ``recall``: memory of the largest share, which is moved as a whole, and of all shares
    that have their memory on the device at a time. 0: no bound but the capacity."""
    foreign_mib: MemoryMib = 0
    """Memory that processes outside the ledger use beyond ``reserved_mib``: new shares do not get
    it, existing ones keep theirs."""
    bursts: Annotated[tuple[Burst, ...], Meta(max_length=SHARES_MOST)] = ()
    """Memory that pods use beyond their requests, by pod: new shares do not get it until these pods
    end."""
    capacity_core_pct: CapacityCorePct = 100
    """Compute that may be handed out: 100 times the configured scaling."""
    slots: Slots = 10
    """Number of containers that may share the device (split count)."""
    minor: Minor | None = None
    bus_id: Word = ""
    numa: Numa | None = None
    healthy: bool = True
    health_reason: Text = ""
    cordoned: bool = False
    """An operator took the device out of service for new pods."""
    mode: Word = "soft"
    partitions: Annotated[tuple[Profile, ...], Meta(max_length=PROFILES_MOST)] = ()
    """Sizes in which the hardware divides it; empty: shares have any size."""
    resources: Resources = {}
    """Totals of the resources besides memory and compute that partitions take, by name."""
    memory_cap: bool = False
    """The vendor's driver limits the memory of each container on it, by its cgroup."""
    attributes: Attributes = {}
