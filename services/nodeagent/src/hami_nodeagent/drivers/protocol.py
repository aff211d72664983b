# SPDX-License-Identifier: Apache-2.0
"""The node half of a vendor: the interface of every driver, whatever library or tool it uses.

A driver only reports its observations. ``core.health`` decides from the stimuli of ``probe`` and
``wait_faults`` if a device may be used. No method lets one bad device hide the others, and none
blocks the loop; the driver abandons hanging calls after its own deadline.

Memory in MiB, compute in percent of one device, power in watts.
"""

from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct

from hami_common.model.device import DeviceFacts, Link
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.health import Stimulus
from hami_nodeagent.drivers.partitioner import Partitioner


class Inventory(Struct, frozen=True, kw_only=True):
    """Result of a discovery."""

    devices: tuple[DeviceFacts, ...]
    """In order of index. A device seen before that does not answer now is listed with its last
    facts, not healthy and with the reason."""
    links: tuple[Link, ...] = ()
    driver_version: str = ""
    problems: tuple[str, ...] = ()
    """Reasons for unlisted devices, one sentence each; the rest of the inventory is valid."""


class ProcessUsage(Struct, frozen=True, kw_only=True):
    """Use of a device by one process of the host; ``None``: not reported by the driver."""

    pid: int
    used_mib: int | None = None
    core_pct: int | None = None


class InstanceUsage(Struct, frozen=True, kw_only=True):
    """Usage of one hardware partition; ``None``: not reported by the driver."""

    instance_id: str
    """As ``Instance.instance_id``."""
    used_mib: int | None = None
    core_pct: int | None = None
    """Percentage of time since the last read in which the partition was active."""


class DeviceUsage(Struct, frozen=True, kw_only=True):
    """Current usage of a device; ``None``: not reported by the driver."""

    uuid: str
    used_mib: int | None = None
    total_mib: int | None = None
    core_pct: int | None = None
    memory_bus_pct: int | None = None
    dram_pct: float | None = None
    """Percent of the bandwidth of its memory."""
    pcie_mib_s: float | None = None
    """Traffic in both directions, in MiB per second."""
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[ProcessUsage, ...] | None = None
    instances: tuple[InstanceUsage, ...] = ()
    """Usage of its hardware partitions, where the driver distinguishes them."""


@runtime_checkable
class ModeSwitch(Protocol):
    """Switches cards between shares in software and partitions in hardware."""

    @property
    def vendor(self) -> str:
        """Vendor word."""
        ...

    async def listed(self) -> tuple[DeviceFacts, ...]:
        """All cards that were ever listed."""
        ...

    async def modes(self) -> tuple[CardMode, ...]:
        """The mode of each card that has any and answers. Raises as ``Driver.discover`` does."""
        ...

    async def switch_mode(self, uuid: str, *, is_divided: bool) -> None:
        """Set the mode before returning; on any error, restore the previous mode if possible.

        ``PartitionBusy``: a process uses the card. ``NotSupported``: it would take a reboot.
        ``DriverDenied``: the agent lacks the permission.
        """
        ...


@runtime_checkable
class MemoryCap(Protocol):
    """Limits the device memory of the processes in a cgroup, by the driver itself."""

    @property
    def vendor(self) -> str:
        """Vendor word."""
        ...

    async def cap_memory(self, uuid: str, group: Path, limit_mib: int | None) -> None:
        """Set the limit of the cgroup at the path ``group`` on a device; ``None``: no limit.

        ``NotSupported``: the driver has no such limit, or the device is divided in hardware.
        ``DriverDenied``: the agent lacks the permission. Other errors of ``Driver.discover`` if the
        limit is not in effect.
        """
        ...


class Driver(Protocol):
    """One vendor's devices on this node."""

    @property
    def vendor(self) -> str:
        """Vendor word, as in ``DeviceFacts.vendor``."""
        ...

    @property
    def is_stuck(self) -> bool:
        """A call into the vendor's library never came back; its thread outlives the loop."""
        ...

    @property
    def partitioner(self) -> Partitioner | None:
        """Partitioner of these devices; ``None`` if they cannot be divided in hardware."""
        ...

    async def discover(self) -> Inventory:
        """List all devices; finds those that were added since the last call.

        ``DriverMissing``, ``DriverMismatch``, ``DriverDenied``, ``DriverTransient`` if no device
        can be listed; a later call may succeed.
        """
        ...

    async def probe(self) -> tuple[Stimulus, ...]:
        """Check each listed device; return one stimulus each by UUID, or ``DriverGone``.

        Raises no driver errors: a stimulus reports them.
        """
        ...

    async def wait_faults(self, limit_s: float) -> tuple[Stimulus, ...]:
        """Return faults that devices report by themselves; empty after ``limit_s`` without any.

        Loop over this call and over ``probe`` in separate tasks; a driver without fault events
        waits and returns nothing. Raises no driver errors: an error that concerns no device is
        logged, and the next call starts again.
        """
        ...

    async def usage(self) -> tuple[DeviceUsage, ...]:
        """Usage of every device that answers, in order of index. Raises as ``discover`` does."""
        ...

    async def aclose(self) -> None:
        """Let go of the driver, so that it can be reloaded. The object can be used again."""
        ...
