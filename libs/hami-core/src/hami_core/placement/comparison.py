# SPDX-License-Identifier: Apache-2.0
"""Compares the best node and its device with the next ones, for the recorded decision (design D57).

The terms of a node are those of ``score``, the terms of a device those of ``choose``. A device is
compared for the first container that requests devices, before the others are placed. ``compare``
copies the state of the two nodes at the time of the decision, ``Comparison.made`` evaluates it
later, when the record is sent. Fractions are of a whole, 0..1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from hami_common.events.decision import DeviceTerms, NodeTerms, ScoreDetail
from hami_common.model.request import PodRequest
from hami_core.placement.choose import choose_devices, links_of
from hami_core.placement.fit import (
    Plan,
    Scene,
    View,
    added_fullness,
    passes,
    wanted_core,
    wanted_mib,
)
from hami_core.placement.placing import order_keys, place
from hami_core.placement.score import filling
from hami_core.table.block import Floats
from hami_core.table.table import DeviceTable


class Ranked(NamedTuple):
    """A node that fits, with the terms that compare it with others."""

    node: str
    score: float
    shared: float
    """Levels of the network shared with members of the gang."""
    excess: float


class Comparison:
    """State of the first two nodes at the time of a decision."""

    def __init__(
        self, request: PodRequest, plan: Plan, best: Sequence[Ranked], views: Sequence[View]
    ) -> None:
        """``views`` are of single nodes, in the order of ``best``."""
        self._request = request
        self._plan = plan
        self._best = best
        self._views = views
        # The table drops matrices of links that no node has any more.
        self._made = self._evaluated() if plan.topology else None

    def made(self) -> ScoreDetail:
        """Return the comparison."""
        return self._made or self._evaluated()

    def _evaluated(self) -> ScoreDetail:
        plan, views, best = self._plan, self._views, self._best
        return ScoreDetail(
            node_policy=plan.policy.node,
            device_policy=",".join(plan.policy.device or order_keys(plan.policy)),
            decided_by=_decided_by(best),
            nodes=tuple(
                _node_terms(view, plan, one) for view, one in zip(views, best, strict=True)
            ),
            container=self._request.containers[plan.steps[0].container].name,
            devices=_devices(views[0], plan),
        )


def compare(
    table: DeviceTable, request: PodRequest, plan: Plan, best: Sequence[Ranked]
) -> Comparison | None:
    """Copy the present state of the first two nodes of ``best``; ``None`` without a node."""
    nodes = [one.node for one in best]
    places = [place for node in nodes if (place := table.place(node)) is not None]
    if not places or not plan.steps or len(places) < len(best):
        return None
    views: list[View] = []
    for block in dict.fromkeys(place.block for place in places):
        columns = [place.column for place in places if place.block is block]
        copy = block.copy_of(np.array(columns, np.intp))
        views += [View(table, copy, np.array([n], np.intp)) for n in range(len(columns))]
    views.sort(key=lambda view: nodes.index(view.name(0)))
    return Comparison(request, plan, best, views)


def _decided_by(best: Sequence[Ranked]) -> str:
    if len(best) == 1:
        return ""
    first, second = best[0], best[1]
    if first.shared != second.shared:
        return "topology"
    if first.excess != second.excess:
        return "excess"
    return "fill" if first.score != second.score else "name"


def _node_terms(view: View, plan: Plan, one: Ranked) -> NodeTerms:
    parts = filling(view, plan)
    return NodeTerms(
        node=one.node,
        score=round(one.score, 3),
        slot=_rounded(parts.slot[0]),
        core=_rounded(parts.core[0]),
        memory=_rounded(parts.memory[0]),
        topology=one.shared,
        excess=round(one.excess, 3),
    )


def _devices(view: View, plan: Plan) -> tuple[DeviceTerms, ...]:
    """Return the terms of a chosen device and of the best one that is not chosen."""
    outcome = place(view, plan, choose=True)
    if not outcome.fits[0]:
        return ()
    scene, step = Scene(view, plan), plan.steps[0]
    chosen, passing = outcome.chosen[0], passes(scene, step)
    others = passing & ~chosen
    rows = [int(np.flatnonzero(chosen[:, 0])[0])]
    if others.any():
        one = replace(step, request=replace(step.request, count=1, shape=""))
        first = choose_devices(
            scene,
            one,
            order_keys(plan.policy),
            passing=others,
            fits=np.ones(1, np.bool_),
            added=added_fullness(scene, one),
        )
        rows.append(int(np.flatnonzero(first[:, 0])[0]))
    links = links_of(view, step, passing) if plan.topology else None
    return tuple(_device_terms(scene, links, row) for row in rows)


def _device_terms(scene: Scene, links: Floats | None, row: int) -> DeviceTerms:
    view, plan, _ = scene
    block, step, column = view.block, plan.steps[0], view.column(0)
    at = (row, column)
    shape = (block.width, 1)
    mib = int(np.broadcast_to(wanted_mib(view, step.request), shape)[row, 0])
    core = int(np.broadcast_to(wanted_core(view, step.request), shape)[row, 0])
    return DeviceTerms(
        uuid=block.uuids[column][row],
        slot=_rounded((int(block.used_slots[at]) + 1) * float(block.per_slot[at])),
        core=_rounded((int(block.used_core[at]) + core) * float(block.per_core[at])),
        memory=_rounded((int(block.used_mib[at]) + mib) * float(block.per_mib[at])),
        topology=0.0 if links is None else float(links[row, 0]),
    )


def _rounded(value: float) -> float:
    return round(float(value), 4)
