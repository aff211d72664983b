# SPDX-License-Identifier: Apache-2.0
"""Ranks the free capacity of each node's devices, which is enough for most verdicts on a node.

For one vendor and one set of constraints that usage does not affect, ``Levels`` keeps for each node
the free capacity of its devices, in falling order of free memory. Where the ``count`` devices with
most memory have capacity for everything that a pod requests of the vendor, it fits, whatever
devices its steps take. Where fewer than ``count`` have capacity for its first step alone, it does
not. Nodes for which neither is certain stay open; they are placed device by device, see
``placing``.

Levels follow their block: only columns that changed are ranked again. They never change an answer,
only its cost. Memory in MiB, compute in percent of one device.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hami_common.model.request import DeviceRequest
from hami_core.placement.fit import (
    Plan,
    Step,
    View,
    bound_key,
    has_count,
    is_refused_by_mps,
    is_single,
    selected,
    together,
    totals_of,
)
from hami_core.table.block import (
    AMOUNT_BITS,
    LEAST_MIB,
    MIB_SHIFT,
    MOST_AMOUNT,
    MOST_MIB,
    MOST_ROOM_MIB,
    NO_MIB,
    NO_ROOM,
    Bools,
    Columns,
    Ints,
)

NODES_WORTH_IT: Final = 16
"""With fewer nodes than this, devices are evaluated one by one."""
NODES_ONE_BY_ONE: Final = 4
"""With at most this many nodes, nodes are evaluated one after the other."""
_NO_LINES: Final[Ints] = np.zeros((0, 0), np.int64)


class Levels:
    """Free capacity of one vendor's devices that suit one kind of step, on each node of a block."""

    def __init__(self) -> None:
        """Start without ranked nodes."""
        self._room, self._room_version = _NO_LINES, -1
        self._offered, self._offered_version = _NO_LINES, -1

    def room(self, view: View, step: Step) -> Ints:
        """Return ``Block.room`` of the devices that suit ``step``, by rank and node.

        The nodes are those of the whole block.
        """
        block = view.block
        if self._room_version != block.version:
            changed = block.stale_since(self._room_version)
            part = View(view.table, block, changed)
            suits = selected(part, step)
            if step.request.exclusive:
                suits = suits & part.bools(block.idle)
            found = np.where(suits, part.ints(block.room), NO_ROOM)
            found.sort(axis=0)
            self._room = _merged(self._room, found[::-1], changed, block.count)
            self._room_version = block.version
        return self._room

    def offered_mib(self, view: View, step: Step) -> Ints:
        """Return the maximum of ``Block.offered_mib`` over these devices, as one line."""
        block = view.block
        if self._offered_version != block.version:
            changed = block.stale_since(self._offered_version)
            part = View(view.table, block, changed)
            found = np.where(selected(part, step), part.ints(block.offered_mib), NO_MIB)
            most = found.max(axis=0, keepdims=True)
            self._offered = _merged(self._offered, most, changed, block.count)
            self._offered_version = block.version
        return self._offered


def settled(view: View, plan: Plan) -> Bools | None:
    """Return the nodes on which the pod surely fits; ``None``: evaluate the devices."""
    if view.block.count < NODES_WORTH_IT or plan.mutex:
        return None
    fits: Bools | None = None
    for vendor in dict.fromkeys(step.request.vendor for step in plan.steps):
        steps = [step for step in plan.steps if step.request.vendor == vendor]
        levels = _levels(view, steps)
        if levels is None:
            return None
        if view.count <= NODES_ONE_BY_ONE:
            here = np.array([_fits_on(view, place, steps) for place in range(view.count)], np.bool_)
        else:
            here = _fit(view, steps, levels)
        fits = here if fits is None else fits & here
    return fits


def _fits_on(view: View, place: int, steps: Sequence[Step]) -> bool:
    """Compute ``_fit`` of one node: for few nodes that costs less than to rank them."""
    column = view.column(place)
    total = totals_of(view, steps[0].request.vendor)
    most = 0 if total is None else int(total[MOST_MIB, place])
    slots, core, mib = together(
        steps, lambda request: request.memory_mib or most * request.memory_pct // 100
    )
    suits = selected(View(view.table, view.block), steps[0])[:, column]
    if steps[0].request.exclusive:
        suits = suits & view.block.idle[:, column]
    room = view.block.room[:, column].tolist()
    ranked = sorted(
        (one for one, suit in zip(room, suits.tolist(), strict=True) if suit), reverse=True
    )
    best = ranked[: max(step.request.count for step in steps)]
    if len(best) < max(step.request.count for step in steps) or best[-1] >> MIB_SHIFT < mib:
        return False
    wants_core = any(step.request.core_pct for step in steps)
    return all(
        one & MOST_AMOUNT >= slots
        and (not wants_core or (one >> AMOUNT_BITS) & MOST_AMOUNT >= core)
        for one in best
    )


def _fit(view: View, steps: Sequence[Step], levels: Levels) -> Bools:
    """Return the nodes on which enough devices for the largest step have capacity for all steps."""
    slots, core, mib = together(steps, lambda request: _wanted(view, request, MOST_MIB))
    room = levels.room(view, steps[0])[: max(step.request.count for step in steps)]
    if len(room) == 1:
        last = worst = view.line(room[0])
    else:
        room = view.cells(room)
        last, worst = room[-1], room
    fits: Bools = last >> MIB_SHIFT >= mib
    if any(step.request.core_pct for step in steps):  # else slots and memory suffice
        has = (worst >> AMOUNT_BITS) & MOST_AMOUNT >= core
        fits &= has if has.ndim == 1 else has.all(axis=0)
    if slots > 1:
        has = worst & MOST_AMOUNT >= slots
        fits &= has if has.ndim == 1 else has.all(axis=0)
    return fits


def stopped(view: View, plan: Plan) -> Bools:
    """Return the nodes that refuse the first step of a pod for which ``settled`` has an answer."""
    step = plan.steps[0]
    levels, request = _levels(view, plan.steps[:1]), step.request
    if levels is None:
        return np.zeros(view.count, np.bool_)
    wanted = _wanted(view, request, LEAST_MIB)
    if isinstance(wanted, int):
        wanted = min(wanted, MOST_ROOM_MIB)
    else:
        wanted = np.minimum(wanted, MOST_ROOM_MIB)
    if not request.core_pct:
        last = view.line(levels.room(view, step)[request.count - 1])
        stops: Bools = last >> MIB_SHIFT < wanted
        return stops
    room = view.cells(levels.room(view, step))
    passing = room >> MIB_SHIFT >= wanted
    passing &= (room >> AMOUNT_BITS) & MOST_AMOUNT >= min(request.core_pct, MOST_AMOUNT)
    return ~has_count(passing, request.count)


def offered_mib(view: View, plan: Plan, number: int) -> Ints | None:
    """Return for each node the most free memory of a device that no earlier constraint stops.

    For step ``number``, whatever steps before it take; ``NO_MIB`` without such a device, ``None``
    when that cannot be derived here.
    """
    step = plan.steps[number]
    is_first = all(other.request.vendor != step.request.vendor for other in plan.steps[:number])
    if view.block.count < NODES_WORTH_IT or plan.mutex or not is_first:
        return None
    levels = _levels(view, [step])
    return None if levels is None else view.line(levels.offered_mib(view, step)[0])


def _levels(view: View, steps: Sequence[Step]) -> Levels | None:
    """Return the levels for a pod's steps of one vendor, if the same devices suit them all."""
    kind = _kind_of(view, steps[0])
    for number, step in enumerate(steps):
        if step.request.count > view.block.width or not is_single(view, step):
            return None
        if step.request.exclusive and len(steps) > 1:
            return None  # they cannot share a device
        if number and _kind_of(view, step) != kind:
            return None
    return view.block.followed(("levels", kind), Levels)


def _kind_of(view: View, step: Step) -> tuple[object, ...]:
    """Return the step's constraints on a device, except amounts that usage affects."""
    request = step.request
    wishes = request.types, request.modes, request.profile, request.exact
    is_refused, bound = is_refused_by_mps(step), bound_key(view, request)
    return request.vendor, request.exclusive, step.selector, wishes, is_refused, bound


def _wanted(view: View, request: DeviceRequest, row: int) -> Ints | int:
    """Return the memory requested of a device, or of that with most or least memory.

    ``row`` selects the row of the totals.
    """
    totals = None if request.memory_mib else totals_of(view, request.vendor)
    return request.memory_mib if totals is None else totals[row] * request.memory_pct // 100


def _merged(old: Ints, new: Ints, changed: Columns | None, count: int) -> Ints:
    """Return the lines of ``count`` nodes, ``new`` where they ``changed``."""
    if changed is None:
        return new
    lines = old[:, :count]
    if lines.shape[1] < count:
        room = np.zeros((len(lines), count - lines.shape[1]), np.int64)
        lines = np.concatenate([lines, room], axis=1)
    lines[:, changed] = new
    return lines
