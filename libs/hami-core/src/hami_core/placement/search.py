# SPDX-License-Identifier: Apache-2.0
"""Tries every choice of devices for a pod's steps, on all nodes of a view at once.

Used for nodes on which placing by preference failed though each step alone would fit. The first
choice in the order of the node's devices that leads to a placement is taken, so the answer is
exact: no node is refused that has one. Steps of different vendors never share a device and are
searched separately.

The bound: a step whose devices matter to a later one multiplies the choices by the number of sets
of its size on a node; where that passes ``CHOICES_TRIED`` for a vendor, nothing is tried. On nodes
with up to 8 devices that leaves four containers with one device each, three with two, or two with
any number; with up to 16 devices three with one device, or two with up to four. All nodes share the
choices, so the cost is the number of choices times one pass over the columns, whatever is booked.
"""

from collections.abc import Sequence
from itertools import combinations
from math import comb
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hami_common.vendors.shapes import legal_sets
from hami_core.placement.choose import choose_first
from hami_core.placement.fit import (
    Held,
    Plan,
    Scene,
    Step,
    View,
    beside_counts,
    divisions_of,
    has_enough,
    kept_devices,
    passes,
)
from hami_core.table.block import Bools

CHOICES_TRIED: Final = 2048


def is_searchable(width: int, plan: Plan) -> bool:
    """Return whether every choice can be tried on nodes with up to ``width`` devices."""
    for numbers in _by_vendor(plan):
        choices = 1
        for number in numbers[:-1]:
            step = plan.steps[number]
            if step.kind != "init":
                choices *= comb(width, step.request.count)
        if choices > CHOICES_TRIED:
            return False
    return not plan.has_one_choice


def _by_vendor(plan: Plan) -> list[list[int]]:
    """Return the steps of each vendor, in kubelet's order."""
    found: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        found.setdefault(step.request.vendor, []).append(number)
    return list(found.values())


def search(view: View, plan: Plan) -> tuple[Bools, dict[int, Bools]]:
    """Return (nodes on which the pod fits, the devices of each step there)."""
    fits = np.ones(view.count, np.bool_)
    for step in plan.steps:
        fits &= has_enough(view, step, passes(Scene(view, plan), step))
    chosen: dict[int, Bools] = {}
    for numbers in _by_vendor(plan):
        if not fits.any():
            break
        tree = _Tree(view, plan, numbers)
        tree.grow(0, fits)
        fits &= tree.solved
        chosen.update(tree.chosen)
    return fits, {number: devices & fits for number, devices in chosen.items()}


class _Tree:
    """All choices for the steps of one vendor."""

    def __init__(self, view: View, plan: Plan, numbers: Sequence[int]) -> None:
        self.solved: Bools = np.zeros(view.count, np.bool_)
        self.chosen = {n: np.zeros((view.block.width, view.count), np.bool_) for n in numbers}
        self._numbers = numbers
        self._path: dict[int, Bools | tuple[int, ...]] = {}
        self._held = Held(view.block.width, view.count)
        self._nothing = np.zeros((view.block.width, view.count))
        self._scene = Scene(view, plan, self._held)

    def grow(self, depth: int, open_: Bools) -> None:
        """Extend the present choice on the nodes that are ``open_``."""
        number = self._numbers[depth]
        view, plan, _ = self._scene
        step = plan.steps[number]
        passing = passes(self._scene, step)
        is_last = depth + 1 == len(self._numbers)
        free = step.kind == "init" and not divisions_of(view, step.request.vendor)
        if (is_last or free) and not step.request.shape:
            open_ = open_ & has_enough(view, step, passing)
            if not open_.any():
                return
            passing = passing & open_
            if step.selector.numa_bind and step.request.count > 1:
                passing &= beside_counts(view, passing) >= step.request.count
            self._path[number] = choose_first(view, step, passing, ())
            if is_last:
                self._solve(open_)
            else:
                self.grow(depth + 1, open_)
            return
        rows = np.flatnonzero((passing & open_).any(axis=1)).tolist()
        for some in combinations(rows, step.request.count):
            here = self._takes(step, passing, some) & open_ & ~self.solved
            if here.any():
                self._path[number] = some
                if is_last:
                    self._solve(here)
                else:
                    before = self._hold(step, some, here)
                    self.grow(depth + 1, here)
                    self._restore(some, before)
                if not (open_ & ~self.solved).any():
                    return

    def _takes(self, step: Step, passing: Bools, rows: Sequence[int]) -> Bools:
        """Return the nodes on which the step can take just these devices."""
        here: Bools = np.logical_and.reduce(passing[list(rows)], axis=0)
        view = self._scene.view
        if step.request.shape:
            index = view.shorts(view.block.index)[list(rows)]
            sets = legal_sets(step.request.shape, step.request.count)
            legal = np.zeros(view.count, np.bool_)
            for some in sets:
                legal |= (np.sort(index, axis=0) == np.array(some.indexes)[:, None]).all(axis=0)
            here = here & legal
        if step.selector.numa_bind and len(rows) > 1:
            numa = view.shorts(view.block.numa)[list(rows)]
            here = here & (numa == numa[0]).all(axis=0)
        return here

    def _hold(self, step: Step, rows: Sequence[int], nodes: Bools) -> list[Any]:
        """Take devices on some nodes; returns the previous values for ``_restore``."""
        held, some = self._held, list(rows)
        before = [
            *(line[some] for line in (held.mib, held.core, held.slots, held.exclusive)),
            *(line[some] for line in (held.taken, held.kind)),
            held.spent[:, some],
        ]
        chosen = np.zeros(held.slots.shape, np.bool_)
        chosen[some] = nodes
        kept = kept_devices(self._scene.view, step, chosen)
        if kept is not None:
            held.add(self._scene.view, kept, step, self._nothing)
        return before

    def _restore(self, rows: Sequence[int], before: list[Any]) -> None:
        """Release the devices."""
        held, some = self._held, list(rows)
        lines: tuple[NDArray[Any], ...] = (
            held.mib,
            held.core,
            held.slots,
            held.exclusive,
            held.taken,
            held.kind,
        )
        for line, was in zip(lines, before[:-1], strict=True):
            line[some] = was
        held.spent[:, some] = before[-1]

    def _solve(self, nodes: Bools) -> None:
        """Record the choices that led here."""
        for number, devices in self._path.items():
            if isinstance(devices, tuple):
                for row in devices:
                    self.chosen[number][row, nodes] = True
            else:
                self.chosen[number][:, nodes] = devices[:, nodes]
        self.solved |= nodes
