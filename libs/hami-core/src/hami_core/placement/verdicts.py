# SPDX-License-Identifier: Apache-2.0
"""Answers of filter and prioritize: nodes that fit, their scores, and the reasons of the others.

Per plan (pods of one template have equal plans) the answer for every node is cached and updated by
placing the plan again on just the columns that changed since. The reasons of nodes that do not fit
and the scores are cached the same way. All feasible nodes are returned. Scores are 0..100. Reads
the table, changes nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hami_common.events.decision import (
    NODES_COMPARED,
    NODES_DETAILED,
    NodeScore,
    RefusalClass,
)
from hami_common.model.request import PodRequest, options
from hami_core.placement.comparison import Comparison, Ranked, compare
from hami_core.placement.details import Details, RecordsOf, look
from hami_core.placement.fit import NO_PLAN, Plan, View, compile_request, known_devices
from hami_core.placement.nodenames import ABSENT, Found, NameIndex, NodeNames
from hami_core.placement.placing import place
from hami_core.placement.reasons import (
    CLASSES_SHOWN,
    Causes,
    ClosestNode,
    NodeRefusal,
    Refusals,
    causes,
    other_reasons,
)
from hami_core.placement.score import (
    exceeds,
    excess_of,
    least_first,
    levels_of,
    nearer,
    priorities,
    ranking,
    score,
)
from hami_core.table.block import Block, Bools, Columns, Floats, Ints, Shorts
from hami_core.table.table import COLUMN_BITS, COLUMN_MASK, DeviceTable

T = TypeVar("T", bound=np.generic)

_NOWHERE: Final = np.zeros(0, np.intp)
_SEVERAL: Final = 4
_MOSTLY: Final = 2
_NO_FITS: Final[Bools] = np.zeros(0, np.bool_)
_NO_STEPS: Final[Shorts] = np.zeros(0, np.int32)
_NO_CAUSES: Final = Causes.none(0)
_NO_SCORES: Final[Floats] = np.zeros(0)
_SCATTER_BITS: Final = 20
_SCATTER: Final = 0x9_E377
"""Odd: numbers below 2^20 times this, modulo 2^20, are the same numbers in another order."""
_FINEST: Final = 2.0**-20
PLANS_KEPT: Final = 128
LISTS_KEPT: Final = 4
"""A filter's list returns with the next filter, its answer with prioritize."""


class _Kept:
    """Cached results of one plan on one block."""

    __slots__ = (
        "causes",
        "causes_version",
        "excess",
        "excess_version",
        "failed",
        "fits",
        "owns_causes",
        "scores",
        "scores_version",
        "version",
    )

    def __init__(self) -> None:
        self.version = -1
        self.fits = _NO_FITS
        self.failed = _NO_STEPS
        self.causes_version = -1
        self.causes = _NO_CAUSES
        self.owns_causes = False
        """True when the lines are not shared, so that they may be written to."""
        self.scores_version = -1
        self.scores = _NO_SCORES
        self.excess_version = -1
        self.excess = _NO_SCORES


class _Part(NamedTuple):
    """The named nodes of one block."""

    block: Block
    places: Columns | slice
    """Places of these nodes among the names."""
    columns: Columns


class Located:
    """Named nodes and their positions in the table."""

    def __init__(self, table: DeviceTable, names: NodeNames, found: Found) -> None:
        """``found`` are codes as in ``DeviceTable.codes``, -1 where a node is not registered."""
        self.names = names
        self.codes = found.numbers
        self._table = table
        self._ranks: Ints | None = None
        self.parts = _parts(table, found)
        """The nodes of each block."""
        self.unregistered = np.flatnonzero(self.codes < 0) if found.least < 0 else _NOWHERE
        """Places of the nodes that are not registered."""
        self._found = found

    def __len__(self) -> int:
        return len(self.codes)

    def part(self, mask: Bools) -> "Located":
        """Return the nodes where ``mask`` is set; itself where that is everywhere."""
        if mask.all():
            return self
        places = np.flatnonzero(mask)
        names = self.names.at(places)
        found = self._found._replace(numbers=self.codes.take(places))
        return Located(self._table, names, found if found.least >= 0 else Found.of(found.numbers))

    def ranks(self) -> Ints:
        """Return each node's place in the order of names, unregistered nodes last."""
        if self._ranks is None:
            self._ranks = np.zeros(len(self.codes), np.int64)
            for part in self.parts:
                self._ranks[part.places] = self._table.name_ranks(part.block)[part.columns]
            others = sorted(self.unregistered.tolist(), key=self.names.string)
            self._ranks[others] = np.arange(len(others)) + len(self._table)
        return self._ranks

    def _ranks_at(self, places: Columns) -> Ints:
        """Return ``ranks`` of some places."""
        if self._ranks is None and len(self.parts) == 1 and not len(self.unregistered):
            (part,) = self.parts
            columns = part.columns if len(places) == len(self) else part.columns.take(places)
            return self._table.name_ranks(part.block).take(columns)
        return self.ranks().take(places)

    def first(self, places: Columns, count: int) -> Columns:
        """Return the first ``count`` of ``places`` in the order of names."""
        ranks = self._ranks_at(places)
        if count == 1:
            return places[[ranks.argmin()]]
        if len(places) > _SEVERAL * count:
            # Ranks are spread about evenly: enough of them are mostly below this one.
            below = _SEVERAL * count * (len(self._table) + 1) // len(places)
            some = np.flatnonzero(ranks < below)
            if len(some) >= count:
                places, ranks = places.take(some), ranks.take(some)
        return places.take(np.argsort(ranks, kind="stable")[:count])

    def scattered(self) -> Ints:
        """Return a number below 2^``_SCATTER_BITS`` for each node, independent of their order.

        Neighbors in the order of names have numbers far apart.
        """
        return (self._ranks_at(np.arange(len(self))) * _SCATTER) & ((1 << _SCATTER_BITS) - 1)

    def several(self, places: Columns) -> list[str]:
        """Return the names at some places."""
        return self.names.several(places)

    def name(self, place: int) -> str:
        """Return the name at a place."""
        return self.names.string(place)


class Filtered:
    """Answer of filter."""

    def __init__(
        self,
        located: Located,
        left: NodeNames,
        refusals: Sequence[Refusals],
        *,
        fits: Sequence[Bools] = (),
    ) -> None:
        """``left`` are the nodes that fit; ``refusals`` those of each alternative of the pod."""
        self.nodes = located.names
        self.left = left
        """Nodes that fit, in the order in which they were named."""
        self.fits = fits
        """By alternative, the nodes that fit it; empty for a pod without alternatives."""
        self._refusals = refusals
        self._groups: list[tuple[NodeRefusal, Columns]] | None = None
        self._classes: tuple[RefusalClass, ...] | None = None

    @property
    def feasible(self) -> list[str]:
        """Names of the nodes that fit, in the order in which they were named."""
        return list(self.left.strings())

    def refused(self) -> dict[str, str]:
        """Return the text by refused node: the same for all nodes of a class."""
        return {
            self.nodes.string(place): refusal.text
            for refusal, places in self.groups()
            for place in places.tolist()
        }

    def groups(self) -> list[tuple[NodeRefusal, Columns]]:
        """Return the refused nodes by text, as places in the order in which they were named."""
        if self._groups is None:
            found = [group for some in self._refusals for group in some.groups()]
            if len(found) > CLASSES_SHOWN:
                found.sort(key=lambda group: (-len(group[1]), group[0].text))
                rest = found[CLASSES_SHOWN - 1 :]
                hidden = (other_reasons(len(rest)), np.concatenate([some for _, some in rest]))
                found = [*found[: CLASSES_SHOWN - 1], hidden]
            self._groups = found
        return self._groups

    def classes(self) -> tuple[RefusalClass, ...]:
        """Return the refused nodes by class, largest first, for the recorded decision."""
        if self._classes is None:
            found = [one for some in self._refusals for one in some.classes()]
            if len(self._refusals) > 1:
                found.sort(key=lambda one: (-one.count, one.text))
            self._classes = tuple(found)
        return self._classes

    def closest(self, count: int, *, choice: int | None = None) -> list[ClosestNode]:
        """Return the refused nodes that are closest to taking the pod, see ``Refusals.closest``.

        Of a pod with alternatives those that ``choice`` refuses, ``told`` by default.
        """
        return self._refusals[self.told if choice is None else choice].closest(count)

    def fitting(self) -> list[list[str]]:
        """Return the nodes that fit, sorted, by the first alternative that fits them."""
        found: list[list[str]] = []
        left = set(self.left.strings())
        for fits in self.fits or (np.ones(len(self.nodes), np.bool_),):
            names = self.nodes.several(np.flatnonzero(fits))
            found.append(sorted(left.intersection(names)))
            left.difference_update(found[-1])
        return found

    @property
    def told(self) -> int:
        """Number of the alternative that refuses most nodes; its details are recorded."""
        sizes = [refusals.count for refusals in self._refusals]
        return sizes.index(max(sizes))


class Scored:
    """Answer of prioritize."""

    def __init__(self, located: Located, scores: Floats) -> None:
        """``scores`` in the order in which the nodes were named, 0 where the pod does not fit."""
        self.nodes = located.names
        self.scores = scores
        self._located = located

    def best(self, count: int) -> list[tuple[str, float]]:
        """Return the best nodes and their scores, best first, by name among equals."""
        places = np.arange(len(self.scores))
        if len(places) > count:
            least = np.partition(self.scores, len(places) - count)[len(places) - count]
            above = np.flatnonzero(self.scores > least)
            equal = self._located.first(np.flatnonzero(self.scores == least), count - len(above))
            places = np.concatenate([above, equal])
        found = zip(self.nodes.several(places), self.scores[places].tolist(), strict=True)
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def priorities(self, *, highest: int) -> Ints:
        """Return whole numbers 0..``highest``, see ``score.priorities``."""
        return priorities(self.scores, self._located.first, highest=highest)


class Verdicts:
    """Filter and prioritize over one table."""

    def __init__(self, table: DeviceTable) -> None:
        """Start without cached results."""
        self._table = table
        self._kept: OrderedDict[Plan, dict[int, _Kept]] = OrderedDict()
        self._index = NameIndex(table.codes)
        self._located: list[Located] = []
        self._places_version = -1
        self._last: tuple[PodRequest | None, Plan] = (None, NO_PLAN)

    def filter(self, request: PodRequest, names: NodeNames | Sequence[str]) -> Filtered:
        """Return the nodes that fit the whole pod, and the refusals of the others.

        A node fits a pod with alternatives if it fits one of them. Else the first alternative
        refuses it for which it has devices.
        """
        located, choices = self._locate(names), options(request)
        if len(choices) > 1:
            return self._filter_any(choices, located)
        plan = self._compiled(request)
        refusals = Refusals(request, plan, located, self._table.divisions)
        if not plan.steps:
            return Filtered(located, located.names, [refusals])
        fits = self._fits(plan, located)
        self._refuse(refusals, plan, located, ~fits)
        left = self._kept_part(located, fits)
        return Filtered(located, left, [refusals])

    def _filter_any(self, choices: Sequence[PodRequest], located: Located) -> Filtered:
        """Return the verdict on alternatives."""
        plans = [compile_request(choice) for choice in choices]
        fits = [self._fits(plan, located) for plan in plans]
        refused = ~np.logical_or.reduce(fits)
        masks: list[Bools] = []
        for plan in plans:
            masks.append(refused & self._has_devices(plan, located))
            refused = refused & ~masks[-1]
        masks[0] |= refused  # nodes without devices of any alternative
        found: list[Refusals] = []
        for choice, plan, mine in zip(choices, plans, masks, strict=True):
            found.append(Refusals(choice, plan, located, self._table.divisions))
            self._refuse(found[-1], plan, located, mine)
        left = self._kept_part(located, np.logical_or.reduce(fits))
        return Filtered(located, left, found, fits=fits)

    def _has_devices(self, plan: Plan, located: Located) -> Bools:
        """Return the nodes that have devices of every vendor of the plan."""
        has = np.zeros(len(located), np.bool_)
        for part in located.parts:
            view = View(self._table, part.block)
            vendors = dict.fromkeys(step.request.vendor for step in plan.steps)
            known = [known_devices(view, vendor)[part.columns] > 0 for vendor in vendors]
            has[part.places] = np.logical_and.reduce(known)
        return has

    def _refuse(self, refusals: Refusals, plan: Plan, located: Located, mine: Bools) -> None:
        """Add the causes of the nodes that are ``mine``, none of which fits the plan."""
        if not mine.any():
            return
        for part in located.parts:
            failing = np.flatnonzero(mine[part.places])
            if len(failing):
                places = failing if isinstance(part.places, slice) else part.places[failing]
                caused = self._caused(plan, part.block).causes
                refusals.add(places, caused, part.columns.take(failing))
        unregistered = located.unregistered[mine[located.unregistered]]
        if count := len(unregistered):
            refusals.add(unregistered, Causes.unregistered(count), np.arange(count))

    def _kept_part(self, located: Located, fits: Bools) -> NodeNames:
        """Return the names of the nodes that fit, and remember them for the next verb."""
        left = located.part(fits)
        if left.names.text and left is not located:
            self._keep(left)
        return left.names

    def prioritize(
        self, request: PodRequest, names: NodeNames | Sequence[str], *, near: Sequence[str] = ()
    ) -> Scored:
        """Return the score of each node, in the order named; 0 where the pod does not fit.

        Nodes that fit an earlier alternative of the pod are before all others. ``near`` are nodes
        of the members of its gang, one entry for each member.
        """
        located, choices = self._locate(names), options(request)
        if len(choices) > 1:
            scores = self._scores_any(choices, located)
        else:
            scores = self._scores(self._compiled(request), located)
        if near and scores.any():
            shared, most = self._shared(located, near)
            scores = nearer(scores, shared, most=most)
        return Scored(located, scores)

    def _scores(self, plan: Plan, located: Located) -> Floats:
        """Return the scores of one plan."""
        scores = np.zeros(len(located))
        if plan.steps:
            for part in located.parts:
                scores[part.places] = self._scored(plan, part.block).scores.take(part.columns)
            beyond = self._excess(plan, located)
            if beyond is not None:
                scores = least_first(scores, beyond, self._fits(plan, located))
        return scores

    def _scores_any(self, choices: Sequence[PodRequest], located: Located) -> Floats:
        """Return the scores of alternatives, each node by the first one that fits."""
        scores, number = np.zeros(len(located)), np.zeros(len(located))
        left = np.ones(len(located), np.bool_)
        for rank, choice in enumerate(choices):
            plan = compile_request(choice)
            mine = left & self._fits(plan, located)
            if mine.any():
                scores[mine] = self._scores(plan, located)[mine]
                number[mine] = rank
                left &= ~mine
        return least_first(scores, number, ~left)

    def shortlist(
        self, request: PodRequest, fitting: NodeNames, count: int, *, near: Sequence[str] = ()
    ) -> NodeNames:
        """Return the ``count`` best of the nodes that fit, in the order in which they were named.

        All, if there are no more. ``near`` as in ``prioritize``. Where the count ends within
        equally good nodes, the selected ones are scattered over the names: neighbors by name often
        share a zone. Numbers within ``_FINEST`` of each other are equal.
        """
        if len(fitting) <= count:
            return fitting
        located = self._locate(fitting)
        if near or request.others:
            ranks = self.prioritize(request, fitting, near=near).scores
        else:
            plan, ranks = self._compiled(request), np.zeros(len(located))
            for part in located.parts:
                ranks[part.places] = ranking(View(self._table, part.block), plan, part.columns)
            beyond = self._excess(plan, located)
            if beyond is not None:
                levels, _ = levels_of(beyond, self._fits(plan, located))
                ranks += levels * (ranks.max() - ranks.min() + 1)
        order = (ranks * (1 / _FINEST)).astype(np.int64) << _SCATTER_BITS
        order |= located.scattered()
        worse = len(order) - count
        return located.names.at(np.sort(np.argpartition(order, worse)[worse:]))

    def details(self, request: PodRequest, filtered: Filtered, records_of: RecordsOf) -> Details:
        """Return the state of the nodes that are closest to taking the pod, of a filter just made.

        ``records_of``: the ledger's records, to name the holders.
        """
        closest = filtered.closest(NODES_DETAILED)
        told = options(request)[filtered.told]
        return look(self._table, told, self._compiled(told), closest, records_of)

    def comparison(
        self, request: PodRequest, best: Sequence[NodeScore], *, near: Sequence[str] = ()
    ) -> Comparison | None:
        """Return the state of the first nodes of a prioritize just made, the best first.

        Of a pod with alternatives those that fit the first node's alternative.
        """
        best = [one for one in best[:NODES_COMPARED] if one.score > 0]
        located = self._locate([one.node for one in best])
        if request.others and best:
            request = self._first_fitting(request, located)
            fits = self._fits(self._compiled(request), located)
            best = [one for one, is_fitting in zip(best, fits, strict=True) if is_fitting]
            located = self._locate([one.node for one in best])
        plan = self._compiled(request)
        beyond = self._excess(plan, located)
        shared = self._shared(located, near)[0] if near else None
        ranked = [
            Ranked(
                node=one.node,
                score=one.score,
                shared=0.0 if shared is None else float(shared[number]),
                excess=0.0 if beyond is None else float(beyond[number]),
            )
            for number, one in enumerate(best)
        ]
        return compare(self._table, request, plan, ranked)

    def _first_fitting(self, request: PodRequest, located: Located) -> PodRequest:
        """Return the pod's first alternative that fits the first of the nodes."""
        choices = options(request)
        fitting = (one for one in choices if self._fits(self._compiled(one), located)[0])
        return next(fitting, choices[0])

    def _compiled(self, request: PodRequest) -> Plan:
        """Return the plan of a pod; a filter's pod is mostly the next prioritize's."""
        if self._last[0] is not request:
            self._last = (request, compile_request(request))
        return self._last[1]

    def _shared(self, located: Located, near: Sequence[str]) -> tuple[Floats, int]:
        """Return the levels that each node shares with those of ``near``, and their maximum."""
        domains = self._table.domains
        closeness = domains.closeness(near)
        shared = np.zeros(len(located))
        for part in located.parts:
            shared[part.places] = closeness[part.block.domains[part.columns]]
        for node, count in Counter(near).items():
            shared[located.codes == self._table.codes.get(node, ABSENT - 1)] += count
        return shared, (domains.depth + 1) * len(near)

    def _locate(self, names: NodeNames | Sequence[str]) -> Located:
        """Locate each named node in the table."""
        version = self._table.places_version
        if version != self._places_version:
            self._index = NameIndex(self._table.codes)
            self._places_version = version
            self._located.clear()
        if not isinstance(names, NodeNames):
            names = NodeNames.of(names)
        elif names.text:
            for known in self._located:
                if known.names.text == names.text:
                    names.rows = known.names.rows
                    return known
        located = Located(self._table, names, self._index.find(names))
        if names.text:
            self._keep(located)
        return located

    def _keep(self, located: Located) -> None:
        self._located.insert(0, located)
        del self._located[LISTS_KEPT:]

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
        """Return ``fits`` and ``failed`` of every column, up to date."""
        kept = self._of(plan, block)
        if kept.version == block.version:
            return kept
        changed = block.stale_since(kept.version)
        outcome = place(View(self._table, block, changed), plan, choose=False)
        kept.fits = _merged(kept.fits, outcome.fits, block, changed)
        kept.failed = _merged(kept.failed, outcome.failed, block, changed)
        kept.version = block.version
        return kept

    def _caused(self, plan: Plan, block: Block) -> _Kept:
        """Return ``causes`` of every column that does not fit, up to date."""
        kept = self._placed(plan, block)
        if kept.causes_version == block.version:
            return kept
        changed = block.stale_since(kept.causes_version)
        if changed is None:
            kept.causes = causes(View(self._table, block), plan, kept.failed)
            kept.owns_causes = False
        else:
            kept.causes = kept.causes.resized(block.count)
            columns = changed[~kept.fits[changed]]
            if len(columns):
                if not kept.owns_causes:
                    kept.causes, kept.owns_causes = kept.causes.copy(), True
                view = View(self._table, block, columns)
                kept.causes.put(causes(view, plan, kept.failed[columns]), columns)
        kept.causes_version = block.version
        return kept

    def _fits(self, plan: Plan, located: Located) -> Bools:
        """Return the nodes on which the pod fits."""
        fits = np.zeros(len(located), np.bool_)
        for part in located.parts:
            fits[part.places] = self._placed(plan, part.block).fits.take(part.columns)
        return fits

    def _excess(self, plan: Plan, located: Located) -> Floats | None:
        """Return each node's ``excess``; ``None`` where it is 0 everywhere."""
        beyond: Floats | None = None
        for part in located.parts:
            if exceeds(View(self._table, part.block), plan):
                if beyond is None:
                    beyond = np.zeros(len(located))
                beyond[part.places] = self._exceeding(plan, part.block).excess.take(part.columns)
        return beyond

    def _exceeding(self, plan: Plan, block: Block) -> _Kept:
        """Return ``excess`` of every column, up to date."""
        kept = self._placed(plan, block)
        if kept.excess_version == block.version:
            return kept
        changed = block.stale_since(kept.excess_version)
        fits = kept.fits if changed is None else kept.fits[changed]
        found = excess_of(View(self._table, block, changed), plan, fits)
        kept.excess = _merged(kept.excess, found, block, changed)
        kept.excess_version = block.version
        return kept

    def _scored(self, plan: Plan, block: Block) -> _Kept:
        """Return ``scores`` of every column, up to date."""
        kept = self._placed(plan, block)
        if kept.scores_version == block.version:
            return kept
        changed = block.stale_since(kept.scores_version)
        fits = kept.fits if changed is None else kept.fits[changed]
        some = np.flatnonzero(fits)
        if len(some) * _MOSTLY < len(fits):  # the others score 0
            scores = np.zeros(len(fits))
            columns = some if changed is None else changed[some]
            scores[some] = score(View(self._table, block, columns), plan, fits[some])
        else:
            scores = score(View(self._table, block, changed), plan, fits)
        kept.scores = _merged(kept.scores, scores, block, changed)
        kept.scores_version = block.version
        return kept


def _parts(table: DeviceTable, found: Found) -> list[_Part]:
    codes, blocks = found.numbers, table.blocks
    if not len(codes):
        return []
    least, most = found.least >> COLUMN_BITS, found.most >> COLUMN_BITS
    if least == most >= 0:
        columns = codes - (least << COLUMN_BITS) if least else codes
        return [_Part(blocks[least], slice(None), columns)]
    numbers = codes >> COLUMN_BITS
    parts: list[_Part] = []
    for number in range(max(0, least), most + 1):
        mine = np.flatnonzero(numbers == number)
        if len(mine):
            parts.append(_Part(blocks[number], mine, codes[mine] & COLUMN_MASK))
    return parts


def _merged(line: NDArray[T], new: NDArray[T], block: Block, changed: Columns | None) -> NDArray[T]:
    """Return the line for the block's present columns, ``new`` where they ``changed``."""
    if changed is None:
        return new
    if len(line) < block.count:
        line = np.concatenate([line, np.zeros(block.count - len(line), line.dtype)])
    line = line[: block.count]
    line[changed] = new
    return line
