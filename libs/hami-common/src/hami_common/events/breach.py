# SPDX-License-Identifier: Apache-2.0
"""Breach messages: a process uses more of a device than its container was given (design D27).

Published by the agent of the node on ``hami.v1.event.breach.<node>.<pod-uid>``, with ``host`` for
the pod's uid where the process belongs to no pod: once when a breach is certain and again while it
goes on. Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import Literal

from msgspec import Struct

BreachKind = Literal["memory", "compute", "foreign"]
BreachAction = Literal["event", "evict"]


class BreachProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that takes part, as the driver and the host's ``/proc`` show it."""

    pid: int
    """On the host."""
    command: str = ""
    """Name that the process gave itself: a hint, never evidence."""
    used_mib: int = 0
    core_pct: int = 0


class BreachRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One breach on one device."""

    kind: BreachKind
    """``memory`` and ``compute``: beyond the container's share; ``foreign``: without any share."""
    node: str
    vendor: str
    uuid: str
    boot_id: str
    seq: int
    time_s: float
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    """Empty for processes of the host."""
    container: str = ""
    allocation_id: str = ""
    limit_mib: int = 0
    used_mib: int = 0
    limit_core_pct: int = 0
    core_pct: int = 0
    processes: tuple[BreachProcess, ...] = ()
    action: BreachAction = "event"
    """What the agent did besides telling."""
