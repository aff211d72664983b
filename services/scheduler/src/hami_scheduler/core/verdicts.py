# SPDX-License-Identifier: Apache-2.0
"""Answers of filter and prioritize: which of the named nodes fit, how well, and why not.

Per plan (pods of one template have equal plans) the answer for every node is kept and brought up to
date by placing the plan again on just the columns that changed since. All feasible nodes are
returned. Scores are 0..100. Reads the table, changes nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from hami_common.events.decision import RefusalClass
from hami_common.model.request import PodRequest
from hami_scheduler.core.block import Block, Bools, Floats, Ints, Shorts
from hami_scheduler.core.fit import Plan, View, compile_request
from hami_scheduler.core.names import NameIndex
from hami_scheduler.core.placing import place
from hami_scheduler.core.reasons import Refusals
from hami_scheduler.core.score import needs_choices, score
from hami_scheduler.core.table import COLUMN_BITS, DeviceTable

T = TypeVar("T", bound=np.generic)

PLANS_KEPT: Final = 128
_COLUMN_MASK: Final = (1 << COLUMN_BITS) - 1
_PART_WORTH_IT: Final = 4
"""Columns are placed again one by one while fewer than one in this many changed."""


class _Kept:
    """What is known of one plan on one block."""

    __slots__ = ("failed", "fits", "scores", "scores_version", "version")

    def __init__(self) -> None:
        self.version = -1
        self.fits: Bools = np.zeros(0, np.bool_)
        self.failed: Shorts = np.zeros(0, np.int32)
        self.scores_version = -1
        self.scores: Floats = np.zeros(0)


class Filtered:
    """Answer of filter."""

    def __init__(self, feasible: list[str], refusals: Refusals) -> None:
        """``feasible`` in the order in which the nodes were named."""
        self.feasible = feasible
        self._refusals = refusals

    @property
    def refused_count(self) -> int:
        """How many nodes do not fit."""
        return len(self._refusals)

    def refused(self) -> dict[str, str]:
        """Text by refused node: the same for all nodes of a class."""
        return self._refusals.by_node()

    def classes(self) -> tuple[RefusalClass, ...]:
        """The refused nodes by class, largest first, for the recorded decision."""
        return self._refusals.classes()


class Verdicts:
    """Filter and prioritize over one table."""

    def __init__(self, table: DeviceTable) -> None:
        """Nothing is known yet."""
        self._table = table
        self._kept: OrderedDict[Plan, dict[int, _Kept]] = OrderedDict()
        self._index = NameIndex(table.codes)
        self._names: list[str] = []
        self._codes: Ints = np.zeros(0, np.int64)
        self._codes_version = -1

    def filter(self, request: PodRequest, names: Sequence[str]) -> Filtered:
        """Which of the nodes fit the whole pod."""
        plan = compile_request(request)
        refusals = Refusals(request, plan)
        if not plan.steps:
            return Filtered(list(names), refusals)
        codes = self._codes_of(names)
        fits = np.zeros(len(codes), np.bool_)
        refused: list[tuple[View, Shorts]] = []
        for block, mine, columns in self._parts(codes):
            kept = self._placed(plan, block)
            fits[mine] = fitting = kept.fits[columns]
            if not fitting.all():
                failing = np.zeros(block.count, np.bool_)
                failing[columns[~fitting]] = True
                places = None if failing.all() else np.flatnonzero(failing)
                failed = kept.failed if places is None else kept.failed[places]
                refused.append((View(self._table, block, places), failed))
        for view, failed in refused:
            refusals.add(view, failed)
        if (codes < 0).any():
            refusals.add_unregistered(compress(names, codes < 0))
        feasible = list(names) if fits.all() else list(compress(names, fits))
        return Filtered(feasible, refusals)

    def prioritize(self, request: PodRequest, names: Sequence[str]) -> list[float]:
        """Score of each node, in the order named; 0 where the pod does not fit."""
        plan = compile_request(request)
        if not plan.steps:
            return [0.0] * len(names)
        codes = self._codes_of(names)
        scores = np.zeros(len(codes))
        for block, mine, columns in self._parts(codes):
            scores[mine] = self._scored(plan, block).scores[columns]
        result: list[float] = scores.tolist()
        return result

    def _codes_of(self, names: Sequence[str]) -> Ints:
        """Where each named node stands, -1 for a node that is not registered."""
        version = self._table.places_version
        if version != self._codes_version:
            self._index = NameIndex(self._table.codes)
            self._codes_version = version
            self._names = []
        if self._names != names:
            self._codes = self._index.find(names)
            self._names = list(names)
        return self._codes

    def _parts(self, codes: Ints) -> list[tuple[Block, slice | NDArray[np.intp], NDArray[np.intp]]]:
        """(block, which of the codes are its, their columns)."""
        blocks = self._table.blocks
        parts: list[tuple[Block, slice | NDArray[np.intp], NDArray[np.intp]]] = []
        if not len(codes):
            return parts
        numbers = codes >> COLUMN_BITS
        least, most = int(numbers.min()), int(numbers.max())
        if least == most >= 0:
            return [(blocks[least], slice(None), codes & _COLUMN_MASK)]
        for number in range(max(0, least), most + 1):
            mine = np.flatnonzero(numbers == number)
            if len(mine):
                parts.append((blocks[number], mine, codes[mine] & _COLUMN_MASK))
        return parts

    def _of(self, plan: Plan, block: Block) -> _Kept:
        by_width = self._kept.get(plan)
        if by_width is None:
            by_width = self._kept[plan] = {}
            if len(self._kept) > PLANS_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(plan)
        return by_width.setdefault(block.width, _Kept())

    def _placed(self, plan: Plan, block: Block) -> _Kept:
        """``fits`` and ``failed`` of every column, up to date."""
        kept = self._of(plan, block)
        if kept.version == block.version:
            return kept
        whole = View(self._table, block)
        # Scores that depend on which devices are taken cost little where these are found anyway.
        both = needs_choices(whole, plan)
        changed = _stale(block, min(kept.version, kept.scores_version) if both else kept.version)
        view = whole if changed is None else whole.part(changed)
        outcome = place(view, plan, choose=both)
        kept.fits = _merged(kept.fits, outcome.fits, block, changed)
        kept.failed = _merged(kept.failed, outcome.failed, block, changed)
        kept.version = block.version
        if both:
            scores = score(view, plan, outcome.fits, outcome.peak)
            kept.scores = _merged(kept.scores, scores, block, changed)
            kept.scores_version = block.version
        return kept

    def _scored(self, plan: Plan, block: Block) -> _Kept:
        """``scores`` of every column, up to date."""
        kept = self._placed(plan, block)
        if kept.scores_version == block.version:
            return kept
        changed = _stale(block, kept.scores_version)
        whole = View(self._table, block)
        view = whole if changed is None else whole.part(changed)
        scores = score(view, plan, kept.fits if changed is None else kept.fits[changed])
        kept.scores = _merged(kept.scores, scores, block, changed)
        kept.scores_version = block.version
        return kept


def _stale(block: Block, version: int) -> NDArray[np.intp] | None:
    """Columns to work out again; ``None`` for all."""
    if version < 0:
        return None
    changed = block.changed_since(version)
    if changed is None or len(changed) * _PART_WORTH_IT > block.count:
        return None
    return changed[changed < block.count]


def _merged(
    line: NDArray[T], new: NDArray[T], block: Block, changed: NDArray[np.intp] | None
) -> NDArray[T]:
    """The line for the block's present columns, ``new`` where they ``changed``."""
    if changed is None:
        return new
    if len(line) < block.count:
        line = np.concatenate([line, np.zeros(block.count - len(line), line.dtype)])
    line = line[: block.count]
    line[changed] = new
    return line
