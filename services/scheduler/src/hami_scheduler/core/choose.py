# SPDX-License-Identifier: Apache-2.0
"""Which of the devices that pass a step takes: as many as it wants, best first, per node.

Order of devices: the words ``binpack``, ``spread`` and ``numa`` of the policy's chain, one after
the other; then the lower NUMA node, then the vendor's enumeration. ``binpack`` is fullest first,
``spread`` emptiest first, with the share on the device; ``numa`` puts NUMA nodes first that can
serve the whole step, then the lower one. ``topology-aware`` goes before all of these: several
devices are the best-connected set, a single one is that whose links to the others that fit are
weakest, so that the best sets stay whole. ``mutex`` is a constraint, see ``fit``.
"""

from collections.abc import Sequence

import numpy as np

from hami_common.model.request import DevicePolicy
from hami_scheduler.core.block import Bools, Floats, Ints, Shorts
from hami_scheduler.core.fit import Scene, Step, View, beside_counts, count_of, wanted_mib


def fullness(scene: Scene, step: Step) -> Floats:
    """How full each device would be with the step's share on it: the weighted sum of used parts."""
    view, plan, running = scene
    block, weights, request = view.block, plan.policy.weights, step.request
    used_slots, used_core = view.shorts(block.used_slots), view.shorts(block.used_core)
    used_mib = view.ints(block.used_mib)
    if running is not None:
        used_slots, used_core = used_slots + running.slots, used_core + running.core
        used_mib = used_mib + running.mib
    total: Floats = np.zeros(used_mib.shape)
    for weight, used, capacity in (
        (weights.slot, used_slots + 1, _divisor(view, "slots", block.slots)),
        (weights.core, used_core + request.core_pct, _divisor(view, "core", block.capacity_core)),
        (
            weights.memory,
            used_mib + wanted_mib(view, request),
            _divisor(view, "mib", block.capacity_mib),
        ),
    ):
        if weight:
            total += weight * (used / capacity)
    return total


def _divisor(view: View, name: str, capacity: Shorts | Ints) -> Floats:
    """Capacity to divide by: infinite where there is none, so that the part is 0."""
    block = view.block

    def make() -> Floats:
        here = capacity[:, : block.count]
        return np.where(here > 0, here, np.inf)

    return view.floats(block.derived(("divisor", name), make))


def choose_devices(
    scene: Scene, step: Step, keys: Sequence[DevicePolicy], *, passing: Bools, fits: Bools
) -> Bools:
    """The step's devices on every node that ``fits``: as many as wanted, none elsewhere."""
    view, wanted = scene.view, step.request.count
    passing = passing & fits
    if step.selector.numa_bind and wanted > 1:
        passing &= beside_counts(view, passing) >= wanted
    elif (count_of(passing) == wanted * fits).all():
        return passing
    order = _order(scene, step, keys, passing)
    if scene.plan.topology:
        uneven = uneven_nodes(view, step.request.vendor) & fits
        if uneven.any():
            return _choose_linked(view, step, passing, order, uneven)
    return _choose_first(view, step, passing, order)


def _order(
    scene: Scene, step: Step, keys: Sequence[DevicePolicy], passing: Bools
) -> list[Floats | Shorts]:
    """What devices are ordered by, smaller first; the cell position decides in the end."""
    order: list[Floats | Shorts] = []
    numa = scene.view.shorts(scene.view.block.numa)
    full = fullness(scene, step)
    for key in keys:
        if key == "numa":
            if step.request.count > 1:
                beside = beside_counts(scene.view, passing)
                order.append((beside < step.request.count).astype(np.int32))
            order.append(numa)
        else:
            order.append(full if key == "spread" else -full)
    if "numa" not in keys:
        order.append(numa)
    return order


def _choose_first(
    view: View, step: Step, passing: Bools, order: Sequence[Floats | Shorts]
) -> Bools:
    """The first devices in order; with NUMA binding all from the node of the first."""
    left = passing
    chosen = np.zeros(passing.shape, np.bool_)
    for taken in range(step.request.count):
        first = _first(left, order)
        chosen |= first
        left = left & ~first
        if not taken and step.selector.numa_bind and step.request.count > 1:
            numa = view.shorts(view.block.numa)
            left = left & (numa == np.add.reduce(numa * first, axis=0))
    return chosen


def _first(left: Bools, order: Sequence[Floats | Shorts]) -> Bools:
    """One device of each node that has any left: the first by the keys, then by position."""
    for key in order:
        highest = np.inf if key.dtype.kind == "f" else np.iinfo(np.int32).max
        least = np.where(left, key, highest).min(axis=0)
        left = left & (key == least)
    first = np.zeros(left.shape, np.bool_)
    seen = np.zeros(left.shape[1], np.bool_)
    for row in range(len(left)):
        np.logical_and(left[row], ~seen, out=first[row])
        seen |= left[row]
    return first


# --- topology -------------------------------------------------------------------------------------


def uneven_nodes(view: View, vendor: str) -> Bools:
    """Nodes on which it matters for links which of the vendor's devices are taken."""
    block, table = view.block, view.table
    number = table.vendors.find(vendor)

    def make() -> Bools:
        classes = table.link_classes
        links = block.links[: block.count]
        uneven = np.zeros(block.count, np.bool_)
        for link_class in np.unique(links):
            if number is not None and not classes[link_class].is_even(number):
                uneven |= links == link_class
        return uneven

    whole = block.derived(("uneven", number), make)
    return whole if view.columns is None else whole[view.columns]


def _choose_linked(
    view: View,
    step: Step,
    passing: Bools,
    order: Sequence[Floats | Shorts],
    uneven: Bools,
) -> Bools:
    """One device: that with the weakest links to the others that fit. Several: the strongest set.

    The order decides between equals.
    """
    if step.request.count == 1:
        return _choose_first(view, step, passing, [_links_of(view, passing, uneven), *order])
    chosen = _choose_first(view, step, passing & ~uneven, order)
    links = view.ids(view.block.links)
    vendor = view.table.vendors.number(step.request.vendor)
    for node in np.flatnonzero(uneven):
        link_class = view.table.link_classes[links[node]]
        fitting = passing[:, node]
        by_rank = np.lexsort([key[:, node] for key in reversed(order)])
        rank = np.empty(len(by_rank), np.int64)
        rank[by_rank] = np.arange(len(by_rank))
        if step.selector.numa_bind:
            numa = view.block.numa[:, node if view.columns is None else view.columns[node]]
            parts = [fitting & (numa == number) for number in np.unique(numa[fitting])]
        else:
            parts = [fitting]
        best = max(
            (
                link_class.best_set(part, rank, vendor, step.request.count)
                for part in parts
                if part.sum() >= step.request.count
            ),
            key=lambda found: found[:2],
        )
        chosen[:, node] = best[2]
    return chosen


def _links_of(view: View, passing: Bools, uneven: Bools) -> Floats:
    """For each device the strength of its links to the passing ones, on uneven nodes."""
    strength = np.zeros(passing.shape)
    links = view.ids(view.block.links)
    for number in np.unique(links[uneven]):
        here = np.flatnonzero(links == number)
        matrix = view.table.link_classes[number].matrix.astype(np.float64)
        strength[:, here] = matrix @ passing[:, here]
    return strength
