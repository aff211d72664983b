# SPDX-License-Identifier: Apache-2.0
"""Hardware state that drivers report and decisions read: partitions and card modes.

Drivers import these types from here; the core imports no driver.
Memory in MiB, compute in percent of one device, positions as in ``hami_common.model.device``.
"""

from msgspec import Struct


class Wanted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition to create, as the ledger booked it for one share."""

    uuid: str
    """UUID of the partition's device."""
    profile: str
    """Name in the device's ``Device.partitions``; empty: the device has no table of sizes."""
    start: int | None = None
    """First position on the device's grid; ``None`` where positions do not matter."""
    kind: str = ""
    """``Share.kind``, such as the QoS of a MetaX sGPU."""
    memory_mib: int
    core_pct: int


class Instance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition that exists on the hardware now, whether or not this agent created it."""

    uuid: str
    """UUID of the partition's device."""
    instance_id: str
    """The vendor's identifier on this device (a MIG UUID, a vNPU's number): unique per device, and
    unchanged between reads while the partition exists."""
    profile: str = ""
    """Name in ``Device.partitions``; empty: of a size that the table does not have."""
    start: int | None = None
    memory_mib: int = 0
    """Size if the hardware reports it; 0: not reported. The same holds for compute."""
    core_pct: int = 0
    kind: str = ""
    """As in ``Wanted``, if the hardware reports it."""
    is_busy: bool | None = None
    """Processes use the partition now; ``None``: the vendor does not report it."""
    handles: dict[str, str] = {}
    """Entries for ``RenderContext.handles`` of its share. An instance with neither profile nor
    handles is incomplete."""


class CardMode(Struct, frozen=True, kw_only=True):
    """Partitioning mode of a card: hardware partitions on or off."""

    uuid: str
    is_divided: bool
    is_divided_next: bool
    """Mode after the card's next reset."""
    pids: tuple[int, ...] = ()
    """Processes that use the card; empty where the driver cannot list them, in which case the
    switch detects them."""
