# SPDX-License-Identifier: Apache-2.0
"""Partition messages: a hardware partition was made, kept, removed, or could not be (design D24).

Published by the agent of the node on ``hami.v1.event.partition.<node>.<vendor>``, after the
hardware was read again, so that a message tells what is there and not what was tried. Memory in
MiB, compute in percent of one device, positions as in ``hami_common.model.device``, times in Unix
seconds.
"""

from typing import Literal

from msgspec import Struct

PartitionChange = Literal["created", "adopted", "removed", "failed"]
PARTITION_CHANGES: tuple[PartitionChange, ...] = ("created", "adopted", "removed", "failed")


class PartitionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change of one hardware partition."""

    change: PartitionChange
    """``created`` and ``removed``: by the agent; ``adopted``: one that existed was given to an
    allocation; ``failed``: it could not be made or removed, see ``code`` and ``reason``."""
    node: str
    vendor: str
    uuid: str
    """UUID of the device it is on."""
    boot_id: str
    seq: int
    time_s: float
    instance_id: str = ""
    """What the vendor calls it on this device; empty where none came to be."""
    profile: str = ""
    """Name in ``Device.partitions``; empty: of a size that the table does not have."""
    start: int | None = None
    """First position on the device's grid, where positions matter."""
    kind: str = ""
    memory_mib: int = 0
    core_pct: int = 0
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    """Empty where it belongs to no pod, such as one left over by a crash."""
    allocation_id: str = ""
    code: str = ""
    """Stable code of a failure."""
    reason: str = ""
    duration_ms: float = 0.0
    """How long the hardware took."""
