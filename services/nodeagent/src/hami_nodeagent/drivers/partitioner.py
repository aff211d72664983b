# SPDX-License-Identifier: Apache-2.0
"""The partitioning half of a driver: makes and removes hardware partitions, one vendor's devices.

A partitioner does one thing at a time as it is told and says what there is; it decides nothing.
Which partition is made, kept or removed, and for whom, is decided by ``core.partitions`` from the
ledger, the journal and what ``instances`` returns. Only the hardware is the truth: no method
answers from memory, and every one may be called again after a crash at any point.

Memory in MiB, compute in percent of one device, positions as in ``hami_common.model.device``.
"""

from typing import Protocol

from msgspec import Struct


class Wanted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition as the ledger booked it for one share."""

    uuid: str
    """UUID of the device it is on."""
    profile: str
    """Name in the device's ``Device.partitions``; empty: the device has no table of sizes."""
    start: int | None = None
    """First position on the device's grid; ``None`` where positions do not matter."""
    kind: str = ""
    """``Share.kind``, such as the QoS of a MetaX sGPU."""
    memory_mib: int
    core_pct: int


class Instance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition that the hardware has now, whoever made it."""

    uuid: str
    """UUID of the device it is on."""
    instance_id: str
    """What the vendor calls it on this device (a MIG UUID, a vNPU's number): never two at a time
    on one device with the same, and the same from one reading to the next while it exists."""
    profile: str = ""
    """Name in ``Device.partitions``; empty: of a size that the table does not have."""
    start: int | None = None
    memory_mib: int = 0
    """Its size where the hardware tells it, and so with compute; 0: not told."""
    core_pct: int = 0
    kind: str = ""
    """As in ``Wanted``, where the hardware tells it."""
    is_busy: bool | None = None
    """Whether processes use it now; ``None`` where the vendor cannot tell."""
    handles: dict[str, str] = {}
    """Words for ``RenderContext.handles`` of the share that it carries. One without profile and
    without handles is not whole."""


class Partitioner(Protocol):
    """What divides the devices of one vendor on this node."""

    @property
    def vendor(self) -> str:
        """Vendor word, as in ``DeviceFacts.vendor``."""
        ...

    async def instances(self) -> tuple[Instance, ...]:
        """Every partition on every device that answers, read from the hardware now.

        A device whose partitions cannot be read makes the call fail as ``Driver.discover`` does:
        half a picture would look like partitions that are gone.
        """
        ...

    async def create(self, wanted: Wanted) -> Instance:
        """Make one partition; it is there, whole, when this returns.

        ``PartitionRefused`` when the hardware has no room for it or does not know the profile: it
        says what there is. Other errors as ``Driver.discover``. On any error what was made of it
        on the way is removed again as far as the hardware lets it; what could not be removed is in
        the next ``instances``, with neither profile nor handles when it is not whole.
        """
        ...

    async def destroy(self, instance: Instance) -> None:
        """Remove one partition; one that is gone already is no error.

        ``PartitionBusy`` when processes use it: it is left as it is.
        """
        ...
