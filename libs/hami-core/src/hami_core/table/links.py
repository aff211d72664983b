# SPDX-License-Identifier: Apache-2.0
"""Chooses the best-connected set among devices of one node, from the strengths of their links.

A set's strength is the sum over its pairs; larger is closer. Among equally strong sets the best is
the one whose links to the other devices that fit are weakest: it leaves the strongest links whole.
Up to ``EXACT_WIDTH`` devices the choice is exact: all sets of a size are listed once per link
matrix, strongest first. Wider nodes grow a set from every start and keep the best. Nodes with equal
matrices share one ``LinkClass``. Devices are named by their cell position; independent of capacity
and of the kind of link: vendors map theirs (NVLink, PCIe, HCCS …) to one scale.
"""

from itertools import combinations
from math import comb
from typing import Final

import numpy as np

from hami_core.table.block import Bools, Ints

EXACT_WIDTH: Final = 16
_MOST_SETS: Final = comb(EXACT_WIDTH, EXACT_WIDTH // 2)

Merit = tuple[int, int, int]
"""Strength inside, strength that is cut (negative), place in the policy's order; more is better."""


class LinkClass:
    """One link matrix, and the values derived from it."""

    def __init__(self, vendors: tuple[int, ...], matrix: Ints) -> None:
        """``vendors`` by cell; ``matrix[a, b]`` is the strength between cells a and b."""
        self.vendors = vendors
        self.matrix = matrix
        self.width = len(vendors)
        self._even: dict[int, bool] = {}
        self._sets: dict[tuple[int, int], tuple[Bools, Ints]] = {}

    def is_even(self, vendor: int) -> bool:
        """Return whether all pairs of the vendor's devices have equal links."""
        even = self._even.get(vendor)
        if even is None:
            cells = [i for i, v in enumerate(self.vendors) if v == vendor]
            strengths = {int(self.matrix[a, b]) for a, b in combinations(cells, 2)}
            even = self._even[vendor] = len(strengths) <= 1
        return even

    def sets(self, vendor: int, size: int) -> tuple[Bools, Ints] | None:
        """Return all sets of ``size`` devices of the vendor, strongest first; ``None``: too many.

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

    def best_set(self, fits: Bools, rank: Ints, vendor: int, size: int) -> tuple[Merit, Bools]:
        """Return the best set of ``size`` fitting devices, and its merit.

        ``rank[d]`` is the device's place in the order that the policy prefers (0 first). Among sets
        that are otherwise equal, the one whose last-ranked members come earliest wins. At least
        ``size`` devices must fit.
        """
        to_fitting = self.matrix @ fits
        listed = self.sets(vendor, size)
        if listed is None:
            found = self._grown_sets(fits, rank, size)
        else:
            member_of, strengths = listed
            allowed = np.flatnonzero(~(member_of & ~fits).any(axis=1))
            found = member_of[allowed[strengths[allowed] == strengths[allowed[0]]]]
            touched = found @ to_fitting
            found = found[touched == touched.min()]
        return max(((self._merit(some, to_fitting, rank), some) for some in found), key=_first)

    def _merit(self, members: Bools, to_fitting: Ints, rank: Ints) -> Merit:
        inside = np.flatnonzero(members)
        strength = int(self.matrix[np.ix_(inside, inside)].sum()) // 2
        cut = int(to_fitting[inside].sum()) - 2 * strength
        return strength, -cut, -sum(1 << int(place) for place in rank[inside])

    def _grown_sets(self, fits: Bools, rank: Ints, size: int) -> Bools:
        """Return the sets that grow from each fitting device by the best next one."""
        order = [int(i) for i in np.argsort(rank, kind="stable") if fits[i]]
        found = np.zeros((len(order), self.width), np.bool_)
        for members, start in zip(found, order, strict=True):
            members[start] = True
            for _ in range(size - 1):
                added = self.matrix @ members
                members[max((i for i in order if not members[i]), key=lambda i: int(added[i]))] = 1
        return found


def _first(pair: tuple[Merit, Bools]) -> Merit:
    return pair[0]
