# SPDX-License-Identifier: Apache-2.0
"""How good a node is for a pod: 0..100 after the pod would be placed there.

Terms live in separate magnitudes, listed here, so that a lesser wish never outvotes a greater one:

======  =========  ==========================================================================
term    magnitude  meaning
======  =========  ==========================================================================
near    above all  of a gang's member: levels that the node shares with the members placed so far
                   (see ``domains``), in the mean; of other pods nothing
fill    0..100     part of the node's devices that would be in use, of the resources asked for:
                   ``binpack`` as it is, ``spread`` 100 minus it
name    order      equal scores are ordered by node name, see ``priorities``
======  =========  ==========================================================================

``fill`` is the mean over the vendors asked and, for each, over slots, memory (if any is asked) and
compute (if any is asked) of used / capacity of its registered devices, each cut off at 1. The pod
counts with what its containers hold together at their busiest moment, wherever on the node they are
placed; a percentage counts as of the node's smallest device. Knows no node names.
"""

from collections.abc import Callable

import numpy as np

from hami_scheduler.core.block import (
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
from hami_scheduler.core.fit import Plan, View, totals_of

HIGHEST = 100.0


def score(view: View, plan: Plan, fits: Bools) -> Floats:
    """Score of each node of the view; 0 where the pod does not fit."""
    total = np.zeros(view.count)
    terms = 0
    for vendor in dict.fromkeys(step.request.vendor for step in plan.steps):
        mine = totals_of(view, vendor)
        if mine is None:
            return np.zeros(view.count)
        slots, core, mib = _busiest(plan, vendor, mine)
        asked = [step.request for step in plan.steps if step.request.vendor == vendor]
        parts: list[tuple[Ints | int, int, int]] = [(slots, USED_SLOTS, SLOTS)]
        if any(request.memory_mib or request.memory_pct for request in asked):
            parts.append((mib, USED_MIB, MIB))
        if any(request.core_pct for request in asked):
            parts.append((core, USED_CORE, CORE))
        for booked, used, capacity in parts:
            ceiling = np.maximum(mine[capacity], 1)
            total += np.minimum((mine[used] + booked) / ceiling, 1.0)
            terms += 1
    fill = HIGHEST * (total / terms)
    return np.where(fits, fill if plan.policy.node == "binpack" else HIGHEST - fill, 0.0)


def nearer(fill: Floats, shared: Floats, *, most: int) -> Floats:
    """Scores that put nodes with more ``shared`` levels first, and among equals those of ``fill``.

    ``most`` is what a node can share; nodes that score nothing are left so.
    """
    return np.where(fill > 0, HIGHEST * (shared + fill / HIGHEST) / (most + 1), 0.0)


def _busiest(plan: Plan, vendor: str, totals: Ints) -> tuple[int, int, Ints | int]:
    """(slots, compute, memory) that the pod holds of the vendor's devices at most, at once."""
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
        most_mib = np.maximum(most_mib, with_mib)
        if step.kind != "init":
            slots, core, mib = with_slots, with_core, with_mib
    return most_slots, most_core, most_mib


def priorities(scores: Floats, first: Callable[[Columns, int], Columns], *, highest: int) -> Ints:
    """Whole numbers 0..``highest`` in the order of the scores, as kube-scheduler takes them.

    The best node alone gets ``highest`` (``first`` finds the first by name among equals), so that
    rounding never lets chance choose; the others share what is below, in proportion.
    """
    if not len(scores):
        return np.zeros(0, np.int64)
    top, below = scores.max(), highest - 1
    given = (scores * below / top if top > 0 else scores).astype(np.int64)
    given[first(np.flatnonzero(scores == top), 1)] = highest
    return given
