# SPDX-License-Identifier: Apache-2.0
"""Positions of nodes in the network, and the closeness of each to the members of a gang.

A node's position is a path of label values, widest domain first (zone, spine, rack …); an empty
value is unknown, and the values below it carry no information. Two nodes are as close as their
paths are equal from the beginning: 0 when not even the widest domain is known to be the same, one
more for each level, and one more for the same node. Independent of pods and labels.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from hami_core.table.block import Floats

Path = tuple[str, ...]


class Domains:
    """The paths of nodes, numbered."""

    def __init__(self) -> None:
        """Start without paths."""
        self.paths: list[Path] = [()]
        """Paths by number; 0 is the path of nodes whose path is not known."""
        self.depth = 0
        """Levels of the longest path."""
        self._numbers: dict[Path, int] = {(): 0}
        self._by_node: dict[str, int] = {}

    def put(self, node: str, path: Iterable[str]) -> int:
        """Set a node's path; returns the number of the path."""
        known = tuple(path)
        if "" in known:
            known = known[: known.index("")]
        number = self._numbers.get(known)
        if number is None:
            number = self._numbers[known] = len(self.paths)
            self.paths.append(known)
            self.depth = max(self.depth, len(known))
        if number:
            self._by_node[node] = number
        else:
            self._by_node.pop(node, None)
        return number

    def of(self, node: str) -> int:
        """Return the number of a node's path."""
        return self._by_node.get(node, 0)

    def known(self) -> dict[str, Path]:
        """Return the path by node, of nodes whose path is known."""
        return {node: self.paths[number] for node, number in self._by_node.items()}

    def closeness(self, nodes: Iterable[str]) -> Floats:
        """Return by number of a path the levels shared with ``nodes``, summed over them."""
        total = np.zeros(len(self.paths))
        for number, count in Counter(map(self.of, nodes)).items():
            other = self.paths[number]
            total += [count * _shared(path, other) for path in self.paths]
        return total


def _shared(a: Path, b: Path) -> int:
    levels = 0
    for mine, other in zip(a, b, strict=False):
        if mine != other:
            break
        levels += 1
    return levels
