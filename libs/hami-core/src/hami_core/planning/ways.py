# SPDX-License-Identifier: Apache-2.0
"""Finds ways to start a pod that no node takes, and the verdict that it would get now.

A way is offered only if it was applied to the given ledger and a node then took the pod, quotas and
the constraints on nodes included; afterwards the ledger is as before. Ways are compared
by cost:

====== ==========================================  ================================================
kind   cost                                        way
====== ==========================================  ================================================
less   fraction that is given up, see ``whatif``   change the request
move   ``MOVE_COST`` for each pod                  restart running pods elsewhere, see ``defrag``
wait   ``WAIT_COST`` for each pod                  the fewest pods of one node that have to end
node   ``NODE_COST``                               add a node like a present one
====== ==========================================  ================================================

The search is bounded: pods to wait for or to move are looked for on the ``NODES_TRIED`` nodes that
are closest to taking the pod. Memory in MiB, ages in seconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.events.inventory import NodeDevices
from hami_common.model.request import PodRequest
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.placement.details import holder_kind
from hami_core.placement.reasons import RESOLVABLE, NodeExplanation, explain
from hami_core.planning.defrag import Move, Tenant, plan_moves
from hami_core.planning.eligible import Document
from hami_core.planning.scaling import Pods, add_nodes, template_of
from hami_core.planning.victims import Pod, Unit, Victims, find_victims, run, without
from hami_core.planning.whatif import Change, Governed, Refusal, Scene, changes

MOVE_COST: Final = 0.25
WAIT_COST: Final = 0.3
NODE_COST: Final = 1.0
NODES_TRIED: Final = 64
MOVES_MOST: Final = 2
_MOVE_TRIALS: Final = 2000
_MOVE_TARGETS: Final = 4
_WAIT_TESTS: Final = 128
_KINDS_TRIED: Final = 16
"""Kinds of nodes of which one more is tried, the most frequent first."""


class Occupant(Struct, frozen=True, kw_only=True):
    """Holder of shares on a node."""

    kind: str
    """See ``hami_common.events.decision.DeviceHolder``."""
    namespace: str
    name: str
    memory_mib: int
    """Sum over its shares."""
    age_s: float
    """Time since its shares were reserved."""


class Way(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way to start the pod."""

    kind: Literal["less", "move", "wait", "node"]
    cost: float
    """Smaller is better, see the module docstring."""
    node: str
    """Node on which the pod would start."""
    change: Change | None = None
    """For ``less``."""
    moves: tuple[Move, ...] = ()
    """For ``move``: in order, each possible after the ones before it."""
    ends: tuple[Occupant, ...] = ()
    """For ``wait``: all of these have to end; most memory first."""
    like: str = ""
    """For ``node``: the present node that the added one equals, empty and healthy."""


class Standing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Verdict that a pod would get now."""

    nodes: int
    feasible: int
    best: str = ""
    """The node that would be chosen."""
    refusals: tuple[Refusal, ...] = ()
    """Those of devices first, then nodes that kube-scheduler excludes."""
    closest: tuple[Way, ...] = ()
    """Cheapest first; only where no node fits."""
    unmoved: str = ""
    """Reason that no moves were tried; empty: they were, or a node fits."""
    explained: NodeExplanation | None = None
    """Device by device, of the requested node."""


class Surroundings(Struct, frozen=True, kw_only=True):
    """Knowledge beyond the ledger with which ways are found."""

    now_s: float
    excluded: Mapping[str, str] = MappingProxyType({})
    """Nodes that kube-scheduler does not offer the pod, with the constraint."""
    tenants: Sequence[Tenant] | None = None
    """Pods that may be moved; ``None``: not known."""
    unmoved: str = ""
    """Reason that the tenants are not known."""
    inventory: Iterable[NodeDevices] = ()
    """Devices of present nodes, for nodes like them."""
    documents: Mapping[str, Document] = MappingProxyType({})
    """Nodes of the Kubernetes API, by name."""
    pod: Document | None = None
    """The pod in the Kubernetes API."""


def standing(
    ledger: Ledger,
    request: PodRequest,
    around: Surroundings,
    *,
    node: str = "",
    governed: Governed | None = None,
) -> Standing:
    """Return the pod's verdict now, and if it is refused the ways to start it.

    ``node`` is explained device by device.
    """
    search = _Search(ledger, request, governed, around)
    best, filtered = search.scene.best(request)
    return Standing(
        nodes=len(ledger.table.nodes()),
        feasible=len(filtered.left),
        best=best,
        refusals=search.scene.refusals(request, filtered),
        closest=() if best else search.ways(),
        unmoved="" if best else around.unmoved,
        explained=explain(ledger.table, request, node) if node else None,
    )


class _Search:
    """Search for ways on one ledger, which is as before after each method."""

    def __init__(
        self,
        ledger: Ledger,
        request: PodRequest,
        governed: Governed | None,
        around: Surroundings,
    ) -> None:
        self._ledger = ledger
        self._request = request
        self._governed = governed
        self._around = around
        self.scene = Scene(ledger, governed, excluded={request.uid: around.excluded})

    def ways(self) -> tuple[Way, ...]:
        """Return all ways found, cheapest first."""
        found = [*self._less(), *self._move(), *self._wait(), *self._node()]
        return tuple(sorted(found, key=lambda way: way.cost))

    def _less(self) -> Iterator[Way]:
        for change in changes(self.scene, self._request):
            yield Way(kind="less", cost=change.cost, node=change.node, change=change)

    def _near(self) -> list[str]:
        """Return the nodes where pods that leave may help, the closest first."""
        nearest = self.scene.nearest(self._request, NODES_TRIED)
        return [one.node for one in nearest if one.code in RESOLVABLE]

    # --- move ------------------------------------------------------------------------------------

    def _move(self) -> Iterator[Way]:
        near, table = set(self._near()), self._ledger.table
        tenants = [one for one in self._around.tenants or () if one.node in near]
        if not tenants:
            return
        plan = plan_moves(
            table,
            self._request,
            tenants,
            most_moves=MOVES_MOST,
            most_trials=_MOVE_TRIALS,
            excluded=self._around.excluded,
            most_targets=_MOVE_TARGETS,
        )
        if not plan.moves:
            return
        for move in plan.moves:
            table.unbook(move.source, move.gives)
            table.book(move.target, move.takes)
        node, _ = self.scene.best(self._request)
        for move in reversed(plan.moves):
            table.unbook(move.target, move.takes)
            table.book(move.source, move.gives)
        if node:
            cost = MOVE_COST * len(plan.moves)
            yield Way(kind="move", cost=cost, node=node, moves=plan.moves)

    # --- wait ------------------------------------------------------------------------------------

    def _wait(self) -> Iterator[Way]:
        best: Victims | None = None
        for node in self._near():
            found = run(
                find_victims(
                    self._ledger.table,
                    self._request,
                    node,
                    [_unit(holding) for holding in self._others(node)],
                    below=None if best is None else best.cost,
                    tests=_WAIT_TESTS,
                )
            )
            if found is not None and self._fits_without(found):
                best = found
        if best is not None:
            uids = best.uids()
            holdings = [
                holding for holding in self._others(best.node) if holding.record.pod_uid in uids
            ]
            ends = [self._occupant(holding) for holding in holdings]
            ends.sort(key=lambda one: (-one.memory_mib, one.namespace, one.name))
            cost = WAIT_COST * len(ends)
            yield Way(kind="wait", cost=cost, node=best.node, ends=tuple(ends))

    def _others(self, node: str) -> list[Holding]:
        """Return the holdings of other pods on the node."""
        found = self._ledger.holdings_of_node(node)
        return [holding for holding in found if holding.record.pod_uid != self._request.uid]

    def _fits_without(self, victims: Victims) -> bool:
        """Return whether the pod starts when these pods have ended, quotas included."""
        with without(self._ledger.table, victims.node, victims.units):
            node, _ = self.scene.best(self._request)
        return bool(node)

    def _occupant(self, holding: Holding) -> Occupant:
        record = holding.record
        return Occupant(
            kind=holder_kind(record),
            namespace=record.namespace,
            name=record.pod,
            memory_mib=sum(share.memory_mib for c in record.containers for share in c.shares),
            age_s=max(0.0, self._around.now_s - record.time_s),
        )

    # --- node ------------------------------------------------------------------------------------

    def _node(self) -> Iterator[Way]:
        inventory = tuple(self._around.inventory)
        for like in _samples(inventory):
            template = template_of(like, inventory, self._around.documents.get(like))
            uid = self._request.uid
            pods = Pods(
                requests=(self._request,),
                excluded={uid: self._around.excluded},
                documents={} if self._around.pod is None else {uid: self._around.pod},
            )
            try:
                (added,), excluded = add_nodes(self._ledger, template, 1, pods)
            except RequestInvalid:
                continue  # a present node has the name of the added one
            node, _ = Scene(self._ledger, self._governed, excluded=excluded).best(self._request)
            self._ledger.table.remove_node(added)
            if node:
                yield Way(kind="node", cost=NODE_COST, node=node, like=like)
                return


def _unit(holding: Holding) -> Unit:
    record = holding.record
    pod = Pod(uid=record.pod_uid, start_s=record.time_s)
    return Unit(pods=(pod,), here=(record.containers,))


def _samples(inventory: Sequence[NodeDevices]) -> list[str]:
    """Return one node of each kind, the most frequent kind first."""
    by_node: dict[str, list[NodeDevices]] = {}
    for known in inventory:
        if known.devices:
            by_node.setdefault(known.node, []).append(known)
    kinds = {node: _kind(some) for node, some in sorted(by_node.items())}
    counts = Counter(kinds.values())
    first = {kind: node for node, kind in reversed(kinds.items())}
    return [first[kind] for kind, _ in counts.most_common(_KINDS_TRIED)]


def _kind(some: Iterable[NodeDevices]) -> tuple[object, ...]:
    """Return a key that is equal for nodes whose empty devices are equal."""
    return tuple(
        (
            known.vendor,
            str(
                [
                    replace(
                        device,
                        uuid="",
                        healthy=True,
                        cordoned=False,
                        health_reason="",
                        foreign_mib=0,
                        bursts=(),
                    )
                    for device in known.devices
                ]
            ),
        )
        for known in sorted(some, key=lambda one: one.vendor)
    )
