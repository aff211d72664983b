# SPDX-License-Identifier: Apache-2.0
"""Chooses devices for a step on each node: as many as it requests, best first.

Order of devices: first those on which the share exceeds the request least, see ``fit.excess``:
devices whose shares have any size before hardware partitions. Then those that break the fewest sets
of the request's ``keeps``, devices in use before idle ones. Then the words ``binpack``,
``spread`` and ``numa`` of the policy's chain, one after the other; then the lower NUMA node, then
the vendor's enumeration. ``binpack`` is fullest first, ``spread`` emptiest first, with the share on
the device; ``numa`` puts NUMA nodes first that can serve the whole step, then the lower one.
``topology-aware`` goes before these words: for several devices it selects the best-connected set,
see ``links``; for a single one the device whose links to the others that fit are weakest, so that
the best sets stay whole. ``mutex`` is a constraint, see ``fit``. Of equal excess, devices whose
shares are of the step's kind already come before all others: to begin a kind on an idle device
makes it unavailable to all other kinds. Devices with a ``shape`` are chosen as a set.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hami_common.model.request import DevicePolicy, ScoringWeights
from hami_common.vendors.shapes import SIZES_KEPT
from hami_core.placement.fit import (
    Scene,
    Step,
    View,
    beside_counts,
    by_index,
    count_of,
    excess,
    is_cut,
    one_per_index,
    open_sets,
)
from hami_core.table.block import Bools, Floats, Shorts

EQUAL: Final = ScoringWeights()
_TIER: Final = 64
_NO_SHORT: Final = np.int32(np.iinfo(np.int32).max)


def fullness(scene: Scene, added: Floats) -> Floats:
    """Return the fullness of each device with one more share, which adds ``added``.

    The weighted sum of the used fractions of slots, compute and memory: first of the booked shares,
    then of each share that the pod runs there already, then of the new one.
    """
    view, plan, running = scene
    block, weights = view.block, plan.policy.weights
    if weights == EQUAL:
        full = view.floats(block.fullness)
    else:
        full = (
            weights.slot * (view.shorts(block.used_slots) * view.floats(block.per_slot))
            + weights.core * (view.shorts(block.used_core) * view.floats(block.per_core))
        ) + weights.memory * (view.ints(block.used_mib) * view.floats(block.per_mib))
    if running is not None:
        full = full + running.fullness
    return full + added


def choose_devices(
    scene: Scene,
    step: Step,
    keys: Sequence[DevicePolicy],
    *,
    passing: Bools,
    fits: Bools,
    added: Floats,
) -> Bools:
    """Return the step's devices on every node that ``fits``: as many as requested, none elsewhere.

    ``added`` is what the step's share adds to each device's fullness.
    """
    view, wanted = scene.view, step.request.count
    passing = passing & fits
    if step.request.shape:
        return choose_shaped(view, step, passing)
    if step.selector.numa_bind and wanted > 1:
        passing &= beside_counts(view, passing) >= wanted
    elif (count_of(passing) == wanted * fits).all():
        return passing
    order = _order(scene, step, keys, passing, added)
    beyond = excess(view, step.request)
    lead: list[Floats | Shorts] = [] if beyond is None else [beyond]
    if step.request.keeps and wanted == 1:
        lead.append(_broken(scene, step, passing))
    orders = lead, order
    if scene.plan.topology:
        uneven = uneven_nodes(view, step.request.vendor) & fits
        if uneven.any():
            return _choose_linked(view, step, passing, orders, uneven)
    return choose_first(view, step, passing, [*orders[0], *orders[1]])


def _order(
    scene: Scene, step: Step, keys: Sequence[DevicePolicy], passing: Bools, added: Floats
) -> list[Floats | Shorts]:
    """Return the sort keys of devices, smaller first; the cell position decides in the end."""
    order: list[Floats | Shorts] = []
    cut = is_cut(scene, step.request)
    if cut is not None:
        order.append(np.where(cut, np.int32(0), np.int32(1)))
    numa = scene.view.shorts(scene.view.block.numa)
    full = fullness(scene, added)
    for key in keys:
        if key == "numa":
            if step.request.count > 1:
                beside = beside_counts(scene.view, passing)
                order.append((beside < step.request.count).astype(np.int32))
            order.append(numa)
        else:
            order.append(full if key == "spread" else -full)
    if "numa" not in keys and not _numa_in_order(scene.view):
        order.append(numa)
    return order


def _broken(scene: Scene, step: Step, passing: Bools) -> Shorts:
    """Return how much each device's use breaks the sets of the step's ``keeps``; 0: in use already.

    1 plus the other idle devices that fit in its aligned group, counted for each size of group.
    """
    view, _, running = scene
    index, idle = view.shorts(view.block.index), view.bools(view.block.idle)
    if running is not None:
        idle = idle & (running.slots == 0)
    open_ = passing & idle
    broken = np.ones(index.shape, np.int32)
    for size in SIZES_KEPT[step.request.keeps]:
        group = index // size
        for row in range(len(group)):
            broken += open_[row] & (group[row] == group)
        broken -= 1  # itself
    return np.where(idle, broken, np.int32(0))


def _numa_in_order(view: View) -> bool:
    """Return whether every node enumerates its devices NUMA node by NUMA node.

    Most nodes do.
    """
    block = view.block

    def make() -> bool:
        numa, here = block.numa[:, : block.count], block.vendor[:, : block.count]
        return bool(((numa[1:] >= numa[:-1]) | (here[1:] != here[:-1])).all())

    return block.derived("numa in order", make)


def choose_shaped(view: View, step: Step, passing: Bools) -> Bools:
    """Choose the best set of the step's shape on each node.

    The lowest tier wins, then the set with the fewest free devices around it.
    """
    passing = one_per_index(view, passing)
    there = by_index(view, passing)
    index = view.shorts(view.block.index)
    chosen = np.zeros(passing.shape, np.bool_)
    best = np.full(view.count, _NO_SHORT)
    for some, nodes in open_sets(view, step, passing):
        left = np.zeros(view.count, np.int32)
        for n in some.around:
            left += there[n]
        merit = np.where(nodes, some.tier * _TIER + left, _NO_SHORT)
        better = merit < best
        best = np.where(better, merit, best)
        mine = np.isin(index, some.indexes) & passing
        chosen = np.where(better, mine, chosen)
    return chosen


def choose_first(view: View, step: Step, passing: Bools, order: Sequence[Floats | Shorts]) -> Bools:
    """Choose the first devices in order; with NUMA binding all from the node of the first.

    On each node either no device passes, or enough do.
    """
    if step.request.shape:
        return choose_shaped(view, step, passing)
    chosen = _first(passing, order)
    if step.request.count == 1:
        return chosen
    left = passing & ~chosen
    if step.selector.numa_bind:
        numa = view.shorts(view.block.numa)
        left &= numa == np.add.reduce(numa * chosen, axis=0)
    for _ in range(step.request.count - 1):
        first = _first(left, order)
        chosen |= first
        left &= ~first
    return chosen


def _first(left: Bools, order: Sequence[Floats | Shorts]) -> Bools:
    """Return one of the devices left on each node: the first by the keys, then by position."""
    for key in order:
        masked = np.where(left, key, np.inf if key.dtype.kind == "f" else _NO_SHORT)
        left = left & (masked == np.minimum.reduce(masked, axis=0))
    first = np.empty(left.shape, np.bool_)
    seen = np.zeros(left.shape[1], np.bool_)
    for row in range(len(left)):
        np.greater(left[row], seen, out=first[row])
        seen |= left[row]
    return first


# --- topology -------------------------------------------------------------------------------------


def uneven_nodes(view: View, vendor: str) -> Bools:
    """Return the nodes on which the choice among the vendor's devices changes the links."""
    block, table = view.block, view.table
    number = table.vendors.find(vendor)

    def make() -> Bools:
        classes = table.link_classes
        links = block.links[: block.count]
        uneven = np.zeros(block.count, np.bool_)
        for link_class in np.unique(links):
            if number is not None and not classes[int(link_class)].is_even(number):
                uneven |= links == link_class
        return uneven

    whole = block.derived(("uneven", number), make)
    return whole if view.columns is None else whole[view.columns]


def _choose_linked(
    view: View,
    step: Step,
    passing: Bools,
    orders: tuple[Sequence[Floats | Shorts], Sequence[Floats | Shorts]],
    uneven: Bools,
) -> Bools:
    """Choose devices by links; ``orders`` are the keys before the links and those after them.

    One device: that with the weakest links to the others that fit. Several: the strongest set,
    where the links decide before all keys.
    """
    lead, rest = orders
    if step.request.count == 1:
        strength = _links_of(view, passing, uneven)
        return choose_first(view, step, passing, [*lead, strength, *rest])
    order = [*lead, *rest]
    chosen = choose_first(view, step, passing & ~uneven, order)
    links = view.ids(view.block.links)
    vendor = view.table.vendors.number(step.request.vendor)
    for node in np.flatnonzero(uneven):
        link_class = view.table.link_classes[int(links[node])]
        fitting = passing[:, node]
        by_rank = np.lexsort([key[:, node] for key in reversed(order)])
        rank = np.empty(len(by_rank), np.int64)
        rank[by_rank] = np.arange(len(by_rank))
        if step.selector.numa_bind:
            numa = view.block.numa[:, node if view.columns is None else view.columns[node]]
            parts = [fitting & (numa == number) for number in np.unique(numa[fitting])]
        else:
            parts = [fitting]
        wanted = step.request.count
        found = [
            link_class.best_set(part, rank, vendor, wanted)
            for part in parts
            if part.sum() >= wanted
        ]
        chosen[:, node] = max(found, key=lambda one: one[0])[1]
    return chosen


def links_of(view: View, step: Step, passing: Bools) -> Floats:
    """Return the strength of each device's links to the passing ones; 0 where all are equal."""
    return _links_of(view, passing, uneven_nodes(view, step.request.vendor))


def _links_of(view: View, passing: Bools, uneven: Bools) -> Floats:
    """Return the strength of each device's links to the passing ones, on uneven nodes."""
    strength = np.zeros(passing.shape)
    links = view.ids(view.block.links)
    for number in np.unique(links[uneven]):
        here = np.flatnonzero(links == number)
        matrix = view.table.link_classes[int(number)].matrix.astype(np.float64)
        strength[:, here] = matrix @ passing[:, here]
    return strength
