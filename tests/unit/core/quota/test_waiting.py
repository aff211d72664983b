# SPDX-License-Identifier: Apache-2.0
"""Positions of waiting pods, and estimates of their starts from observed starts."""

from typing import get_args

import pytest

from hami_common.model.waiting import class_of, main_refusal
from hami_core.placement.reasons import RefusalCode
from hami_core.quota.resourcequota import Resource
from hami_core.quota.waiting import Starts, Waiter, places

MEMORY = Resource("", "memory_mib")
NOW_S = 100_000.0


def waiter(
    uid: str, mib: int = 1000, *, queue: str = "q", priority: int = 0, age_s: float = 60.0
) -> Waiter:
    return Waiter(
        uid=uid,
        queue=queue,
        priority=priority,
        created_s=NOW_S - age_s,
        name=f"team/{uid}",
        wanted={MEMORY: mib},
    )


def started(*mibs: int, since_s: float = 3600.0, queue: str = "q") -> Starts:
    found = Starts()
    found.begin(now_s=NOW_S - since_s)
    for number, mib in enumerate(mibs):
        found.seen(waiter(f"s{number}", mib, queue=queue, age_s=600.0), now_s=NOW_S - 100.0)
    return found


def test_positions_follow_priority_then_age_and_are_counted_per_queue() -> None:
    found = places(
        [
            waiter("young", 10, age_s=1),
            waiter("old", 20, age_s=9),
            waiter("urgent", 40, priority=5, age_s=0),
            waiter("other", 80, queue="r", age_s=5),
        ]
    )
    assert {uid: place.position for uid, place in found.items()} == {
        "urgent": 1,
        "old": 2,
        "young": 3,
        "other": 1,
    }
    assert found["young"].ahead == {MEMORY: 60}
    assert found["other"].ahead == {}


def test_estimate_is_the_position_over_the_rate_of_starts() -> None:
    found = started(1000, 1000, 2000, 500).estimate(waiter("a"), 2, never=False, now_s=NOW_S)
    assert (found.wait_s, found.basis, found.served, found.window_s) == (1800.0, "rate", 4, 3600.0)


@pytest.mark.parametrize(
    ("starts", "never", "basis"),
    [
        (started(1000, 1000), False, "few-starts"),
        (started(1000, 1000, 1000, queue="r"), False, "few-starts"),
        (started(1000, 1000, 1000, since_s=30.0), False, "few-starts"),
        (started(999, 999, 999), False, "none-as-large"),
        (started(1000, 1000, 1000), True, "never"),
        (Starts(), False, "few-starts"),
    ],
)
def test_there_is_no_estimate_without_a_basis(starts: Starts, basis: str, *, never: bool) -> None:
    found = starts.estimate(waiter("a"), 1, never=never, now_s=NOW_S)
    assert (found.wait_s, found.basis) == (None, basis)


def test_starts_without_a_wait_and_old_ones_do_not_count() -> None:
    found = started(1000, 1000, 1000)
    found.seen(waiter("quick", age_s=105.0), now_s=NOW_S - 100.0)
    assert found.estimate(waiter("a"), 1, never=False, now_s=NOW_S).served == 3
    assert found.estimate(waiter("a"), 1, never=False, now_s=NOW_S + 3501.0).served == 0
    found = Starts()
    found.seen(waiter("before", age_s=600.0), now_s=NOW_S)
    found.begin(now_s=NOW_S)
    assert found.estimate(waiter("a"), 1, never=False, now_s=NOW_S + 600.0).served == 0


def test_refusal_to_act_on_first_is_that_of_the_nodes_with_devices() -> None:
    assert main_refusal(["CardInsufficientMemory", "QueueOverLimit"]) == 1
    assert main_refusal(["CardNotHealth", "CardCordoned"]) == 0
    assert main_refusal([]) == -1
    classes = {code: class_of(code) for code in get_args(RefusalCode)}
    assert {code for code, kind in classes.items() if kind == "quota"} == {"ResourceQuotaNotFit"}
    assert {code for code, kind in classes.items() if kind == "queue"} == {
        "QueueOverLimit",
        "QueueCannotBorrow",
        "QueueWaitsItsTurn",
    }
    named = {code for code, kind in classes.items() if kind != "devices"}
    assert not any(code.startswith(("Card", "Node")) for code in named)
