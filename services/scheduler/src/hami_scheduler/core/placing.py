# SPDX-License-Identifier: Apache-2.0
"""Whether and where a whole pod fits: one greedy placing, run on all nodes of a view at once.

Containers are placed in kubelet's order, each on top of what runs beside it (booking rule of
``hami_common.model.placement``): an init container beside the sidecars before it, an application
container beside all sidecars and the application containers placed before it.

Run on all columns this gives feasibility (filter), on one column the devices (bind). Where placing
in the policy's order fails and the pod has several steps, a second attempt places the largest
application container first and on the fullest device that takes it, so that a wish to spread does
not make a pod unschedulable that fits.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from hami_common.model.request import DevicePolicy, DeviceRequest, PlacementPolicy
from hami_scheduler.core.block import Bools, Columns, Shorts
from hami_scheduler.core.choose import choose_devices
from hami_scheduler.core.fit import (
    Held,
    Plan,
    Scene,
    Step,
    View,
    added_fullness,
    has_enough,
    passes,
    wanted_mib,
)


class Attempt(Struct, frozen=True, kw_only=True):
    """One way to go about a plan."""

    order: tuple[int, ...]
    """Steps, in the order in which they are placed."""
    keys: tuple[DevicePolicy, ...]
    """How devices that fit are ordered."""


def order_keys(policy: PlacementPolicy) -> tuple[DevicePolicy, ...]:
    """The words of the chain that order devices; without ``binpack`` it ends in ``spread``."""
    keys: tuple[DevicePolicy, ...] = tuple(
        word for word in policy.device if word in ("binpack", "spread", "numa")
    )
    return keys if "binpack" in keys or "spread" in keys else (*keys, "spread")


def attempts(plan: Plan) -> tuple[Attempt, ...]:
    """The policy's way, then the tightest, which one step has no need of."""
    numbers = tuple(range(len(plan.steps)))
    first = Attempt(order=numbers, keys=order_keys(plan.policy))
    if len(numbers) <= 1:
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
    """What came of placing a plan on the columns of a view."""

    def __init__(self, view: View) -> None:
        """Every node fits until a step fails."""
        self.fits = np.ones(view.count, np.bool_)
        self.failed: Shorts = np.full(view.count, -1, np.int32)
        """Step at which the first attempt failed; -1 where the pod fits."""
        self.chosen: dict[int, Bools] = {}
        """By step: the devices taken. The last step's only if choices were asked for."""
        self.peak: Held | None = None
        """What the pod would book; only if choices were asked for."""


def place(view: View, plan: Plan, *, choose: bool) -> Outcome:
    """Place ``plan`` on every node of ``view``.

    Without ``choose`` the last step's devices are left open: feasibility does not depend on them.
    """
    ways = attempts(plan)
    outcome = _place(view, plan, ways[0], choose=choose)
    for way in ways[1:]:
        places = np.flatnonzero(~outcome.fits)
        if not len(places):
            break
        other = _place(view.part(places), plan, way, choose=choose)
        if len(places) == view.count:
            other.failed = np.where(other.fits, other.failed, outcome.failed)
            outcome = other
        elif other.fits.any():
            _merge(outcome, other, places)
    return outcome


def _merge(outcome: Outcome, other: Outcome, places: Columns) -> None:
    """Take over the nodes on which the other attempt succeeded."""
    found = other.fits
    into = places[found]
    outcome.fits[into] = True
    outcome.failed[into] = -1
    for step, chosen in other.chosen.items():
        if step in outcome.chosen:
            outcome.chosen[step][:, into] = chosen[:, found]
    if outcome.peak is not None and other.peak is not None:
        for mine, theirs in (
            (outcome.peak.mib, other.peak.mib),
            (outcome.peak.core, other.peak.core),
            (outcome.peak.slots, other.peak.slots),
        ):
            mine[:, into] = theirs[:, found]


class Walk:
    """The pod's containers one after another: what they hold so far on each node of a view."""

    def __init__(self, view: View, plan: Plan, keys: Sequence[DevicePolicy]) -> None:
        """Nothing is held; devices that fit will be ordered by ``keys``."""
        self.scene = Scene(view, plan)
        self.peak: Held | None = None
        """What the pod books if it ends here."""
        self._keys = keys

    def take(self, step: Step, *, passing: Bools, fits: Bools) -> Bools:
        """Take the step's devices, out of those ``passing``, on the nodes that ``fits``."""
        view, plan, running = self.scene
        added = added_fullness(self.scene, step)
        chosen = choose_devices(
            self.scene, step, self._keys, passing=passing, fits=fits, added=added
        )
        mib = wanted_mib(view, step.request)
        if running is None or self.peak is None:
            running = Held(view.block.width, view.count)
            self.peak = Held(view.block.width, view.count) if plan.has_init else running
            self.scene = Scene(view, plan, running)
        if step.kind == "init":
            self.peak.raise_with(running, chosen, mib, step)
        else:
            running.add(chosen, mib, step, added)
            if self.peak is not running:
                self.peak.raise_to(running)
        return chosen


def _place(view: View, plan: Plan, way: Attempt, *, choose: bool) -> Outcome:
    outcome = Outcome(view)
    walk = Walk(view, plan, way.keys)
    for position, number in enumerate(way.order, start=1):
        step = plan.steps[number]
        passing = passes(walk.scene, step)
        enough = has_enough(view, step, passing)
        outcome.failed[outcome.fits & ~enough] = number
        outcome.fits &= enough
        if not outcome.fits.any():
            break
        if not choose and (step.kind == "init" or position == len(way.order)):
            continue  # what it takes makes no difference to the steps after it
        outcome.chosen[number] = walk.take(step, passing=passing, fits=outcome.fits)
    outcome.peak = walk.peak
    return outcome
