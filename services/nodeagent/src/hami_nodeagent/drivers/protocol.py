# SPDX-License-Identifier: Apache-2.0
"""The node half of a vendor: what every driver does, whatever library or tool it uses inside.

A driver only tells what it sees. Whether a device may be used is decided by ``core.health`` from
the stimuli that ``probe`` and ``wait_faults`` return. No method lets one bad device hide the
others, and none blocks the loop; hanging calls are given up after the driver's own deadline.

Memory in MiB, compute in percent of one device, power in watts.
"""

from typing import Protocol, runtime_checkable

from msgspec import Struct

from hami_common.model.device import DeviceFacts, Link
from hami_nodeagent.core.health import Stimulus
from hami_nodeagent.drivers.partitioner import Partitioner


class Inventory(Struct, frozen=True, kw_only=True):
    """What discovery found."""

    devices: tuple[DeviceFacts, ...]
    """In order of index. A device seen before that does not answer now is listed with its last
    facts, not healthy and with the reason."""
    links: tuple[Link, ...] = ()
    driver_version: str = ""
    problems: tuple[str, ...] = ()
    """What could not be listed, one sentence each; the rest of the inventory stands."""


class ProcessUsage(Struct, frozen=True, kw_only=True):
    """What one process of the host takes of a device; ``None`` where the driver cannot tell."""

    pid: int
    used_mib: int | None = None
    core_pct: int | None = None


class InstanceUsage(Struct, frozen=True, kw_only=True):
    """What is done in one hardware partition; ``None`` where the driver cannot tell."""

    instance_id: str
    """As ``Instance.instance_id``."""
    used_mib: int | None = None
    core_pct: int | None = None
    """Percent of the time, since the last look, in which the partition did anything."""


class DeviceUsage(Struct, frozen=True, kw_only=True):
    """What a device does now; ``None`` where the driver cannot tell."""

    uuid: str
    used_mib: int | None = None
    total_mib: int | None = None
    core_pct: int | None = None
    memory_bus_pct: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[ProcessUsage, ...] | None = None
    instances: tuple[InstanceUsage, ...] = ()
    """Of its hardware partitions, where the driver tells them apart."""


class CardMode(Struct, frozen=True, kw_only=True):
    """Whether a card is in the mode in which its hardware divides it."""

    uuid: str
    is_divided: bool
    is_divided_next: bool
    """After the card's next reset."""
    pids: tuple[int, ...] = ()
    """Processes that use the card; where that is not told, the switch itself finds out."""


@runtime_checkable
class ModeSwitch(Protocol):
    """What switches cards between shares in software and parts in hardware."""

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
        """Have the mode in effect when this returns; on any error what was before, if possible.

        ``PartitionBusy``: somebody uses the card. ``NotSupported``: it would take a reboot.
        ``DriverDenied``: the agent may not.
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
        """What divides these devices in hardware; ``None`` where nothing does."""
        ...

    async def discover(self) -> Inventory:
        """List all devices; finds those that were added since the last call.

        ``DriverMissing``, ``DriverMismatch``, ``DriverDenied``, ``DriverTransient`` when nothing at
        all can be listed; a later call may succeed.
        """
        ...

    async def probe(self) -> tuple[Stimulus, ...]:
        """Ask each listed device whether it works: one stimulus each by UUID, or ``DriverGone``.

        Raises nothing of the driver's errors: a stimulus says it.
        """
        ...

    async def wait_faults(self, limit_s: float) -> tuple[Stimulus, ...]:
        """Faults that devices report by themselves; empty after ``limit_s`` without any.

        Loop over this call and over ``probe`` in separate tasks; a driver that cannot be told of
        faults waits and returns nothing. Raises nothing of the driver's errors; one that says
        nothing about devices is logged, and the next call starts afresh.
        """
        ...

    async def usage(self) -> tuple[DeviceUsage, ...]:
        """Usage of every device that answers, in order of index. Raises as ``discover`` does."""
        ...

    async def aclose(self) -> None:
        """Let go of the driver, so that it can be reloaded. The object can be used again."""
        ...
