# SPDX-License-Identifier: Apache-2.0
"""Breach messages: a process uses more of a device than its container was given (design D27).

Published by the agent of the node on ``hami.v1.event.breach.<node>.<pod-uid>``, with ``host`` for
the pod's uid where the process belongs to no pod: once when a breach is certain and again while it
continues. Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hami_common.bounds import (
    LIST_MOST,
    Amount,
    BootId,
    CorePct,
    Count,
    DeviceId,
    Label,
    MemoryMib,
    Name,
    Sequence,
    Uid,
    UnixS,
    Vendor,
    Word,
)

BreachKind = Literal["memory", "compute", "foreign"]
BreachAction = Literal["event", "evict"]


class BreachProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process of the breach, as the driver and the host's ``/proc`` report it."""

    pid: Count
    """On the host."""
    command: Word = ""
    """Name that the process gave itself: a hint, never evidence."""
    used_mib: Amount = 0
    core_pct: Amount = 0


class BreachRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One breach on one device."""

    kind: BreachKind
    """``memory`` and ``compute``: beyond the container's share; ``foreign``: without any share."""
    node: Name
    vendor: Vendor
    uuid: DeviceId
    boot_id: BootId
    seq: Sequence
    time_s: UnixS
    namespace: Label = ""
    pod: Name = ""
    pod_uid: Uid = ""
    """Empty for processes of the host."""
    container: Label = ""
    allocation_id: Uid = ""
    limit_mib: MemoryMib = 0
    used_mib: Amount = 0
    limit_core_pct: CorePct = 0
    core_pct: Amount = 0
    processes: Annotated[tuple[BreachProcess, ...], Meta(max_length=LIST_MOST)] = ()
    action: BreachAction = "event"
    """Action of the agent besides this message."""
