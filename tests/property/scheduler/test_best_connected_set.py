# SPDX-License-Identifier: Apache-2.0
"""Topology-aware placement takes the same devices as a search over all sets."""

import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_common.model.placement import Placement
from hami_core.placement.pick import pick
from hami_core.table.links import LinkClass
from hami_core.table.table import DeviceTable
from tests.support import builders

MATRICES = 10_000
SCALES = ((10, 20), (10, 20, 50, 300), (7,), (0, 100, 200, 300, 400), tuple(range(100)))

Matrix = Sequence[Sequence[int]]


def matrix_of(width: int, scores: Sequence[int], chance: random.Random) -> list[list[int]]:
    matrix = [[0] * width for _ in range(width)]
    for a, b in combinations(range(width), 2):
        matrix[a][b] = matrix[b][a] = chance.choice(scores)
    return matrix


def merit(
    matrix: Matrix, fits: Sequence[int], rank: Sequence[int], some: Sequence[int]
) -> tuple[int, int, list[int]]:
    """Strongest inside, then least cut from the others that fit, then earliest; less is better."""
    inside = sum(matrix[a][b] for a, b in combinations(some, 2))
    cut = sum(matrix[a][b] for a in some for b in fits if b not in some)
    return -inside, cut, sorted((rank[i] for i in some), reverse=True)


def test_best_set_equals_brute_force_on_ten_thousand_random_matrices() -> None:
    for seed in range(MATRICES):
        chance = random.Random(seed)
        width = chance.choice((2, 3, 4, 5, 6, 8))
        matrix = matrix_of(width, chance.choice(SCALES), chance)
        fits = sorted(chance.sample(range(width), chance.randint(1, width)))
        rank = chance.sample(range(width), width)
        size = chance.randint(1, len(fits))
        want = min(combinations(fits, size), key=lambda some: merit(matrix, fits, rank, some))
        mask = np.isin(np.arange(width), fits)
        links = LinkClass((0,) * width, np.array(matrix, np.int64))
        (strength, cut, _), members = links.best_set(mask, np.array(rank), 0, size)
        assert tuple(np.flatnonzero(members).tolist()) == want, seed
        assert (-strength, -cut) == merit(matrix, fits, rank, want)[:2]


@settings(max_examples=150)
@given(st.data())
def test_pod_gets_the_best_set_of_the_devices_that_fit(data: st.DataObject) -> None:
    width = data.draw(st.integers(2, 9))
    scores = st.sampled_from(data.draw(st.sampled_from(SCALES)))
    matrix = [[0] * width for _ in range(width)]
    for a, b in combinations(range(width), 2):
        matrix[a][b] = matrix[b][a] = data.draw(scores)
    fits = sorted(data.draw(st.sets(st.integers(0, width - 1), min_size=1)))
    size = data.draw(st.integers(1, len(fits)))
    names = [f"d{i}" for i in range(width)]
    table = DeviceTable()
    table.upsert_node(
        builders.node_devices(
            "n",
            [
                builders.device(name, index=i, memory_mib=100 if i in fits else 10)
                for i, name in enumerate(names)
            ],
            links=[(names[a], names[b], matrix[a][b]) for a, b in combinations(range(width), 2)],
        )
    )
    request = builders.pod(builders.ask(size, mib=50), device=("topology-aware", "binpack"))
    placed = pick(table, request, "n")
    assert isinstance(placed, Placement)
    taken = [names.index(share.uuid) for share in placed.containers[0].shares]
    want = min(combinations(fits, size), key=lambda some: merit(matrix, fits, range(width), some))
    assert tuple(taken) == want
