# SPDX-License-Identifier: Apache-2.0
"""Moves of device memory to the host, counted by the container that waited for it."""

from hami_nodeagent.core.priorities import key_of
from hami_nodeagent.core.recalluse import PAIRS_MOST, RecallUses
from tests.unit.nodeagent.core.test_breach import holder


def test_moves_are_counted_by_moved_and_waiting_container() -> None:
    uses = RecallUses()
    for cause in (holder("b"), None, holder("b"), holder("c")):
        uses.moved(holder("a"), cause, moved_mib=100)
    assert [(one.for_pod, one.moves, one.moved_mib) for one in uses.all()] == [
        ("", 1, 100),
        ("b", 2, 200),
        ("c", 1, 100),
    ]
    uses.keep([key_of(holder("b"))])
    assert uses.all() == ()


def test_container_that_is_moved_for_many_others_keeps_messages_small() -> None:
    uses = RecallUses()
    for number in range(PAIRS_MOST):
        uses.moved(holder("a"), holder(f"job-{number}"), moved_mib=1)
    uses.moved(holder("a"), holder("job-0"), moved_mib=1)
    uses.moved(holder("a"), holder("job-new"), moved_mib=1)
    found = uses.all()
    assert len(found) == PAIRS_MOST
    assert [(one.for_pod, one.moves) for one in found[-2:]] == [("job-0", 2), ("job-new", 1)]
    assert found[0].for_pod == "job-2", "the pair that moved longest ago is dropped"
