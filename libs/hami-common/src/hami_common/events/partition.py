# SPDX-License-Identifier: Apache-2.0
"""Partition messages: a hardware partition was created, kept, removed, or failed (design D24).

Published by the agent of the node on ``hami.v1.event.partition.<node>.<vendor>``, after the
hardware was read again, so a message reports the actual partition and not the attempt. Memory in
MiB, compute in percent of one device, positions as in ``hami_common.model.device``, times in Unix
seconds.
"""

from typing import Literal

from msgspec import Struct

from hami_common.bounds import (
    BootId,
    CorePct,
    DeviceId,
    Duration,
    GridPosition,
    Label,
    MemoryMib,
    Name,
    Sequence,
    Text,
    Uid,
    UnixS,
    Vendor,
    Word,
)

PartitionChange = Literal["created", "adopted", "removed", "failed"]
PARTITION_CHANGES: tuple[PartitionChange, ...] = ("created", "adopted", "removed", "failed")


class PartitionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of one hardware partition."""

    change: PartitionChange
    """``created`` and ``removed``: by the agent; ``adopted``: one that existed was given to an
    allocation; ``failed``: it could not be made or removed, see ``code`` and ``reason``."""
    node: Name
    vendor: Vendor
    uuid: DeviceId
    """UUID of the device it is on."""
    boot_id: BootId
    seq: Sequence
    time_s: UnixS
    instance_id: Word = ""
    """Instance id of the vendor on this device; empty where none was created."""
    profile: Word = ""
    """Name in ``Device.partitions``; empty: of a size that the table does not have."""
    start: GridPosition | None = None
    """First position on the device's grid, where positions matter."""
    kind: Word = ""
    memory_mib: MemoryMib = 0
    core_pct: CorePct = 0
    namespace: Label = ""
    pod: Name = ""
    pod_uid: Uid = ""
    """Empty where it belongs to no pod, such as one left over by a crash."""
    allocation_id: Uid = ""
    code: Word = ""
    """Stable code of a failure."""
    reason: Text = ""
    duration_ms: Duration = 0.0
    """Time that the hardware operation took."""
