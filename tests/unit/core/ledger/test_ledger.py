# SPDX-License-Identifier: Apache-2.0
"""The ledger: folding, fences, leases, plans. Each test ends with all totals recomputed."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from hami_common.bus import subjects
from hami_common.errors import InvariantBroken
from hami_common.events.allocation import (
    AllocationOp,
    AllocationRecord,
    ReportedState,
    StateRecord,
    hold_uid,
    purpose_of,
)
from hami_common.model.placement import ContainerShares, Placement
from hami_common.pods.signing import SignedPlacement
from hami_common.ports import Expect
from hami_core.ledger.holding import Holding
from hami_core.ledger.ledger import KEYS_PER_NODE, SHARE_LOST, STORY_LINES, Hold, Ledger
from hami_core.ledger.stimuli import (
    Accepted,
    Append,
    CapacityReturned,
    Effect,
    Examine,
    FeedSynced,
    NodeRead,
    Over,
    RecordSeen,
    Repaired,
    Reuse,
    StateSeen,
    Tick,
    Wiped,
    WriteState,
)
from hami_core.placement.reasons import NodeRefusal
from hami_core.table.table import DeviceTable
from tests.support.builders import ask, device, devices, held, node_devices, pod, share

NODE = "node-1.example"
HALF = (held(share(f"{NODE}-nvidia-0", 20_000, 50)),)
MORE = (held(share(f"{NODE}-nvidia-0", 30_000, 50)),)


@pytest.fixture
def table() -> DeviceTable:
    table = DeviceTable()
    table.upsert_node(devices(NODE, 2))
    table.upsert_node(devices("node-2", 2))
    return table


@pytest.fixture
def ledger(table: DeviceTable) -> Iterator[Ledger]:
    ledger = Ledger(table, writer="me", lease_s=30.0, fence_delay_s=3.0)
    yield ledger
    ledger.check()


def record(
    containers: tuple[ContainerShares, ...] = HALF,
    *,
    op: AllocationOp = "reserve",
    allocation_id: str = "a1",
    uid: str = "uid-1",
    node: str = NODE,
    writer: str = "me",
    lease_s: float = 0.0,
) -> AllocationRecord:
    return AllocationRecord(
        op=op,
        allocation_id=allocation_id,
        node=node,
        pod_uid=uid,
        namespace="default",
        pod="pod-1",
        containers=() if op == "release" else containers,
        writer=writer,
        lease_s=lease_s,
    )


def state(
    word: ReportedState, *, allocation_id: str = "a1", uid: str = "uid-1", code: str = ""
) -> StateRecord:
    return StateRecord(
        state=word,
        allocation_id=allocation_id,
        node=NODE,
        pod_uid=uid,
        namespace="default",
        pod="pod-1",
        ledger_seq=1,
        code=code,
    )


def see(ledger: Ledger, seq: int, some: AllocationRecord, now_s: float = 0.0) -> list[Effect]:
    return ledger.handle(RecordSeen(seq=seq, record=some, now_s=now_s))


def see_state(ledger: Ledger, seq: int, some: StateRecord, now_s: float = 0.0) -> None:
    assert ledger.handle(StateSeen(seq=seq, state=some, now_s=now_s)) == []


def used_mib(ledger: Ledger, node: str = NODE) -> int:
    usage = ledger.table.usage(node, f"{node}-nvidia-0")
    return 0 if usage is None else usage.memory_mib


def only(ledger: Ledger) -> Holding:
    (holding,) = ledger.holdings()
    return holding


def signed(
    containers: tuple[ContainerShares, ...] = HALF, *, allocation_id: str = "a1", seq: int = 5
) -> SignedPlacement:
    return SignedPlacement(
        pod_uid="uid-1",
        namespace="default",
        pod="pod-1",
        allocation_id=allocation_id,
        ledger_seq=seq,
        placement=Placement(node=NODE, containers=containers),
    )


# --- owners --------------------------------------------------------------------------------------


def test_shares_of_an_owner_are_found_without_a_search(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        uid = hold_uid("workload-1" if number else "workload-2", 0, number)
        purpose = purpose_of("workload", "default", "w")
        containers = (held(share(f"{NODE}-nvidia-0", 1000)),)
        see(ledger, number + 1, replace(record(containers, uid=uid), held_for=purpose))
    assert [one.record.pod_uid for one in ledger.holdings_of_owner("workload-1")] == [
        "workload-1-0-1",
        "workload-1-0-2",
    ]
    assert len(ledger.holdings_of_owner("workload default/w")) == 3
    read: list[tuple[str, str]] = []
    find = ledger.holding

    def holding(node: str, uid: str) -> Holding | None:
        read.append((node, uid))
        return find(node, uid)

    monkeypatch.setattr(ledger, "holding", holding)
    assert ledger.holdings_of_owner("another") == []
    assert len(ledger.holdings_of_owner("workload-2")) == 1
    assert read == [(NODE, "workload-2-0-0")]
    see(ledger, 9, record(op="release", uid="workload-2-0-0"))
    assert ledger.holdings_of_owner("workload-2") == []
    ledger.handle(Wiped(now_s=9.0))
    assert ledger.holdings_of_owner("workload-1") == []


# --- folding -------------------------------------------------------------------------------------


def test_record_books_its_shares_and_a_release_gives_them_back(ledger: Ledger) -> None:
    assert see(ledger, 4, record()) == []
    assert used_mib(ledger) == 20_000
    assert only(ledger).revision == 4
    assert see(ledger, 9, record(op="release")) == [CapacityReturned(node=NODE)]
    assert used_mib(ledger) == 0
    assert list(ledger.holdings()) == []
    assert ledger.holding(NODE, "uid-1") is None
    assert ledger.state_of(NODE, "uid-1") == "released"


def test_duplicates_and_stale_records_of_a_key_change_nothing(ledger: Ledger) -> None:
    see(ledger, 4, record())
    see(ledger, 9, record(MORE, op="resize"))
    for seq, some in ((4, record()), (9, record(MORE, op="resize")), (4, record(op="release"))):
        assert see(ledger, seq, some) == []
    assert used_mib(ledger) == 30_000


def test_newer_record_replaces_the_older_one(ledger: Ledger) -> None:
    see(ledger, 4, record())
    see(ledger, 5, record(MORE, allocation_id="a2"))
    assert used_mib(ledger) == 30_000
    assert only(ledger).record.allocation_id == "a2"


def test_release_seen_first_wins_over_the_reservation_seen_later(ledger: Ledger) -> None:
    assert see(ledger, 9, record(op="release")) == []
    assert see(ledger, 4, record()) == []
    assert used_mib(ledger) == 0


def test_devices_that_are_over_are_reported(ledger: Ledger) -> None:
    see(ledger, 1, record(MORE))
    assert see(ledger, 2, record(MORE, uid="uid-2")) == [
        Over(node=NODE, uuids=(f"{NODE}-nvidia-0",))
    ]


def test_record_of_an_unknown_node_is_kept(ledger: Ledger) -> None:
    see(ledger, 1, record((held(share("x", 5)),), node="elsewhere"))
    assert only(ledger).record.node == "elsewhere"
    ledger.table.upsert_node(devices("elsewhere", 1))
    ledger.check()


def test_holdings_are_found_by_pod_and_by_node(ledger: Ledger) -> None:
    see(ledger, 1, record(uid="b"))
    see(ledger, 2, record(uid="a"))
    see(ledger, 3, record((held(share("node-2-nvidia-0")),), uid="a", node="node-2"))
    assert [h.record.pod_uid for h in ledger.holdings_of_node(NODE)] == ["a", "b"]
    assert [h.record.node for h in ledger.holdings_of_pod("a")] == [NODE, "node-2"]
    assert ledger.holdings_of_pod("c") == []
    assert ledger.sequence_of(NODE, "a", "a1") == 2
    assert ledger.sequence_of(NODE, "a", "other") == 0
    assert ledger.sequence_of(NODE, "c", "a1") == 0
    assert ledger.state_of(NODE, "c") is None


# --- states --------------------------------------------------------------------------------------


def test_state_is_the_join_of_record_and_report(ledger: Ledger) -> None:
    see(ledger, 1, record())
    assert ledger.state_of(NODE, "uid-1") == "reserved"
    words: tuple[ReportedState, ...] = ("bound", "prepared", "running")
    for seq, word in enumerate(words, start=1):
        see_state(ledger, seq, state(word))
        assert ledger.state_of(NODE, "uid-1") == word
    see(ledger, 2, record(op="release"))
    assert ledger.state_of(NODE, "uid-1") == "released"


def test_report_may_arrive_before_its_record_and_skip_states(ledger: Ledger) -> None:
    see_state(ledger, 7, state("running"))
    assert ledger.state_of(NODE, "uid-1") is None
    see(ledger, 1, record())
    assert ledger.state_of(NODE, "uid-1") == "running"
    see_state(ledger, 3, state("bound"))
    assert ledger.state_of(NODE, "uid-1") == "running"


def test_report_of_another_reservation_does_not_count(ledger: Ledger) -> None:
    see(ledger, 1, record(allocation_id="a2"))
    see_state(ledger, 1, state("running", allocation_id="a1"))
    assert ledger.state_of(NODE, "uid-1") == "reserved"
    see_state(ledger, 2, state("bound", allocation_id="a2"))
    assert ledger.state_of(NODE, "uid-1") == "bound"


def test_impossible_change_raises_with_the_story_and_is_not_folded(ledger: Ledger) -> None:
    see(ledger, 1, record())
    see_state(ledger, 1, state("running"))
    with pytest.raises(InvariantBroken, match="from running to bound") as caught:
        see_state(ledger, 2, state("bound"))
    assert any("reserve a1" in line for line in caught.value.history)
    assert ledger.state_of(NODE, "uid-1") == "running"


def test_history_is_ordered_and_bounded(ledger: Ledger) -> None:
    see(ledger, 1, record(), now_s=1.0)
    see_state(ledger, 1, state("failed", code=SHARE_LOST), now_s=2.0)
    lines = [str(line) for line in ledger.story(NODE, "uid-1")]
    assert lines == [
        "1.000 reserve a1 by me (sequence 1)",
        "2.000 state failed a1 by unknown: share-lost (sequence 1)",
    ]
    for seq in range(2, 100):
        see(ledger, seq, record())
    assert len(ledger.story(NODE, "uid-1")) == STORY_LINES
    assert ledger.story(NODE, "nobody") == []


# --- fence ---------------------------------------------------------------------------------------


def test_fence_is_the_highest_sequence_of_the_node(ledger: Ledger) -> None:
    assert ledger.fence(NODE) == 0
    see(ledger, 4, record())
    see(ledger, 9, record(op="release"))
    see(ledger, 6, record(uid="uid-2"))
    see(ledger, 20, record((held(share("node-2-nvidia-0")),), node="node-2"))
    assert (ledger.fence(NODE), ledger.fence("node-2")) == (9, 20)
    assert ledger.feed_seq == 20
    assert ledger.snapshot_id == "20.0"


def accept(ledger: Ledger, append: Append, seq: int) -> list[Effect]:
    return ledger.handle(Accepted(append=append, seq=seq, now_s=0.0))


def test_own_fenced_append_moves_the_fence_and_the_feed_repeats_it(ledger: Ledger) -> None:
    plan = ledger.plan_bind(pod(ask()), NODE, allocation_id="a1", now_s=0.0)
    assert isinstance(plan, Append)
    assert plan.expect.subject == subjects.node_fence(NODE)
    assert plan.expect.sequence == 0
    assert accept(ledger, plan, 7) == []
    assert ledger.fence(NODE) == 7
    assert ledger.feed_seq == 0
    assert see(ledger, 7, plan.record) == []
    assert ledger.feed_seq == 7


def test_own_release_does_not_move_the_fence_over_records_not_yet_seen(ledger: Ledger) -> None:
    see(ledger, 4, record())
    release = ledger.plan_release(only(ledger), now_s=0.0, reason="gone")
    key = subjects.allocation_key(NODE, "uid-1")
    assert release.expect.subject == subjects.kv_subject(subjects.ALLOC_BUCKET, key)
    assert release.expect.sequence == 4
    assert accept(ledger, release, 6) == [CapacityReturned(node=NODE)]
    assert ledger.fence(NODE) == 4
    see(ledger, 5, record(uid="uid-2"))
    see(ledger, 6, release.record)
    assert ledger.fence(NODE) == 6


def test_consistent_read_of_a_node_updates_all_its_records(ledger: Ledger) -> None:
    see(ledger, 4, record())
    entries = ((9, record(op="release")), (7, record(uid="uid-2")))
    effects = ledger.handle(NodeRead(node=NODE, entries=entries, now_s=0.0))
    assert effects == [CapacityReturned(node=NODE)]
    assert ledger.fence(NODE) == 9
    assert only(ledger).record.pod_uid == "uid-2"
    assert ledger.handle(NodeRead(node="node-2", entries=(), now_s=0.0)) == []


# --- lease ---------------------------------------------------------------------------------------


def examined(ledger: Ledger, now_s: float) -> list[str]:
    effects = ledger.handle(Tick(now_s=now_s))
    assert all(isinstance(effect, Examine) for effect in effects)
    return [e.holding.record.allocation_id for e in effects if isinstance(e, Examine)]


def test_own_reservation_is_examined_when_its_lease_ends_and_after_another(ledger: Ledger) -> None:
    see(ledger, 1, record(), now_s=100.0)
    assert examined(ledger, 129.9) == []
    assert examined(ledger, 130.0) == ["a1"]
    assert examined(ledger, 131.0) == []
    assert examined(ledger, 160.0) == ["a1"]


def test_reservations_of_other_replicas_expire_a_little_later(ledger: Ledger) -> None:
    see(ledger, 1, record(writer="other", lease_s=10.0), now_s=100.0)
    assert examined(ledger, 112.9) == []
    assert examined(ledger, 113.0) == ["a1"]


def test_bound_reservation_has_no_lease(ledger: Ledger) -> None:
    see(ledger, 1, record())
    see_state(ledger, 1, state("bound"))
    assert ledger.reserved() == []
    assert examined(ledger, 1e6) == []


def test_oldest_reservation_is_examined_first(ledger: Ledger) -> None:
    see(ledger, 5, record(uid="uid-2", allocation_id="a2"))
    see(ledger, 3, record())
    see(ledger, 8, record(uid="uid-3", allocation_id="a3"))
    see(ledger, 9, record(uid="uid-3", allocation_id="a3", op="release"))
    assert [h.record.allocation_id for h in ledger.reserved()] == ["a1", "a2"]
    assert examined(ledger, 1e6) == ["a1", "a2"]


def test_renewed_reservation_has_a_new_lease(ledger: Ledger) -> None:
    see(ledger, 1, record(writer="other"), now_s=0.0)
    renew = ledger.plan_renew(only(ledger), now_s=20.0)
    assert not renew.fenced
    assert renew.expect.sequence == 1
    assert renew.record.containers == HALF
    ledger.handle(Accepted(append=renew, seq=2, now_s=20.0))
    assert examined(ledger, 49.0) == []
    assert examined(ledger, 50.0) == ["a1"]
    assert used_mib(ledger) == 20_000


# --- bind ----------------------------------------------------------------------------------------


def test_plan_names_pod_devices_and_fence(ledger: Ledger) -> None:
    see(ledger, 3, record(uid="other"))
    request = pod(ask(mib=5_000), uid="uid-9", name="web")
    plan = ledger.plan_bind(request, NODE, allocation_id="a9", now_s=12.0)
    assert isinstance(plan, Append)
    assert plan == Append(
        record=AllocationRecord(
            op="reserve",
            allocation_id="a9",
            node=NODE,
            pod_uid="uid-9",
            namespace="default",
            pod="web",
            containers=(held(share(f"{NODE}-nvidia-1", 5_000)),),
            time_s=12.0,
            lease_s=30.0,
            writer="me",
        ),
        key=subjects.allocation_key(NODE, "uid-9"),
        expect=Expect(subject=subjects.node_fence(NODE), sequence=3),
        fenced=True,
    )


def test_pod_that_does_not_fit_is_refused_with_the_reason(ledger: Ledger) -> None:
    plan = ledger.plan_bind(pod(ask(3)), NODE, allocation_id="a1", now_s=0.0)
    assert isinstance(plan, NodeRefusal)
    assert plan.code == "NodeInsufficientDevice"


def test_fitting_reservation_is_reused(ledger: Ledger) -> None:
    request = pod(ask(mib=20_000, core=50))
    see(ledger, 3, record())
    plan = ledger.plan_bind(request, NODE, allocation_id="a2", now_s=0.0)
    assert plan == Reuse(holding=only(ledger))
    other = ledger.plan_bind(request, "node-2", allocation_id="a2", now_s=0.0)
    assert isinstance(other, Append)


@pytest.mark.parametrize("fenced", ["a1", "a1/3"])
def test_fenced_reservation_is_replaced(ledger: Ledger, fenced: str) -> None:
    see(ledger, 3, record(MORE))
    request = pod(ask(mib=30_000, core=50), device=("binpack",))
    plan = ledger.plan_bind(request, NODE, allocation_id="a2", now_s=0.0, fenced=fenced)
    assert isinstance(plan, Append)
    accept(ledger, plan, 4)
    assert only(ledger).record.allocation_id == "a2"
    assert used_mib(ledger) == 30_000


def test_reservation_that_no_longer_suits_is_examined_not_overwritten(ledger: Ledger) -> None:
    see(ledger, 3, record(), now_s=0.0)
    plan = ledger.plan_bind(pod(ask(mib=1)), NODE, allocation_id="a2", now_s=5.0)
    assert isinstance(plan, NodeRefusal)
    assert plan.code == "ReservationInDoubt"
    assert examined(ledger, 5.0) == ["a1"]


def test_bound_allocation_is_reused_whatever_the_request_says(ledger: Ledger) -> None:
    see(ledger, 3, record())
    see_state(ledger, 1, state("bound"))
    plan = ledger.plan_bind(pod(ask(mib=1)), NODE, allocation_id="a2", now_s=5.0)
    assert plan == Reuse(holding=only(ledger))


# --- state, release, resize, restore -------------------------------------------------------------


def test_bound_is_written_once(ledger: Ledger) -> None:
    see(ledger, 3, record())
    write = ledger.plan_state(only(ledger), "bound", now_s=8.0)
    key = subjects.allocation_key(NODE, "uid-1")
    assert isinstance(write, WriteState)
    assert write.key == key
    assert write.expect.subject == subjects.kv_subject(subjects.STATE_BUCKET, key)
    assert write.expect.sequence == 0
    assert (write.state.state, write.state.ledger_seq, write.state.writer) == ("bound", 3, "me")
    see_state(ledger, 6, write.state)
    assert ledger.plan_state(only(ledger), "bound", now_s=9.0) is None
    see_state(ledger, 7, state("running"))
    assert ledger.plan_state(only(ledger), "bound", now_s=9.0) is None
    failed = ledger.plan_state(only(ledger), "failed", now_s=9.0, code="x", reason="y")
    assert failed is not None
    assert failed.expect.sequence == 7


@pytest.mark.parametrize(("keeps", "uuid"), [((), "x"), (("eager",), "y")])
def test_hold_leaves_the_shares_of_pods_that_end_for_their_bursts(
    keeps: tuple[str, ...], uuid: str
) -> None:
    table = DeviceTable()
    bursting = device("y", index=1, memory_mib=20_000, bursts={"eager": 5_000})
    table.upsert_node(node_devices(NODE, [device("x", memory_mib=20_000), bursting]))
    ledger = Ledger(table, writer="me")
    see(ledger, 1, record((held(share("x", 18_000), share("y", 3_000)),), uid="eager"))
    see(ledger, 2, record((held(share("y", 6_500)),), allocation_id="a2", uid="calm"))
    hold = Hold(held_for="preemption", lease_s=60.0, awaits=("eager",), keeps=keeps)
    request = pod(ask(mib=6_000), uid="me")
    plan = ledger.plan_hold(request, NODE, allocation_id="h", now_s=0.0, hold=hold)
    assert isinstance(plan, Append)
    assert [one.uuid for one in plan.record.containers[0].shares] == [uuid]
    assert plan.record.awaits == ("eager",)
    table.check()


def test_resize_takes_free_capacity_and_keeps_the_id(ledger: Ledger) -> None:
    see(ledger, 3, record())
    see(ledger, 4, record((held(share(f"{NODE}-nvidia-0", 5_000)),), uid="uid-2"))
    holding = ledger.holding(NODE, "uid-1")
    assert holding is not None
    plan = ledger.plan_resize(
        holding, Placement(node=NODE, containers=MORE), now_s=0.0, reason="asked"
    )
    assert isinstance(plan, Append)
    assert (plan.record.op, plan.record.allocation_id, plan.fenced) == ("resize", "a1", True)
    accept(ledger, plan, 5)
    assert used_mib(ledger) == 35_000
    too_much = (held(share(f"{NODE}-nvidia-0", 36_000)),)
    now = ledger.holding(NODE, "uid-1")
    assert now is not None
    for placement in (
        Placement(node=NODE, containers=too_much),
        Placement(node="node-2", containers=HALF),
    ):
        refused = ledger.plan_resize(now, placement, now_s=0.0, reason="asked")
        assert isinstance(refused, NodeRefusal)


def test_restore_writes_the_allocation_that_the_pod_proves(ledger: Ledger) -> None:
    plan = ledger.plan_restore(signed(), now_s=0.0, must=False)
    assert isinstance(plan, Append)
    assert (plan.record.allocation_id, plan.record.containers) == ("a1", HALF)
    assert plan.fenced
    accept(ledger, plan, 9)
    assert ledger.plan_restore(signed(), now_s=0.0, must=False) is None


def test_restore_replaces_another_reservation_of_the_pod(ledger: Ledger) -> None:
    see(ledger, 3, record(MORE, allocation_id="a2"))
    plan = ledger.plan_restore(signed(MORE), now_s=0.0, must=False)
    assert isinstance(plan, Append)
    accept(ledger, plan, 4)
    assert only(ledger).record.allocation_id == "a1"


def test_restore_is_refused_where_the_share_is_taken_unless_containers_exist(
    ledger: Ledger,
) -> None:
    see(ledger, 3, record(MORE, uid="uid-2"))
    refused = ledger.plan_restore(signed(), now_s=0.0, must=False)
    assert isinstance(refused, NodeRefusal)
    assert refused.code == "ShareLost"
    write = ledger.plan_failed(signed(), refused, now_s=0.0)
    assert write is not None
    assert (write.state.state, write.state.code) == ("failed", SHARE_LOST)
    assert write.state.allocation_id == "a1"
    see_state(ledger, 1, write.state)
    assert ledger.plan_failed(signed(), refused, now_s=0.0) is None
    must = ledger.plan_restore(signed(), now_s=0.0, must=True)
    assert isinstance(must, Append)
    assert accept(ledger, must, 4) == [Over(node=NODE, uuids=(f"{NODE}-nvidia-0",))]


def test_failure_is_reported_for_this_allocation_even_after_anothers(ledger: Ledger) -> None:
    refusal = NodeRefusal(code="ShareLost", text="taken")
    see_state(ledger, 4, state("failed", allocation_id="a0"))
    write = ledger.plan_failed(signed(), refusal, now_s=0.0)
    assert write is not None
    assert write.expect.sequence == 4


# --- readiness, wipe, tombstones -----------------------------------------------------------------


def test_ledger_is_ready_after_feed_and_repair_and_not_after_a_wipe(ledger: Ledger) -> None:
    assert (ledger.synced, ledger.ready) == (False, False)
    assert ledger.handle(FeedSynced(now_s=0.0)) == []
    assert (ledger.synced, ledger.ready) == (True, False)
    assert ledger.handle(Repaired(now_s=0.0)) == []
    assert ledger.ready
    see(ledger, 3, record())
    assert ledger.handle(Wiped(now_s=0.0)) == []
    assert (ledger.synced, ledger.ready, ledger.feed_seq, ledger.fence(NODE)) == (
        False,
        False,
        0,
        0,
    )
    assert used_mib(ledger) == 0
    see(ledger, 1, record())
    assert used_mib(ledger) == 20_000


def test_tombstones_go_except_a_nodes_newest_record(ledger: Ledger) -> None:
    see(ledger, 1, record())
    see(ledger, 2, record(op="release"), now_s=10.0)
    see(ledger, 3, record(uid="uid-2"), now_s=10.0)
    assert ledger.forgettable(seen_before_s=5.0) == []
    assert ledger.forgettable(seen_before_s=20.0) == [(NODE, "uid-1")]
    ledger.forget(NODE, "uid-2")
    ledger.forget(NODE, "nobody")
    ledger.forget(NODE, "uid-1")
    assert ledger.story(NODE, "uid-1") == []
    assert ledger.holding(NODE, "uid-2") is not None
    see(ledger, 4, record(uid="uid-2", op="release"), now_s=10.0)
    assert ledger.forgettable(seen_before_s=20.0) == []
    ledger.forget(NODE, "uid-2")
    assert ledger.holdings_of_node(NODE) == []


def test_states_of_unknown_pods_are_dropped(ledger: Ledger) -> None:
    see_state(ledger, 1, state("failed", uid="invented"), now_s=10.0)
    assert ledger.forgettable(seen_before_s=5.0) == []
    assert ledger.forgettable(seen_before_s=20.0) == [(NODE, "invented")]
    ledger.forget(NODE, "invented")
    assert ledger.forgettable(seen_before_s=20.0) == []


def test_flood_of_states_of_one_node_has_an_end_and_spares_records(ledger: Ledger) -> None:
    for number in range(KEYS_PER_NODE + 10):
        see_state(ledger, number + 1, state("failed", uid=f"invented-{number}"))
    assert len(ledger.forgettable(seen_before_s=1.0)) == KEYS_PER_NODE
    see(ledger, 1, record())
    see_state(ledger, KEYS_PER_NODE + 11, state("bound"))
    assert only(ledger).revision == 1
    assert ledger.state_of(NODE, "uid-1") == "bound"


def test_forgetting_one_node_of_a_pod_keeps_the_other(ledger: Ledger) -> None:
    see(ledger, 1, record())
    see(ledger, 2, record(op="release"))
    see(ledger, 3, record((held(share("node-2-nvidia-0")),), node="node-2"))
    ledger.forget(NODE, "uid-1")
    assert [h.record.node for h in ledger.holdings_of_pod("uid-1")] == ["node-2"]


# --- check ---------------------------------------------------------------------------------------


def test_check_finds_a_booking_without_a_record(table: DeviceTable) -> None:
    ledger = Ledger(table)
    see(ledger, 1, record())
    table.book(NODE, HALF)
    with pytest.raises(InvariantBroken, match="its records sum to") as caught:
        ledger.check()
    assert any("reserve a1" in line for line in caught.value.history)


def test_check_finds_a_record_without_a_booking(table: DeviceTable) -> None:
    ledger = Ledger(table)
    some = (held(share("ghost")),)
    see(ledger, 1, record(some))
    table.unbook(NODE, some)
    with pytest.raises(InvariantBroken, match="is not in the table"):
        ledger.check()


def test_holding_is_a_copy_that_does_not_move(ledger: Ledger) -> None:
    see(ledger, 1, record())
    before = only(ledger)
    see(ledger, 2, record(MORE, op="resize"))
    assert before.record.containers == HALF
    assert replace(only(ledger), revision=1).record.containers == MORE
