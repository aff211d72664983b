# SPDX-License-Identifier: Apache-2.0
"""Chooses the best-connected set among devices of one node, from the strengths of their links.

A set's strength is the sum over its pairs; larger is closer. Up to ``EXACT_WIDTH`` devices the
choice is exact: all sets of a size are listed once per link matrix, strongest first. Wider nodes
grow a set from every start and keep the strongest. Nodes with equal matrices share one
``LinkClass``. Devices are named by their cell position; knows nothing of capacity.
"""

from itertools import combinations
from math import comb
from typing import Final

import numpy as np

from hami_scheduler.core.block import Bools, Ints

EXACT_WIDTH: Final = 16
_MOST_SETS: Final = comb(EXACT_WIDTH, EXACT_WIDTH // 2)


class LinkClass:
    """One link matrix, and everything worked out from it."""

    def __init__(self, vendors: tuple[int, ...], matrix: Ints) -> None:
        """``vendors`` by cell; ``matrix[a, b]`` is the strength between cells a and b."""
        self.vendors = vendors
        self.matrix = matrix
        self.width = len(vendors)
        self._even: dict[int, bool] = {}
        self._sets: dict[tuple[int, int], tuple[Bools, Ints]] = {}

    def is_even(self, vendor: int) -> bool:
        """Whether all pairs of the vendor's devices are linked alike, so that any set will do."""
        even = self._even.get(vendor)
        if even is None:
            cells = [i for i, v in enumerate(self.vendors) if v == vendor]
            strengths = {int(self.matrix[a, b]) for a, b in combinations(cells, 2)}
            even = self._even[vendor] = len(strengths) <= 1
        return even

    def sets(self, vendor: int, size: int) -> tuple[Bools, Ints] | None:
        """All sets of ``size`` devices of the vendor, strongest first; ``None`` when too many.

        Given as rows of a membership matrix, with their strengths.
        """
        key = (vendor, size)
        if key not in self._sets:
            cells = [i for i, v in enumerate(self.vendors) if v == vendor]
            if comb(len(cells), size) > _MOST_SETS:
                return None
            members = np.array(list(combinations(cells, size)), np.intp).reshape(-1, size)
            strengths = np.zeros(len(members), np.int64)
            for a, b in combinations(range(size), 2):
                strengths += self.matrix[members[:, a], members[:, b]]
            order = np.argsort(-strengths, kind="stable")
            member_of = np.zeros((len(members), self.width), np.bool_)
            np.put_along_axis(member_of, members[order], values=True, axis=1)
            self._sets[key] = (member_of, strengths[order])
        return self._sets[key]

    def best_set(self, fits: Bools, rank: Ints, vendor: int, size: int) -> tuple[int, int, Bools]:
        """(strength, preference, members) of the strongest set of ``size`` fitting devices.

        ``rank[d]`` is the device's place in the order that the policy prefers (0 first). Among sets
        of equal strength the one wins whose last-ranked members come earliest; ``preference`` is
        that as a number, larger first. At least ``size`` devices must fit.
        """
        worth = np.zeros(self.width, np.object_)
        worth[fits] = [-(1 << int(r)) for r in rank[fits]]
        listed = self.sets(vendor, size)
        if listed is None:
            members = self._grown_set(fits, rank, size)
        else:
            member_of, strengths = listed
            allowed = np.flatnonzero(~(member_of & ~fits).any(axis=1))
            strongest = allowed[strengths[allowed] == strengths[allowed[0]]]
            members = max((member_of[i] for i in strongest), key=lambda row: int(worth[row].sum()))
        inside = np.flatnonzero(members)
        strength = int(self.matrix[np.ix_(inside, inside)].sum()) // 2
        return strength, int(worth[members].sum()), members

    def _grown_set(self, fits: Bools, rank: Ints, size: int) -> Bools:
        """The strongest of the sets that grow from each fitting device by the best next one."""
        order = [int(i) for i in np.argsort(rank, kind="stable") if fits[i]]
        best: list[int] = []
        best_strength = -1
        for start in order:
            grown = [start]
            strength = 0
            while len(grown) < size:
                added = self.matrix[grown].sum(axis=0)
                following = max((i for i in order if i not in grown), key=lambda i: int(added[i]))
                strength += int(added[following])
                grown.append(following)
            if strength > best_strength:
                best, best_strength = grown, strength
        members = np.zeros(self.width, np.bool_)
        members[best] = True
        return members
