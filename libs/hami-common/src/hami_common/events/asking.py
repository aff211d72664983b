# SPDX-License-Identifier: Apache-2.0
"""Answers of a node's agent to questions that are asked when somebody wants to know now.

A question is a request on ``hami.v1.ask.<node>.<what>`` without a body; the answer is one message,
nothing is stored. ``what`` is ``usage`` (answer ``UsageAnswer``) or ``check`` (``CheckAnswer``).
Memory in MiB, compute in percent of one device, times in Unix seconds.
"""

from typing import Literal

from msgspec import Struct

Question = Literal["usage", "check"]
Verdict = Literal["PASS", "WARN", "FAIL"]


class ShareNow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One container on one device."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    vendor: str
    uuid: str
    memory_mib: int
    """What the ledger gives."""
    core_pct: int = 0
    used_mib: int = 0
    """What its processes use, as far as anything counts it."""
    used_core_pct: int = 0
    is_whole: bool = False
    is_held: bool = False
    """Something keeps the container to its memory: the library, a partition or the vendor."""
    is_over: bool = False
    """It uses more than a limit that was lowered."""
    file_mib: int | None = None
    """What the container's limits file says now; ``None``: there is none that can be read."""
    file_core_pct: int | None = None


class UsageAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is used on a node now."""

    node: str
    time_s: float
    shares: tuple[ShareNow, ...] = ()


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at."""

    check: str
    """Stable word."""
    verdict: Verdict
    text: str
    """What was found."""
    fix: str = ""
    """What to do; empty when nothing is to be done."""
    node: str = ""
    """Empty: not about one node."""


class CheckAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent found when it looked at its node."""

    node: str
    time_s: float
    """The node's clock."""
    version: str = ""
    """Of the agent."""
    findings: tuple[Finding, ...] = ()
