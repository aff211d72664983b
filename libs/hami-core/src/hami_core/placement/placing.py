# SPDX-License-Identifier: Apache-2.0
"""Places a whole pod on all nodes of a view at once: feasibility and devices.

Containers are placed in kubelet's order, each on top of the containers that run beside it (booking
rule of ``hami_common.model.placement``): an init container beside the sidecars before it, an
application container beside all sidecars and the application containers placed before it.

Run on all columns this gives feasibility (filter), on one column the devices (bind). Three ways are
tried, each on the nodes where the one before failed:

- First by the policy's preference, step by step.
- Then the largest application container first, each on the fullest device that takes it, so that a
  preference to spread does not make a pod unschedulable that fits.
- Last every possible choice, see ``search``: within its bound, no pod is refused that fits.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from hami_common.model.request import DevicePolicy, DeviceRequest, PlacementPolicy
from hami_core.placement.choose import choose_devices
from hami_core.placement.fit import (
    Held,
    Plan,
    Scene,
    Step,
    View,
    added_fullness,
    divisions_of,
    free_of,
    has_count,
    has_enough,
    has_room,
    is_plain,
    kept_devices,
    known_devices,
    passes,
)
from hami_core.placement.levels import settled, stopped
from hami_core.placement.search import is_searchable, search
from hami_core.table.block import Bools, Columns, Shorts


class Attempt(Struct, frozen=True, kw_only=True):
    """One way to place a plan."""

    order: tuple[int, ...]
    """Steps, in the order in which they are placed."""
    keys: tuple[DevicePolicy, ...]
    """Sort keys of the devices that fit."""


def order_keys(policy: PlacementPolicy) -> tuple[DevicePolicy, ...]:
    """Return the words of the chain that order devices.

    Without ``binpack`` it ends in ``spread``.
    """
    keys: tuple[DevicePolicy, ...] = tuple(
        word for word in policy.device if word in ("binpack", "spread", "numa")
    )
    return keys if "binpack" in keys or "spread" in keys else (*keys, "spread")


def attempts(plan: Plan) -> tuple[Attempt, ...]:
    """Return the policy's way, then the tightest, which one step or several alike steps omit."""
    numbers = tuple(range(len(plan.steps)))
    first = Attempt(order=numbers, keys=order_keys(plan.policy))
    if plan.has_one_choice:
        return (first,)
    before = [n for n in numbers if plan.steps[n].kind != "app"]
    apps = sorted(
        (n for n in numbers if plan.steps[n].kind == "app"),
        key=lambda n: _size(plan.steps[n].request),
        reverse=True,
    )
    second = Attempt(order=(*before, *apps), keys=("binpack",))
    return (first,) if second == first else (first, second)


def _size(request: DeviceRequest) -> tuple[bool, int, int, int, int]:
    return (
        request.exclusive,
        request.memory_pct,
        request.memory_mib,
        request.core_pct,
        request.count,
    )


class Outcome:
    """Result of placing a plan on the columns of a view."""

    def __init__(self, view: View) -> None:
        """Start with no node that fits."""
        self.fits: Bools = np.zeros(view.count, np.bool_)
        self.failed: Shorts = np.full(view.count, -1, np.int32)
        """Step that stops the node, in the first attempt; -1 where the pod fits."""
        self.chosen: dict[int, Bools] = {}
        """The devices taken, by step; complete only if choices were requested."""
        self._shape = view.block.width, view.count

    def part(self, places: Columns, view: View) -> "Outcome":
        """Return the same for some of the nodes."""
        other = Outcome(view.part(places))
        other.fits, other.failed = self.fits[places], self.failed[places]
        other.chosen = {step: chosen[:, places] for step, chosen in self.chosen.items()}
        return other

    def put(self, part: "Outcome", places: Columns) -> None:
        """Copy the results for the nodes at ``places``."""
        if len(places) == len(self.fits):
            self.fits, self.failed, self.chosen = part.fits, part.failed, part.chosen
            return
        self.fits[places], self.failed[places] = part.fits, part.failed
        for step, chosen in part.chosen.items():
            mine = self.chosen.setdefault(step, np.zeros(self._shape, np.bool_))
            mine[:, places] = chosen


def place(view: View, plan: Plan, *, choose: bool) -> Outcome:
    """Place ``plan`` on every node of ``view``.

    A node with too few devices for some step is rejected at once. Without ``choose`` the devices of
    the last step stay open, and those of any step where every choice leads to a placement:
    feasibility does not depend on them.
    """
    outcome = Outcome(view)
    known = None if choose else settled(view, plan)
    if known is not None and known.all():
        outcome.fits = known
        return outcome
    outcome.failed = lacking_step(view, plan).copy()
    is_open = outcome.failed < 0
    if known is not None:
        outcome.fits = known
        is_open = is_open > known
    places = np.flatnonzero(is_open)
    if known is not None and len(places):
        stops = stopped(view if len(places) == view.count else view.part(places), plan)
        outcome.failed[places[stops]] = 0
        places = places[~stops]
    if not len(places):
        return outcome
    if not choose and len(plan.steps) > 1 and len(places):
        wide = roomy(view if len(places) == view.count else view.part(places), plan)
        outcome.fits[places[wide]] = True
        places = places[~wide]
    for number, way in enumerate(attempts(plan)):
        if not len(places):
            break
        part = view if len(places) == view.count else view.part(places)
        found = _place(part, plan, way, choose=choose)
        if number:
            if not found.fits.any():
                break
            places = places[found.fits]
            found = found.part(np.flatnonzero(found.fits), part)
        outcome.put(found, places)
        places = places[~found.fits]
    if len(places) and is_searchable(view.block.width, plan):
        fits, chosen = search(view.part(places), plan)
        if fits.any():
            found = Outcome(view.part(places[fits]))
            found.fits[:] = True
            found.chosen = {number: devices[:, fits] for number, devices in chosen.items()}
            outcome.put(found, places[fits])
    return outcome


def roomy(view: View, plan: Plan) -> Bools:
    """Return nodes on which the pod fits whatever devices its steps take.

    There each vendor has as many devices as its largest step requests, each with capacity for all
    of the pod's steps together. Decides nothing for other nodes, nor for plans with constraints on
    combinations of devices.
    """
    everywhere = np.ones(view.count, np.bool_)
    if plan.mutex or not all(is_plain(view, step) for step in plan.steps):
        return ~everywhere
    free = free_of(view)
    for vendor in dict.fromkeys(step.request.vendor for step in plan.steps):
        steps = [step for step in plan.steps if step.request.vendor == vendor]
        wide = has_count(has_room(view, steps, free), max(step.request.count for step in steps))
        everywhere &= wide
    return everywhere


def lacking_key(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return for each step the (vendor, devices) that must be registered on a node."""
    return tuple((step.request.vendor, step.request.count) for step in plan.steps)


def lacking_step(view: View, plan: Plan) -> Shorts:
    """Return the first step for which a node has too few registered devices, -1 without one.

    The result is shared: callers must not write to it.
    """
    block, wanted = view.block, lacking_key(plan)

    def make() -> Shorts:
        whole = View(view.table, block)
        lacking = np.full(block.count, -1, np.int32)
        for number, (vendor, count) in reversed(list(enumerate(wanted))):
            lacking[known_devices(whole, vendor) < count] = number
        return lacking

    return view.line(block.derived(("lacking", wanted), make))


class Walk:
    """Walk over the pod's containers with the devices used so far on each node of a view."""

    def __init__(self, view: View, plan: Plan, keys: Sequence[DevicePolicy]) -> None:
        """Start with no devices used; devices that fit will be ordered by ``keys``."""
        self.scene = Scene(view, plan)
        self._keys = keys

    def take(self, step: Step, *, passing: Bools, fits: Bools) -> Bools:
        """Take the step's devices, out of those ``passing``, on the nodes that ``fits``."""
        view, plan, running = self.scene
        added = added_fullness(self.scene, step)
        chosen = choose_devices(
            self.scene, step, self._keys, passing=passing, fits=fits, added=added
        )
        kept = kept_devices(view, step, chosen)
        if kept is not None:
            if running is None:
                running = Held(view.block.width, view.count)
                self.scene = Scene(view, plan, running)
            running.add(view, kept, step, added)
        return chosen


def _place(view: View, plan: Plan, way: Attempt, *, choose: bool) -> Outcome:
    outcome = Outcome(view)
    outcome.fits[:] = True
    walk = Walk(view, plan, way.keys)
    for position, number in enumerate(way.order, start=1):
        step = plan.steps[number]
        passing = passes(walk.scene, step)
        enough = has_enough(view, step, passing)
        outcome.failed[outcome.fits & ~enough] = number
        outcome.fits &= enough
        if not outcome.fits.any():
            break
        gives_back = step.kind == "init" and not divisions_of(view, step.request.vendor)
        if not choose and (gives_back or position == len(way.order)):
            continue  # its devices make no difference to the steps after it
        outcome.chosen[number] = walk.take(step, passing=passing, fits=outcome.fits)
    return outcome
