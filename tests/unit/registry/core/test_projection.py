# SPDX-License-Identifier: Apache-2.0
"""Read models: joins, bookings, bounded memory."""

import pytest
from msgspec.structs import replace

from hami_common.events.allocation import AllocationRecord, StateRecord
from hami_common.events.decision import DecisionRecord, RefusedNode
from hami_common.events.inventory import NodeDevices
from hami_common.model.device import Device
from hami_common.model.placement import ContainerShares, Share
from hami_registry.core import projection as projections
from hami_registry.core.projection import DECISIONS_PER_POD, Projection

SHARES = (
    ContainerShares(
        name="main",
        kind="app",
        shares=(Share(vendor="nvidia", uuid="GPU-a", memory_mib=3000, core_pct=30),),
    ),
)


def record(op: str = "reserve", allocation_id: str = "x") -> AllocationRecord:
    return AllocationRecord(
        op=op,  # type: ignore[arg-type]  # test data
        allocation_id=allocation_id,
        node="n",
        pod_uid="u",
        namespace="ns",
        pod="p",
        containers=SHARES if op == "reserve" else (),
    )


def state(word: str, allocation_id: str = "x") -> StateRecord:
    return StateRecord(
        state=word,  # type: ignore[arg-type]  # test data
        allocation_id=allocation_id,
        node="n",
        pod_uid="u",
        namespace="ns",
        pod="p",
        ledger_seq=1,
    )


def devices() -> NodeDevices:
    device = Device(
        uuid="GPU-a", vendor="nvidia", index=0, type="H200", memory_mib=9000, capacity_mib=9000
    )
    return NodeDevices(
        node="n",
        vendor="nvidia",
        boot_id="1",
        seq=1,
        time_s=0,
        config_generation=4,
        devices=(device,),
    )


def decision(pod: str = "p", verdict: str = "refused", time_s: float = 0.0) -> DecisionRecord:
    return DecisionRecord(
        verb="filter",
        namespace="ns",
        pod=pod,
        pod_uid="u",
        time_s=time_s,
        verdict=verdict,  # type: ignore[arg-type]  # test data
        snapshot_id="1.1",
    )


def test_allocation_joins_ledger_and_state() -> None:
    projection = Projection(liveness_s=15)
    projection.record_seen("n.u", 1, record())
    assert [v.state for v in projection.allocations()] == ["reserved"]
    projection.state_seen("n.u", 1, state("bound"))
    projection.state_seen("n.u", 2, state("running"))
    assert [v.state for v in projection.allocations()] == ["running"]


def test_state_of_an_earlier_reservation_does_not_count() -> None:
    projection = Projection(liveness_s=15)
    projection.state_seen("n.u", 1, state("failed", allocation_id="old"))
    projection.record_seen("n.u", 2, record())
    assert [v.state for v in projection.allocations()] == ["reserved"]


def test_late_and_repeated_entries_change_nothing() -> None:
    projection = Projection(liveness_s=15)
    projection.record_seen("n.u", 5, record("release"))
    projection.record_seen("n.u", 4, record())
    projection.record_seen("n.u", 5, record("release"))
    assert projection.allocations() == []
    assert [v.state for v in projection.allocations(released=True)] == ["released"]


def test_device_shows_bookings_until_their_release() -> None:
    projection = Projection(liveness_s=15)
    projection.devices_seen(devices())
    projection.record_seen("n.u", 1, record())
    (view,) = projection.devices()
    assert (view.booked_mib, view.booked_core_pct, view.booked_slots) == (3000, 30, 1)
    projection.record_seen("n.u", 2, record("release"))
    assert projection.devices()[0].booked_mib == 0


@pytest.mark.parametrize(
    ("mode", "cap", "name"),
    [
        ("soft", False, "hook"),
        ("soft", True, "hook+wall"),
        ("timeslice", True, "timeslice+wall"),
        ("mps", False, "mps"),
    ],
)
def test_device_shows_the_class_of_its_shares(mode: str, name: str, *, cap: bool) -> None:
    published = devices()
    device = replace(published.devices[0], mode=mode, memory_cap=cap)
    projection = Projection(liveness_s=15)
    projection.devices_seen(replace(published, devices=(device,)))
    assert [view.isolation.name for view in projection.devices()] == [name]


def test_node_totals_and_liveness() -> None:
    projection = Projection(liveness_s=15)
    projection.devices_seen(devices())
    projection.record_seen("n.u", 1, record())
    projection.heartbeat_seen("n", ("nvidia",), now_s=100)
    (alive,) = projection.nodes(now_s=110)
    (silent,) = projection.nodes(now_s=116)
    assert (alive.alive, silent.alive) == (True, False)
    assert (alive.devices, alive.booked_mib, alive.allocations) == (1, 3000, 1)
    assert alive.config_generation == 4


def test_explain_keeps_the_newest_decisions_first_and_few() -> None:
    projection = Projection(liveness_s=15)
    for second in range(DECISIONS_PER_POD + 3):
        projection.decision_seen(decision(time_s=second))
    projection.decision_seen(decision(verdict="placed", time_s=99))
    explained = projection.explain("ns", "p")
    assert explained is not None
    assert len(explained.decisions) == DECISIONS_PER_POD
    assert explained.decisions[0].verdict == "placed"
    assert projection.explain("ns", "other") is None


def test_repeated_decision_counts_once() -> None:
    projection = Projection(liveness_s=15)
    for second in (1, 2, 1, 2):
        projection.decision_seen(decision(time_s=second))
    explained = projection.explain("ns", "p")
    assert explained is not None
    assert [d.time_s for d in explained.decisions] == [2, 1]


def test_decisions_that_travel_in_one_message_are_explained_one_by_one() -> None:
    projection = Projection(liveness_s=15)
    filtered, bound = decision(verdict="feasible", time_s=1), decision(verdict="placed", time_s=2)
    projection.decision_seen(replace(bound, before=(filtered,)))
    projection.decision_seen(filtered)
    explained = projection.explain("ns", "p")
    assert explained is not None
    assert explained.decisions == (bound, filtered)


def test_explain_of_a_finished_pod_still_shows_its_allocation() -> None:
    projection = Projection(liveness_s=15)
    projection.record_seen("n.u", 1, record("release"))
    explained = projection.explain("ns", "p")
    assert explained is not None
    assert [a.state for a in explained.allocations] == ["released"]


def test_losing_one_bucket_does_not_forget_what_the_other_repeated() -> None:
    projection = Projection(liveness_s=15)
    projection.record_seen("n.u", 7, record())
    projection.state_seen("n.u", 9, state("bound"))
    projection.reset_states()
    projection.state_seen("n.u", 1, state("running"))
    projection.reset_ledger()
    assert projection.allocations() == []
    projection.record_seen("n.u", 1, record())
    assert [v.state for v in projection.allocations()] == ["running"]


def test_devices_of_a_lost_bucket_are_dropped() -> None:
    projection = Projection(liveness_s=15)
    projection.devices_seen(devices())
    projection.reset_devices()
    assert projection.devices() == []


def test_wiped_ledger_drops_its_allocations() -> None:
    projection = Projection(liveness_s=15)
    projection.record_seen("n.u", 7, record())
    projection.reset_ledger()
    projection.record_seen("n.u", 1, record())
    assert [v.ledger_seq for v in projection.allocations()] == [1]


def test_holdings_list_pods_and_amounts_per_device() -> None:
    projection = Projection(liveness_s=15)
    projection.record_seen("n.u", 1, record())
    projection.record_seen("n.v", 2, replace(record(), pod_uid="v", pod="q"))
    held = projection.holdings()["GPU-a"]
    assert (held.booked.memory_mib, held.booked.slots) == (6000, 2)
    assert held.pods == ("ns/p", "ns/q")
    projection.record_seen("n.u", 3, record("release"))
    assert projection.holdings()["GPU-a"].pods == ("ns/q",)


def detailed(pod: str = "p", time_s: float = 0.0) -> DecisionRecord:
    closest = (RefusedNode(node="n", code="CardInsufficientMemory"),)
    return replace(decision(pod, time_s=time_s), closest=closest)


def times_with_details(projection: Projection, pod: str = "p") -> list[tuple[float, bool]]:
    view = projection.explain("ns", pod)
    return [] if view is None else [(one.time_s, bool(one.closest)) for one in view.decisions]


def test_newest_details_are_kept_beyond_later_decisions() -> None:
    projection = Projection(liveness_s=15)
    for time_s in (1.0, 2.0):
        projection.decision_seen(detailed(time_s=time_s))
    projection.decision_seen(decision(time_s=3.0))
    assert times_with_details(projection) == [(3.0, False), (2.0, True), (1.0, False)]
    projection.decision_seen(detailed(time_s=2.0))  # delivered again
    assert times_with_details(projection) == [(3.0, False), (2.0, True), (1.0, False)]
    for number in range(DECISIONS_PER_POD):
        projection.decision_seen(decision(time_s=4.0 + number))
    assert times_with_details(projection)[-1] == (2.0, True)


def test_details_are_kept_of_a_bounded_number_of_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "PODS_DETAILED", 2)
    projection = Projection(liveness_s=15)
    for pod in ("a", "b", "a", "c"):
        projection.decision_seen(detailed(pod))
    found = {pod: times_with_details(projection, pod) for pod in ("a", "b", "c")}
    assert found == {"a": [(0.0, True)], "b": [(0.0, False)], "c": [(0.0, True)]}
    monkeypatch.setattr(projections, "PODS_REMEMBERED", 1)
    projection.decision_seen(detailed("d"))
    assert times_with_details(projection, "a") == []
    assert times_with_details(projection, "d") == [(0.0, True)]
