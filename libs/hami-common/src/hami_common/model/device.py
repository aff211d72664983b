# SPDX-License-Identifier: Apache-2.0
"""What a device is: the facts an agent reports and the canonical device the registry publishes.

Units: memory in MiB, compute in percent of one device. A device is named by its vendor UUID
everywhere; ``index`` and ``minor`` are the vendor's own numbers and are never used as identity.
"""

from msgspec import Struct


class Profile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One size in which a device can be divided in hardware, such as a MIG profile.

    A device with profiles gives each share the smallest that holds what was asked, and books the
    profile's size. The profile without a name is the whole device: its share is exclusive.
    """

    name: str = ""
    """The vendor's own word, such as ``1g.18gb`` or ``vir05_1c_16g``; empty: the whole device."""
    memory_mib: int
    core_pct: int = 0
    """Part of the device's compute, rounded down."""
    resources: dict[str, int] = {}
    """What else it takes, by the names of ``Device.resources``: AI cores, AI CPUs, slices …"""
    size: int = 0
    """Length on the device's grid of positions; 0 where positions do not matter."""
    starts: tuple[int, ...] = ()
    """Legal first positions on the grid."""
    kind: str = ""
    """Instances on one device all have the same kind: a size where sizes do not mix; empty: any."""
    limit: int = 0
    """Most instances of it on one device; 0: as many as there is room for."""
    native_id: int | None = None
    """The vendor's number for it."""
    by_name_only: bool = False
    """Given only to who names it: it has something that a mere size does not ask for."""

    def need(self, start: int | None = None) -> dict[str, int]:
        """Everything but memory and compute that an instance at ``start`` takes of its device.

        Positions of the grid count as resources of which there is one each.
        """
        taken = dict(self.resources)
        if self.limit:
            taken[f"limit {self.name}"] = 1
        if start is not None:
            taken.update({f"position {at}": 1 for at in range(start, start + self.size)})
        return taken


class DeviceFacts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accelerator as the node's driver describes it, before any configuration is applied."""

    uuid: str
    vendor: str
    """Vendor word, for example ``nvidia``: the key of ``hami_common.vendors.catalog``."""
    index: int
    """Position in the vendor's own enumeration."""
    type: str
    """Model name as users select it, for example ``NVIDIA H200``."""
    memory_mib: int
    """Physical memory, rounded down."""
    core_pct: int = 100
    """Physical compute; 100 for every whole device."""
    minor: int | None = None
    """N of the device node ``/dev/nvidiaN`` where the vendor has one."""
    bus_id: str = ""
    numa: int | None = None
    """NUMA node, or ``None`` when the platform reports no affinity."""
    healthy: bool = True
    health_reason: str = ""
    """Why the device is not healthy, in words for an operator; empty when healthy."""
    cordoned: bool = False
    """The node's agent wants no new pods on it, because it is about to change the device."""
    mode: str = "soft"
    """How the device can be shared now.

    ``soft`` (limited by the in-container library), ``mig``, ``whole`` …
    """
    partitions: tuple[Profile, ...] = ()
    """Sizes in which the hardware can be divided now; empty: it is not divided."""
    resources: dict[str, int] = {}
    """Totals of what partitions take beside memory and compute, by name."""
    max_shares: int = 0
    """Most shares that the hardware allows at a time; 0: no limit of its own."""
    attributes: dict[str, str] = {}
    """Further facts of the vendor, such as ``compute_capability``.

    Never needed for placement arithmetic.
    """


class Link(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """Strength of the connection between two devices of one node; symmetric, larger is closer."""

    a: str
    b: str
    score: int


class Device(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accelerator as the scheduler may use it: facts plus configuration.

    Written by the registry only.
    """

    uuid: str
    vendor: str
    index: int
    type: str
    memory_mib: int
    """Physical memory; percentages are taken of this figure."""
    capacity_mib: int
    """Memory that may be handed out: physical memory times the configured scaling."""
    capacity_core_pct: int = 100
    """Compute that may be handed out: 100 times the configured scaling."""
    slots: int = 10
    """How many containers may share the device (split count)."""
    minor: int | None = None
    bus_id: str = ""
    numa: int | None = None
    healthy: bool = True
    health_reason: str = ""
    cordoned: bool = False
    """An operator took the device out of service for new pods."""
    mode: str = "soft"
    partitions: tuple[Profile, ...] = ()
    """Sizes in which the hardware divides it; empty: shares have any size."""
    resources: dict[str, int] = {}
    """Totals of what partitions take beside memory and compute, by name."""
    attributes: dict[str, str] = {}
