# SPDX-License-Identifier: Apache-2.0
"""What a device is: the facts an agent reports and the canonical device the registry publishes.

Units: memory in MiB, compute in percent of one device. A device is named by its vendor UUID
everywhere; ``index`` and ``minor`` are the vendor's own numbers and are never used as identity.
"""

from msgspec import Struct


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
    mode: str = "soft"
    """How the device can be shared now.

    ``soft`` (limited by the in-container library), ``mig``, ``whole`` …
    """
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
    attributes: dict[str, str] = {}
