# SPDX-License-Identifier: Apache-2.0
"""Repair of each difference between ledger and pods."""

import pytest

from hami_core.ledger import repair
from hami_core.ledger.holding import Holding
from hami_core.ledger.podfacts import PodFacts
from hami_core.ledger.repair import Confirm, Doubt, Release, Restore, compare, judge
from tests.unit.core.facts import holding, pod_facts, signed

BOUND = pod_facts(node="n1", signed=signed("a1"))


@pytest.mark.parametrize(
    ("held", "pod", "judgement", "reason"),
    [
        (holding("a1"), pod_facts(is_finished=True, node="n1"), "release", "pod-finished"),
        (holding("a1"), pod_facts(), "undecided", ""),
        (holding("a1"), pod_facts(node="n2"), "release", "bound-elsewhere"),
        (holding("a1"), pod_facts(node="n1"), "release", "bound-without-allocation"),
        (holding("a1", state="bound"), pod_facts(node="n1"), "release", "bound-without-allocation"),
        (holding("a1", state="running"), pod_facts(node="n1"), "keep", ""),
        (holding("a1", state="prepared"), pod_facts(node="n1"), "keep", ""),
        (
            holding("a1", state="running", state_of="a0"),
            pod_facts(node="n1"),
            "release",
            "bound-without-allocation",
        ),
        (holding("a1"), pod_facts(node="n1", mistrust="bad signature"), "keep", ""),
        (holding("a2"), BOUND, "replace", ""),
        (holding("a1"), BOUND, "confirm", ""),
        (holding("a1", state="bound", state_of="a0"), BOUND, "confirm", ""),
        (holding("a1", state="bound"), BOUND, "keep", ""),
        (holding("a1", state="failed"), BOUND, "keep", ""),
    ],
)
def test_judgement(held: Holding, pod: PodFacts, judgement: str, reason: str) -> None:
    assert judge(held, pod) == (judgement, reason)


def test_agreement_needs_no_step() -> None:
    assert compare([holding("a1", state="bound")], {"u1": BOUND}) == []
    assert compare([holding("a1")], {"u1": pod_facts()}) == []
    assert compare([], {"u1": pod_facts()}) == []
    assert compare([], {"u1": pod_facts(node="n1")}) == []


def test_each_difference_has_its_step_and_releases_are_first() -> None:
    done = pod_facts(uid="u2", is_finished=True)
    steps = compare(
        [holding("a1"), holding("a9", uid="u9"), holding("a2", uid="u2")],
        {"u1": BOUND, "u2": done},
    )
    assert steps == [
        Release(holding=holding("a2", uid="u2"), reason="pod-finished"),
        Confirm(holding=holding("a1")),
        Doubt(holding=holding("a9", uid="u9")),
    ]


def test_committed_allocation_without_record_is_restored() -> None:
    assert compare([], {"u1": BOUND}) == [Restore(signed=signed("a1"))]
    assert compare([], {"u1": pod_facts(node="n1", signed=signed("a1"), is_finished=True)}) == []


def test_committed_allocation_replaces_the_record_of_an_attempt_that_lost() -> None:
    held = holding("a2")
    assert compare([held], {"u1": BOUND}) == [Restore(signed=signed("a1"), replaces=held)]


def test_record_on_another_node_does_not_replace_the_lost_one() -> None:
    held = holding("a0", node="n2")
    assert compare([held], {"u1": BOUND}) == [
        Release(holding=held, reason="bound-elsewhere"),
        Restore(signed=signed("a1")),
    ]


def test_restores_are_ordered_by_running_pods_first_then_by_age() -> None:
    pods = {
        uid: pod_facts(
            uid=uid,
            node="n1",
            is_started=started,
            signed=signed(f"a-{uid}", uid=uid, ledger_seq=seq),
        )
        for uid, seq, started in (("u1", 3, False), ("u2", 1, False), ("u3", 9, True))
    }
    restores = [step for step in compare([], pods) if isinstance(step, repair.Restore)]
    assert [step.signed.pod_uid for step in restores] == ["u3", "u2", "u1"]
    assert [step.must for step in restores] == [True, False, False]
