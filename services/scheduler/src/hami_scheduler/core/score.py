# SPDX-License-Identifier: Apache-2.0
"""How good a node is for a pod: 0..100 after the pod would be placed there.

Terms live in separate magnitudes, listed here, so that a lesser wish never outvotes a greater one:

======  =========  ==========================================================================
term    magnitude  meaning
======  =========  ==========================================================================
fill    0..100     part of the node's devices that would be in use, of the resources asked for:
                   ``binpack`` as it is, ``spread`` 100 minus it
name    order      equal scores are ordered by node name, see ``priorities``
======  =========  ==========================================================================

``fill`` is the mean over the vendors asked and, for each, over slots, memory (if any is asked) and
compute (if any is asked) of used / capacity of its registered devices, each cut off at 1. What the
pod books is its peak (booking rule of ``hami_common.model.placement``). Knows no node names.
"""

from collections.abc import Sequence

import numpy as np

from hami_scheduler.core.block import (
    CORE,
    LEAST_MIB,
    MIB,
    MOST_MIB,
    SLOTS,
    USED_CORE,
    USED_MIB,
    USED_SLOTS,
    Bools,
    Floats,
    Ints,
)
from hami_scheduler.core.fit import Held, Plan, View, devices_of, totals_of

HIGHEST = 100.0


def needs_choices(view: View, plan: Plan) -> bool:
    """Whether what a pod would book on a node depends on which of its devices are taken."""
    if plan.has_init and len(plan.steps) > 1:
        return True
    return any(
        step.request.memory_pct
        and not step.request.memory_mib
        and not _is_uniform(view, step.request.vendor)
        for step in plan.steps
    )


def _is_uniform(view: View, vendor: str) -> bool:
    """Whether the devices of each node have equally much physical memory."""
    block = view.block

    def make() -> bool:
        totals = totals_of(View(view.table, block), vendor)
        return totals is None or bool((totals[LEAST_MIB] == totals[MOST_MIB]).all())

    return block.derived(("uniform", vendor), make)


def score(view: View, plan: Plan, fits: Bools, peak: Held | None = None) -> Floats:
    """Score of each node of the view; 0 where the pod does not fit.

    ``peak`` is what the pod books; it is read only where ``needs_choices``.
    """
    total = np.zeros(view.count)
    terms = 0
    for vendor in dict.fromkeys(step.request.vendor for step in plan.steps):
        mine = totals_of(view, vendor)
        if mine is None:
            return np.zeros(view.count)
        slots, core, mib = _booked(view, plan, peak, vendor, mine)
        asked = [step.request for step in plan.steps if step.request.vendor == vendor]
        parts = [(slots, USED_SLOTS, SLOTS)]
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


def _booked(
    view: View, plan: Plan, peak: Held | None, vendor: str, totals: Ints
) -> tuple[Ints | int, Ints | int, Ints | int]:
    """(slots, compute, memory) that the pod would book of the vendor's devices on each node."""
    if needs_choices(view, plan):
        if peak is None:
            return 0, 0, 0
        mine = devices_of(view, vendor)
        return (
            (peak.slots * mine).sum(axis=0),
            (peak.core * mine).sum(axis=0),
            (peak.mib * mine).sum(axis=0),
        )
    slots = core = 0
    mib: Ints | int = 0
    for step in plan.steps:
        request = step.request
        if request.vendor == vendor:
            slots += request.count
            core += request.count * request.core_pct
            # one size of device on a node, or a number of MiB: see needs_choices
            each = request.memory_mib or totals[LEAST_MIB] * request.memory_pct // 100
            mib = mib + request.count * each
    return slots, core, mib


def priorities(scores: Sequence[float], names: Sequence[str], *, highest: int) -> list[int]:
    """Whole numbers 0..``highest`` in the order of the scores, as kube-scheduler takes them.

    The best node alone gets ``highest`` (by name among equals), so that rounding never lets chance
    choose; the others share what is below, in proportion.
    """
    if not scores:
        return []
    top = max(scores)
    best = min((i for i, value in enumerate(scores) if value == top), key=lambda i: names[i])
    below = highest - 1
    given = [int(value * below / top) if top > 0 else 0 for value in scores]
    given[best] = highest
    return given
