# SPDX-License-Identifier: Apache-2.0
"""Computes the shares of a running container, or of a ResourceClaim, after a resize request.

A resize takes three steps (``hami_scheduler.shell.resize``):

1. The ledger books the larger of old and new.
2. The pod's annotations are set to the new shares. A claim that a user wrote has none: the node
   agent follows its ledger record, with the new shares of a growth.
3. Once the container's limits file has the new shares too, the ledger books them.

So the ledger never promises capacity to others that the container may still take, and at any moment
the annotations are reconciled from the ledger. Only soft shares whose limit lives in a file can
change under a running process: a partition is cut in hardware, a whole device has no limit, and
other vendors set theirs when a container starts. Memory in MiB per device, compute in percent of
one device (0: no limit). Pure.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from hami_common.bounds import Label, Name, SignedInt32
from hami_common.compat.origins import title_of
from hami_common.errors import RequestInvalid
from hami_common.events.allocation import is_of_claim
from hami_common.model.placement import ContainerShares, Share
from hami_common.model.request import MPS_MODE
from hami_common.vendors.protocol import LIMITED_VENDORS
from hami_core.ledger.holding import Holding

WHOLE_PCT = 100


class ResizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requested shares of a running container."""

    namespace: Label
    pod: Name = ""
    claim: Name = ""
    """A ResourceClaim that a user wrote, instead of ``pod``."""
    container: Label = ""
    """The pod's container, or the claim's request; empty: the only one with a share."""
    memory_mib: SignedInt32 | None = None
    """Memory of each of the container's devices; ``None``: unchanged."""
    core_pct: SignedInt32 | None = None
    """Compute of each device; ``None``: unchanged; 0: no limit."""
    force: bool = False
    """Also allow less than is in use: the container is over its limit until it frees memory."""


def resized(
    holding: Holding, wish: ResizeRequest, *, state: str
) -> tuple[ContainerShares, tuple[ContainerShares, ...]]:
    """Return the resized container, and all containers with it.

    ``RequestInvalid`` names the reason of a refusal.
    """
    is_claim, title = is_of_claim(holding.record), title_of(holding.record.origin)
    subject = "claim" if is_claim else "pod"
    if holding.record.origin and not is_claim:
        raise RequestInvalid(
            field="pod",
            problem=f"it was placed by {title}, which limits its share",
            fix="create it again: then it is ours and can be resized",
        )
    wanted = "prepared" if is_claim else "running"
    if state != wanted:
        raise RequestInvalid(
            field=subject,
            problem=f"its allocation is {state}, and only a {wanted} one can be resized",
            fix="wait until a pod uses it" if is_claim else "wait until all its containers run",
        )
    if wish.memory_mib is None and wish.core_pct is None:
        raise RequestInvalid(
            field="memory_mib", problem="nothing is asked for", fix="give memory_mib or core_pct"
        )
    if wish.memory_mib is not None and wish.memory_mib < 1:
        raise RequestInvalid(
            field="memory_mib", problem=f"{wish.memory_mib} is no amount", fix="give at least 1 MiB"
        )
    if wish.core_pct is not None and not 0 <= wish.core_pct <= WHOLE_PCT:
        raise RequestInvalid(
            field="core_pct",
            problem=f"{wish.core_pct} is not a percentage of one device",
            fix="give 0 (no limit) to 100",
        )
    what = "request" if is_claim else "container"
    target = _container(subject, what, holding.record.containers, wish.container)
    for share in target.shares:
        _require_resizable(f"{what} {target.name}", share)
    changed = replace(target, shares=tuple(_changed(share, wish) for share in target.shares))
    if changed == target:
        raise RequestInvalid(
            field="memory_mib",
            problem=f"{what} {target.name} has these shares already",
            fix="give other amounts",
        )
    containers = tuple(
        changed if one.name == target.name else one for one in holding.record.containers
    )
    return changed, containers


def larger(
    old: Iterable[ContainerShares], new: Iterable[ContainerShares]
) -> tuple[ContainerShares, ...]:
    """Return the containers with the larger of each amount; the shares are otherwise equal."""
    return tuple(
        replace(
            one,
            shares=tuple(
                _with(
                    share,
                    memory_mib=max(share.memory_mib, wanted.memory_mib),
                    core_pct=max(share.core_pct, wanted.core_pct),
                    memory_limit_mib=max(share.memory_limit_mib, wanted.memory_limit_mib),
                    core_limit_pct=max(share.core_limit_pct, wanted.core_limit_pct),
                )
                for share, wanted in zip(one.shares, other.shares, strict=True)
            ),
        )
        for one, other in zip(old, new, strict=True)
    )


def shrinks(old: Iterable[ContainerShares], new: Iterable[ContainerShares]) -> bool:
    """Return whether any memory shrinks."""
    return any(
        wanted.memory_mib < share.memory_mib
        for one, other in zip(old, new, strict=True)
        for share, wanted in zip(one.shares, other.shares, strict=True)
    )


def _container(
    subject: str, what: str, containers: Iterable[ContainerShares], name: str
) -> ContainerShares:
    known = [one for one in containers if one.shares]
    found = [one for one in known if not name or one.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in known)
    raise RequestInvalid(
        field="container",
        problem=f"{name!r} has no share"
        if name
        else f"the {subject} has several {what}s with shares",
        fix=f"name one of {names}" if names else f"choose another {subject}",
    )


def _require_resizable(title: str, share: Share) -> None:
    if share.profile:
        problem = f"it holds the hardware partition {share.part}, whose size is the hardware's"
        fix = "start the pod again with another partition"
    elif share.exclusive:
        problem = f"it holds device {share.uuid} whole, so nothing limits it"
        fix = "start the pod again with a share of a device"
    elif share.mode == MPS_MODE:
        problem = "its Multi-Process Service takes limits only when a program starts"
        fix = "start the pod again with another request"
    elif share.vendor not in LIMITED_VENDORS:
        problem = f"devices of {share.vendor} take their limit only when a container starts"
        fix = "start the pod again with another request"
    else:
        return
    raise RequestInvalid(field=title, problem=problem, fix=fix)


def _changed(share: Share, wish: ResizeRequest) -> Share:
    return _with(
        share,
        memory_mib=share.memory_mib if wish.memory_mib is None else wish.memory_mib,
        core_pct=share.core_pct if wish.core_pct is None else wish.core_pct,
        memory_limit_mib=share.memory_limit_mib,
        core_limit_pct=share.core_limit_pct,
    )


def _with(
    share: Share, *, memory_mib: int, core_pct: int, memory_limit_mib: int, core_limit_pct: int
) -> Share:
    """Return the share with these amounts, and with its limits where they are above them."""
    return replace(
        share,
        memory_mib=memory_mib,
        core_pct=core_pct,
        memory_limit_mib=memory_limit_mib if memory_limit_mib > memory_mib else 0,
        core_limit_pct=max(core_limit_pct, core_pct) if core_limit_pct and core_pct else 0,
    )
