# SPDX-License-Identifier: Apache-2.0
"""Answers of a node's agent to questions about its current state.

A question is a request on ``hami.v1.ask.<node>.<what>``; the answer is one message, nothing is
stored. ``what`` is ``usage`` (answer ``UsageAnswer``) or ``check`` (``CheckAnswer``), both without
a body, or ``recall``: a request to move a pod's device memory to the host, with a
``RecallQuestion`` as body and a ``RecallAnswer``.
Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hami_common.bounds import (
    LIST_MOST,
    Amount,
    CorePct,
    Count,
    DeviceId,
    Label,
    MemoryMib,
    Name,
    Text,
    Uid,
    UnixS,
    Vendor,
    Word,
)

Question = Literal["usage", "check"]
Verdict = Literal["PASS", "WARN", "FAIL"]


class ShareNow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container on one device."""

    namespace: Label
    pod: Name
    pod_uid: Uid
    container: Label
    vendor: Vendor
    uuid: DeviceId
    memory_mib: MemoryMib
    """Memory that the ledger gives."""
    core_pct: CorePct = 0
    used_mib: Amount = 0
    """Memory that its processes use, as far as it is measured."""
    used_core_pct: Amount = 0
    is_whole: bool = False
    is_held: bool = False
    """The memory limit is enforced: by the library, a partition or the vendor."""
    is_over: bool = False
    """Usage exceeds a limit that was lowered."""
    file_mib: Amount | None = None
    """Memory limit in the container's limits file; ``None``: no readable file."""
    file_core_pct: Amount | None = None
    owner_uid: Uid = ""
    """Uid under which the ledger has the share, if it is not the pod's: a ResourceClaim's."""
    owner_container: Label = ""
    """Name of the share in the ledger, if it is not the container's: the claim's request, or the
    container whose request this one uses.
    """


class UsageAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Current use of a node."""

    node: Name
    time_s: UnixS
    shares: Annotated[tuple[ShareNow, ...], Meta(max_length=LIST_MOST)] = ()


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one check."""

    check: Word
    """Stable word."""
    verdict: Verdict
    text: Text
    """Text of the result."""
    fix: Text = ""
    """Action to take; empty when none is needed."""
    node: Name = ""
    """Node concerned; empty: not about one node."""


class CheckAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Inventory of a node as its agent detected it."""

    node: Name
    time_s: UnixS
    """The node's clock."""
    version: Word = ""
    """Of the agent."""
    findings: Annotated[tuple[Finding, ...], Meta(max_length=LIST_MOST)] = ()


class RecallQuestion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to park the idle containers of a pod."""

    pod_uid: Uid


class RecallAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Containers of the pod that are parked; all 0 where none has shares of a recall device."""

    node: Name
    containers: Count = 0
    """Containers that are being parked because of the request."""
    parked: Count = 0
    """Containers whose memory is in the host already, or on its way there."""
