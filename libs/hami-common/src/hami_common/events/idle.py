# SPDX-License-Identifier: Apache-2.0
"""Idle messages: an allocation did no work on its devices for some time, and what was done.

The registry publishes them on ``hami.v1.event.idle.<node>.<pod_uid>``, one ``idle`` for each idle
period that lasts longer than ``after_s``, and one ``active`` when the allocation works again. Each
is stored under the condition that the newest message of the subject is the one that its writer
knows, so replicas and restarts publish none twice; ``ce-id`` is the same for every attempt. A
release ends an idle period without a message.

The scheduler publishes on ``hami.v1.event.idleaction.<node>.<pod_uid>`` what its policy for the
allocation is in this period, and the outcome. Memory in MiB, compute in percent of one device,
times in Unix seconds, device time in seconds of one whole device.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hami_common.bounds import (
    NODE_DEVICES_MOST,
    Amount,
    CorePct,
    DeviceId,
    Duration,
    Label,
    MemoryMib,
    Name,
    Text,
    Uid,
    UnixS,
    Word,
)

IdleChange = Literal["idle", "active"]
IDLE_CHANGES: tuple[IdleChange, ...] = ("idle", "active")
IdlePolicy = Literal["report", "shrink", "recall", "evict"]
IDLE_POLICIES: tuple[IdlePolicy, ...] = ("report", "shrink", "recall", "evict")
IdleOutcome = Literal["waiting", "done", "refused"]
IDLE_OUTCOMES: tuple[IdleOutcome, ...] = ("waiting", "done", "refused")


class IdleDevice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device of which an idle allocation holds a share."""

    uuid: DeviceId
    model: Text = ""
    memory_mib: MemoryMib = 0
    """Reserved memory."""
    core_pct: CorePct = 0
    """Reserved compute; 0: no limit."""
    used_mib: Amount = 0
    """Memory in use at the newest sample."""


class IdleRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Idle time of one allocation."""

    change: IdleChange
    node: Name
    pod_uid: Uid
    allocation_id: Uid
    namespace: Label
    pod: Name
    queue: Word = ""
    """Queue that the pod names; empty: its namespace decides."""
    since_s: UnixS
    """Begin of the idle time; equal in both messages of one period."""
    is_since_known: bool = False
    """False: it was idle already when the measurement began."""
    time_s: UnixS
    """End of the idle time: of ``idle`` so far, the newest sample; of ``active`` the last sample
    before the work.
    """
    lost_s: Duration
    """Device time reserved in between."""
    after_s: Duration = 0.0
    """Idle time after which the message is sent (``idle_after_s`` of the registry)."""
    measured_by: Literal["limiter", "driver"] = "limiter"
    """``driver``: no limiter counts the work; the driver's utilization was 0 in every sample."""
    devices: Annotated[tuple[IdleDevice, ...], Meta(max_length=NODE_DEVICES_MOST)] = ()
    writer: Word = ""
    """Replica that wrote the message."""


class IdleActionRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Action of the scheduler on one idle allocation."""

    policy: IdlePolicy
    outcome: IdleOutcome
    """``waiting``: the policy applies from ``due_s`` on. ``refused``: it is tried again later."""
    node: Name
    pod_uid: Uid
    allocation_id: Uid
    namespace: Label
    pod: Name
    since_s: UnixS
    """Begin of the idle time, as in the message of the period."""
    time_s: UnixS
    due_s: UnixS = 0.0
    """Time from which the policy applies."""
    code: Word = ""
    """Stable word for the reason of a refusal (docs/runbook/errors.md)."""
    reason: Text = ""
    """Result, or reason of a refusal, as a sentence."""
    writer: Word = ""
    """Replica that wrote the message."""
