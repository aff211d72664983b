# SPDX-License-Identifier: Apache-2.0
"""A tenant that exceeds its share in bursts is reported; one that stays within it never is.

In process: the agent's own looks, at the moments that it would choose.
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami_nodeagent.core import breach as core
from hami_nodeagent.core.breach import BreachBook, BreachRules, Process
from hami_nodeagent.core.holders import Holder

GPU = "GPU-0"
LOOK_S = 3.0
LIMIT_MIB = 1000
BOUND_S = 120.0
SEEDS = 20


def holder(**more: Any) -> Holder:
    return Holder(
        pod_uid="uid",
        namespace="default",
        pod="pod",
        container="main",
        vendor="nvidia",
        uuid=GPU,
        number=0,
        limit_mib=LIMIT_MIB,
        **more,
    )


def process(used_mib: int, core_pct: int = 0) -> Process:
    return Process(pid=7, pod_uid="uid", container="main", used_mib=used_mib, core_pct=core_pct)


def reported_after_s(*, over_s: float, under_s: float, phase_s: float, seed: int) -> float:
    """Seconds until bursts of 3 GiB are reported; ``inf`` where ``BOUND_S`` pass first."""
    chance = random.Random(seed)
    pause_s = getattr(core, "pause_s", lambda look_s, _: look_s)
    book, now_s = BreachBook(BreachRules()), 0.0
    while now_s <= BOUND_S:
        is_over = (now_s + phase_s) % (over_s + under_s) < over_s
        processes = [process(3000)] if is_over else []
        if book.look([holder()], {GPU: processes}, now_s=now_s).tell:
            return now_s
        now_s += pause_s(LOOK_S, chance.random())
    return float("inf")


@pytest.mark.parametrize(
    ("over_s", "under_s"), [(2.0, 4.0), (1.0, 2.0), (1.4, 2.8), (3.0, 6.0), (1.0, 4.0)]
)
def test_bursts_over_the_share_are_reported_within_two_minutes(
    over_s: float, under_s: float
) -> None:
    waits_s = [
        reported_after_s(over_s=over_s, under_s=under_s, phase_s=phase / 4, seed=seed)
        for seed in range(SEEDS)
        for phase in range(int(4 * (over_s + under_s)))
    ]
    assert max(waits_s) <= BOUND_S
    assert sum(waits_s) / len(waits_s) <= BOUND_S / 4


def test_use_that_stays_over_the_share_is_reported_within_two_readings() -> None:
    waits_s = [
        reported_after_s(over_s=1000.0, under_s=1.0, phase_s=0.0, seed=seed)
        for seed in range(SEEDS)
    ]
    assert max(waits_s) <= LOOK_S


@settings(max_examples=200, deadline=None)
@given(
    looks=st.lists(st.tuples(st.integers(0, LIMIT_MIB), st.integers(0, 50)), max_size=60),
    rules=st.builds(
        BreachRules,
        looks=st.integers(1, 4),
        memory_margin_mib=st.integers(0, 64),
        core_looks=st.integers(1, 4),
        core_margin_pct=st.integers(0, 20),
    ),
)
def test_tenant_within_its_share_is_never_reported(
    looks: list[tuple[int, int]], rules: BreachRules
) -> None:
    book = BreachBook(rules, is_core_forced=True)
    for number, (used_mib, core_pct) in enumerate(looks):
        shown = {GPU: [process(used_mib, core_pct)]}
        outcome = book.look([holder(core_pct=50)], shown, now_s=float(number))
        assert (outcome.tell, outcome.going) == ((), ())
