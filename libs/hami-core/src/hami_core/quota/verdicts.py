# SPDX-License-Identifier: Apache-2.0
"""Applies quotas to filter's answer: the fitting nodes that the limits allow.

Placement is evaluated first, so a pod that fits nowhere gets the reason why it does not fit. A pod
that fits somewhere and would exceed a quota is refused everywhere with one text. Nodes may differ
only where a percentage of a device's memory is requested: it counts as the MiB that the node's
smallest device would give, so nodes are evaluated by that size. The live scheduler, simulations and
replays all use ``QuotaVerdicts``.
"""

from collections.abc import Callable, Collection
from itertools import chain
from typing import Final

import numpy as np

from hami_common.events.allocation import Account
from hami_common.events.decision import NODES_LISTED, RefusalClass
from hami_common.model.request import PodRequest, options
from hami_common.vendors import nvidia
from hami_core.placement.fit import View, totals_of
from hami_core.placement.nodenames import NodeNames
from hami_core.placement.reasons import CLASSES_SHOWN, TEXT_BYTES, NodeRefusal, other_reasons
from hami_core.placement.verdicts import Filtered
from hami_core.quota.accounts import QuotaLedger, priority_too_high, unknown_queue
from hami_core.quota.resourcequota import Amounts, Asker, least_amounts, vendors_by_percentage
from hami_core.table.block import LEAST_MIB, Columns
from hami_core.table.table import COLUMN_BITS, COLUMN_MASK, DeviceTable

Ask = Callable[[Amounts], NodeRefusal | None]
"""Returns why the pod may not use the amounts, ``None`` when it may."""
WAITING_CODES: Final = frozenset({"QueueCannotBorrow", "QueueWaitsItsTurn"})
"""Refusals after which a pod waits for its queue to borrow."""
TOLD_BYTES: Final = (CLASSES_SHOWN - 1) * TEXT_BYTES
"""Maximum of all texts of one answer together, without the text that stands for the rest.

With kube-scheduler's additions, a pod's condition stays under 1 KiB.
"""


class Allowed:
    """``Filtered`` without the nodes that quotas refuse."""

    def __init__(
        self, filtered: Filtered, left: NodeNames, refused: list[tuple[NodeRefusal, Columns]]
    ) -> None:
        """``refused`` are places of nodes that fit, by text."""
        self.nodes = filtered.nodes
        self.left = left
        """Nodes that remain, in the order in which they were named."""
        self.refused = refused
        self.filtered = filtered
        """Answer of filter, before quotas."""

    def groups(self) -> list[tuple[NodeRefusal, Columns]]:
        """Return the refused nodes by text, as places in the order in which they were named.

        As many texts as fit in ``TOLD_BYTES``, those of quotas first, then those of most nodes; the
        nodes of the others share one.
        """
        if not self.refused:
            return self.filtered.groups()
        shown: list[tuple[NodeRefusal, Columns]] = []
        rest: list[Columns] = []
        left = TOLD_BYTES
        quotas = sorted(self.refused, key=lambda group: (-len(group[1]), group[0].text))
        for refusal, places in (*quotas, *self.filtered.groups()):
            left -= len(refusal.text.encode())
            if left >= 0 and refusal.code != "OtherReasons":
                shown.append((refusal, places))
            else:
                left = -1  # the remaining groups have fewer nodes
                rest.append(places)
        if rest:
            hidden = len(self.filtered.classes()) + len(self.refused) - len(shown)
            shown.append((other_reasons(hidden), np.concatenate(rest)))
        return shown

    def classes(self) -> tuple[RefusalClass, ...]:
        """Return the refused nodes by class, for the recorded decision."""
        return (*self.filtered.classes(), *map(self._class, self.refused))

    def _class(self, refused: tuple[NodeRefusal, Columns]) -> RefusalClass:
        refusal, places = refused
        names = sorted(self.nodes.several(places))
        return RefusalClass(
            code=refusal.code,
            text=refusal.text,
            count=len(places),
            nodes=tuple(names[:NODES_LISTED]),
        )


class QuotaVerdicts:
    """Answers over one table and one ledger of quotas."""

    def __init__(self, table: DeviceTable, ledger: QuotaLedger) -> None:
        """Query ``ledger``, and add claims of pods that wait for their queue to it."""
        self._table = table
        self._ledger = ledger

    def governs(self, namespace: str, asker: Asker) -> bool:
        """Return whether any quota or queue can refuse the pod."""
        return self._is_astray(namespace, asker) or self._ledger.governs(namespace, asker.account)

    def _is_astray(self, namespace: str, asker: Asker) -> bool:
        """Return whether the pod names a queue that it cannot use."""
        tree = self._ledger.tree
        return bool(asker.wish and tree) and not tree.admits(namespace, asker.wish)

    def _too_high(self, request: PodRequest, account: Account | None) -> NodeRefusal | None:
        """Return why the pod's queue refuses its task priority, ``None`` when it does not."""
        tree = self._ledger.tree
        queue = tree.queue_of(request.namespace, account.queue if account else "")
        floor = tree.task_priority_floor(queue)
        for container in (one for choice in options(request) for one in choice.containers):
            priority = container.priority
            if priority is None and any(one.vendor == nvidia.NAME for one in container.requests):
                priority = nvidia.DEFAULT_PRIORITY
            if priority is not None and priority < floor:
                return priority_too_high(container.name, priority, queue, floor)
        return None

    def allowed(
        self,
        request: PodRequest,
        filtered: Filtered,
        asker: Asker,
        *,
        waiting: Collection[str],
    ) -> Filtered | Allowed:
        """Return filter's answer without the nodes that quotas refuse, and update the pod's claim.

        ``waiting``: pods that waited for their queues and still do, by uid.
        """
        answer, wanted = self.look(request, filtered, asker, waiting=waiting)
        if wanted is None or len(answer.left):
            self._ledger.unclaim(request.uid)
        else:
            self._ledger.claim(request.uid, request.namespace, asker.account, wanted)
        return answer

    def look(
        self,
        request: PodRequest,
        filtered: Filtered,
        asker: Asker,
        *,
        waiting: Collection[str],
    ) -> tuple[Filtered | Allowed, Amounts | None]:
        """Return the same answer and the amounts the pod waits for; changes no claim."""
        namespace, account = request.namespace, asker.account
        if self._is_astray(namespace, asker):
            refusal = unknown_queue(asker.wish, namespace)
            return allowed(self._table, request, account, filtered, lambda _: refusal), None
        if not self._ledger.governs(namespace, account):
            return filtered, None
        if (too_high := self._too_high(request, account)) is not None:
            return allowed(self._table, request, account, filtered, lambda _: too_high), None
        own = [(node, request.uid) for node in asker.own]
        still = frozenset(waiting)
        short: list[Amounts] = []

        def ask(wanted: Amounts) -> NodeRefusal | None:
            refusal = self._ledger.first_look(
                namespace, account, wanted, own=own, waits=still.__contains__
            )
            if refusal is not None and refusal.code in WAITING_CODES:
                short.append(wanted)
            return refusal

        answer = allowed(self._table, request, account, filtered, ask)
        return answer, short[-1] if short else None


def wanted_on(
    table: DeviceTable, request: PodRequest, account: Account | None, node: str
) -> Amounts:
    """Return the amounts that the request would count on the node, the least if it is unknown."""
    vendors = vendors_by_percentage(request)
    if not vendors or node not in table.codes:
        return least_amounts(request, {}, account)
    ((least_mib, _),) = _by_least_mib(table, [node], vendors)
    return least_amounts(request, least_mib, account)


def allowed(
    table: DeviceTable,
    request: PodRequest,
    account: Account | None,
    filtered: Filtered,
    ask: Ask,
) -> Allowed:
    """Evaluate quotas for each amount that the request may have on the nodes that fit."""
    if not len(filtered.left):
        return Allowed(filtered, filtered.left, [])
    stays = np.zeros(len(filtered.nodes), np.bool_)
    why: dict[NodeRefusal, list[Columns]] = {}
    for number, choice in enumerate(options(request)):
        if filtered.fits:
            fitting = np.flatnonzero(filtered.fits[number] & ~stays)
        else:
            fitting = _fitting(filtered)
        stays[fitting] = True
        refused = _refused(table, choice, account, ask, nodes=filtered.nodes, fitting=fitting)
        for refusal, places in refused:
            stays[places] = False
            why.setdefault(refusal, []).append(places)
    if not why:
        return Allowed(filtered, filtered.left, [])
    left = filtered.nodes.part(stays) if stays.any() else NodeNames.of(())
    seen = stays.copy()
    groups: list[tuple[NodeRefusal, Columns]] = []
    for refusal, some in why.items():
        places = np.unique(np.concatenate(some))
        places = places[~seen[places]]
        seen[places] = True
        if len(places):
            groups.append((refusal, places))
    return Allowed(filtered, left, groups)


def _refused(
    table: DeviceTable,
    request: PodRequest,
    account: Account | None,
    ask: Ask,
    *,
    nodes: NodeNames,
    fitting: Columns,
) -> list[tuple[NodeRefusal, Columns]]:
    """Return the nodes among ``fitting`` that quotas refuse, by refusal."""
    if not len(fitting):
        return []
    vendors = vendors_by_percentage(request)
    if not vendors:
        refusal = ask(least_amounts(request, {}, account))
        return [] if refusal is None else [(refusal, fitting)]
    found: dict[NodeRefusal, list[Columns]] = {}
    for least_mib, mine in _by_least_mib(table, nodes.several(fitting), vendors):
        refusal = ask(least_amounts(request, least_mib, account))
        if refusal is not None:
            found.setdefault(refusal, []).append(fitting[mine])
    return [(refusal, np.sort(np.concatenate(some))) for refusal, some in found.items()]


def _fitting(filtered: Filtered) -> Columns:
    """Return the places of the nodes that fit."""
    fits = np.ones(len(filtered.nodes), np.bool_)
    fits[list(chain.from_iterable(places.tolist() for _, places in filtered.groups()))] = False
    return np.flatnonzero(fits)


def _by_least_mib(
    table: DeviceTable, names: list[str], vendors: tuple[str, ...]
) -> list[tuple[dict[str, int], Columns]]:
    """Group places in ``names`` by the memory of the smallest device of each vendor."""
    codes = np.array([table.codes[name] for name in names], np.int64)
    blocks, columns = codes >> COLUMN_BITS, codes & COLUMN_MASK
    least = np.zeros((len(names), len(vendors)), np.int64)
    for number in np.unique(blocks).tolist():
        mine = np.flatnonzero(blocks == number)
        view = View(table, table.blocks[number], None)
        for at, vendor in enumerate(vendors):
            totals = totals_of(view, vendor)
            if totals is not None:
                least[mine, at] = totals[LEAST_MIB][columns[mine]]
    rows, group = np.unique(least, axis=0, return_inverse=True)
    return [
        (dict(zip(vendors, row, strict=True)), np.flatnonzero(group.reshape(-1) == number))
        for number, row in enumerate(rows.tolist())
    ]
