# SPDX-License-Identifier: Apache-2.0
"""Scores a node for a pod: 0..100 as if the pod were placed there.

Terms live in separate magnitudes, listed here, so that a lesser preference never outvotes a greater
one:

======  =========  ==========================================================================
term    magnitude  meaning
======  =========  ==========================================================================
near    above all  of a gang's member: levels that the node shares with the members placed so far
                   (see ``domains``), in the mean; of other pods nothing
excess  below it   how much the pod's shares exceed its request, least first; compares the nodes
                   of one answer, see ``least_first``
fill    0..100     part of the node's devices that would be in use, of the resources requested:
                   ``binpack`` as it is, ``spread`` 100 minus it
name    order      equal scores are ordered by node name, see ``priorities``
======  =========  ==========================================================================

``fill`` is the mean over the requested vendors and, for each, over slots, memory (if requested) and
compute (if requested) of used / capacity of its registered devices, each cut off at 1. The pod
counts with the largest amount that its containers use at one time, wherever on the node they are
placed; a percentage counts as of the node's smallest device.

``excess`` is the sum over the pod's steps, each regarded alone: ``fit.excess`` of the devices that
it would take. It is 0 on nodes whose devices without partitions suffice. Independent of node names.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hami_core.placement.fit import Plan, Scene, View, excess, passes, totals_of
from hami_core.table.block import (
    CORE,
    LEAST_MIB,
    MIB,
    SLOTS,
    USED_CORE,
    USED_MIB,
    USED_SLOTS,
    Bools,
    Columns,
    Floats,
    Ints,
)

HIGHEST = 100.0


class _Term(NamedTuple):
    """One of the parts that ``fill`` averages."""

    vendor: str
    totals: Ints
    """The vendor's totals, of the nodes of the view."""
    booked: Ints | int
    """Amount that the pod takes."""
    used: int
    capacity: int
    """Row of the capacity in ``totals``."""


def _terms(view: View, plan: Plan) -> list[_Term]:
    """Return the parts of ``fill``; empty where some vendor has no device at all."""
    terms: list[_Term] = []
    for vendor in dict.fromkeys(step.request.vendor for step in plan.steps):
        mine = totals_of(view, vendor)
        if mine is None:
            return []
        slots, core, mib = _busiest(plan, vendor, mine)
        asked = [step.request for step in plan.steps if step.request.vendor == vendor]
        terms.append(_Term(vendor, mine, slots, USED_SLOTS, SLOTS))
        if any(request.memory_mib or request.memory_pct for request in asked):
            terms.append(_Term(vendor, mine, mib, USED_MIB, MIB))
        if any(request.core_pct for request in asked):
            terms.append(_Term(vendor, mine, core, USED_CORE, CORE))
    return terms


def score(view: View, plan: Plan, fits: Bools) -> Floats:
    """Return the score of each node of the view; 0 where the pod does not fit."""
    terms = _terms(view, plan)
    if not terms:
        return np.zeros(view.count)
    total = np.zeros(view.count)
    for term in terms:
        total += _filled(term)
    fill = HIGHEST * (total / len(terms))
    return np.where(fits, fill if plan.policy.node == "binpack" else HIGHEST - fill, 0.0)


class Filling(NamedTuple):
    """Fractions of each node's capacity that would be in use: the parts of ``fill``.

    Each is the mean over the requested vendors; 0 for a resource that is not requested.
    """

    slot: Floats
    core: Floats
    memory: Floats


def filling(view: View, plan: Plan) -> Filling:
    """Return the parts of ``fill`` for each node of the view."""
    by_capacity: dict[int, list[Floats]] = {}
    for term in _terms(view, plan):
        by_capacity.setdefault(term.capacity, []).append(_filled(term))
    none = np.zeros(view.count)
    means = {key: sum(parts, none) / len(parts) for key, parts in by_capacity.items()}
    return Filling(*(means.get(key, none) for key in (SLOTS, CORE, MIB)))


def _filled(term: _Term) -> Floats:
    """Return the fraction of each node's capacity that would be in use."""
    ceiling = np.maximum(term.totals[term.capacity], 1)
    filled: Floats = np.minimum((term.totals[term.used] + term.booked) / ceiling, 1.0)
    return filled


class _Filled:
    """Fullness of the nodes of a block before a pod: the sum over some parts. Follows the block."""

    def __init__(self) -> None:
        """Start without sums."""
        self._line, self._version = np.zeros(0), -1

    def line(self, whole: View, terms: Sequence[_Term]) -> Floats:
        """Return the present sums."""
        block = whole.block
        if self._version != block.version:
            changed = block.stale_since(self._version)
            if len(self._line) != block.count:
                changed = None
            found = np.zeros(block.count if changed is None else len(changed))
            for term in terms:
                used, capacity = term.totals[term.used], term.totals[term.capacity]
                if changed is not None:
                    used, capacity = used.take(changed), capacity.take(changed)
                found += used / np.maximum(capacity, 1)
            if changed is None:
                self._line = found
            else:
                self._line[changed] = found
            self._version = block.version
        return self._line


def ranking(whole: View, plan: Plan, columns: Columns) -> Floats:
    """Return numbers that rank some nodes of a block by ``score``, the best highest.

    Only valid where the pod fits, and as if no node were booked beyond its capacity: there each
    part that ``score`` cuts off at 1 counts as it is. Costs less than the scores, because booked
    amounts are summed up as they change, for all pods that request the same resources.
    """
    terms = _terms(whole, plan)
    if not terms:
        return np.zeros(len(columns))
    key = tuple((term.vendor, term.used) for term in terms)
    rank = whole.block.followed(("filled", key), _Filled).line(whole, terms)
    is_few = len(columns) * 2 < whole.count
    if is_few:
        rank = rank.take(columns)
    everywhere = 0.0
    for term in terms:
        per, is_even = _per_unit(whole, term)
        booked = term.booked
        if isinstance(booked, np.ndarray):
            booked = booked.take(columns) if is_few else booked
        elif is_even:
            everywhere += booked * float(per[0])
            continue
        rank = rank + (per.take(columns) if is_few else per) * booked
    rank = rank + everywhere
    if not is_few:
        rank = rank.take(columns)
    return rank if plan.policy.node == "binpack" else -rank


def _per_unit(whole: View, term: _Term) -> tuple[Floats, bool]:
    """Return one unit as a fraction of each node's capacity, and whether it is equal on all."""

    def make() -> tuple[Floats, bool]:
        per = 1 / np.maximum(term.totals[term.capacity], 1)
        return per, len(per) > 0 and bool((per == per[0]).all())

    return whole.block.derived(("per unit", term.vendor, term.capacity), make)


def exceeds(view: View, plan: Plan) -> bool:
    """Return whether some node's shares may exceed the pod's request."""
    return any(excess(view, step.request) is not None for step in plan.steps)


def excess_of(view: View, plan: Plan, fits: Bools) -> Floats:
    """Return ``excess`` of each node of the view; 0 where the pod does not fit."""
    total, scene = np.zeros(view.count), Scene(view, plan)
    for step, times in Counter(plan.steps).items():
        beyond = excess(view, step.request)
        if beyond is None:
            continue
        beyond = np.where(passes(scene, step), beyond, np.inf)
        if step.request.count > 1:
            beyond = np.sort(beyond, axis=0)[: step.request.count]
            total += times * beyond.sum(axis=0)
        else:
            total += times * beyond.min(axis=0)
    return np.where(fits, total, 0.0)


def levels_of(beyond: Floats, fits: Bools) -> tuple[Ints, int]:
    """Return (the number of different ``excess`` above each node's, the number of all).

    Of the nodes that fit; others have no meaning.
    """
    different = np.unique(beyond[fits])
    return len(different) - 1 - np.searchsorted(different, beyond), len(different)


def least_first(fill: Floats, beyond: Floats, fits: Bools) -> Floats:
    """Return scores that put nodes with less ``excess`` first, then those of ``fill``."""
    worse, count = levels_of(beyond, fits)
    if count <= 1:
        return fill
    return np.where(fits, HIGHEST * (worse + fill / HIGHEST) / count, 0.0)


def nearer(fill: Floats, shared: Floats, *, most: int) -> Floats:
    """Return scores that put nodes with more ``shared`` levels first, then those of ``fill``.

    ``most`` is the maximum that a node can share; nodes that score 0 keep 0.
    """
    return np.where(fill > 0, HIGHEST * (shared + fill / HIGHEST) / (most + 1), 0.0)


def _busiest(plan: Plan, vendor: str, totals: Ints) -> tuple[int, int, Ints | int]:
    """Return the pod's peak of (slots, compute, memory) on a vendor's devices."""
    slots = core = most_slots = most_core = 0
    mib: Ints | int = 0
    most_mib: Ints | int = 0
    for step in plan.steps:
        request = step.request
        if request.vendor != vendor:
            continue
        each = request.memory_mib or totals[LEAST_MIB] * request.memory_pct // 100
        with_slots = slots + request.count
        with_core = core + request.count * request.core_pct
        with_mib = mib + request.count * each
        most_slots, most_core = max(most_slots, with_slots), max(most_core, with_core)
        is_line = isinstance(with_mib, np.ndarray) or isinstance(most_mib, np.ndarray)
        most_mib = np.maximum(most_mib, with_mib) if is_line else max(most_mib, with_mib)
        if step.kind != "init":
            slots, core, mib = with_slots, with_core, with_mib
    return most_slots, most_core, most_mib


def priorities(scores: Floats, first: Callable[[Columns, int], Columns], *, highest: int) -> Ints:
    """Return integers 0..``highest`` in the order of the scores, as kube-scheduler takes them.

    The best node alone gets ``highest`` (``first`` finds the first by name among equals), so that
    rounding never lets chance choose; the others share the values below in proportion.
    """
    if not len(scores):
        return np.zeros(0, np.int64)
    top, below = scores.max(), highest - 1
    given = (scores * below / top if top > 0 else scores).astype(np.int64)
    given[first(np.flatnonzero(scores == top), 1)] = highest
    return given
