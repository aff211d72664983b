# SPDX-License-Identifier: Apache-2.0
"""The devices a pod gets on the chosen node: the same placing as the filter's, on one column.

Shares of a container stand in the order of its requests and, within one, in the order of the node's
devices (the vendor's own enumeration). Memory in MiB, compute in percent of one device.
"""

from collections.abc import Iterable

import numpy as np

from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.model.request import PodRequest
from hami_scheduler.core.fit import Plan, View, compile_request, wanted_mib
from hami_scheduler.core.placing import Outcome, place
from hami_scheduler.core.reasons import NodeRefusal, refusal_of, unregistered
from hami_scheduler.core.table import DeviceTable, Place


def pick(
    table: DeviceTable,
    request: PodRequest,
    node: str,
    *,
    without: Iterable[ContainerShares] = (),
) -> Placement | NodeRefusal:
    """Shares for the pod on ``node``, as if the holding ``without`` were not booked; or why not."""
    mine = tuple(without)
    if mine:
        table.unbook(node, mine)
    try:
        return _pick(table, request, node)
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
    return Placement(
        node=node,
        containers=tuple(
            ContainerShares(
                name=container.name,
                kind=container.kind,
                shares=_shares(view, plan, outcome, number),
                priority=container.priority,
            )
            for number, container in enumerate(request.containers)
        ),
    )


def _shares(view: View, plan: Plan, outcome: Outcome, container: int) -> tuple[Share, ...]:
    column = view.column(0)
    uuids = view.block.uuids[column]
    shares: list[Share] = []
    for number, step in enumerate(plan.steps):
        if step.container != container:
            continue
        mib = np.broadcast_to(wanted_mib(view, step.request), (view.block.width, 1))
        shares.extend(
            Share(
                vendor=step.request.vendor,
                uuid=uuids[row],
                memory_mib=int(mib[row, 0]),
                core_pct=step.request.core_pct,
                exclusive=step.request.exclusive,
            )
            for row in np.flatnonzero(outcome.chosen[number][:, 0])
        )
    return tuple(shares)


def satisfies(
    table: DeviceTable, request: PodRequest, node: str, containers: tuple[ContainerShares, ...]
) -> bool:
    """Whether shares that the pod holds on ``node`` are exactly what it asks for.

    On devices in use.
    """
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
            if len(mine) != asked.count or len({share.uuid for share in mine}) != asked.count:
                return False
            for share in mine:
                row = found.rows.get(share.uuid)
                if row is None or not _is_usable(found, row):
                    return False
                memory_mib = int(found.block.memory_mib[row, column])
                if (share.memory_mib, share.core_pct, share.exclusive) != (
                    asked.memory_mib_on(memory_mib),
                    asked.core_pct,
                    asked.exclusive,
                ):
                    return False
        if left:
            return False
    return True


def _is_usable(found: Place, row: int) -> bool:
    block, at = found.block, (row, found.column)
    return bool(block.known[at] and block.healthy[at] and block.alive[at])
