# SPDX-License-Identifier: Apache-2.0
"""The devices a pod gets on the chosen node: the same placing as the filter's, on one column.

Shares of a container stand in the order of its requests and, within one, in the order of the node's
devices (the vendor's own enumeration), parts of one device in the order of their places. A share
that is a hardware partition has its place on the device's grid where positions matter. Memory in
MiB, compute in percent of one device.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hami_common.errors import InvariantBroken
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import (
    NAMED_MODES,
    DeviceRequest,
    PodRequest,
    options,
    wants_parts,
)
from hami_common.vendors.partitions import Division, Grant, assign_starts
from hami_core.placement.fit import NO_CONSTRAINT, Plan, View, compile_request, wanted_mib
from hami_core.placement.placing import Outcome, place
from hami_core.placement.reasons import NodeRefusal, refusal_of, unregistered
from hami_core.table.block import Block
from hami_core.table.table import DeviceTable, Place


def pick(
    table: DeviceTable,
    request: PodRequest,
    node: str,
    *,
    without: Iterable[ContainerShares] = (),
) -> Placement | NodeRefusal:
    """Pick shares for the pod on ``node`` as if the holding ``without`` were not booked.

    Of its alternatives, the first one that fits. ``NodeRefusal`` when the pod does not fit.
    """
    mine = tuple(without)
    if mine:
        table.unbook(node, mine)
    try:
        refusal: NodeRefusal | None = None
        for choice in options(request):
            found = _pick(table, choice, node)
            if isinstance(found, Placement):
                return found
            refusal = refusal or found
        return refusal or unregistered(request, node)
    finally:
        if mine:
            table.book(node, mine)


def _pick(table: DeviceTable, request: PodRequest, node: str) -> Placement | NodeRefusal:
    found = table.place(node)
    if found is None:
        return unregistered(request, node)
    plan = compile_request(request)
    view = View(table, found.block, np.array([found.column], np.intp))
    outcome = place(view, plan, choose=True)
    if not outcome.fits[0]:
        return refusal_of(view, request, plan, outcome)
    shares = _with_starts(view, _given(view, plan, outcome))
    if shares is None:
        raise InvariantBroken(what=f"partitions that fit on {node} have no places")
    return Placement(
        node=node,
        containers=tuple(
            ContainerShares(
                name=container.name,
                kind=container.kind,
                shares=_in_order(
                    [
                        share
                        for step, some in zip(plan.steps, shares, strict=True)
                        if step.container == number
                        for share in some
                    ],
                    found,
                ),
                priority=container.priority,
            )
            for number, container in enumerate(request.containers)
        ),
    )


def _in_order(shares: Iterable[Share], found: Place) -> tuple[Share, ...]:
    """Return the shares of each of a container's requests by device and place."""
    return tuple(
        share
        for _, some in groupby(shares, key=lambda share: share.vendor)
        for share in sorted(some, key=lambda share: (found.rows[share.uuid], share.start or 0))
    )


class _Given(NamedTuple):
    """One share before partitions have their places."""

    row: int
    share: Share
    profile: int
    """Place in the table of the device's division; -1 for a share that is no partition."""


def _given(view: View, plan: Plan, outcome: Outcome) -> list[list[_Given]]:
    """Return the shares of the chosen devices, by step."""
    uuids = view.block.uuids[view.column(0)]
    given: list[list[_Given]] = []
    for number, step in enumerate(plan.steps):
        request = step.request
        mib = np.broadcast_to(wanted_mib(view, request), (view.block.width, 1))
        some: list[_Given] = []
        for row in np.flatnonzero(outcome.chosen[number][:, 0]).tolist():
            grant = _grant(view, row, request)
            share = Share(
                vendor=request.vendor,
                uuid=uuids[row],
                memory_mib=int(mib[row, 0]),
                core_pct=request.core_pct,
                exclusive=request.exclusive,
                kind=request.kind,
                mode=_named_mode(view, row),
            )
            if grant is not None:
                share = replace(
                    share,
                    core_pct=grant.core_pct,
                    exclusive=grant.exclusive,
                    kind=grant.kind,
                    profile=_division(view, row).profiles[grant.profile].name,
                )
            share = _limited(share, request, view.block, (row, view.column(0)))
            profile = -1 if grant is None or not share.profile else grant.profile
            some.append(_Given(row, share, profile))
        given.append(some)
    return given


def _limited(share: Share, asked: DeviceRequest, block: Block, at: tuple[int, int]) -> Share:
    """Return the share with the limits above its request that its device has (ADR 52)."""
    if share.exclusive or share.profile or share.mode:
        return replace(share, memory_limit_mib=0, core_limit_pct=0)
    memory_mib = int(block.memory_mib[at])
    is_backed = block.capacity_mib[at] <= memory_mib and not block.largest_mib[at]
    limit_mib = min(asked.memory_limit_mib, memory_mib) if is_backed else 0
    return replace(
        share,
        memory_limit_mib=limit_mib if limit_mib > share.memory_mib else 0,
        core_limit_pct=asked.core_limit_pct if share.core_pct else 0,
    )


def with_limits(
    table: DeviceTable, request: PodRequest, node: str, containers: tuple[ContainerShares, ...]
) -> tuple[ContainerShares, ...]:
    """Return shares that satisfy the request with the limits that it has on their devices.

    Shares that were picked for another request, such as a Workload's, may have other limits.
    """
    choice = next(one for one in options(request) if _satisfies(table, one, node, containers))
    found = table.place(node)
    if found is None:
        raise InvariantBroken(what=f"node {node} has shares and is not in the table")
    return tuple(
        replace(
            held,
            shares=tuple(
                _limited(share, asked, found.block, (found.rows[share.uuid], found.column))
                for share in held.shares
                for asked in wanted.requests
                if asked.vendor == share.vendor
            ),
        )
        for wanted, held in zip(choice.containers, containers, strict=True)
    )


def _named_mode(view: View, row: int) -> str:
    """Return the device's mode where the share has to name it, see ``Share.mode``."""
    mode, _ = view.table.modes.words[int(view.block.mode[row, view.column(0)])]
    return mode if mode in NAMED_MODES else ""


def _division(view: View, row: int) -> Division:
    return view.table.divisions[int(view.block.division[row, view.column(0)])]


def _grant(view: View, row: int, request: DeviceRequest) -> Grant | None:
    division = _division(view, row)
    return division.grant(request) if division.profiles else None


def _with_starts(view: View, given: list[list[_Given]]) -> list[list[Share]] | None:
    """Return the shares by step, partitions with their places; ``None`` without such places."""
    starts: dict[tuple[int, str], int | None] = {}
    for row in {one.row for some in given for one in some if one.profile >= 0}:
        mine = [
            (number, one)
            for number, some in enumerate(given)
            for one in some
            if one.row == row and one.profile >= 0
        ]
        found = assign_starts(
            _division(view, row),
            int(view.block.taken[row, view.column(0)]),
            [one.profile for _, one in mine],
        )
        if found is None:
            return None
        starts.update(
            {(n, one.share.uuid): start for (n, one), start in zip(mine, found, strict=True)}
        )
    return [
        [replace(one.share, start=starts.get((number, one.share.uuid))) for one in some]
        for number, some in enumerate(given)
    ]


def satisfies(
    table: DeviceTable, request: PodRequest, node: str, containers: tuple[ContainerShares, ...]
) -> bool:
    """Return whether the pod's shares on ``node`` are exactly its request, on devices in use.

    Of a pod with alternatives: exactly one of them. Limits above the request are not compared: no
    device is chosen by them.
    """
    return any(_satisfies(table, choice, node, containers) for choice in options(request))


def _satisfies(
    table: DeviceTable, request: PodRequest, node: str, containers: tuple[ContainerShares, ...]
) -> bool:
    found = table.place(node)
    if found is None or len(containers) != len(request.containers):
        return False
    column = found.column
    for wanted, held in zip(request.containers, containers, strict=True):
        if (wanted.name, wanted.kind) != (held.name, held.kind):
            return False
        left = list(held.shares)
        for asked in wanted.requests:
            mine = [share for share in left if share.vendor == asked.vendor]
            left = [share for share in left if share.vendor != asked.vendor]
            selector = request.selectors.get(asked.vendor, NO_CONSTRAINT)
            is_by_part = wants_parts(asked, selector) and not selector.numa_bind
            alone = [share.uuid for share in mine if not (is_by_part and share.part)]
            if len(mine) != asked.count or len(set(alone)) != len(alone):
                return False
            for share in mine:
                row = found.rows.get(share.uuid)
                if row is None or not _is_usable(found, row):
                    return False
                memory_mib = int(found.block.memory_mib[row, column])
                division = table.divisions[found.block.division[row, column]]
                if not _is_granted(share, asked, division, memory_mib):
                    return False
        if left:
            return False
    return True


def _is_granted(share: Share, asked: DeviceRequest, division: Division, memory_mib: int) -> bool:
    """Return whether the share is the one that a device with this memory and table would grant."""
    expected = (asked.memory_mib_on(memory_mib), asked.core_pct, asked.exclusive, asked.kind, "")
    if division.profiles:
        grant = division.grant(asked)
        if grant is None:
            return False
        profile = division.profiles[grant.profile]
        expected = (
            grant.memory_mib,
            grant.core_pct,
            grant.exclusive,
            grant.kind,
            profile.name,
        )
    return expected == (
        share.memory_mib,
        share.core_pct,
        share.exclusive,
        share.kind,
        share.profile,
    )


def _is_usable(found: Place, row: int) -> bool:
    block, at = found.block, (row, found.column)
    return bool(block.known[at] and block.healthy[at] and block.alive[at])
