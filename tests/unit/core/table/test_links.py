# SPDX-License-Identifier: Apache-2.0
"""The best-connected set equals the result of trying all sets."""

import random
from itertools import combinations

import numpy as np
import pytest

from hami_core.table.links import LinkClass


def random_matrix(width: int, seed: int, scores: tuple[int, ...]) -> LinkClass:
    chance = random.Random(seed)
    matrix = np.zeros((width, width), np.int64)
    for a, b in combinations(range(width), 2):
        matrix[a, b] = matrix[b, a] = chance.choice(scores)
    return LinkClass((0,) * width, matrix)


@pytest.mark.parametrize("seed", range(40))
def test_best_set_equals_brute_force_on_random_matrices(seed: int) -> None:
    chance = random.Random(seed)
    width = chance.choice((2, 3, 4, 6, 8))
    links = random_matrix(width, seed, chance.choice(((10, 20), (10, 20, 50, 300), (7,))))
    fits = np.array([chance.random() < 0.8 for _ in range(width)])
    if not fits.any():
        fits[0] = True
    size = chance.randint(1, int(fits.sum()))
    rank = np.array(chance.sample(range(width), width))
    want = min(
        combinations(np.flatnonzero(fits).tolist(), size),
        key=lambda some: (
            -sum(int(links.matrix[a, b]) for a, b in combinations(some, 2)),
            sum(
                int(links.matrix[a, b]) for a in some for b in np.flatnonzero(fits) if b not in some
            ),
            sorted((int(rank[i]) for i in some), reverse=True),
        ),
    )
    (strength, _, _), members = links.best_set(fits, rank, 0, size)
    assert tuple(np.flatnonzero(members)) == want
    assert strength == sum(int(links.matrix[a, b]) for a, b in combinations(want, 2))


def test_sixteen_devices_are_searched_exactly() -> None:
    links = random_matrix(16, 3, (10, 20, 300))
    fits = np.ones(16, np.bool_)
    (strength, _, _), members = links.best_set(fits, np.arange(16), 0, 4)
    best = max(
        sum(int(links.matrix[a, b]) for a, b in combinations(some, 2))
        for some in combinations(range(16), 4)
    )
    assert members.sum() == 4
    assert strength == best


def test_wide_node_gets_a_connected_set_without_trying_all() -> None:
    width = 64
    matrix = np.full((width, width), 10, np.int64)
    for island in range(0, width, 8):
        matrix[island : island + 8, island : island + 8] = 300
    np.fill_diagonal(matrix, 0)
    links = LinkClass((0,) * width, matrix)
    fits = np.ones(width, np.bool_)
    fits[1:40] = False
    _, members = links.best_set(fits, np.arange(width), 0, 8)
    chosen = np.flatnonzero(members).tolist()
    assert len(chosen) == 8
    assert chosen == list(range(40, 48))


def test_other_vendors_devices_do_not_make_links_uneven() -> None:
    matrix = np.array([[0, 5, 1], [5, 0, 2], [1, 2, 0]])
    links = LinkClass((0, 0, 1), matrix)
    assert links.is_even(0)
    assert links.is_even(1)
    assert links.is_even(7)
    assert not LinkClass((0, 0, 0), matrix).is_even(0)
