# SPDX-License-Identifier: Apache-2.0
"""The partitioning half of a driver: makes and removes hardware partitions, one vendor's devices.

A partitioner executes one operation at a time and lists the existing partitions; it makes no
decisions. ``core.partitions`` decides from the ledger, the journal and the result of ``instances``
which partition is made, kept or removed, and for which pod. The hardware is the only source of
truth: no method answers from a cache, and every method may be called again after a crash at any
point.

Memory in MiB, compute in percent of one device, positions as in ``hami_common.model.device``.
"""

from typing import Protocol

from hami_nodeagent.core.hardware import Instance, Wanted


class Partitioner(Protocol):
    """Divides the devices of one vendor on this node."""

    @property
    def vendor(self) -> str:
        """Vendor word, as in ``DeviceFacts.vendor``."""
        ...

    async def instances(self) -> tuple[Instance, ...]:
        """Read every partition on every device that answers from the hardware.

        A device whose partitions are unreadable makes the call fail as ``Driver.discover`` does: an
        incomplete list would look like removed partitions.
        """
        ...

    async def create(self, wanted: Wanted) -> Instance:
        """Make one partition; it exists completely when this returns.

        ``PartitionRefused`` if the hardware has no capacity for it or does not support the profile:
        the error lists the alternatives. Other errors as ``Driver.discover``. On any error the
        partial result is rolled back as far as the hardware allows; remains are in the next
        ``instances``, with neither profile nor handles if incomplete.
        """
        ...

    async def destroy(self, instance: Instance) -> None:
        """Remove one partition; idempotent.

        ``PartitionBusy`` if processes use it: it is left unchanged.
        """
        ...
