# SPDX-License-Identifier: Apache-2.0
"""The refusals of waiting pods: counted while the pod waits, and ended exactly once."""

from typing import Literal

from hami_common.events.decision import DecisionRecord
from hami_core.ledger.podfacts import PodFacts
from hami_scheduler.shell.refusals import UNSEEN_S, Refusals


class Watched:
    """The pods that the watch delivered."""

    def __init__(self, *pods: PodFacts) -> None:
        self.by_uid = {pod.uid: pod for pod in pods}

    def get(self, uid: str) -> PodFacts | None:
        return self.by_uid.get(uid)

    def is_waiting(self, uid: str) -> bool:
        pod = self.by_uid.get(uid)
        return pod is not None and not pod.node


def pod(*, node: str = "") -> PodFacts:
    return PodFacts(
        uid="u1", namespace="team-a", name="train", resource_version="1", node=node, created_s=50.0
    )


def decision(
    time_s: float = 100.0, verdict: Literal["feasible", "refused"] = "refused"
) -> DecisionRecord:
    return DecisionRecord(
        verb="filter",
        namespace="team-a",
        pod="train",
        pod_uid="u1",
        time_s=time_s,
        verdict=verdict,
        snapshot_id="1.1",
    )


def test_consecutive_refusals_are_counted_until_the_pod_has_devices() -> None:
    refusals = Refusals()
    assert refusals.noted(decision(), pod()).attempts == 1
    again = refusals.noted(decision(), pod())
    assert (again.attempts, again.created_s) == (2, 50.0)
    refusals.placed("u1")
    assert refusals.get("u1") is None
    assert refusals.noted(decision(), pod()).attempts == 1


def test_only_refusals_of_filters_are_remembered() -> None:
    refusals = Refusals()
    assert refusals.noted(decision(verdict="feasible"), pod()) == decision(verdict="feasible")
    assert refusals.get("u1") is None


def test_deleted_pod_ends_once_and_a_waiting_one_does_not() -> None:
    refusals, watched = Refusals(), Watched(pod())
    refusals.noted(decision(), pod())
    assert refusals.ended(watched, now_s=1000.0) == {}
    watched.by_uid.clear()
    assert [one.pod for one in refusals.ended(watched, now_s=1000.0).values()] == ["train"]
    assert refusals.ended(watched, now_s=1000.0) == {}


def test_pod_with_a_node_is_dropped_and_has_not_ended() -> None:
    refusals = Refusals()
    refusals.noted(decision(), pod())
    assert refusals.ended(Watched(pod(node="gpu-1")), now_s=101.0) == {}
    assert refusals.get("u1") is None


def test_pod_deleted_during_its_refusal_has_ended() -> None:
    refusals, nothing = Refusals(), Watched()
    refusals.noted(decision(), pod())
    refusals.noted(decision(101.0), None)
    assert list(refusals.ended(nothing, now_s=102.0)) == ["u1"]


def test_pod_that_the_watch_never_delivers_ends_after_a_time() -> None:
    refusals, nothing = Refusals(), Watched()
    refusals.noted(decision(), None)
    assert refusals.ended(nothing, now_s=100.0 + UNSEEN_S - 1) == {}
    assert list(refusals.ended(nothing, now_s=100.0 + UNSEEN_S)) == ["u1"]
