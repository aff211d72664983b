# SPDX-License-Identifier: Apache-2.0
"""Decides when a card without partitions switches between its modes of sharing (ADR 27).

Modes: ``soft`` (the in-container library limits memory and compute), ``timeslice`` (the driver
gives equal turns; the library limits memory), ``mps`` (a Multi-Process Service of the card's own).
A card has one mode at a time, and all its shares are of it. A card in another mode than configured
is cordoned until it is unused, as for MIG (``core.modes``), and then changes its mode at once:
nothing is set on the hardware. A card whose service does not answer takes no new pods.

Times in seconds; depends on no driver, disk or clock.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import Struct

from hami_nodeagent.core.claims import Entry
from hami_nodeagent.core.modes import waits_for

Setting = Literal["hook", "timeslice", "mps"]
SOFT = "soft"
MPS = "mps"
MODES = (SOFT, *get_args(Setting)[1:])


class SharingLook(Struct, frozen=True, kw_only=True):
    """Input of a decision on one card."""

    mode: str
    wanted: str
    users: tuple[str, ...] = ()
    is_known: bool = False
    """Ledger and pods are known, so ``users`` is complete."""
    cordoned_for_s: float = -1.0
    """Seconds for which the registry has cordoned the card; negative: not yet."""
    settle_s: float = 0.0
    """Seconds after which no reservation from before the cordon can still arrive."""
    problem: str = ""
    """Reason why the card's Multi-Process Service does not serve now; empty: it does."""


class SharingVerdict(Struct, frozen=True, kw_only=True):
    """A decision."""

    text: str = ""
    """Text for the operator; empty: the mode is as configured and works."""
    is_withheld: bool = False
    """The card takes no new pods."""
    step: str = ""
    """The mode to change to now."""


def mode_of(setting: Setting | None) -> str:
    """Return the mode that a setting names; without one it is the library's."""
    return SOFT if setting in (None, "hook") else str(setting)


def mode_in_use(entries: Iterable[Entry], uuid: str) -> str | None:
    """Return the mode in which the ledger's shares of a card were given; ``None`` without any."""
    modes = {
        share.mode or SOFT
        for entry in entries
        if entry.record.op != "release"
        for container in entry.record.containers
        for share in container.shares
        if share.uuid == uuid and not share.exclusive
    }
    return min(modes) if modes else None


def decide_sharing(look: SharingLook) -> SharingVerdict:
    """Return the next step of the card's mode, if any."""
    if look.wanted == look.mode:
        if look.problem:
            text = f"its Multi-Process Service is not ready: {look.problem}"
            return SharingVerdict(text=text, is_withheld=True)
        return SharingVerdict()
    doing = f"changing the mode of sharing from {look.mode} to {look.wanted}"
    waits = waits_for(
        look.users,
        is_known=look.is_known,
        cordoned_for_s=look.cordoned_for_s,
        settle_s=look.settle_s,
    )
    return SharingVerdict(
        text=f"{doing} {waits or 'is under way'}",
        is_withheld=True,
        step="" if waits else look.wanted,
    )
