# SPDX-License-Identifier: Apache-2.0
"""Finds the fewest and least important pods that must leave a node for another pod to fit.

A ``Unit`` is evicted as a whole: one pod, or all members of a gang, wherever they are. Sets of
units are compared as kube-scheduler compares candidates (``pickOneNodeForPreemption``, v1.34):
fewest disruptions beyond a budget, then the lowest highest priority, the smallest sum of
priorities, the fewest pods, and the latest start among those of the highest priority.

The search goes through the sets in that order and takes the first that frees enough capacity, so
its answer is exact while it needs no more than ``tests`` trials. Beyond that it evicts all units
and restores units, the most important first, while the pod still fits: then no pod of the answer
could stay, but another answer might be cheaper, and ``Victims.is_exact`` is false. A trial unbooks
the shares of the set and books them again, so the table is unchanged whenever the search yields. A
trial also offers the memory that these pods use beyond their requests. Of pods it uses only their
priorities; times are Unix seconds.
"""

import heapq
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from hami_common.model.placement import ContainerShares
from hami_common.model.request import PodRequest
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import SPOT_OFFSET
from hami_core.placement.fit import Plan, Scene, Stage, View, compile_request, reached
from hami_core.placement.placing import place
from hami_core.table.block import Columns
from hami_core.table.table import DeviceTable

TESTS: Final = 512
"""Trials on one node within which the answer is exact: every set of 9 units, or any pair of 31."""
TESTS_AT_ONCE: Final = 2
"""Trials between two points where other tasks may run."""
NEEDED_OF_MOST: Final = 16
"""With more units than this, the indispensable ones are searched first."""
_PRIORITY_OFFSET: Final = 2**31 + SPOT_OFFSET
"""Makes every priority positive, so that one more pod is never cheaper."""

Shares = tuple[ContainerShares, ...]


class Pod(Struct, frozen=True, kw_only=True):
    """Cost of a pod that may have to leave."""

    uid: str
    priority: int = 0
    start_s: float = 0.0
    budgets: tuple[str, ...] = ()
    """PodDisruptionBudgets that cover it."""
    uses: tuple[tuple[str, int], ...] = ()
    """Amounts of other bounds that its eviction uses, by name."""
    keeps_share: bool = False
    """Its end offers its burst only, so that it can start again beside the other pod."""


class Unit(Struct, frozen=True, kw_only=True):
    """Pods that leave together or not at all."""

    pods: tuple[Pod, ...]
    here: tuple[Shares, ...]
    """Shares on the node that the end of the unit offers, by pod."""
    kept: tuple[Shares, ...] = ()
    """Shares on the node that stay booked, by pod: those of ``Pod.keeps_share``."""

    @property
    def name(self) -> str:
        """Key that orders units of equal cost."""
        return self.pods[0].uid


class Leaving(NamedTuple):
    """A pod that leaves the node anyway."""

    uid: str
    shares: Shares

    @classmethod
    def of(cls, holding: Holding) -> "Leaving":
        """Return the pod of ``holding``."""
        return cls(holding.record.pod_uid, holding.record.containers)


class Cost(NamedTuple):
    """Cost of a set of victims; less is better."""

    violations: int
    highest: int
    total: int
    pods: int
    newest: float
    """The earliest start among those of the highest priority, negative: later is better."""


NOTHING: Final = Cost(0, -_PRIORITY_OFFSET, 0, 0, 0.0)


def least_of(priority: int) -> Cost:
    """Return the minimum cost of a set in which every pod has at least this priority."""
    return Cost(0, priority, priority + _PRIORITY_OFFSET, 1, -inf)


class Victims(Struct, frozen=True, kw_only=True):
    """Pods that must leave a node."""

    node: str
    units: tuple[Unit, ...]
    cost: Cost
    is_exact: bool

    def uids(self) -> tuple[str, ...]:
        """Return the pods to evict, on any node."""
        return tuple(sorted(pod.uid for unit in self.units for pod in unit.pods))


def cost_of(units: Sequence[Unit], allowed: Mapping[str, int]) -> Cost:
    """Return the cost of evicting ``units``; ``allowed`` by budget, or by bound of ``uses``."""
    pods = [pod for unit in units for pod in unit.pods]
    if not pods:
        return NOTHING
    covered = Counter(budget for pod in pods for budget in pod.budgets)
    for pod in pods:
        covered.update(dict(pod.uses))
    highest = max(pod.priority for pod in pods)
    return Cost(
        violations=sum(max(0, n - allowed.get(name, 0)) for name, n in covered.items()),
        highest=highest,
        total=sum(pod.priority + _PRIORITY_OFFSET for pod in pods),
        pods=len(pods),
        newest=-min(pod.start_s for pod in pods if pod.priority == highest),
    )


def find_victims(
    table: DeviceTable,
    request: PodRequest,
    node: str,
    units: Iterable[Unit],
    *,
    leaving: Sequence[Leaving] = (),
    allowed: Mapping[str, int] | None = None,
    below: Cost | None = None,
    tests: int = TESTS,
) -> Generator[None, None, Victims | None]:
    """Return the cheapest of ``units`` without which the pod fits on ``node``, or ``None``.

    ``leaving`` are pods that leave anyway. Only an answer that costs less than ``below``
    is searched for. The node, the units and their shares must not change during the search.
    """
    trial = _Trial(table, request, node, leaving)
    if not trial.is_known:
        return None
    budgets = allowed or {}
    useful = sorted(
        (unit for unit in units if trial.concerns(unit)),
        key=lambda unit: (cost_of([unit], budgets), unit.name),
    )
    if below is not None and useful and not leaving and cost_of(useful[:1], budgets) >= below:
        return None  # the cheapest set already costs too much
    if not trial.fits(useful):
        return None
    yield
    done = 1
    needed: list[Unit] = []
    is_looked_for = len(useful) > NEEDED_OF_MOST
    sets: list[tuple[Cost, tuple[int, ...]]] = [(NOTHING, ())]
    while sets:
        cost, numbers = heapq.heappop(sets)
        if below is not None and cost >= below:
            return None
        if done >= tests:
            break
        if len(numbers) > 1 and not is_looked_for:
            # No single unit was enough so far: restart with the units that are indispensable.
            is_looked_for = True
            needed = yield from _needed(trial, useful)
            done += len(useful)
            useful = [unit for unit in useful if unit not in needed]
            sets = [(cost_of(needed, budgets), ())]
            continue
        chosen = [*needed, *(useful[number] for number in numbers)]
        if trial.fits(chosen):
            return Victims(node=node, units=tuple(chosen), cost=cost, is_exact=True)
        done += 1
        if not done % TESTS_AT_ONCE:
            yield
        for number in range(numbers[-1] + 1 if numbers else 0, len(useful)):
            more = cost_of([*chosen, useful[number]], budgets)
            heapq.heappush(sets, (more, (*numbers, number)))
    found = yield from _without_spared(trial, [*needed, *useful], budgets)
    cost = cost_of(found, budgets)
    if below is not None and cost >= below:
        return None
    return Victims(node=node, units=tuple(found), cost=cost, is_exact=False)


def _needed(trial: "_Trial", useful: Sequence[Unit]) -> Generator[None, None, list[Unit]]:
    """Return the units without which all others together are not enough."""
    needed = []
    for number, unit in enumerate(useful):
        if not trial.fits([other for other in useful if other is not unit]):
            needed.append(unit)
        if not number % TESTS_AT_ONCE:
            yield
    return needed


@contextmanager
def without(
    table: DeviceTable, node: str, units: Iterable[Unit], leaving: Iterable[Leaving] = ()
) -> Iterator[None]:
    """Offer what these pods have on the node, in the table until the context ends."""
    units, leaving = tuple(units), tuple(leaving)
    shares = [*(one.shares for one in leaving), *(some for unit in units for some in unit.here)]
    uids = {*(one.uid for one in leaving), *(pod.uid for unit in units for pod in unit.pods)}
    for uid in uids:
        table.lower_bursts(node, uid)
    for some in shares:
        table.unbook(node, some)
    try:
        yield
    finally:
        for some in shares:
            table.book(node, some)
        for uid in uids:
            table.restore_bursts(node, uid)


def run(search: Generator[None, None, Victims | None]) -> Victims | None:
    """Run a search without interruption and return its answer."""
    while True:
        try:
            next(search)
        except StopIteration as end:
            found: Victims | None = end.value
            return found


def _without_spared(
    trial: "_Trial", useful: Sequence[Unit], allowed: Mapping[str, int]
) -> Generator[None, None, list[Unit]]:
    """Return ``useful`` without the units that can stay, the most expensive tried first."""
    leave = list(useful)
    for number, unit in enumerate(
        sorted(useful, key=lambda u: (cost_of([u], allowed), u.name), reverse=True)
    ):
        others = [other for other in leave if other is not unit]
        if trial.fits(others):
            leave = others
        if not number % TESTS_AT_ONCE:
            yield
    return leave


class _Trial:
    """Test whether the pod would fit on one node without some of the pods there."""

    def __init__(
        self, table: DeviceTable, request: PodRequest, node: str, leaving: Sequence[Leaving]
    ) -> None:
        self._table = table
        self._node = node
        self._leaving = leaving
        self._plan: Plan = compile_request(request)
        self.is_known = table.place(node) is not None
        self._uuids = self._wanted_uuids() if self.is_known else frozenset()

    def _view(self) -> View:
        place = self._table.place(self._node)
        columns: Columns = np.array([0 if place is None else place.column], np.intp)
        block = self._table.blocks[0] if place is None else place.block
        return View(self._table, block, columns)

    def _wanted_uuids(self) -> frozenset[str]:
        """Return the devices that the pod could use if they were idle."""
        view = self._view()
        uuids = view.block.uuids[view.column(0)]
        rows: set[int] = set()
        for step in self._plan.steps:
            stages = reached(Scene(view, self._plan), step)[:, 0]
            rows.update(np.flatnonzero(stages >= Stage.SLOT).tolist())
        return frozenset(uuids[row] for row in rows if row < len(uuids))

    def concerns(self, unit: Unit) -> bool:
        """Return whether the unit has a share of a device that the pod could use."""
        return any(
            share.uuid in self._uuids
            for shares in (*unit.here, *unit.kept)
            for container in shares
            for share in container.shares
        )

    def fits(self, units: Iterable[Unit]) -> bool:
        """Return whether the pod fits without ``units`` and the pods that leave anyway."""
        with without(self._table, self._node, units, self._leaving):
            return bool(place(self._view(), self._plan, choose=False).fits[0])
