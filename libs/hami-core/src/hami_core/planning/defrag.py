# SPDX-License-Identifier: Apache-2.0
"""Plans moves of running pods, one after another, so that a pod fits that does not fit now.

A move ends a pod on its node and starts it where the plan says: on another node, or on other
devices of its own. A move is made only where the pod fits at that time, with its own share
released, by the same placing as the scheduler's: so selectors, modes, mutex, NUMA, cordons, silent
agents and the places of hardware partitions count for moved pods as for new ones. The plan has the
fewest moves and, among those plans, the least memory moved; a pod that is moved twice counts twice.

The search deepens: it searches for plans of one move, then of two … A branch is cut where more pods
have to leave every node than moves are left: that bound is exact, so a plan that is found is the
best, and a search that ends without a plan has proved that no plan has so few moves. It also gives
up after a number of trials (placings tried); then nothing is proved beyond the moves that were
searched in full. Equal idle devices are tried once, nodes likewise.

Works on a table that the caller may modify; leaves it as it was. Memory in MiB.

A plan is executed in steps (ADR 0049): ``places_of`` lists what to hold before the first eviction,
``progress`` derives the next step from the held places and the pods alone.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hami_common.events.allocation import owner_of
from hami_common.model.placement import ContainerShares, Placement
from hami_common.model.request import ContainerRequest, DeviceSelector, PodRequest, options
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import Ledger
from hami_core.ledger.podfacts import PodFacts
from hami_core.placement.fit import compile_request
from hami_core.placement.pick import pick
from hami_core.placement.verdicts import Verdicts
from hami_core.table.block import Cell
from hami_core.table.table import DeviceTable

MOST_MOVES: Final = 4
MOST_TRIALS: Final = 200_000


class Tenant(Struct, frozen=True, kw_only=True):
    """A running pod that may be moved."""

    request: PodRequest
    """The pod's request; its uid identifies the pod."""
    node: str
    containers: tuple[ContainerShares, ...]
    """The pod's shares."""
    stays_on_node: bool = False
    """The pod may move only to devices of its own node."""
    excluded: frozenset[str] = frozenset()
    """Nodes that kube-scheduler would not offer the pod."""


class Move(Struct, frozen=True, kw_only=True):
    """One pod that is ended and started elsewhere."""

    namespace: str
    pod: str
    uid: str
    source: str
    """Node on which it runs."""
    target: str
    gives: tuple[ContainerShares, ...]
    takes: tuple[ContainerShares, ...]
    memory_mib: int
    """Memory that it frees."""


class DefragPlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a search."""

    outcome: Literal["fits", "found", "none", "not-found"]
    """``fits``: no move is needed.

    ``none``: proved, no plan of up to ``moves_searched`` moves exists. ``not-found``: the trials
    ended first, a plan may exist.
    """
    moves_searched: int
    """Every plan of up to so many moves was searched, or was no better than this one."""
    trials: int
    moves: tuple[Move, ...] = ()
    """In order: each is possible after the ones before it."""
    memory_mib: int = 0
    """Sum over all moves."""
    is_least_memory: bool = True
    """True when no plan with so few moves moves less; false when the trials ended first."""
    node: str = ""
    """Node on which the pod fits then."""
    containers: tuple[ContainerShares, ...] = ()
    """Shares that it would get."""
    movable: int = 0
    """Number of pods that could be moved."""


def plan_moves(
    table: DeviceTable,
    wanted: PodRequest,
    tenants: Iterable[Tenant],
    *,
    most_moves: int = MOST_MOVES,
    most_trials: int = MOST_TRIALS,
    excluded: Collection[str] = (),
    most_targets: int | None = None,
) -> DefragPlan:
    """Return the best plan by which ``wanted`` fits on a node that is not ``excluded``.

    The module docstring defines "best" and "none". With ``most_targets`` each pod is tried on so
    many nodes only, its own first: then a plan of another number of moves may be better, and
    "none" proves nothing.
    """
    search = _Search(
        table,
        wanted,
        tenants,
        most_trials=most_trials,
        excluded=excluded,
        most_targets=most_targets,
    )
    try:
        return search.run(most_moves)
    finally:
        search.restore()


class Place(Struct, frozen=True, kw_only=True):
    """Devices that must be held before any pod of a plan is evicted."""

    request: PodRequest
    """Request of the pod that is to start there, for exactly these devices."""
    node: str
    awaits: tuple[str, ...]
    """UIDs of the moved pods on this node that must leave before."""


def places_of(plan: DefragPlan, wanted: PodRequest, tenants: Iterable[Tenant]) -> tuple[Place, ...]:
    """Return the places of a plan's moves, in order, and at last that of ``wanted``.

    Empty when a pod is moved twice: each pod is evicted at most once.
    """
    requests = {tenant.request.uid: tenant.request for tenant in tenants}
    if len({move.uid for move in plan.moves}) < len(plan.moves):
        return ()
    found: list[Place] = []
    for number, move in enumerate(plan.moves, start=1):
        leaving = [one.uid for one in plan.moves[:number] if one.source == move.target]
        request = _only_on(requests[move.uid], _uuids(move.takes))
        found.append(Place(request=request, node=move.target, awaits=tuple(leaving)))
    leaving = [one.uid for one in plan.moves if one.source == plan.node]
    request = _only_on(wanted, _uuids(plan.containers))
    return (*found, Place(request=request, node=plan.node, awaits=tuple(leaving)))


class Progress(Struct, frozen=True, kw_only=True):
    """State of a defragmentation, as its held places and the pods show it."""

    wanted: Holding | None
    """Place of the waiting pod; ``None`` when it is not held (any more)."""
    staying: tuple[PodFacts, ...]
    """Pods that are still to be evicted."""
    outstanding: tuple[Holding, ...]
    """Places of evicted pods whose replacements have no node yet."""
    pending: tuple[Holding, ...]
    """Places of ``staying``."""
    following: PodFacts | None
    """Pod to evict next; ``None`` while a replacement is outstanding."""


def progress(
    ledger: Ledger, purpose: str, wanted_uid: str, pod_of: Callable[[str], PodFacts | None]
) -> Progress:
    """Return the state of the defragmentation whose places are held for ``purpose``."""
    held = ledger.holdings_of_owner(purpose)
    awaited = {place.record.pod_uid: ledger.awaited(place) for place in held}
    uids = {one.record.pod_uid for some in awaited.values() for one in some}
    pods = [pod for uid in sorted(uids) if (pod := pod_of(uid)) is not None]
    staying = [pod for pod in pods if not pod.is_deleting and not pod.is_finished]
    places = [place for place in held if owner_of(place.record) != wanted_uid]
    pending: list[Holding] = []
    for pod in staying:
        # Equal pods of one controller: any of its places is the pod's, blocked ones first.
        free = [
            place
            for place in places
            if owner_of(place.record) == pod.controller and place not in pending
        ]
        pending += sorted(free, key=lambda place: -len(awaited[place.record.pod_uid]))[:1]
    outstanding = [place for place in places if place not in pending]
    ready = (
        pod
        for pod in staying
        for place in pending
        if owner_of(place.record) == pod.controller
        and all(one.record.pod_uid == pod.uid for one in awaited[place.record.pod_uid])
    )
    return Progress(
        wanted=next((place for place in held if owner_of(place.record) == wanted_uid), None),
        staying=tuple(staying),
        outstanding=tuple(outstanding),
        pending=tuple(pending),
        following=None if outstanding else next(ready, None),
    )


class _TrialsEndedError(Exception):
    """The number of trials is used up."""


class _Spot(NamedTuple):
    """Position of a pod."""

    node: str
    containers: tuple[ContainerShares, ...]


class _Option(NamedTuple):
    """One possible move."""

    uid: str
    spot: _Spot
    memory_mib: int


class _Found(NamedTuple):
    moves: tuple[Move, ...]
    memory_mib: int
    node: str
    containers: tuple[ContainerShares, ...]


class _Search:
    """One search."""

    def __init__(
        self,
        table: DeviceTable,
        wanted: PodRequest,
        tenants: Iterable[Tenant],
        *,
        most_trials: int,
        excluded: Collection[str],
        most_targets: int | None,
    ) -> None:
        self._table = table
        self._verdicts = Verdicts(table)
        self._wanted = wanted
        self._most_trials = most_trials
        self._offered = [name for name in table.nodes() if name not in excluded]
        self._most_targets = most_targets
        self._tenants = {t.request.uid: t for t in sorted(tenants, key=lambda t: t.request.uid)}
        self._start = {uid: _Spot(t.node, t.containers) for uid, t in self._tenants.items()}
        self._spots = dict(self._start)
        self._trials = 0
        self._path: list[Move] = []
        self._best: _Found | None = None
        self._needs: dict[tuple[str, tuple[tuple[str, _Spot], ...]], tuple[int, int]] = {}
        self._seen: dict[tuple[tuple[str, _Spot], ...], list[tuple[int, int]]] = {}
        requests = [wanted, *(t.request for t in self._tenants.values())]
        self._named = _named(requests)
        self._by_index = any(r.shape for q in requests for c in q.containers for r in c.requests)

    def run(self, most_moves: int) -> DefragPlan:
        """Deepen until a plan is found, the search space is exhausted, or the trials end."""
        searched = -1
        try:
            for limit in range(most_moves + 1):
                self._seen.clear()
                self._deepen(limit, 0)
                searched = limit
                if self._best is not None:
                    break
        except _TrialsEndedError:
            pass
        found = self._best
        if found is None:
            is_proved = searched == most_moves
            return DefragPlan(
                outcome="none" if is_proved else "not-found",
                moves_searched=max(0, searched),
                trials=self._trials,
                is_least_memory=False,
                movable=len(self._tenants),
            )
        return DefragPlan(
            outcome="found" if found.moves else "fits",
            moves_searched=max(0, searched, len(found.moves) - 1),
            trials=self._trials,
            moves=found.moves,
            memory_mib=found.memory_mib,
            is_least_memory=searched == len(found.moves),
            node=found.node,
            containers=found.containers,
            movable=len(self._tenants),
        )

    def restore(self) -> None:
        """Restore every pod to its original shares."""
        for uid, spot in self._start.items():
            if self._spots[uid] != spot:
                self._go(uid, spot)

    def _go(self, uid: str, spot: _Spot) -> None:
        now = self._spots[uid]
        self._table.unbook(now.node, now.containers)
        self._table.book(spot.node, spot.containers)
        self._spots[uid] = spot

    def _try(self) -> None:
        self._trials += 1
        if self._trials > self._most_trials:
            raise _TrialsEndedError

    # --- the tree of moves -----------------------------------------------------------------------

    def _deepen(self, left: int, moved_mib: int) -> None:
        """Search every plan of up to ``left`` more moves."""
        if self._best is not None and moved_mib >= self._best.memory_mib:
            return
        if self._is_seen(left, moved_mib):
            return
        self._try()
        feasible = self._verdicts.filter(self._wanted, self._offered).feasible
        if feasible:
            self._solved(feasible, moved_mib)
            return
        if not left:
            return
        leaving = self._leaving_by_node(left)
        if not leaving:
            return
        # With no move to spare, only moves that one of these nodes needs anyway help.
        helpful = None if min(leaving.values()) < left else frozenset(leaving)
        for option in self._options(helpful):
            source = self._spots[option.uid]
            self._path.append(self._move(option))
            self._go(option.uid, option.spot)
            try:
                self._deepen(left - 1, moved_mib + option.memory_mib)
            finally:
                self._go(option.uid, source)
                self._path.pop()

    def _solved(self, feasible: Sequence[str], moved_mib: int) -> None:
        scored = self._verdicts.prioritize(self._wanted, feasible)
        node = scored.best(1)[0][0]
        placed = pick(self._table, self._wanted, node)
        if isinstance(placed, Placement):
            self._best = _Found(tuple(self._path), moved_mib, node, placed.containers)

    def _move(self, option: _Option) -> Move:
        request, source = self._tenants[option.uid].request, self._spots[option.uid]
        return Move(
            namespace=request.namespace,
            pod=request.name,
            uid=option.uid,
            source=source.node,
            target=option.spot.node,
            gives=source.containers,
            takes=option.spot.containers,
            memory_mib=option.memory_mib,
        )

    def _is_seen(self, left: int, moved_mib: int) -> bool:
        """Return whether these spots were searched at no more cost and with as many moves left."""
        key = tuple((uid, spot) for uid, spot in self._spots.items() if spot != self._start[uid])
        before = self._seen.setdefault(key, [])
        if any(old >= left and mib <= moved_mib for old, mib in before):
            return True
        before.append((left, moved_mib))
        return False

    # --- the bound -------------------------------------------------------------------------------

    def _leaving_by_node(self, most: int) -> dict[str, int]:
        """Return the number of pods that must leave each node, where it is at most ``most``."""
        on_node: dict[str, list[str]] = {}
        offered = frozenset(self._offered)
        for uid, spot in self._spots.items():
            if spot.node in offered:
                on_node.setdefault(spot.node, []).append(uid)
        found = {node: self._leaving(node, uids, most) for node, uids in on_node.items()}
        return {node: count for node, count in found.items() if count <= most}

    def _leaving(self, node: str, uids: Sequence[str], most: int) -> int:
        """Return the same for one node on which ``uids`` can be moved.

        ``most`` + 1: more than that.
        """
        key = (node, tuple((uid, self._spots[uid]) for uid in uids))
        known, looked = self._needs.get(key, (0, 0))
        if known:
            return known
        for count in range(looked + 1, min(most, len(uids)) + 1):
            if any(self._fits_without(node, some) for some in combinations(uids, count)):
                self._needs[key] = (count, count)
                return count
        self._needs[key] = (0, max(most, looked))
        return most + 1

    def _fits_without(self, node: str, uids: Iterable[str]) -> bool:
        self._try()
        gone = [self._spots[uid].containers for uid in uids]
        for containers in gone:
            self._table.unbook(node, containers)
        placed = pick(self._table, self._wanted, node)
        for containers in gone:
            self._table.book(node, containers)
        return isinstance(placed, Placement)

    # --- possible moves --------------------------------------------------------------------------

    def _options(self, nodes: frozenset[str] | None) -> list[_Option]:
        """Return possible moves of pods on ``nodes`` (``None``: any), least memory first."""
        found: list[_Option] = []
        for uid, spot in list(self._spots.items()):
            if nodes is not None and spot.node not in nodes:
                continue
            memory_mib = sum(s.memory_mib for c in spot.containers for s in c.shares)
            self._table.unbook(spot.node, spot.containers)
            try:
                found += [
                    _Option(uid, other, memory_mib)
                    for other in self._destinations(self._tenants[uid])
                    if other != spot
                ]
            finally:
                self._table.book(spot.node, spot.containers)
        found.sort(key=lambda option: option.memory_mib)
        return found

    def _destinations(self, tenant: Tenant) -> Iterator[_Spot]:
        """Yield the spots where the pod fits with its share released: each choice of devices."""
        names = [tenant.node]
        if not tenant.stays_on_node:
            others = (name for name in self._table.nodes() if name != tenant.node)
            names += [name for name in others if name not in tenant.excluded]
        alike: set[tuple[object, ...]] = set()
        feasible = self._verdicts.filter(tenant.request, names).feasible
        for node in feasible[: self._most_targets]:
            cells = self._cells(node)
            if not any(cell.is_booked() for cell in cells):
                kind = (node == tenant.node, *sorted(self._kind(cell) for cell in cells))
                if kind in alike:
                    continue
                alike.add(kind)
            yield from self._choices(tenant.request, node, cells)

    def _choices(self, request: PodRequest, node: str, cells: Sequence[Cell]) -> Iterator[_Spot]:
        """Yield every choice of the node's devices that the pod fits on."""
        sizes = _sizes(request)
        tried: set[tuple[object, ...]] = set()
        seen: set[tuple[ContainerShares, ...]] = set()
        for size in range(max(sizes), min(sum(sizes), len(cells)) + 1):
            for some in combinations(cells, size):
                kind = tuple(self._kind(cell) for cell in some)
                if kind in tried:
                    continue
                tried.add(kind)
                self._try()
                placed = pick(self._table, _only_on(request, [c.uuid for c in some]), node)
                if isinstance(placed, Placement) and placed.containers not in seen:
                    seen.add(placed.containers)
                    yield _Spot(node, placed.containers)

    def _cells(self, node: str) -> list[Cell]:
        place = self._table.place(node)
        cells = [] if place is None else place.block.read(place.column)
        return [cell for cell in cells if cell.known]

    def _kind(self, cell: Cell) -> tuple[str, ...]:
        """Return a key that is equal for devices that this search need not distinguish."""
        if cell.is_booked() or cell.uuid in self._named:
            return (cell.uuid,)
        static = (
            cell.vendor,
            cell.type,
            cell.mode,
            cell.numa,
            cell.division,
            cell.memory_mib,
            cell.capacity_mib,
            cell.largest_mib,
            cell.foreign_mib,
            cell.burst_mib,
            cell.capacity_core,
            cell.slots,
            cell.healthy,
            cell.cordoned,
            cell.alive,
            cell.withheld,
            cell.index if self._by_index else 0,
        )
        return ("", *map(str, static))


def _named(requests: Iterable[PodRequest]) -> frozenset[str]:
    """Return the devices that any request names."""
    return frozenset(
        uuid
        for request in requests
        for choice in options(request)
        for selector in choice.selectors.values()
        for uuid in (*selector.allow_uuids, *selector.deny_uuids)
    )


def _sizes(request: PodRequest) -> list[int]:
    """Return the number of devices that each step requests."""
    return [step.request.count for step in compile_request(request).steps]


def _uuids(containers: Iterable[ContainerShares]) -> list[str]:
    return [share.uuid for container in containers for share in container.shares]


def _only_on(request: PodRequest, uuids: Sequence[str]) -> PodRequest:
    """Return a copy that allows only these devices, for each of its alternatives."""
    others = tuple(
        replace(other, selectors=_only(other.containers, other.selectors, uuids))
        for other in request.others
    )
    selectors = _only(request.containers, request.selectors, uuids)
    return replace(request, selectors=selectors, others=others)


def _only(
    containers: Iterable[ContainerRequest],
    selectors: Mapping[str, DeviceSelector],
    uuids: Sequence[str],
) -> dict[str, DeviceSelector]:
    vendors = {asked.vendor for container in containers for asked in container.requests}
    narrowed: dict[str, DeviceSelector] = {}
    for vendor in vendors:
        selector = selectors.get(vendor, DeviceSelector())
        wanted = tuple(uuid for uuid in uuids if selector.accepts_uuid(uuid))
        narrowed[vendor] = replace(selector, allow_uuids=wanted or ("",), deny_uuids=())
    return narrowed
