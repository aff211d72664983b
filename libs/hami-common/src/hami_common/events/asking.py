# SPDX-License-Identifier: Apache-2.0
"""Answers of a node's agent to questions that are asked when somebody wants to know now.

A question is a request on ``hami.v1.ask.<node>.<what>`` without a body; the answer is one message,
nothing is stored. ``what`` is ``usage`` (answer ``UsageAnswer``) or ``check`` (``CheckAnswer``).
Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hami_common.bounds import (
    LIST_MOST,
    Amount,
    CorePct,
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
    """What the ledger gives."""
    core_pct: CorePct = 0
    used_mib: Amount = 0
    """What its processes use, as far as anything counts it."""
    used_core_pct: Amount = 0
    is_whole: bool = False
    is_held: bool = False
    """Something keeps the container to its memory: the library, a partition or the vendor."""
    is_over: bool = False
    """It uses more than a limit that was lowered."""
    file_mib: Amount | None = None
    """What the container's limits file says now; ``None``: there is none that can be read."""
    file_core_pct: Amount | None = None


class UsageAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is used on a node now."""

    node: Name
    time_s: UnixS
    shares: Annotated[tuple[ShareNow, ...], Meta(max_length=LIST_MOST)] = ()


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at."""

    check: Word
    """Stable word."""
    verdict: Verdict
    text: Text
    """What was found."""
    fix: Text = ""
    """What to do; empty when nothing is to be done."""
    node: Name = ""
    """Empty: not about one node."""


class CheckAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent found when it looked at its node."""

    node: Name
    time_s: UnixS
    """The node's clock."""
    version: Word = ""
    """Of the agent."""
    findings: Annotated[tuple[Finding, ...], Meta(max_length=LIST_MOST)] = ()
